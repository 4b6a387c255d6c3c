"""Graph transformers on long node sequences.

The public names are loaded on first use (PEP 562), so that `import torchgt` costs nothing: a command line
that only prints its help, or a child process that only partitions a graph, must not wait for torch.
"""

from __future__ import annotations

from importlib import import_module

from torchgt._version import __version__

# Public name -> module that defines it.
_EXPORTS = {
    "AttentionPattern": "torchgt.pattern",
    "Batch": "torchgt.models",
    "GT": "torchgt.models",
    "Graph": "torchgt.graph",
    "GraphStore": "torchgt.data.store",
    "Graphormer": "torchgt.models",
    "ModelConfig": "torchgt.models",
    "Partition": "torchgt.partition",
    "RunConfig": "torchgt.training.config",
    "RunRecord": "torchgt.training.record",
    "SequenceParallel": "torchgt.parallel",
    "check_conditions": "torchgt.conditions",
    "connected_subset": "torchgt.graph",
    "graph_attention": "torchgt.attention.api",
    "partition_graph": "torchgt.partition",
    "register_system": "torchgt.training.registry",
    "train": "torchgt.training.trainer",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'torchgt' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
