"""Fused attention for CPUs, in C++: forward in one pass over the pairs, backward in one by rows and one by columns.

Nothing of the size of pairs x head dimension is ever made. The forward pass keeps the output and the softmax sums of
every row; the backward pass recomputes the weights from them. It sums gradients of keys and values along the
transposed pattern instead of scattering, so no two threads write one element, and every sum has an order that depends
on the pattern alone: results are the same bits for any number of threads. Tensors stay in their natural layout.

float32 and float64 compute in themselves; bfloat16 is storage only and computes in float32. The algorithm is the
online softmax of FlashAttention (Dao et al. 2022) over a sparse pattern in rows. Largest score and inverse sum of
exponentials are kept apart instead of as one log-sum-exp, whose rounding would reach every weight of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchgt.attention import build, hashing
from torchgt.attention.impl import AttentionArgs

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def availability() -> bool | str:
    """True, or why the compiled kernels cannot run on this machine."""
    return build.load()


def refusal(query: Tensor) -> str | None:
    """Why these kernels cannot compute this call, or None."""
    if query.device.type != "cpu":
        return f"the C++ kernels compute on the CPU, and query is on {query.device}"
    if query.dtype not in _DTYPES:
        return f"the C++ kernels take float32, bfloat16 and float64, and query is {query.dtype}"
    reason = build.load()
    return None if reason is True else reason


def attention(query: Tensor, key: Tensor, value: Tensor, pattern, args: AttentionArgs) -> tuple[Tensor, Tensor | None]:
    """Output [N, H, D] and, if wanted, log-sum-exp [N, H] of the scores (-inf for a token with no pair)."""
    reason = refusal(query)
    if reason is not None:
        raise ValueError(f"impl='cpu' refuses this call: {reason}")
    tensors = [query, key, value, args.pair_bias, args.type_bias]
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    rowptr_t, col_t, index_t = pattern.transposed() if needs_grad else (None, None, None)
    out, sums = sparse_attention_op(
        _rows_apart(query),
        _rows_apart(key),
        _rows_apart(value),
        pattern.rowptr,
        pattern.col,
        rowptr_t,
        col_t,
        index_t,
        pattern.pair_type if args.type_bias is not None else None,
        None if args.pair_bias is None else args.pair_bias.contiguous(),
        args.type_bias,
        args.dropout_seed,
        args.token_ids,
        pattern.num_global,
        pattern.num_types,
        args.scale,
        args.dropout_p,
        args.head_offset,
    )
    if not args.need_lse:
        return out, None
    top, inverse = sums.unbind(1)
    empty = inverse == 0
    # The largest score cancels in the gradient of the log-sum-exp, which therefore comes through the sum alone.
    lse = top.detach() - inverse.masked_fill(empty, 1.0).log()
    return out, lse.masked_fill(empty, -torch.inf)


def _rows_apart(x: Tensor) -> Tensor:
    """`x` if the heads of each token are contiguous (as in a slice of a joint projection), else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@torch.library.custom_op("torchgt::sparse_attention", mutates_args=(), device_types="cpu")
def sparse_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    rowptr_t: Tensor | None,
    col_t: Tensor | None,
    index_t: Tensor | None,
    pair_type: Tensor | None,
    pair_bias: Tensor | None,
    type_bias: Tensor | None,
    dropout_seed: Tensor | None,
    token_ids: Tensor | None,
    num_global: int,
    num_types: int,
    scale: float,
    dropout_p: float,
    head_offset: int,
) -> tuple[Tensor, Tensor]:
    """Output [N, H, D]; [N, 2, H]: largest score of each row, a constant for autograd, and 1 / sum of exp(score -
    largest), 0 for a row without pairs. The transposed pattern is read by the backward pass only."""
    return torch.ops.torchgt_cpu.forward(
        query,
        key,
        value,
        rowptr,
        col,
        pair_type,
        pair_bias,
        type_bias,
        dropout_seed if dropout_p else None,
        token_ids,
        num_global,
        num_types,
        scale,
        hashing.threshold(dropout_p),
        1.0 / (1.0 - dropout_p),
        head_offset,
    )


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@sparse_attention_op.register_fake
def _(query, key, value, rowptr, col, *rest):
    num_tokens, num_heads = query.shape[:2]
    return query.new_empty(query.shape), query.new_empty((num_tokens, 2, num_heads), dtype=_arithmetic(query.dtype))


