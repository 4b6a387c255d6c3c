"""`graph_attention`: checks the arguments, chooses an implementation, calls it.

Everything that a caller can get wrong is refused here, by argument name, before any implementation runs: the
implementations trust their inputs. Index arrays are read through once for each pattern and remembered as checked.

Legend: N tokens, H heads, D head dimension, E stored pairs, T pair types.
"""

from __future__ import annotations

import math
import warnings

import torch

from torchgt.attention.impl import AttentionArgs, cpu, dense, reference, scatter
from torchgt.errors import unknown

IMPLEMENTATIONS = ("reference", "scatter", "cpu", "triton", "dense")
_MODULES = {"reference": reference, "scatter": scatter, "cpu": cpu, "dense": dense}
_ABSENT = {"triton": "this version has no Triton kernels"}
# Below this mean size, complete graphs of one sequence are too small to be worth a library call each.
_SMALL_GRAPH = 64
_warned: set[str] = set()


def available_impls() -> dict[str, bool | str]:
    """Every implementation: True if it can run here, otherwise one line that says why not.

    Asking for "cpu" compiles its kernels if that has not happened yet.
    """
    return {name: _availability(name) for name in IMPLEMENTATIONS}


def graph_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern,
    *,
    pair_bias: torch.Tensor | None = None,
    type_bias: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    impl: str = "auto",
    dense_backend: str | None = None,
    head_offset: int = 0,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention over the pairs of `pattern`; returns [N, H, D] in the dtype of `query`.

    Token i becomes the softmax-weighted mean, over the tokens j that it attends to, of `value[j]`, with the scores
    `scale * query[i] . key[j]` plus the biases. A token with no pair gets 0 and zero gradients.

    Args:
        query, key, value: floating point [N, H, D] of one dtype and device, N = `pattern.num_tokens`. Any strides.
        pattern: AttentionPattern, or a reformation (anything with `to_pattern()`), on the same device.
        pair_bias: [E, H], added to the scores of the stored pairs, in their order. Differentiable.
        type_bias: [num_types, H], added by pair type; its last two rows are for pairs from and to global tokens.
            Differentiable. Biases of another floating dtype are cast to that of `query`.
        scale: factor of the dot products; default D ** -0.5.
        dropout_p: probability in [0, 1) of dropping an attention weight (the kept ones are scaled up). The mask
            hashes (dropout_seed, i, j, head), so it is the same for every implementation and thread count.
        dropout_seed: int64 scalar tensor; required if dropout_p > 0.
        impl: "auto", or one of `IMPLEMENTATIONS`, which then runs or raises, and never falls back. "auto" takes
            "dense" for complete patterns and "cpu" for the others on a CPU; "scatter" where that cannot run.
        dense_backend: with impl="dense", the one kernel of scaled_dot_product_attention to use ("flash",
            "efficient", "cudnn", "math"); RuntimeError if it cannot run.
        head_offset: global number of the first head, where `query` holds some of a layer's heads (dropout only).
        token_ids: int64 [N], global ids of the tokens, where the pattern is part of a larger one (dropout only).

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; names it and what was expected.
        RuntimeError: the implementation asked for cannot run here.
    """
    pattern, args, tensors = _checked(
        query, key, value, pattern, pair_bias, type_bias, scale, dropout_p, dropout_seed, head_offset, token_ids
    )
    if dense_backend is not None:
        _check_dense_backend(dense_backend, impl)
    name = _choose(impl, query, pattern, args)
    if query.numel() == 0:
        return _nothing(query, key, value, args)
    if name == "dense":
        return dense.attention(*tensors, pattern, args, backend=dense_backend)
    return _MODULES[name].attention(*tensors, pattern, args)[0]


def graph_attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern,
    *,
    pair_bias: torch.Tensor | None = None,
    type_bias: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    impl: str = "auto",
    head_offset: int = 0,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `graph_attention`, and the log-sum-exp [N, H] of every token's scores (-inf if it has no pair).

    Attention over parts of the keys can be merged exactly from the two. Both are differentiable. The dtype of the
    log-sum-exp is that of the arithmetic: float32 for 16-bit inputs in "cpu". Not offered by impl="dense".
    """
    pattern, args, tensors = _checked(
        query, key, value, pattern, pair_bias, type_bias, scale, dropout_p, dropout_seed, head_offset, token_ids
    )
    name = _choose(impl, query, pattern, args, need_lse=True)
    if query.numel() == 0:
        return _nothing(query, key, value, args), query.new_full(query.shape[:2], -torch.inf)
    return _MODULES[name].attention(*tensors, pattern, args._replace(need_lse=True))


