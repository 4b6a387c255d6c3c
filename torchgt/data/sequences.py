"""Which nodes a training step sees: `SequenceSampler` cuts the node ids into sequences of bounded length.

Every draw depends only on the seed and on what it is drawn for (the epoch, the step), never on earlier draws, so that a
resumed run and all ranks see the same sequences. A sequence holds int64 ids of the store, each at most once; its order
is the order of the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchgt.errors import unknown
from torchgt.training.seeds import derive_seed

if TYPE_CHECKING:
    from torchgt.partition import Partition

KINDS = ("full", "clusters", "random")


class SequenceSampler:
    """Sequences of nodes, drawn anew each epoch.

    Args:
        kind: "full", all nodes in one sequence; "clusters", unions of whole clusters drawn at random, so that edges
            inside a sequence are many; "random", a random permutation cut into pieces, as published.
        num_nodes: N.
        tokens: most nodes of a sequence; "full" ignores it. A cluster larger than this is cut into near-even pieces.
        partition: the clusters; "clusters" needs them. The others use their order for `whole`, `union` and `disjoint`
            if they are given.
        seed: of all draws.

    ValueError names the argument that does not fit.
    """

    def __init__(self, kind: str, num_nodes: int, tokens: int = 0, partition: Partition | None = None, seed: int = 0):
        if kind not in KINDS:
            raise ValueError(unknown("kind of sequence", kind, KINDS))
        if num_nodes < 0:
            raise ValueError(f"num_nodes is {num_nodes}; allowed: 0 or more")
        if kind != "full" and tokens < 1:
            raise ValueError(f"tokens is {tokens} with kind {kind!r}; allowed: at least 1")
        if kind == "clusters" and partition is None:
            raise ValueError("partition is None with kind 'clusters'; allowed: a Partition")
        if partition is not None and partition.order.numel() != num_nodes:
            raise ValueError(f"partition has {partition.order.numel()} nodes; num_nodes is {num_nodes}")
        self.kind, self.num_nodes, self.tokens, self.partition, self.seed = kind, num_nodes, tokens, partition, seed

    def epoch(self, epoch: int) -> list[Tensor]:
        """The epoch's sequences, none of them empty; together they hold every node once."""
        if self.num_nodes == 0:
            return []
        if self.kind == "full":
            return [self.whole()]
        if self.kind == "random":
            nodes = torch.randperm(self.num_nodes, generator=self._generator("epoch", epoch))
            return list(nodes.split(self.tokens))
        pieces = _cut(self._clusters(), self.tokens)
        drawn = torch.randperm(len(pieces), generator=self._generator("epoch", epoch)).tolist()
        return [_join(pieces, group) for group in _fill(pieces, drawn, self.tokens)]

    def whole(self) -> Tensor:
        """All nodes: in the clusters' order if there are clusters, else in the store's."""
        return torch.arange(self.num_nodes) if self.partition is None else self.partition.order.to(torch.int64)

    def union(self, step: int, tokens: int) -> Tensor:
        """A fresh union of clusters with at most `tokens` nodes, for the fully connected step `step`.

        Clusters are drawn in random order and taken as they fit, so the union is as full as they allow. Without
        clusters it is a random set of `tokens` nodes. All nodes if `tokens` is at least N.
        """
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}; allowed: at least 1")
        if tokens >= self.num_nodes:
            return self.whole()
        generator = self._generator("union", step)
        if self.partition is None:
            return torch.randperm(self.num_nodes, generator=generator)[:tokens]
        pieces = _cut(self._clusters(), tokens)
        taken, room = [], tokens
        for piece in torch.randperm(len(pieces), generator=generator).tolist():
            if len(pieces[piece]) <= room:
                taken.append(piece)
                room -= len(pieces[piece])
        return _join(pieces, taken)

    def disjoint(self) -> list[Tensor]:
        """Fixed sequences of at most `tokens` nodes (all nodes if it is 0) that hold every node once, for evaluation.

        Neighbouring clusters share a sequence. Without clusters it is one random cut, the same every time.
        """
        if self.num_nodes == 0:
            return []
        tokens = self.tokens or self.num_nodes
        if tokens >= self.num_nodes:
            return [self.whole()]
        if self.partition is None:
            return list(torch.randperm(self.num_nodes, generator=self._generator("disjoint")).split(tokens))
        pieces = _cut(self._clusters(), tokens)
        return [_join(pieces, group) for group in _fill(pieces, range(len(pieces)), tokens)]

    def _clusters(self) -> list[Tensor]:
        """The nodes of each cluster, in the clusters' order."""
        return list(self.whole().split(self.partition.offsets.diff().tolist()))

    def _generator(self, *purpose: object) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "sequences", *purpose))


def _cut(clusters: list[Tensor], tokens: int) -> list[Tensor]:
    """The clusters, those above `tokens` nodes cut into near-even pieces; empty ones left out."""
    pieces: list[Tensor] = []
    for nodes in clusters:
        if len(nodes):
            pieces += nodes.tensor_split(-(-len(nodes) // tokens))
    return pieces


def _fill(pieces: list[Tensor], order: list[int] | range, tokens: int) -> list[list[int]]:
    """Put the pieces, in `order`, into groups of at most `tokens` nodes: each into the first recent group it fits.

    Looking back a few groups fills the gap that a large piece left, without a quadratic search.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for piece in order:
        size = len(pieces[piece])
        fits = [g for g in range(max(0, len(groups) - 8), len(groups)) if room[g] >= size]
        if not fits:
            groups.append([])
            room.append(tokens)
            fits = [len(groups) - 1]
        groups[fits[0]].append(piece)
        room[fits[0]] -= size
    return groups


def _join(pieces: list[Tensor], group: list[int]) -> Tensor:
    # Ascending: within a sequence the clusters keep their order, which puts related clusters side by side.
    return torch.cat([pieces[piece] for piece in sorted(group)])
