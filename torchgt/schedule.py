"""Dual-interleaved attention: which step is sparse (the graph's pairs) and which is fully connected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class InterleavedSchedule:
    """Every `dense_every`-th step is fully connected, all others are sparse; 0 means never, 1 always.

    Source: TorchGT (SC'24), section on Dual-interleaved Attention.
    """

    dense_every: int

    def __post_init__(self) -> None:
        if self.dense_every < 0:
            raise ValueError(f"dense_every: {self.dense_every}; allowed: 0 (never) or more")

    def kind(self, step: int) -> str:
        """ "dense" or "sparse" for the step counted from 0."""
        return "dense" if self.dense_every and (step + 1) % self.dense_every == 0 else "sparse"

    def amortised(self, sparse_s: float, dense_s: float) -> float:
        """Mean seconds a step over one round of the schedule."""
        if not self.dense_every:
            return sparse_s
        return ((self.dense_every - 1) * sparse_s + dense_s) / self.dense_every
