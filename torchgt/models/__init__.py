"""Graph transformers: one module a model, independent of pattern, bias and parallelism.

A model maps a `Batch` (the node tokens of one sequence, or one worker's share of them) to logits.
"""

from torchgt.models.batch import Batch
from torchgt.models.config import MODEL_NAMES, ModelConfig
from torchgt.models.graphormer import Graphormer
from torchgt.models.gt import GT

__all__ = ["GT", "MODEL_NAMES", "Batch", "Graphormer", "ModelConfig", "build_model"]

_CLASSES = {"graphormer-slim": Graphormer, "graphormer-large": Graphormer, "gt": GT}


def build_model(config: ModelConfig) -> Graphormer | GT:
    """The model that `config.name` names, freshly initialised from torch's default generator."""
    return _CLASSES[config.name](config)
