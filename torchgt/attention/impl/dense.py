"""Dense attention by scaled_dot_product_attention.

A complete pattern without a bias takes no mask, so that the flash kernel can run; a bias or an incomplete pattern
makes an additive mask, which costs N^2 memory per head. Several graphs in one sequence are computed graph by graph,
never as one big masked square.

Attention dropout is hashed, which no library kernel can do: with dropout the same computation is written out
(softmax of a score matrix), unless a kernel was asked for by name, which is then refused.

Legend: G graphs, n tokens of one graph, N tokens, H heads, D head dimension, T pair types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torchgt.attention import hashing
from torchgt.attention.impl import AttentionArgs
from torchgt.attention.pairs import ExplicitPairs, bias_of_pairs, explicit_pairs

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def availability() -> bool | str:
    """Runs everywhere (a single kernel asked for by name may still be unable to)."""
    return True


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern,
    args: AttentionArgs,
    backend: str | None = None,
) -> torch.Tensor:
    """Output [N, H, D]. `backend`: pin one kernel of `BACKENDS`; RuntimeError if it cannot run."""
    if backend is not None and args.dropout_p:
        raise ValueError(
            f"dense_backend={backend!r} cannot apply the hashed dropout; use dropout_p=0 or no dense_backend"
        )
    with nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        try:
            if pattern.is_full:
                return _full(query, key, value, pattern, args)
            return _masked(query, key, value, pattern, args)
        except RuntimeError as error:
            if backend is None or "No available kernel" not in str(error):
                raise
            raise RuntimeError(
                f"dense_backend={backend!r} cannot run for query of shape {list(query.shape)}, {query.dtype} on "
                f"{query.device}" + (" with a bias" if args.type_bias is not None or args.pair_bias is not None else "")
            ) from error


def _graph_spans(pattern) -> Iterator[tuple[int, int, int]]:
    """(first token, size, first stored pair) of every graph of a full pattern."""
    first_pair = 0
    ptr = pattern.ptr.tolist()
    for start, stop in zip(ptr[:-1], ptr[1:], strict=True):
        size = stop - start
        if size:
            yield start, size, first_pair
        first_pair += size * size


def _full(query, key, value, pattern, args: AttentionArgs) -> torch.Tensor:
    spans = list(_graph_spans(pattern))
    has_bias = args.type_bias is not None or args.pair_bias is not None
    sizes = {size for _, size, _ in spans}
    if len(sizes) == 1 and not has_bias and not args.dropout_p:
        # Graphs of one size are a batch.
        size = sizes.pop()
        batch = [x.reshape(len(spans), size, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)]
        out = scaled_dot_product_attention(*batch, scale=args.scale)
        return out.transpose(1, 2).reshape(query.shape)
    outputs = []
    for start, size, first_pair in spans:
        rows = slice(start, start + size)
        bias = _full_bias(pattern, args, size, first_pair) if has_bias else None
        tokens = torch.arange(start, start + size, device=query.device) if args.dropout_p else None
        outputs.append(_square(query[rows], key[rows], value[rows], bias, args, tokens))
    return torch.cat(outputs)


def _full_bias(pattern, args: AttentionArgs, size: int, first_pair: int) -> torch.Tensor:
    """Additive score [H, n, n] of one graph of a full pattern."""
    pairs = slice(first_pair, first_pair + size * size)
    bias = None
    if args.type_bias is not None:
        if pattern.pair_type is None:
            types_nn = torch.zeros(size, size, dtype=torch.int64, device=args.type_bias.device)
        else:
            types_nn = pattern.pair_type[pairs].view(size, size).long()
        bias = _look_up(args.type_bias, types_nn)
    if args.pair_bias is not None:
        by_pair = args.pair_bias[pairs].view(size, size, -1).permute(2, 0, 1)
        bias = by_pair if bias is None else bias + by_pair
    return bias


def _look_up(type_bias: torch.Tensor, types_nn: torch.Tensor) -> torch.Tensor:
    """type_bias [T, H] at int64 types [n, n] -> [H, n, n].

    The table is expanded over rows before the gather, so that its gradient is summed row by row and then over the
    rows: many threads, and partial sums small enough not to lose digits.
    """
    num_types, num_heads = type_bias.shape
    n = types_nn.shape[0]
    table_HnT = type_bias.t()[:, None, :].expand(num_heads, n, num_types)
    return table_HnT.gather(2, types_nn[None].expand(num_heads, n, n))


def _square(query, key, value, bias_Hnn, args: AttentionArgs, tokens) -> torch.Tensor:
    """Complete attention within one set of tokens [n, H, D], with an optional additive score [H, n, n]."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    if not args.dropout_p:
        mask = None if bias_Hnn is None else bias_Hnn[None]
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=args.scale)[0]
        return out.transpose(0, 1)
    score_Hnn = (q @ k.transpose(1, 2)) * args.scale
    if bias_Hnn is not None:
        score_Hnn = score_Hnn + bias_Hnn
    if args.token_ids is not None:
        tokens = args.token_ids[tokens]
    i_nn, j_nn = torch.broadcast_tensors(tokens[:, None], tokens[None, :])
    keep_nnH = hashing.keep_pairs(args.dropout_seed, i_nn, j_nn, q.shape[0], args.dropout_p, args.head_offset)
    weight_Hnn = score_Hnn.softmax(-1) * keep_nnH.permute(2, 0, 1) / (1.0 - args.dropout_p)
    return (weight_Hnn @ v).transpose(0, 1)