@torch.library.custom_op("torchgt::sparse_attention_backward", mutates_args=(), device_types="cpu")
def sparse_attention_backward_op(
    grad_out: Tensor,
    grad_sums: Tensor | None,
    out: Tensor,
    sums: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rowptr: Tensor,
    col: Tensor,
    rowptr_t: Tensor,
    col_t: Tensor,
    index_t: Tensor,
    pair_type: Tensor | None,
    pair_bias: Tensor | None,
    type_bias: Tensor | None,
    dropout_seed: Tensor | None,
    token_ids: Tensor | None,
    num_global: int,
    num_types: int,
    scale: float,
    dropout_p: float,
    head_offset: int,
    want_pair_bias: bool,
    want_type_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, pair_bias and type_bias; an unwanted bias gradient has no rows."""
    grads = torch.ops.torchgt_cpu.backward(
        grad_out.contiguous(),
        None if grad_sums is None else grad_sums.contiguous(),
        out,
        sums,
        query,
        key,
        value,
        rowptr,
        col,
        rowptr_t,
        col_t,
        index_t,
        pair_type,
        pair_bias,
        type_bias,
        dropout_seed if dropout_p else None,
        token_ids,
        num_global,
        num_types,
        scale,
        hashing.threshold(dropout_p),
        1.0 / (1.0 - dropout_p),
        head_offset,
        want_pair_bias,
        want_type_bias,
    )
    return (*grads[:4], grads[4].to(query.dtype))


@sparse_attention_backward_op.register_fake
def _(grad_out, grad_sums, out, sums, query, key, value, rowptr, col, *rest):
    num_types, want_pair_bias, want_type_bias = rest[9], rest[-2], rest[-1]
    grads = [query.new_empty(query.shape) for _ in range(3)]
    num_heads = query.shape[1]
    grad_pair_bias = query.new_empty((col.shape[0] if want_pair_bias else 0, num_heads))
    grad_type_bias = query.new_empty((num_types if want_type_bias else 0, num_heads))
    return (*grads, grad_pair_bias, grad_type_bias)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, num_global, num_types, scale, dropout_p, head_offset = inputs
    ctx.numbers = (num_global, num_types, scale, dropout_p, head_offset)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_sums):
    *tensors, out, sums = ctx.saved_tensors
    rowptr_t = tensors[5]
    if grad_out is None and grad_sums is None:
        return (None,) * 18
    if rowptr_t is None:
        raise RuntimeError("torchgt::sparse_attention needs the transposed pattern where gradients are wanted")
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    want_pair_bias, want_type_bias = ctx.needs_input_grad[9], ctx.needs_input_grad[10]
    grads = sparse_attention_backward_op(
        grad_out, grad_sums, out, sums, *tensors, *ctx.numbers, want_pair_bias, want_type_bias
    )
    grad_pair_bias = grads[3] if want_pair_bias else None
    grad_type_bias = grads[4] if want_type_bias else None
    return (*grads[:3], *(None,) * 6, grad_pair_bias, grad_type_bias, *(None,) * 7)


sparse_attention_op.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("torchgt::token_dropout", mutates_args=(), device_types="cpu")
def token_dropout_op(x: Tensor, seed: Tensor, p: float, token_offset: int) -> Tensor:
    """Feature dropout [N, C] with a hashed mask; its own gradient, as the mask is recomputed."""
    threshold, keep_scale = hashing.threshold(p), 1.0 / (1.0 - p)
    return torch.ops.torchgt_cpu.token_dropout(x.contiguous(), seed, threshold, keep_scale, token_offset)


@token_dropout_op.register_fake
def _(x, seed, p, token_offset):
    return x.new_empty(x.shape)


def _token_dropout_context(ctx, inputs, output) -> None:
    _, seed, ctx.p, ctx.token_offset = inputs
    ctx.save_for_backward(seed)


def _token_dropout_backward(ctx, grad):
    return token_dropout_op(grad, *ctx.saved_tensors, ctx.p, ctx.token_offset), None, None, None


token_dropout_op.register_autograd(_token_dropout_backward, setup_context=_token_dropout_context)