def _availability(name: str) -> bool | str:
    return _ABSENT[name] if name in _ABSENT else _MODULES[name].availability()


def _nothing(query, key, value, args: AttentionArgs) -> torch.Tensor:
    """The empty output, connected to every differentiable input."""
    out = query + key + value
    for bias in (args.pair_bias, args.type_bias):
        if bias is not None and bias.requires_grad:
            out = out + 0.0 * bias.sum()
    return out


# Choice of the implementation.


def _choose(impl: str, query: torch.Tensor, pattern, args: AttentionArgs, need_lse: bool = False) -> str:
    if impl != "auto":
        if impl not in IMPLEMENTATIONS:
            raise ValueError(unknown("impl", impl, ("auto", *IMPLEMENTATIONS)))
        if need_lse and impl == "dense":
            raise ValueError("impl='dense' does not return the log-sum-exp; allowed: auto, cpu, reference, scatter")
        reason = _availability(impl)
        if reason is not True:
            raise RuntimeError(f"impl={impl!r} cannot run: {reason}")
        return impl
    small = pattern.num_pairs < _SMALL_GRAPH * pattern.num_tokens
    if pattern.is_full and not need_lse and not args.dropout_p and not small:
        return "dense"
    if query.device.type != "cpu":
        return "dense" if pattern.is_full and not need_lse else "scatter"
    reason = cpu.refusal(query)
    if reason is None:
        return "cpu"
    if pattern.is_full and not need_lse:
        return "dense"
    _warn_once(f"sparse attention falls back to the slow gather/scatter implementation: {reason}")
    return "scatter"


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _check_dense_backend(dense_backend: str, impl: str) -> None:
    backends = dense.BACKENDS
    if impl != "dense":
        raise ValueError(f"dense_backend={dense_backend!r} needs impl='dense', found impl={impl!r}")
    if dense_backend not in backends:
        raise ValueError(unknown("dense_backend", dense_backend, backends))


# Checks.


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))


def _checked(query, key, value, pattern, pair_bias, type_bias, scale, dropout_p, dropout_seed, head_offset, token_ids):
    """The pattern, the AttentionArgs and (query, key, value), all checked."""
    if hasattr(pattern, "to_pattern"):
        pattern = pattern.to_pattern()
    if not hasattr(pattern, "with_globals_as_pairs"):
        raise ValueError(f"pattern is {type(pattern).__name__}, expected an AttentionPattern or a reformation of one")
    _check_qkv(query, key, value, pattern)
    _check_pattern(pattern)
    if pattern.device != query.device:
        raise ValueError(f"pattern is on {pattern.device}, expected {query.device}, the device of query")
    num_tokens, num_heads, head_dim = query.shape
    if pair_bias is not None:
        pair_bias = _check_bias("pair_bias", pair_bias, (pattern.num_pairs, num_heads), "[E, H]", query)
    if type_bias is not None:
        type_bias = _check_bias("type_bias", type_bias, (pattern.num_types, num_heads), "[num_types, H]", query)
    if scale is None:
        scale = head_dim**-0.5 if head_dim else 1.0
    if not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}, expected a finite number or None")
    dropout_seed = _check_dropout(dropout_p, dropout_seed)
    if token_ids is not None and (token_ids.dtype != torch.int64 or token_ids.shape != (num_tokens,)):
        raise ValueError(f"token_ids is {token_ids.dtype} {_shape(token_ids)}, expected torch.int64 [{num_tokens}]")
    args = AttentionArgs(
        pair_bias, type_bias, float(scale), float(dropout_p), dropout_seed, int(head_offset), token_ids
    )
    return pattern, args, (query, key, value)


