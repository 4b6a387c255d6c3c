"""Negative controls. `mlp` ignores the graph; `random-blocks` keeps TorchGT's cost and drops the graph.

`random-blocks` computes what the published artifact's reformation computes: in every cluster (pair of METIS parts) the
true pairs are dropped, and random tiles of the same budget of pairs stand in for them. Self-loops and the global token
are lost with them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgt
from torchgt.data.store import GraphStore
from torchgt.errors import ConfigError
from torchgt.graph import Graph
from torchgt.models import Batch
from torchgt.models.config import preset_width
from torchgt.parallel import SequenceParallel
from torchgt.partition import partition_graph
from torchgt.pattern import AttentionPattern
from torchgt.training.config import RunConfig
from torchgt.training.seeds import derive_seed
from torchgt.training.system import GraphSystem, TransformerSystem


class ResidualMLP(nn.Module):
    """The message-passing net without messages: same depth, width, residuals and normalisation."""

    def __init__(self, in_features: int, hidden: int, layers: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.encode = nn.Linear(in_features, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, num_outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [N, C] of the batch's nodes."""
        h_NC = self.encode(batch.x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h_NC = h_NC + F.dropout(F.relu(layer(norm(h_NC))), self.dropout, self.training)
        return self.head(h_NC)


class MLP(GraphSystem):
    """Features only."""

    OPTIONS: dict[str, Any] = {"hidden": None, "layers": 3}

    def build_model(self) -> nn.Module:
        hidden = self.options["hidden"] or preset_width(self.config.model)
        net = ResidualMLP(self.x_NF.shape[1], hidden, self.options["layers"], self.num_outputs, self.config.dropout)
        return net.to(device=self.device, dtype=self.dtype)

    def pattern_facts(self) -> dict[str, Any]:
        return {"pairs": 0, "recall": 0.0, "recall_edges": 0.0}


class RandomBlocks(TransformerSystem):
    """Random tiles in place of the graph's pairs, in training and in evaluation."""

    type_bias = False
    OPTIONS: dict[str, Any] = {"clusters": 8, "tile": 16}

    def __init__(self, config: RunConfig, store: GraphStore, parallel: SequenceParallel) -> None:
        super().__init__(config, store, parallel)
        for key in self.OPTIONS:
            if not isinstance(self.options[key], int) or self.options[key] < 1:
                raise ConfigError(f"options.{key}: {self.options[key]!r}; allowed: a whole number of at least 1")
        self.model_config.num_global = 0

    def pattern(self, graph: Graph, nodes_N: Tensor) -> AttentionPattern:
        seed = derive_seed(self.config.seed, "random blocks", len(nodes_N), int(nodes_N[0]) if len(nodes_N) else 0)
        part = partition_graph(graph, min(self.options["clusters"], max(1, graph.num_nodes)), seed=self.config.seed)
        return random_blocks(graph, part.assignment, part.num_parts, self.options["tile"], seed)

    def pattern_facts(self) -> dict[str, Any]:
        layout = self._cached_layout(self.sampler.whole(), "sparse")
        kept = shared_pairs(self.graph.subgraph(layout.nodes), layout.pattern)
        edges = max(1, self.graph.num_edges)
        pairs = max(1, layout.pattern.num_pairs)
        recall_all = kept / (edges + self.num_nodes)  # self-loops among the true pairs, as for the other systems
        facts = {"pairs": layout.pattern.num_pairs, "recall": recall_all, "recall_edges": kept / edges}
        return {**facts, "precision": kept / pairs, "num_global": 0}


def random_blocks(graph: Graph, part_N: Tensor, num_parts: int, tile: int, seed: int) -> AttentionPattern:
    """Drop every pair; give each cluster random tile x tile blocks of the budget it had.

    Args:
        graph: the sequence's graph; its budget counts a self-loop a node.
        part_N: int64 [N], part of each node. A cluster is a pair of parts; its rows and columns are the parts' nodes.
        num_parts: number of parts k.
        tile: side of a block.
        seed: what the blocks are drawn with, without replacement within a cluster.

    Returns:
        The pattern, all pairs of type 0, no global token. Blocks at the edge of a cluster may be smaller; the share of
        a block that a cluster's budget leaves over is carried to the next cluster.
    """
    generator = torch.Generator().manual_seed(seed)
    n = graph.num_nodes
    members = [(part_N == p).nonzero().flatten() for p in range(num_parts)]
    rows_E = torch.repeat_interleave(torch.arange(n), graph.degrees())
    cluster_E = part_N[rows_E] * num_parts + part_N[graph.col.long()]
    budget_K = torch.bincount(cluster_E, minlength=num_parts * num_parts)
    budget_K += torch.bincount(part_N * num_parts + part_N, minlength=num_parts * num_parts)
    keys, carry = [], 0.0
    for cluster, budget in enumerate(budget_K.tolist()):
        rows, cols = members[cluster // num_parts], members[cluster % num_parts]
        grid_r, grid_c = -(-len(rows) // tile), -(-len(cols) // tile)
        carry += budget / tile**2
        count = min(int(carry), grid_r * grid_c)
        carry -= int(carry)
        if not count:
            continue
        blocks = _draw(grid_r * grid_c, count, generator)
        inside = torch.arange(tile)
        r = ((blocks // grid_c)[:, None] * tile + inside)[:, :, None].expand(-1, -1, tile)
        c = ((blocks % grid_c)[:, None] * tile + inside)[:, None, :].expand(-1, tile, -1)
        valid = (r < len(rows)) & (c < len(cols))
        keys.append(rows[r[valid]] * n + cols[c[valid]])
    key_E = torch.cat(keys).sort().values if keys else torch.zeros(0, dtype=torch.int64)
    rowptr = torch.zeros(n + 1, dtype=torch.int64)
    rowptr[1:] = torch.bincount(key_E // max(1, n), minlength=n).cumsum(0)
    return AttentionPattern.from_pairs(rowptr, key_E % max(1, n))


def _draw(population: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below `population`, without a permutation of all of them where they are many."""
    if population <= 4 * count or population < 2**16:
        return torch.randperm(population, generator=generator)[:count]
    drawn = torch.randint(population, (2 * count,), generator=generator).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]


def shared_pairs(graph: Graph, pattern: AttentionPattern) -> int:
    """How many of the graph's edges the pattern (without global tokens) attends along."""
    n = graph.num_nodes
    edges = torch.repeat_interleave(torch.arange(n), graph.degrees()) * n + graph.col.long()
    counts = pattern.rowptr[1:] - pattern.rowptr[:-1]
    pairs = torch.repeat_interleave(torch.arange(n), counts) * n + pattern.col.long()
    return int(torch.isin(edges, pairs, assume_unique=True).sum())


torchgt.register_system("mlp", MLP)
torchgt.register_system("random-blocks", RandomBlocks)
