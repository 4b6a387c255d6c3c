"""Is an implementation of attention right on this very input? Asked before anything is timed.

A sample of the tokens is checked, output and every gradient, against the float64 oracle; on a small pattern that is
all of them. The columns sampled are complete: every row that attends to them is computed whole, so gradients of keys
and values are exact too. An implementation may err at most twice as much (root mean square) as the gather/scatter
formulation in the same precision, which is given the same small problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgt.attention import graph_attention
from torchgt.graph import gather_rows
from torchgt.pattern import AttentionPattern

Attention = Callable[..., Tensor]

GRADIENTS = ("query", "key", "value", "pair_bias")
_SAMPLE_PAIRS = 50_000


@dataclass
class Inputs:
    """One attention call: query, key, value and the output's gradient [N, H, D], biases or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    pair_bias: Tensor | None = None
    type_bias: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None

    def keywords(self) -> dict:
        """The keyword arguments of `graph_attention`."""
        return {
            "pair_bias": self.pair_bias,
            "type_bias": self.type_bias,
            "dropout_p": self.dropout_p,
            "dropout_seed": self.dropout_seed,
        }

    def differentiable(self) -> dict[str, Tensor]:
        """Tensors that take a gradient, by name."""
        named = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "pair_bias": self.pair_bias,
            "type_bias": self.type_bias,
        }
        return {name: x for name, x in named.items() if x is not None}


@dataclass
class Sample:
    """A part of a pattern that can be checked whole.

    rows: tokens whose output and query gradient are exact; columns: tokens whose key and value gradients are;
    tokens: all tokens that take part; pairs: positions in the whole pattern of the part's pairs.
    """

    rows: Tensor
    columns: Tensor
    tokens: Tensor
    pairs: Tensor
    pattern: AttentionPattern


def take_sample(pattern: AttentionPattern, seed: int = 0, max_pairs: int = _SAMPLE_PAIRS) -> Sample:
    """Random columns, all rows that attend to them, and all pairs of those rows, up to about `max_pairs` pairs.

    Patterns with global tokens are taken whole: each global token touches every pair.
    """
    if pattern.num_pairs_computed <= max_pairs or pattern.num_global:
        everything = torch.arange(pattern.num_tokens)
        return Sample(everything, everything, everything, torch.arange(pattern.num_pairs), pattern)
    rowptr_t, col_t, _ = pattern.transposed()
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randint(pattern.num_tokens, (4096,), generator=generator).unique()
    candidates = candidates[torch.randperm(len(candidates), generator=generator)]
    sizes = pattern.rowptr.diff()
    columns, pairs = [], 0
    for column in candidates.tolist():
        attending = col_t[rowptr_t[column] : rowptr_t[column + 1]].long()
        more = int(sizes[attending].sum())
        if pairs + more > max_pairs:
            if columns:
                break
            continue  # a hub's neighbourhood alone would be too much
        columns.append(column)
        pairs += more
    columns = torch.tensor(columns, dtype=torch.int64)
    _, position = gather_rows(rowptr_t, columns)
    rows = col_t[position].long().unique()
    rowptr, position = gather_rows(pattern.rowptr, rows)
    cols = pattern.col[position].long()
    tokens = torch.cat((rows, cols, columns)).unique()
    local_rows = torch.searchsorted(tokens, rows)
    counts = torch.zeros(len(tokens), dtype=torch.int64)
    counts[local_rows] = rowptr.diff()
    part = AttentionPattern.from_pairs(
        torch.cat((counts.new_zeros(1), counts.cumsum(0))),
        torch.searchsorted(tokens, cols),
        pattern.pair_type[position],
        num_pair_types=pattern.num_pair_types,
    )
    return Sample(rows, columns, tokens, position, part)


def errors(
    found: dict[str, Tensor], inputs: Inputs, pattern: AttentionPattern, sample: Sample
) -> dict[str, tuple[float, float]]:
    """By name of output and gradient: (error, error of gather/scatter in the same precision), root mean square.

    Args:
        found: "out" and the gradients by name, of the whole problem, as `run` returns them.
        inputs, pattern: the whole problem.
        sample: the part to check.
    """
    part = _restrict(inputs, sample)
    ids = {"token_ids": sample.tokens}  # dropout hashes them
    exact = run(graph_attention, _cast(part, torch.float64), sample.pattern, impl="reference", **ids)
    eager = run(graph_attention, part, sample.pattern, impl="scatter", **ids)
    whole = sample.pattern is pattern
    results = {}
    for name, reference in exact.items():
        if name == "type_bias" and not whole:
            continue  # sums over all pairs
        where = {"out": sample.rows, "query": sample.rows, "pair_bias": sample.pairs}.get(name, sample.columns)
        local = slice(None)
        if name != "pair_bias" and not whole:
            local = torch.searchsorted(sample.tokens, where)
        ours = found[name] if name == "type_bias" else found[name][where]
        results[name] = (_rms(ours, reference[local]), _rms(eager[name][local], reference[local]))
    return results


def verify(
    found: dict[str, Tensor], inputs: Inputs, pattern: AttentionPattern, sample: Sample
) -> dict[str, tuple[float, float]]:
    """As `errors`; ArithmeticError names the first result that is off by more than twice what gather/scatter is."""
    measured = errors(found, inputs, pattern, sample)
    for name, (ours, eager) in measured.items():
        unit = torch.finfo(inputs.query.dtype).eps
        if not ours <= 2 * eager + unit:
            raise ArithmeticError(f"{name} errs by {ours:.3g}; gather/scatter in the same precision by {eager:.3g}")
    return measured


def run(attention: Attention, inputs: Inputs, pattern: AttentionPattern, **keywords) -> dict[str, Tensor]:
    """Output and the gradients of everything differentiable."""
    named = inputs.differentiable()
    out = attention(inputs.query, inputs.key, inputs.value, pattern, **inputs.keywords(), **keywords)
    grads = torch.autograd.grad(out, list(named.values()), inputs.grad_out)
    return {"out": out.detach(), **dict(zip(named, grads, strict=True))}


def _restrict(inputs: Inputs, sample: Sample) -> Inputs:
    def of(x: Tensor | None, index: Tensor) -> Tensor | None:
        return None if x is None else x.detach()[index].requires_grad_()

    grad_out = torch.zeros_like(inputs.grad_out[sample.tokens])
    local = torch.searchsorted(sample.tokens, sample.rows)
    grad_out[local] = inputs.grad_out[sample.rows]
    return Inputs(
        of(inputs.query, sample.tokens),
        of(inputs.key, sample.tokens),
        of(inputs.value, sample.tokens),
        grad_out,
        of(inputs.pair_bias, sample.pairs),
        inputs.type_bias,
        inputs.dropout_p,
        inputs.dropout_seed,
    )


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    def to(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(dtype).requires_grad_()

    return Inputs(
        to(inputs.query),
        to(inputs.key),
        to(inputs.value),
        inputs.grad_out.to(dtype),
        to(inputs.pair_bias),
        to(inputs.type_bias),
        inputs.dropout_p,
        inputs.dropout_seed,
    )


def _rms(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).square().mean().sqrt()) if exact.numel() else 0.0


__all__ = ["Inputs", "Sample", "errors", "run", "take_sample", "verify"]
