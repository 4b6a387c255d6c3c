"""The counter hash behind every dropout mask.

A mask element is a pure function of (seed, token i, token j, head) or (seed, token, channel), never of a stream
position. The mask is therefore the same for any thread count, any order of the pairs and any split of tokens or
heads over processes, and a backward pass recomputes it instead of storing it.

The same arithmetic is written once more in `csrc/hash.h`; the tests compare the two bit for bit. Everything here
is int64 with wrap-around, because torch has no full unsigned 64-bit arithmetic.

Mixers: splitmix64's finaliser (Steele, Lea, Flood 2014) for keys, Wellons' "lowbias32" for the final 32 bits.
"""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN64 = _signed(0x9E3779B97F4A7C15)
_MIX64_A = _signed(0xBF58476D1CE4E5B9)
_MIX64_B = _signed(0x94D049BB133111EB)
_GOLDEN32 = 0x9E3779B9
_MIX32_A = 0x7FEB352D
_MIX32_B = 0x846CA68B


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX64_A
    x = (x ^ _shift_right(x, 27)) * _MIX64_B
    return x ^ _shift_right(x, 31)


def row_key(seed: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """64-bit key of each token `row` (int64, any shape) under the int64 scalar `seed`."""
    return _mix64(_mix64(seed + _GOLDEN64) + row * _GOLDEN64)


def pair_key(seed: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """64-bit key of each pair (i, j), int64 tensors of one shape."""
    return _mix64(row_key(seed, i) + (j + 1) * _GOLDEN64)


def hash32(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """32 uniform bits (as int64 in [0, 2**32)) for each key and counter (head or channel); the shapes broadcast.

    Both halves of the key enter at different rounds, so that two keys with one equal half share no sequence.
    """
    x = ((key & _MASK32) + counter * _GOLDEN32) & _MASK32
    x = ((x ^ (x >> 16)) * _MIX32_A) & _MASK32
    x = x ^ _shift_right(key, 32)
    x = ((x ^ (x >> 15)) * _MIX32_B) & _MASK32
    return x ^ (x >> 16)


def threshold(p: float) -> int:
    """An element is dropped when its 32 bits are below this number."""
    return min(round(p * (1 << 32)), _MASK32)


def keep_pairs(
    seed: torch.Tensor, i: torch.Tensor, j: torch.Tensor, num_heads: int, p: float, head_offset: int = 0
) -> torch.Tensor:
    """Attention dropout: bool [*i.shape, num_heads], True where the weight of pair (i, j) is kept.

    `i`, `j`: int64 global token ids of one shape; `head_offset`: global number of the first head.
    """
    heads_H = torch.arange(head_offset, head_offset + num_heads, device=i.device)
    return hash32(pair_key(seed, i, j)[..., None], heads_H) >= threshold(p)


def keep_tokens(seed: torch.Tensor, first_row: int, num_rows: int, num_channels: int, p: float) -> torch.Tensor:
    """Feature dropout: bool [num_rows, num_channels], True where kept; rows count from `first_row`."""
    rows_N = torch.arange(first_row, first_row + num_rows, device=seed.device)
    channels_C = torch.arange(num_channels, device=seed.device)
    return hash32(row_key(seed, rows_N)[:, None], channels_C) >= threshold(p)
