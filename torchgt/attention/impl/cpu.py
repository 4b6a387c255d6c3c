"""Fused C++ attention for CPUs."""

from __future__ import annotations

import torch

from torchgt.attention import build


def availability() -> bool | str:
    """True, or why the compiled kernels cannot run on this machine."""
    return build.load()


def refusal(query: torch.Tensor) -> str | None:
    """Why these kernels cannot compute this call, or None."""
    reason = build.load()
    return None if reason is True else reason
