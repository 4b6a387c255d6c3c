"""Counts what a worker sends to the others."""

from __future__ import annotations

from dataclasses import dataclass, field

CATEGORIES = ("attention", "global", "bias", "parameters")


def _zeros() -> dict[str, int]:
    return dict.fromkeys(CATEGORIES, 0)


@dataclass
class Traffic:
    """Bytes this worker sent to other workers, and collective calls, by category, forward and backward together.

    Categories: attention (queries, keys, values, outputs and their gradients), global (exchanges of their own that
    global tokens need), bias (biases along pairs), parameters (gradients). What a worker keeps for itself costs
    nothing. Bookkeeping numbers (how many tokens each worker holds) are not counted.
    """

    bytes_sent: dict[str, int] = field(default_factory=_zeros)
    calls: dict[str, int] = field(default_factory=_zeros)

    def add(self, category: str, num_bytes: int) -> None:
        """Counts one call that sends `num_bytes` to other workers."""
        self.bytes_sent[category] += num_bytes
        self.calls[category] += 1

    def reset(self) -> None:
        """Sets every count to 0."""
        self.bytes_sent, self.calls = _zeros(), _zeros()

    def to_dict(self) -> dict[str, dict[str, int]]:
        """A copy as plain numbers: {"bytes_sent": {category: n}, "calls": {category: n}}."""
        return {"bytes_sent": dict(self.bytes_sent), "calls": dict(self.calls)}
