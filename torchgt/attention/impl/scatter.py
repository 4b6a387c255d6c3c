"""Gather/scatter: the formulation that most graph libraries use, and the yardstick of every speed-up here.

Queries, keys and values are gathered to one row per pair, softmax is a scattered maximum and a scattered sum, and
the weighted values are scattered back. Global tokens become ordinary pairs. It is kept as it is commonly written,
neither fused nor slowed: of torch's ways to gather and to scatter-add it uses the fastest on a CPU
(index_select, and scatter_add with an expanded index on two-dimensional tensors).

Legend: N tokens, H heads, D head dimension, P pairs.
"""

from __future__ import annotations

import torch

from torchgt.attention import hashing
from torchgt.attention.impl import AttentionArgs
from torchgt.attention.pairs import bias_of_pairs, explicit_pairs


def availability() -> bool | str:
    """Runs everywhere."""
    return True


def _scatter_sum(source_PC: torch.Tensor, row_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    index_PC = row_P[:, None].expand_as(source_PC)
    return source_PC.new_zeros(num_rows, source_PC.shape[1]).scatter_add(0, index_PC, source_PC)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern, args: AttentionArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, H, D] and log-sum-exp [N, H] of the scores (-inf for a token with no pair)."""
    num_tokens, num_heads, head_dim = query.shape
    pairs = explicit_pairs(pattern)
    row_P, col_P = pairs.row_P, pairs.col_P

    query_PHD = query.index_select(0, row_P)
    key_PHD = key.index_select(0, col_P)
    score_PH = (query_PHD * key_PHD).sum(-1) * args.scale
    bias_PH = bias_of_pairs(pairs, args.pair_bias, args.type_bias)
    if bias_PH is not None:
        score_PH = score_PH + bias_PH

    max_NH = query.new_full((num_tokens, num_heads), -torch.inf)
    max_NH = max_NH.scatter_reduce(0, row_P[:, None].expand_as(score_PH), score_PH.detach(), "amax")
    shift_NH = max_NH.masked_fill(max_NH == -torch.inf, 0.0)
    weight_PH = (score_PH - shift_NH.index_select(0, row_P)).exp()
    sum_NH = _scatter_sum(weight_PH, row_P, num_tokens)
    empty_NH = sum_NH == 0
    sum_NH = sum_NH.masked_fill(empty_NH, 1.0)
    weight_PH = weight_PH / sum_NH.index_select(0, row_P)
    lse_NH = sum_NH.log() + shift_NH.masked_fill(empty_NH, -torch.inf)

    if args.dropout_p:
        i_P, j_P = (row_P, col_P) if args.token_ids is None else (args.token_ids[row_P], args.token_ids[col_P])
        keep_PH = hashing.keep_pairs(args.dropout_seed, i_P, j_P, num_heads, args.dropout_p, args.head_offset)
        weight_PH = weight_PH * keep_PH / (1.0 - args.dropout_p)

    message_PHD = value.index_select(0, col_P) * weight_PH[..., None]
    out_NC = _scatter_sum(message_PHD.flatten(1), row_P, num_tokens)
    return out_NC.view(num_tokens, num_heads, head_dim), lse_NH
