"""A System turns a store into steps: it prepares the graph, builds the model, and lays out each step's batch.

`System` is what the trainer knows. `TransformerSystem` is every graph transformer here: systems differ in their
attention pattern and implementation, not in the model. `GraphSystem` feeds the induced graph to a message-passing
model. The system `torchgt` is at the end; the baselines live outside this package and register themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchgt.attention.api import available_impls
from torchgt.conditions import check_conditions
from torchgt.data.sequences import SequenceSampler
from torchgt.data.store import GraphStore
from torchgt.errors import ConfigError, unknown
from torchgt.graph import Graph
from torchgt.models import GT, Batch, Graphormer, ModelConfig
from torchgt.models.config import MODEL_NAMES
from torchgt.partition import partition_graph
from torchgt.pattern import AttentionPattern
from torchgt.schedule import InterleavedSchedule
from torchgt.training.config import RunConfig
from torchgt.training.metrics import check_metric, labelled
from torchgt.training.registry import register_system
from torchgt.training.seeds import derive_seed

if TYPE_CHECKING:
    from torchgt.parallel import SequenceParallel

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # bf16 keeps float32 parameters

# Initial type biases, by pair type: self, edge, path, added, from a global token, to a global token.
# Starting the pairs that augmentation adds at -4 makes it free in accuracy; 0 cost 2.7 points on WordNet.
AUGMENTED_BIAS = (0.0, 0.0, -4.0, 0.0, 0.0, -4.0)
ADDED = 3


class System:
    """One way to train on a store. Subclasses say how batches are laid out and which model reads them.

    Args:
        config: the run's configuration.
        store: an opened store with a node task.
        parallel: the processes that share the work; its world size may be 1.
    """

    parallelism = "sequence"  # "sequence": ranks share each sequence; "data": each rank takes its own sequences
    OPTIONS: dict[str, Any] = {}  # the system's own options and their defaults
    imports: tuple[str, ...] = ()  # slow modules, imported before memory is measured

    def __init__(self, config: RunConfig, store: GraphStore, parallel: SequenceParallel) -> None:
        self.config, self.store, self.parallel = config, store, parallel
        for key in config.options:
            if key not in self.OPTIONS:
                raise ConfigError(unknown(f"option of system {config.system!r}", key, self.OPTIONS or ["(none)"]))
        self.options = {**self.OPTIONS, **config.options}
        if config.model not in MODEL_NAMES:
            raise ConfigError(unknown("model", config.model, MODEL_NAMES))
        if store.meta["task"] != "node":
            raise ConfigError(f"store {store.name!r}: task {store.meta['task']!r}; allowed here: node")
        self.target: str = store.meta["target"]
        self.metric = check_metric(self.target, config.evaluation.metric or store.meta["metric"])
        self.num_outputs: int = store.num_outputs
        self.device = _device(config.device)
        self.dtype = DTYPES[config.precision]
        self.graph: Graph = store.graph
        self.x_NF = store.x.to(self.dtype)
        self.y = store.y.long() if self.target == "multiclass" else store.y.to(self.dtype)
        self.splits = self._splits()
        self.is_train_N = torch.zeros(self.num_nodes, dtype=torch.bool)
        self.is_train_N[self.splits["train"]] = True
        self.is_train_N &= labelled(self.target, self.y)
        if not self.is_train_N.any():
            raise ConfigError(f"store {store.name!r}: the train split has no labelled node")
        if parallel.world_size > self.num_nodes:
            raise ConfigError(f"{parallel.world_size} ranks for {self.num_nodes} tokens; allowed: at most one a token")
        self.seconds: dict[str, float] = {}  # preprocessing, by stage
        self._layouts: dict[str, Batch] = {}

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    def _splits(self) -> dict[str, Tensor]:
        if self.config.protocol == "artifact":  # a fresh random split whatever the store's is, as published
            generator = torch.Generator().manual_seed(derive_seed(self.config.seed, "artifact split"))
            nodes = torch.randperm(self.num_nodes, generator=generator)
            a, b = int(0.6 * len(nodes)), int(0.8 * len(nodes))
            return {"train": nodes[:a], "valid": nodes[a:b], "test": nodes[b:]}
        splits = self.store.splits
        if self.config.split >= len(splits):
            raise ConfigError(f"split: {self.config.split}; store {self.store.name!r} has 0..{len(splits) - 1}")
        return splits[self.config.split]

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Account a stage of the preprocessing."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    # What a subclass provides -------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Preprocess: cluster the graph and set up the sequences."""
        sequence = self.config.sequence
        needs_clusters = self.uses_clusters()
        with self.timed("partition_s"):
            parts = max(1, -(-self.num_nodes // sequence.cluster_tokens))
            partition = None
            if needs_clusters:  # once, on rank 0: every rank must work with the same clusters
                partition = self.parallel.broadcast_object(
                    lambda: partition_graph(self.graph, parts, seed=self.config.seed)
                )
        self.partition = partition
        self.sampler = SequenceSampler(
            sequence.kind, self.num_nodes, sequence.tokens, partition=partition, seed=self.config.seed
        )
        world, sequences = self.parallel.world_size, len(self.sampler.epoch(0))
        if self.parallelism == "data" and world > sequences:
            raise ConfigError(
                f"{world} ranks for {sequences} sequences: system {self.config.system!r} gives each rank its own "
                "sequence; allowed: at most one rank a sequence (sequence.kind clusters makes more)"
            )

    def uses_clusters(self) -> bool:
        return self.config.sequence.kind == "clusters"

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def layout(self, nodes_N: Tensor, kind: str) -> Batch:
        """The batch of a sequence of nodes (ids in the store, in sequence order), without a dropout seed."""
        raise NotImplementedError

    def step_context(self, batch: Batch) -> AbstractContextManager:
        """Wraps forward and backward; a system that pins a kernel does it here."""
        return contextlib.nullcontext()

    def kind(self, step: int) -> str:
        """ "sparse" or "dense", for the step counted from 0."""
        return "sparse"

    # What the trainer calls ---------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        """Lay out what every step of a full sequence shares, so that no step pays for it."""
        if self.config.sequence.kind == "full":
            with self.timed("layout_s"):
                whole = self.sampler.whole()
                for kind in self.whole_kinds():
                    self._cached_layout(whole, kind)

    def whole_kinds(self) -> list[str]:
        """Kinds of steps that see the whole sequence."""
        return [self.kind(0)]

    def train_batches(self, epoch: int, step: int) -> Iterator[tuple[float, Batch | None]]:
        """The epoch's batches, each with the share of the epoch that is finished after it.

        `step` counts all steps before the epoch. A batch of None: this rank has no sequence in this step.
        """
        sequences = self.sampler.epoch(epoch)
        world, rank = self.parallel.world_size, self.parallel.rank
        if self.parallelism == "data" and world > 1:
            steps = -(-len(sequences) // world)
            sequences = [
                sequences[s * world + rank] if s * world + rank < len(sequences) else None for s in range(steps)
            ]
        for index, nodes in enumerate(sequences):
            kind = self.kind(step + index)
            batch = None if nodes is None else self.train_batch(nodes, kind, step + index)
            yield (index + 1) / len(sequences), batch

    def train_batch(self, nodes_N: Tensor, kind: str, step: int) -> Batch:
        batch = self._cached_layout(nodes_N, kind)
        rank = self.parallel.rank if self.parallelism == "data" else 0
        seed = derive_seed(self.config.seed, "dropout", step, rank)
        return dataclasses.replace(batch, dropout_seed=torch.tensor(seed, dtype=torch.int64))

    def eval_batches(self) -> Iterator[Batch]:
        """Batches that together hold every node once."""
        world, rank = self.parallel.world_size, self.parallel.rank
        for index, nodes in enumerate(self.eval_sequences()):
            if self.parallelism == "data" and index % world != rank:
                continue
            yield dataclasses.replace(self._cached_layout(nodes, self.eval_kind()), dropout_seed=None)

    def eval_sequences(self) -> list[Tensor]:
        if self.eval_mode() == "whole":
            return [self.sampler.whole()]
        return self.sampler.disjoint()

    def eval_kind(self) -> str:
        return "sparse"

    def eval_mode(self) -> str:
        """whole or clusters."""
        return "whole" if self.config.evaluation.kind == "auto" else self.config.evaluation.kind

    def _cached_layout(self, nodes_N: Tensor, kind: str) -> Batch:
        # The whole graph in its one order comes back every step: lay it out once.
        if len(nodes_N) < self.num_nodes or self.config.sequence.kind == "random":
            return self.layout(nodes_N, kind)
        if kind not in self._layouts:
            self._layouts[kind] = self.layout(nodes_N, kind)
        return self._layouts[kind]

    def pattern_facts(self) -> dict[str, Any]:
        """What the record says of the pattern."""
        return {}

    def edges_kept(self, sequences: list[Tensor]) -> float:
        """Share of the graph's edges whose two ends are in one sequence."""
        if len(sequences) == 1 and len(sequences[0]) == self.num_nodes:
            return 1.0
        owner_N = torch.full((self.num_nodes,), -1, dtype=torch.int64)
        for index, nodes in enumerate(sequences):
            owner_N[nodes] = index
        rows = torch.repeat_interleave(torch.arange(self.num_nodes), self.graph.degrees())
        kept = (owner_N[rows] == owner_N[self.graph.col.long()]) & (owner_N[rows] >= 0)
        return kept.double().mean().item() if len(kept) else 1.0


class GraphSystem(System):
    """A model that reads the features and the induced graph of each sequence (message passing, or features only)."""

    parallelism = "data"

    def layout(self, nodes_N: Tensor, kind: str) -> Batch:
        whole = len(nodes_N) == self.num_nodes and bool((nodes_N == torch.arange(self.num_nodes)).all())
        graph = self.graph if whole else self.graph.subgraph(nodes_N)
        return Batch(
            x=self.x_NF[nodes_N].to(self.device),
            y=self.y[nodes_N].to(self.device),
            weight=self.is_train_N[nodes_N].to(self.device),
            nodes=nodes_N,
            graph=self.graph_input(graph),
            pattern=None,
            kind=kind,
        )

    def graph_input(self, graph: Graph) -> Any:
        """What the model gets as `batch.graph`."""
        return graph

    def pattern_facts(self) -> dict[str, Any]:
        return {"pairs": self.graph.num_edges, "recall": 1.0, "recall_edges": 1.0}


class TransformerSystem(System):
    """A Graphormer or GT over some attention pattern.

    Subclasses choose `attention` ("topology": the graph's pairs, or "full"), `impl`, and whether type biases are used.
    """

    attention = "topology"
    impl = "auto"
    type_bias = True
    dense_bias = False  # whether the fully connected pattern has pair types for the biases
    type_bias_init: tuple[float, ...] | None = AUGMENTED_BIAS
    hamiltonian_path = False

    def __init__(self, config: RunConfig, store: GraphStore, parallel: SequenceParallel) -> None:
        super().__init__(config, store, parallel)
        self.model_config = ModelConfig.preset(
            config.model,
            in_features=self.x_NF.shape[1],
            num_outputs=self.num_outputs,
            dropout=config.dropout,
            input_dropout=config.input_dropout,
            attention_dropout=config.attention_dropout,
            activation_checkpointing=config.activation_checkpointing,
            type_bias=self.type_bias,
            type_bias_init=self.type_bias_init if self.type_bias else None,
        )

    def uses_clusters(self) -> bool:
        return True  # also a full sequence is laid out in cluster order

    def build_model(self) -> nn.Module:
        model = {"gt": GT}.get(self.config.model, Graphormer)(self.model_config)
        return model.to(device=self.device, dtype=self.dtype)

    def kind(self, step: int) -> str:
        return "dense" if self.attention == "full" else "sparse"

    def eval_kind(self) -> str:
        return "dense" if self.attention == "full" else "sparse"

    def eval_mode(self) -> str:
        mode = self.config.evaluation.kind
        if mode != "auto":
            return mode
        # A system that trains on the whole sequence can also evaluate on it.
        fits = self.config.sequence.kind == "full" or self.num_nodes <= self.config.schedule.dense_tokens
        return "whole" if self.attention != "full" or fits else "clusters"

    def pattern(self, graph: Graph, nodes_N: Tensor) -> AttentionPattern:
        """The sparse step's pattern over a sequence; `graph` is induced on `nodes_N`, in sequence order."""
        return AttentionPattern.from_graph(
            graph, self_loops=True, num_global=self.model_config.num_global, hamiltonian_path=self.hamiltonian_path
        )

    def dense_pattern(self, graph: Graph) -> AttentionPattern:
        """The fully connected step's pattern: every token of the sequence, global ones included."""
        tokens = self.model_config.num_global + graph.num_nodes
        return AttentionPattern.full(torch.tensor([0, tokens]))

    def dense_impl(self) -> str:
        return "dense"

    def layout(self, nodes_N: Tensor, kind: str) -> Batch:
        sizes = self.parallel.shard_sizes(len(nodes_N))
        offset = sum(sizes[: self.parallel.rank])
        mine = nodes_N[offset : offset + sizes[self.parallel.rank]]
        graph = self.graph.subgraph(nodes_N)
        dense = kind == "dense"
        pattern = self.dense_pattern(graph) if dense else self.pattern(graph, nodes_N)
        return Batch(
            x=self.x_NF[mine].to(self.device),
            y=self.y[mine].to(self.device),
            weight=self.is_train_N[mine].to(self.device),
            nodes=nodes_N,
            pattern=pattern.to(self.device),
            token_offset=offset,
            kind=kind,
            impl=self.dense_impl() if dense else self.impl,
            use_type_bias=self.type_bias and (self.dense_bias or not dense),
            parallel=self.parallel if self.parallel.world_size > 1 else None,
        )

    def pattern_facts(self) -> dict[str, Any]:
        if self.attention == "full":
            tokens = self.model_config.num_global + (self.config.sequence.tokens or self.num_nodes)
            return {"pairs": tokens * tokens, "recall": 1.0, "recall_edges": 1.0}
        pattern = self._cached_layout(self.sampler.whole(), "sparse").pattern
        edges = self.graph.num_edges
        return {
            "pairs": pattern.num_pairs,
            "recall": 1.0,
            "recall_edges": 1.0,
            "precision": min(1.0, (edges + self.num_nodes) / max(1, pattern.num_pairs)),
            "num_global": self.model_config.num_global,
        }


class TorchGT(TransformerSystem):
    """Dual-interleaved attention over the cluster-ordered graph (TorchGT, SC'24).

    Sparse steps attend along the graph's edges; every `schedule.dense_every`-th step is fully connected, over the
    whole sequence where it is short enough, else over a fresh union of clusters. Where the conditions C1-C3 of
    Yun et al. (2020) do not hold for the graph, `schedule.on_conditions_fail` says what happens.
    """

    def __init__(self, config: RunConfig, store: GraphStore, parallel: SequenceParallel) -> None:
        super().__init__(config, store, parallel)
        self.schedule = InterleavedSchedule(dense_every=config.schedule.dense_every)
        self.dense_bias = config.schedule.dense_bias
        # All the pairs that a fully connected step adds to a token together start with the weight of one edge. Without
        # any bias such a step blurs what the sparse steps have learned: 3.7 points of accuracy on WordNet.
        bias = list(AUGMENTED_BIAS)
        bias[ADDED] = -math.log(min(config.schedule.dense_tokens, self.num_nodes))
        self.model_config.type_bias_init = tuple(bias)
        self.conditions: dict[str, Any] = {}
        self.always_dense = False

    def prepare(self) -> None:
        super().prepare()
        with self.timed("conditions_s"):
            verdict = self.parallel.broadcast_object(self._check)
            self._apply(*verdict)

    def _check(self) -> tuple[bool, dict[str, Any]]:
        order = self.sampler.whole()
        plain = self.pattern(self.graph.subgraph(order), order)
        found = check_conditions(plain, self.model_config.layers)
        facts = {
            "self_loops": found.self_loops,
            "hamiltonian_path": found.hamiltonian_path,
            "reachable": found.reachable,
            "satisfied": found.satisfied,
            "reasons": list(found.reasons),
        }
        return found.satisfied, facts

    def _apply(self, satisfied: bool, facts: dict[str, Any]) -> None:
        policy = self.config.schedule.on_conditions_fail
        self.conditions = {**facts, "action": "none" if satisfied else policy}
        if satisfied:
            return
        logger.info("conditions C1-C3 do not hold (%s): %s", "; ".join(facts["reasons"]), policy)
        if policy == "augment":
            self.hamiltonian_path = True
            self.model_config = dataclasses.replace(self.model_config, num_global=max(1, self.model_config.num_global))
        elif policy == "dense":
            self.always_dense = True

    def kind(self, step: int) -> str:
        return "dense" if self.always_dense else self.schedule.kind(step)

    def whole_kinds(self) -> list[str]:
        short = self.num_nodes <= self.config.schedule.dense_tokens
        return ["sparse", "dense"] if self.schedule.dense_every and short else ["sparse"]

    def train_batch(self, nodes_N: Tensor, kind: str, step: int) -> Batch:
        if kind != "dense" or len(nodes_N) <= self.config.schedule.dense_tokens:
            return super().train_batch(nodes_N, kind, step)
        # The union holds few of the sequence's labels. Averaged over those few, its noisy gradient would count as
        # much as that of a step over the whole sequence; averaged over the sequence's, every label counts alike.
        labels = int(self.is_train_N[nodes_N].sum())
        batch = super().train_batch(self.sampler.union(step, self.config.schedule.dense_tokens), kind, step)
        return dataclasses.replace(batch, loss_tokens=max(1, labels))

    def dense_pattern(self, graph: Graph) -> AttentionPattern:
        if not self.dense_bias:
            return super().dense_pattern(graph)
        plain = self.pattern(graph, torch.arange(graph.num_nodes))
        return complete(plain)

    def dense_impl(self) -> str:
        # The fused kernel adds biases by pair type as it goes; scaled_dot_product_attention wants an N x N x H mask.
        fused = self.dense_bias and self.device.type == "cpu" and available_impls()["cpu"] is True
        return "cpu" if fused else "dense"

    def pattern_facts(self) -> dict[str, Any]:
        return {**super().pattern_facts(), "conditions": self.conditions, "beta": None, "tiles": 0}


def complete(pattern: AttentionPattern) -> AttentionPattern:
    """`pattern` with every pair of node tokens, the new ones of type ADDED; its global tokens stay what they are."""
    n, g = pattern.num_nodes, pattern.num_global
    type_NN = torch.full((n, n), ADDED, dtype=torch.uint8)
    rows_E = torch.repeat_interleave(torch.arange(n), (pattern.rowptr[1:] - pattern.rowptr[:-1])[g:])
    type_NN[rows_E, pattern.col.long() - g] = pattern.pair_type
    rowptr = torch.cat([torch.zeros(g, dtype=torch.int64), torch.arange(n + 1) * n])
    col_E = torch.arange(g, g + n, dtype=torch.int32).repeat(n)
    return AttentionPattern.from_pairs(
        rowptr, col_E, pair_type=type_NN.reshape(-1), num_global=g, num_pair_types=pattern.num_pair_types
    )


def _device(name: str) -> torch.device:
    import os

    from torchgt.errors import RefusedError

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RefusedError("device: 'cuda' asked for, but torch sees no GPU here")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= torch.cuda.device_count():
        raise RefusedError(f"device: rank {local} on this host, but there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", local)


register_system("torchgt", TorchGT)