def _check_qkv(query, key, value, pattern) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} is {type(x).__name__}, expected a tensor [N, H, D]")
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {_shape(x)}, expected [N, H, D]")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {x.dtype}, expected a floating dtype")
        if x.shape != query.shape:
            raise ValueError(f"{name} has shape {_shape(x)}, expected {_shape(query)}, the shape of query")
        if x.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, expected {query.dtype}, the dtype of query")
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}, expected {query.device}, the device of query")
    if query.shape[0] != pattern.num_tokens:
        raise ValueError(
            f"query has shape {_shape(query)}, expected N = {pattern.num_tokens}, the number of tokens of pattern "
            f"({pattern.num_global} global)"
        )


def _check_bias(name: str, bias, shape: tuple[int, int], symbols: str, query: torch.Tensor) -> torch.Tensor:
    if not isinstance(bias, torch.Tensor) or not bias.dtype.is_floating_point:
        found = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise ValueError(f"{name} is {found}, expected a floating tensor {symbols} = {list(shape)}")
    if tuple(bias.shape) != shape:
        raise ValueError(f"{name} has shape {_shape(bias)}, expected {symbols} = {list(shape)}")
    if bias.device != query.device:
        raise ValueError(f"{name} is on {bias.device}, expected {query.device}, the device of query")
    return bias.to(query.dtype)


def _check_dropout(dropout_p, dropout_seed) -> torch.Tensor | None:
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p!r}, expected a number in [0, 1)")
    if dropout_p == 0.0:
        return None
    if not isinstance(dropout_seed, torch.Tensor) or dropout_seed.dtype != torch.int64 or dropout_seed.dim() != 0:
        found = (
            f"{dropout_seed.dtype} {_shape(dropout_seed)}" if isinstance(dropout_seed, torch.Tensor) else dropout_seed
        )
        raise ValueError(f"dropout_seed is {found}, expected an int64 scalar tensor, as dropout_p is {dropout_p}")
    return dropout_seed


def _check_pattern(pattern) -> None:
    """Read the index arrays through, once for each pattern: native code will follow them blindly."""
    if getattr(pattern, "_attention_checked", False):
        return
    if not pattern.is_full:  # a full pattern makes its own arrays
        rowptr, col = pattern.rowptr, pattern.col
        if rowptr.dtype != torch.int64 or rowptr.dim() != 1 or rowptr.numel() != pattern.num_tokens + 1:
            raise ValueError(
                f"pattern.rowptr is {rowptr.dtype} {_shape(rowptr)}, expected int64 [{pattern.num_tokens + 1}]"
            )
        if col.dtype not in (torch.int32, torch.int64) or col.dim() != 1:
            raise ValueError(f"pattern.col is {col.dtype} {_shape(col)}, expected int32 or int64 [E]")
        if int(rowptr[0]) != 0 or int(rowptr[-1]) != col.numel() or bool((rowptr.diff() < 0).any()):
            raise ValueError(f"pattern.rowptr is not ascending from 0 to E = {col.numel()}")
        if int(rowptr[pattern.num_global]) != 0:
            raise ValueError(f"pattern stores pairs in the rows of its {pattern.num_global} global tokens")
        if col.numel():
            low, high = (int(x) for x in col.aminmax())
            if low < pattern.num_global or high >= pattern.num_tokens:
                raise ValueError(
                    f"pattern.col holds {low}..{high}, expected {pattern.num_global}..{pattern.num_tokens - 1}"
                )
        _check_pair_type(pattern)
    pattern._attention_checked = True


def _check_pair_type(pattern) -> None:
    kind = pattern.pair_type
    if kind.dtype != torch.uint8 or tuple(kind.shape) != (pattern.num_pairs,):
        raise ValueError(f"pattern.pair_type is {kind.dtype} {_shape(kind)}, expected uint8 [{pattern.num_pairs}]")
    if kind.numel() and int(kind.max()) >= pattern.num_types - 2:
        raise ValueError(f"pattern.pair_type holds {int(kind.max())}, expected at most {pattern.num_types - 3}")
