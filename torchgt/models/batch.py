"""What a model receives in one step: a sequence of node tokens, or one worker's share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchgt.graph import Graph
    from torchgt.parallel import SequenceParallel
    from torchgt.pattern import AttentionPattern
    from torchgt.reformation import Reformation


@dataclass(kw_only=True)
class Batch:
    """One step's input. N nodes in the sequence, N_r of them on this worker (N_r = N on one process).

    Raises ValueError if rows of `x`, `y` and `weight` differ in number.
    """

    x: torch.Tensor
    """[N_r, F] float, features of this worker's nodes in sequence order"""
    pattern: AttentionPattern | Reformation | None = None
    """who attends to whom in the WHOLE sequence, global tokens included"""
    graph: Graph | None = None
    """the graph induced on the sequence, for systems that pass messages"""
    y: torch.Tensor | None = None
    """[N_r] or [N_r, T], labels"""
    weight: torch.Tensor | None = None
    """[N_r] bool or float, which nodes count in the loss"""
    nodes: torch.Tensor | None = None
    """[N] int64, ids of the sequence's nodes in the store"""
    token_offset: int = 0
    """position in the sequence, not counting global tokens, of this worker's first node"""
    dropout_seed: torch.Tensor | None = None
    """int64 scalar tensor, equal on all workers, new each step; None: no dropout"""
    impl: str = "auto"
    """implementation of attention"""
    use_type_bias: bool = True
    """False leaves the model's bias table out of this step (dense steps)"""
    pair_bias: torch.Tensor | None = None
    """[E_r, H], bias along the pairs of this worker's rows of the pattern"""
    parallel: SequenceParallel | None = None
    """how the sequence is split over workers; None: one process"""
    kind: str = "sparse"
    """"sparse" or "dense": what the schedule chose"""
    loss_tokens: int | None = None
    """labelled tokens to average the loss over, where the batch stands for a longer sequence; None: its own"""
    graph_ptr: torch.Tensor | None = None
    """[G + 1] int64, where each graph's nodes begin, for tasks that label graphs"""

    def __post_init__(self) -> None:
        if self.x.dim() != 2:
            raise ValueError(f"x: expected [nodes, features], found shape {tuple(self.x.shape)}")
        for key in ("y", "weight"):
            value = getattr(self, key)
            if value is not None and value.shape[:1] != self.x.shape[:1]:
                raise ValueError(f"{key}: expected {self.x.shape[0]} rows as in x, found shape {tuple(value.shape)}")
        if self.kind not in ("sparse", "dense"):
            raise ValueError(f"kind: expected 'sparse' or 'dense', found {self.kind!r}")

    @property
    def num_local(self) -> int:
        """Nodes on this worker."""
        return self.x.shape[0]
