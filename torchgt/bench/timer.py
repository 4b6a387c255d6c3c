"""Step times by kind, honestly: device synchronised, warm-up dropped, median with quartiles and n."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

WARMUP = 2


class StepTimer:
    """Collects the seconds of steps by kind ("sparse", "dense").

    The first two steps of a kind are warm-up (allocator, caches, lazily built layouts) and count only while there
    are no others.
    """

    def __init__(self, device: torch.device, warmup: int = WARMUP) -> None:
        self.device, self.warmup = device, warmup
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        self._synchronise()
        start = time.perf_counter()
        yield
        self._synchronise()
        self.seconds.setdefault(kind, []).append(time.perf_counter() - start)

    def summary(self) -> dict[str, dict[str, float]]:
        """{kind: {median, q25, q75, n}} in seconds."""
        return {kind: quartiles(values[self.warmup :] or values) for kind, values in self.seconds.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = {kind: list(values) for kind, values in state["seconds"].items()}

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def quartiles(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles (linear interpolation) of at least one value."""
    q25, median, q75 = torch.quantile(
        torch.tensor(seconds, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    ).tolist()
    return {"median": median, "q25": q25, "q75": q75, "n": len(seconds)}
