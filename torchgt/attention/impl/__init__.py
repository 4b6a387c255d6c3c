"""The implementations of graph_attention, one module each; none imports another.

Each module has `availability()`, True or the reason why it cannot run on this machine, and
`attention(query, key, value, pattern, args)` with `args` an `AttentionArgs` and inputs that the API has checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionArgs(NamedTuple):
    """The checked keyword arguments of one attention call."""

    pair_bias: torch.Tensor | None
    """[E, H] along the stored pairs"""
    type_bias: torch.Tensor | None
    """[num_types, H]"""
    scale: float
    """factor of the dot products"""
    dropout_p: float
    """probability in [0, 1) of dropping an attention weight"""
    dropout_seed: torch.Tensor | None
    """int64 scalar; None iff dropout_p is 0"""
    head_offset: int
    """global number of the first head, for the dropout hash"""
    token_ids: torch.Tensor | None
    """int64 [N] global ids of the tokens, for the dropout hash; None: 0..N-1"""
    need_lse: bool = False
    """whether the caller wants the log-sum-exp"""
