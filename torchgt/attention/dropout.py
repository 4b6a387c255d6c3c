"""Dropout over token features whose mask is a hash, not a stream.

Element (token, channel) is kept or dropped by a hash of (seed, global token number, channel): any split of the
tokens over processes, and any thread count, gives the same bits, and the backward pass recomputes the mask.

Legend: N tokens, C channels.
"""

from __future__ import annotations

import torch

from torchgt.attention import build, hashing


def token_dropout(
    x: torch.Tensor, p: float, seed: torch.Tensor | None, token_offset: int = 0, training: bool = True
) -> torch.Tensor:
    """Drop elements of `x` [N, C] with probability `p` and scale the others by 1 / (1 - p).

    Args:
        x: floating point [N, C].
        p: probability in [0, 1).
        seed: int64 scalar tensor on the device of x; not read if nothing is to be dropped.
        token_offset: global number of the first row, where `x` is a share of a longer sequence.
        training: False returns `x` itself.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value.
    """
    if not isinstance(p, (int, float)) or not 0.0 <= p < 1.0:
        raise ValueError(f"p is {p!r}, expected a number in [0, 1)")
    if not training or p == 0.0:
        return x
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected floating point [N, C]")
    if not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64 or seed.dim() != 0:
        found = f"{seed.dtype} {list(seed.shape)}" if isinstance(seed, torch.Tensor) else repr(seed)
        raise ValueError(f"seed is {found}, expected an int64 scalar tensor")
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float64) and build.load() is True:
        from torchgt.attention.impl.cpu import token_dropout_op

        return token_dropout_op(x, seed, float(p), int(token_offset))
    return token_dropout_torch(x, seed, float(p), int(token_offset))


def token_dropout_torch(x: torch.Tensor, seed: torch.Tensor, p: float, token_offset: int) -> torch.Tensor:
    """The same in plain PyTorch, for devices and dtypes that the compiled op does not take."""
    keep_NC = hashing.keep_tokens(seed, token_offset, x.shape[0], x.shape[1], p)
    arithmetic = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return torch.where(keep_NC, arithmetic * (1.0 / (1.0 - p)), 0.0).to(x.dtype)
