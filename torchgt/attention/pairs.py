"""Every attended pair of a pattern, written out, for the implementations that need them so.

Legend: N tokens, H heads, P pairs with those of the global tokens included, E stored pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExplicitPairs(NamedTuple):
    """Pairs sorted by row, the global tokens' rows and columns included."""

    row_P: torch.Tensor
    """int64, the attending token"""
    col_P: torch.Tensor
    """int64, the attended token"""
    type_P: torch.Tensor
    """int64, row of a type_bias"""
    index_P: torch.Tensor | None
    """int64, position among the stored pairs, -1 for a pair of a global token; None if every pair is stored"""


def explicit_pairs(pattern) -> ExplicitPairs:
    """All pairs of an AttentionPattern, laid out once for each pattern."""
    if getattr(pattern, "_explicit_pairs", None) is None:
        rowptr, col, kind, index = pattern.with_globals_as_pairs()
        rows = torch.arange(rowptr.numel() - 1, device=rowptr.device)
        row = torch.repeat_interleave(rows, rowptr.diff(), output_size=col.numel())
        pattern._explicit_pairs = ExplicitPairs(row, col.long(), kind.long(), index if pattern.num_global else None)
    return pattern._explicit_pairs


def bias_of_pairs(
    pairs: ExplicitPairs, pair_bias: torch.Tensor | None, type_bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Additive score [P, H] of every pair, or None without a bias. `pair_bias` [E, H], `type_bias` [num_types, H]."""
    bias = None if type_bias is None else type_bias.index_select(0, pairs.type_P)
    if pair_bias is None:
        return bias
    if pairs.index_P is None:
        return pair_bias if bias is None else bias + pair_bias
    stored = (pairs.index_P >= 0).nonzero().squeeze(1)
    if bias is None:
        bias = pair_bias.new_zeros(pairs.row_P.numel(), pair_bias.shape[1])
    return bias.index_add(0, stored, pair_bias.index_select(0, pairs.index_P[stored]))