def _masked(query, key, value, pattern, args: AttentionArgs) -> torch.Tensor:
    """An incomplete pattern as a mask over the whole square."""
    num_tokens, num_heads, _ = query.shape
    pairs = explicit_pairs(pattern)
    allowed_NN = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=query.device)
    allowed_NN[pairs.row_P, pairs.col_P] = True
    has_pair_N = allowed_NN.any(1)
    mask_HNN = _masked_bias(pairs, allowed_NN, has_pair_N, query, args)

    # A product with weight 0 would still let a NaN of an unattended token through: such values are taken out of
    # the products and put back into exactly the rows that attend to them.
    key_bad, value_bad = ~key.isfinite(), ~value.isfinite()
    out = _square(
        query,
        key.masked_fill(key_bad, 0.0),
        value.masked_fill(value_bad, 0.0),
        mask_HNN,
        args,
        torch.arange(num_tokens, device=query.device),
    )
    out = out.masked_fill(~has_pair_N[:, None, None], 0.0)
    bad = key_bad.any(-1, keepdim=True) | value_bad
    if torch.compiler.is_compiling() or bool(bad.any()):
        reached = allowed_NN.to(query.dtype) @ bad.to(query.dtype).flatten(1)
        out = out.masked_fill(reached.view(out.shape) > 0, torch.nan)
    return out


def _masked_bias(pairs: ExplicitPairs, allowed_NN, has_pair_N, query, args: AttentionArgs) -> torch.Tensor:
    """Additive score [H or 1, N, N], -inf outside the pattern, but finite in rows with no pair (zeroed later)."""
    num_tokens = query.shape[0]
    closed_NN = ~allowed_NN & has_pair_N[:, None]
    bias_PH = bias_of_pairs(pairs, args.pair_bias, args.type_bias)
    if bias_PH is None:
        return query.new_zeros(1, num_tokens, num_tokens).masked_fill(closed_NN, -torch.inf)
    square = query.new_zeros(num_tokens * num_tokens, bias_PH.shape[1])
    square = square.index_copy(0, pairs.row_P * num_tokens + pairs.col_P, bias_PH)
    return square.view(num_tokens, num_tokens, -1).permute(2, 0, 1).masked_fill(closed_NN, -torch.inf)
