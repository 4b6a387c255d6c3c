"""What graph_attention refuses, and which implementation it takes."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.ops.cases import PATTERNS, make_inputs, random_graph
from torchgt import AttentionPattern
from torchgt.attention import api, available_impls, build, graph_attention, graph_attention_with_lse
from torchgt.attention.impl import cpu, dense, scatter

N, H, D, E = 6, 2, 4, 6  # of the pattern below: self-loops only


def pattern():
    return AttentionPattern.from_pairs(torch.arange(N + 1), torch.arange(N))


def x(*shape, **options):
    return torch.zeros(shape or (N, H, D), **options)


REFUSALS = {
    "rank": ({"query": x(N, D)}, r"query has shape \[6, 4\], expected \[N, H, D\]"),
    "type": ({"query": 3}, "query is int, expected a tensor"),
    "integer": ({"query": x(dtype=torch.int64)}, "query has dtype torch.int64, expected a floating dtype"),
    "tokens": (
        {name: x(5, H, D) for name in ("query", "key", "value")},
        r"query has shape \[5, 2, 4\], expected N = 6, the number of tokens of pattern",
    ),
    "key shape": ({"key": x(N, 1, D)}, r"key has shape \[6, 1, 4\], expected \[6, 2, 4\], the shape of query"),
    "value shape": ({"value": x(N, H, 3)}, r"value has shape \[6, 2, 3\], expected \[6, 2, 4\]"),
    "key dtype": ({"key": x(dtype=torch.float64)}, "key has dtype torch.float64, expected torch.float32"),
    "value device": ({"value": x(device="meta")}, "value is on meta, expected cpu"),
    "pattern": ({"pattern": "full"}, "pattern is str, expected an AttentionPattern"),
    "pair_bias": ({"pair_bias": x(E + 1, H)}, r"pair_bias has shape \[7, 2\], expected \[E, H\] = \[6, 2\]"),
    "pair_bias heads": ({"pair_bias": x(E, 1)}, r"pair_bias has shape \[6, 1\], expected \[E, H\] = \[6, 2\]"),
    "pair_bias dtype": ({"pair_bias": x(E, H, dtype=torch.int32)}, "pair_bias is torch.int32, expected a floating"),
    "type_bias": ({"type_bias": x(1, H)}, r"type_bias has shape \[1, 2\], expected \[num_types, H\] = \[3, 2\]"),
    "scale": ({"scale": float("nan")}, "scale is nan, expected a finite number"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p is 1.0, expected a number in \[0, 1\)"),
    "negative dropout": ({"dropout_p": -0.1}, "dropout_p is -0.1"),
    "no seed": ({"dropout_p": 0.5}, "dropout_seed is None, expected an int64 scalar tensor, as dropout_p is 0.5"),
    "seed": ({"dropout_p": 0.5, "dropout_seed": torch.tensor(1.0)}, "dropout_seed is torch.float32"),
    "ids": ({"token_ids": torch.arange(3)}, r"token_ids is torch.int64 \[3\], expected torch.int64 \[6\]"),
    "impl": ({"impl": "scater"}, r"unknown impl 'scater' \(did you mean 'scatter'\?\)"),
    "backend": ({"impl": "dense", "dense_backend": "flsh"}, "unknown dense_backend 'flsh'"),
    "backend of another": ({"impl": "cpu", "dense_backend": "flash"}, "dense_backend='flash' needs impl='dense'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case):
    changes, message = REFUSALS[case]
    arguments = {"query": x(), "key": x(), "value": x(), "pattern": pattern()} | changes
    with pytest.raises(ValueError, match=message):
        graph_attention(**arguments)


def broken(rowptr, col, num_global=0, pair_type=None):
    rowptr, col = torch.tensor(rowptr), torch.tensor(col, dtype=torch.int32)
    return AttentionPattern(rowptr, col, pair_type, num_global=num_global, num_pair_types=1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: broken([0, 1, 2], [0, 2]), r"pattern.col holds 0..2, expected 0..1"),
        (lambda: broken([0, 1, 2], [-1, 0]), r"pattern.col holds -1..0, expected 0..1"),
        (lambda: broken([0, 0, 1], [0], num_global=1), r"pattern.col holds 0..0, expected 1..1"),
        (lambda: broken([0, 2, 1], [0, 1]), "pattern.rowptr is not ascending from 0 to E = 2"),
        (lambda: broken([0, 1, 3], [0, 1]), "pattern.rowptr is not ascending from 0 to E = 2"),
        (lambda: broken([1, 1, 2], [0, 1]), "pattern.rowptr is not ascending"),
        (lambda: broken([0, 1, 1], [1], num_global=1), "stores pairs in the rows of its 1 global tokens"),
        (lambda: broken([0, 1, 2], [0, 1], pair_type=torch.tensor([0, 1], dtype=torch.uint8)), "pair_type holds 1"),
        (
            lambda: broken([0, 1, 2], [0, 1], pair_type=torch.zeros(1, dtype=torch.uint8)),
            r"uint8 \[1\], expected uint8",
        ),
    ],
)
def test_broken_index_arrays_never_reach_native_code(made, message):
    inputs = [torch.zeros(2, 1, 8)] * 3
    for _ in range(2):  # a refusal is not remembered as a check passed
        with pytest.raises(ValueError, match=message):
            graph_attention(*inputs, made(), impl="cpu")


def test_a_pattern_is_read_through_once(monkeypatch):
    one = pattern()
    graph_attention(x(), x(), x(), one, impl="reference")
    monkeypatch.setattr(api, "_check_pair_type", lambda pattern: pytest.fail("checked again"))
    graph_attention(x(), x(), x(), one, impl="reference")


def taken(monkeypatch, pattern, call=graph_attention, dtype=torch.float32, **keywords) -> str:
    """Name of the implementation that "auto" takes."""
    names = []
    for module in (scatter, dense, cpu):
        name = module.__name__.rsplit(".", 1)[1]
        monkeypatch.setattr(
            module, "attention", lambda *a, n=name, **k: names.append(n) or (torch.zeros(0), torch.zeros(0))
        )
    inputs = [torch.zeros(pattern.num_tokens, 1, 8, dtype=dtype)] * 3
    call(*inputs, pattern, **keywords)
    (name,) = names
    return name


def test_auto_takes_the_fastest_that_fits(monkeypatch):
    sparse, full, small = PATTERNS["hub"](), PATTERNS["full"](), PATTERNS["equal graphs"]()
    assert taken(monkeypatch, sparse) == "cpu"
    assert taken(monkeypatch, sparse, dtype=torch.bfloat16) == "cpu"
    assert taken(monkeypatch, full) == "dense"
    assert taken(monkeypatch, full, dropout_p=0.5, dropout_seed=torch.tensor(1)) == "cpu"
    assert taken(monkeypatch, small) == "cpu"
    assert taken(monkeypatch, full, call=graph_attention_with_lse) == "cpu"
    with pytest.warns(RuntimeWarning, match="falls back to the slow gather/scatter .* query is torch.float16"):
        assert taken(monkeypatch, sparse, dtype=torch.float16) == "scatter"


def test_full_patterns_of_any_size_are_not_laid_out(monkeypatch):
    """A million tokens: their square would not fit into any memory."""
    assert taken(monkeypatch, AttentionPattern.full(torch.tensor([0, 1_000_000]))) == "dense"


def test_auto_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(build, "_state", "no compiler, for the test")
    monkeypatch.setattr(api, "_warned", set())
    inputs = make_inputs(PATTERNS["hub"](), dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match="no compiler, for the test") as caught:
        for _ in range(3):
            out = graph_attention(inputs.query, inputs.key, inputs.value, PATTERNS["hub"]())
    assert len(caught) == 1
    assert torch.equal(out, graph_attention(inputs.query, inputs.key, inputs.value, PATTERNS["hub"](), impl="scatter"))
    assert available_impls()["cpu"] == "no compiler, for the test"
    with pytest.raises(RuntimeError, match="impl='cpu' cannot run: no compiler, for the test"):
        graph_attention(inputs.query, inputs.key, inputs.value, PATTERNS["hub"](), impl="cpu")


def test_an_implementation_asked_for_runs_or_raises():
    assert available_impls()["triton"] is not True
    with pytest.raises(RuntimeError, match="impl='triton' cannot run"):
        graph_attention(x(), x(), x(), pattern(), impl="triton")
    half = x(dtype=torch.float16)
    with pytest.raises(ValueError, match="impl='cpu' refuses this call: .* query is torch.float16"):
        graph_attention(half, half, half, pattern(), impl="cpu")
    with pytest.raises(ValueError, match="impl='dense' does not return the log-sum-exp"):
        graph_attention_with_lse(x(), x(), x(), pattern(), impl="dense")


@pytest.mark.parametrize("shape", [[0, 40], [0, 20, 40], [0, 15, 40]])
def test_flash_is_flash(shape, monkeypatch):
    full = AttentionPattern.full(torch.tensor(shape))
    inputs = make_inputs(full, 2, 8, torch.float32)
    seen = []
    original = dense.scaled_dot_product_attention
    monkeypatch.setattr(
        dense, "scaled_dot_product_attention", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1]
    )
    out = graph_attention(inputs.query, inputs.key, inputs.value, full, impl="dense", dense_backend="flash")
    assert seen and all("Flash" in type(y.grad_fn).__name__ for y in seen)
    expected = graph_attention(inputs.query, inputs.key, inputs.value, full, impl="reference")
    torch.testing.assert_close(out, expected)


def test_flash_fails_where_it_cannot_run():
    """A bias that wants a gradient: torch's flash kernel takes none."""
    full = AttentionPattern.full(torch.tensor([0, 40]))
    inputs = make_inputs(full, 2, 8, torch.float32, bias=True)
    arguments = (inputs.query, inputs.key, inputs.value, full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains itself in warnings
        with pytest.raises(RuntimeError, match="dense_backend='flash' cannot run for query of shape .* with a bias"):
            graph_attention(*arguments, type_bias=inputs.type_bias, impl="dense", dense_backend="flash")
    with pytest.raises(ValueError, match="dense_backend='flash' cannot apply the hashed dropout"):
        graph_attention(*arguments, dropout_p=0.1, dropout_seed=torch.tensor(1), impl="dense", dense_backend="flash")


def test_biases_of_another_precision_are_cast():
    one = PATTERNS["one global"]()
    inputs = make_inputs(one, dtype=torch.bfloat16, bias=True)
    wide = inputs.type_bias.detach().float().requires_grad_()
    arguments = (inputs.query, inputs.key, inputs.value, one)
    out = graph_attention(*arguments, type_bias=wide, impl="cpu")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, graph_attention(*arguments, type_bias=inputs.type_bias, impl="cpu"))
    assert torch.autograd.grad(out.sum(), wide)[0].dtype == torch.float32


def test_a_reformation_stands_for_its_pattern():
    one = AttentionPattern.from_graph(random_graph(20, 50))

    class Reformation:
        def to_pattern(self):
            return one

    inputs = make_inputs(one)
    arguments = (inputs.query, inputs.key, inputs.value)
    assert torch.equal(
        graph_attention(*arguments, Reformation(), impl="cpu"), graph_attention(*arguments, one, impl="cpu")
    )
