"""How fast attention over a pattern could be at best: the bytes that must move, the operations that must be done.

The floor of a time is max(bytes / copy bandwidth, operations / multiply-add rate), both rates measured on the same
device and threads in the same run. Every operand counts once, as if caches were perfect: no implementation can be
faster, and the ratio to the floor says how much of the hardware one uses.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from torchgt.bench.timer import quartiles


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bytes/s of a copy (read and written bytes both count), flop/s of a matrix product."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True)
class Work:
    """Bytes and floating-point operations of one pass."""

    bytes: int
    flop: int

    def floor_s(self, rates: Rates) -> float:
        """The shortest possible time, seconds."""
        return max(self.bytes / rates.bytes_per_s, self.flop / rates.flop_per_s)

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flop + other.flop)


def attention_work(
    num_tokens: int,
    num_pairs: int,
    heads: int,
    head_dim: int,
    itemsize: int,
    *,
    index_itemsize: int = 4,
    type_bias: bool = False,
    pair_bias: bool = False,
) -> dict[str, Work]:
    """Least work of "forward", "backward" and both together ("total") over `num_pairs` computed pairs.

    Bytes, forward: query, key, value and output, the log-sum-exp (float32), row pointers, columns, biases. Backward:
    these and the output's gradient read, three gradients (and that of the pair bias) written. Operations: two products
    of length D a pair and head forward; five backward (scores again, and the gradients of weight, query, key, value).
    """
    tensor = num_tokens * heads * head_dim * itemsize
    sums = num_tokens * heads * 4
    index = (num_tokens + 1) * 8 + num_pairs * (index_itemsize + int(type_bias))
    bias = num_pairs * heads * itemsize if pair_bias else 0
    product = 2 * num_pairs * heads * head_dim
    forward = Work(4 * tensor + sums + index + bias, 2 * product)
    backward = Work(8 * tensor + sums + index + 2 * bias, 5 * product)
    return {"forward": forward, "backward": backward, "total": forward + backward}


def measure_rates(device: torch.device, dtype: torch.dtype = torch.float32) -> Rates:
    """Copy bandwidth over buffers far larger than any cache, and the rate of a square product in `dtype`.

    The rate of bfloat16 on a CPU is that of float32: it is storage there, and arithmetic is in float32.
    """
    on_gpu = device.type == "cuda"
    size = (1 << 30) if on_gpu else (1 << 28)
    source = torch.zeros(size // 4, device=device)
    target = torch.ones_like(source)
    copy = _fastest(functools.partial(target.copy_, source), device)
    del source, target
    side = 8192 if on_gpu else 1536
    if not on_gpu and dtype == torch.bfloat16:
        dtype = torch.float32
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    product = _fastest(functools.partial(torch.mm, a, b), device)
    return Rates(2 * size / copy, 2 * side**3 / product)


def _fastest(function, device: torch.device, repeats: int = 7) -> float:
    """Lower quartile of the seconds: a rate that the device sustains, not one that a neighbour disturbed."""
    seconds = []
    for _ in range(repeats + 2):
        _synchronise(device)
        start = time.perf_counter()
        function()
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
    return quartiles(seconds[2:])["q25"]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


__all__ = ["Rates", "Work", "attention_work", "measure_rates"]
