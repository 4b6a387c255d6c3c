"""Plain PyTorch: the oracle that every other implementation is tested against.

Any dtype, differentiable twice, written to be read rather than to be fast. A pair that is not in the pattern is
never touched, so a NaN in the key or value of an unattended token cannot reach an output.

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


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern, args: AttentionArgs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, H, D] and log-sum-exp [N, H] of the scores (-inf for a token with no pair)."""
    num_tokens, num_heads, _ = query.shape
    pairs = explicit_pairs(pattern)
    row_P, col_P = pairs.row_P, pairs.col_P

    score_PH = (query[row_P] * key[col_P]).sum(-1) * args.scale
    bias_PH = bias_of_pairs(pairs, args.pair_bias, args.type_bias)
    if bias_PH is not None:
        score_PH = score_PH + bias_PH

    # The maximum cancels in the softmax, so it needs no gradient.
    max_NH = query.new_full((num_tokens, num_heads), -torch.inf)
    max_NH = max_NH.scatter_reduce(0, row_P[:, None].expand(-1, num_heads), score_PH.detach(), "amax")
    shift_NH = torch.where(max_NH == -torch.inf, 0.0, max_NH)
    weight_PH = (score_PH - shift_NH[row_P]).exp()
    sum_NH = torch.zeros_like(max_NH).index_add(0, row_P, weight_PH)
    # A row without pairs (or with none but -inf scores) must give 0 and zero gradients, not 0/0.
    empty_NH = sum_NH == 0
    weight_PH = weight_PH / torch.where(empty_NH, 1.0, sum_NH)[row_P]
    lse_NH = torch.where(empty_NH, 1.0, sum_NH).log() + torch.where(empty_NH, -torch.inf, shift_NH)

    if args.dropout_p:
        i_P, j_P = (row_P, col_P) if args.token_ids is None else (args.token_ids[row_P], args.token_ids[col_P])
        keep_PH = hashing.keep_pairs(args.dropout_seed, i_P, j_P, num_heads, args.dropout_p, args.head_offset)
        weight_PH = weight_PH * keep_PH / (1.0 - args.dropout_p)

    out = torch.zeros_like(query).index_add(0, row_P, weight_PH[..., None] * value[col_P])
    return out, lse_NH
