"""The operators behind torch's machinery: its own checks, compilation, recomputation, second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.ops.cases import PATTERNS, attend, make_inputs
from torchgt.attention import build, graph_attention, token_dropout
from torchgt.attention.impl import cpu

pytestmark = pytest.mark.skipif(build.load() is not True, reason=str(build.load()))


def operands(name="one global", bias=True, dropout_p=0.3, token_ids=False):
    """Arguments of the attention operator."""
    pattern = PATTERNS[name]()
    inputs = make_inputs(pattern, 8, 8, torch.float32, bias=bias)
    return (
        inputs.query,
        inputs.key,
        inputs.value,
        pattern.rowptr,
        pattern.col,
        *pattern.transposed(),
        pattern.pair_type if bias else None,
        inputs.pair_bias,
        inputs.type_bias,
        torch.tensor(5) if dropout_p else None,
        torch.arange(pattern.num_tokens) * 3 if token_ids else None,
        pattern.num_global,
        pattern.num_types,
        0.3,
        dropout_p,
        2,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False, "dropout_p": 0.0}, {"token_ids": True}, {"name": "no pairs"}],
    ids=["all", "plain", "ids", "no pairs"],
)
def test_attention_operator(options):
    torch.library.opcheck(cpu.sparse_attention_op, operands(**options))


def test_backward_operator():
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in operands()]
    out, sums = cpu.sparse_attention_op(*arguments)
    grad_sums = torch.randn_like(sums)
    torch.library.opcheck(
        cpu.sparse_attention_backward_op,
        (torch.randn_like(out), grad_sums, out, sums, *arguments, True, True),
    )


def test_token_dropout_operator():
    x = torch.randn(9, 12, requires_grad=True)
    torch.library.opcheck(cpu.token_dropout_op, (x, torch.tensor(1), 0.5, 4))


def layer(inputs, pattern):
    hidden = graph_attention(inputs.query.sin(), inputs.key, inputs.value, pattern, impl="cpu", **inputs.keywords())
    return token_dropout(hidden.flatten(1), 0.3, torch.tensor(4)).view_as(hidden).tanh()


def run(function, inputs, pattern):
    out = function(inputs, pattern)
    return [out, *torch.autograd.grad(out, list(inputs.tensors().values()), inputs.grad_out)]


@pytest.mark.parametrize("name", ["one global", "full, typed"])
def test_compiled_without_a_break(name):
    pattern = PATTERNS[name]()
    inputs = make_inputs(pattern, 8, 8, torch.float32, bias=True, dropout_p=0.3)
    eager = run(layer, inputs, pattern)
    compiled = run(torch.compile(layer, backend="aot_eager", fullgraph=True), inputs, pattern)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.long
def test_compiled_by_inductor():
    pattern = PATTERNS["one global"]()
    inputs = make_inputs(pattern, 8, 8, torch.float32, bias=True, dropout_p=0.3)
    eager, compiled = run(layer, inputs, pattern), run(torch.compile(layer), inputs, pattern)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["reference", "scatter", "dense", "cpu"])
def test_recomputation_gives_the_same_bits(impl):
    pattern = PATTERNS["one global"]()
    inputs = make_inputs(pattern, 8, 8, torch.float32, bias=True, dropout_p=0.3)
    plain = attend(pattern, inputs, impl)
    names = list(inputs.tensors())

    def function(*tensors):
        named = dict(zip(names, tensors, strict=True))
        return graph_attention(
            named["query"],
            named["key"],
            named["value"],
            pattern,
            pair_bias=named["pair_bias"],
            type_bias=named["type_bias"],
            dropout_p=0.3,
            dropout_seed=torch.tensor(11),
            impl=impl,
        )

    out = checkpoint(function, *inputs.tensors().values(), use_reentrant=False)
    grads = torch.autograd.grad(out, list(inputs.tensors().values()), inputs.grad_out)
    assert torch.equal(out, plain["out"])
    assert all(torch.equal(grad, plain[name]) for grad, name in zip(grads, names, strict=True))


def test_second_derivatives_are_refused_not_wrong():
    pattern = PATTERNS["random"]()
    inputs = make_inputs(pattern)
    out = graph_attention(inputs.query, inputs.key, inputs.value, pattern, impl="cpu")
    (grad,) = torch.autograd.grad(out.square().sum(), inputs.query, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


def test_without_gradients_the_transposed_pattern_is_not_made():
    pattern = PATTERNS["random"]()
    inputs = make_inputs(pattern, dtype=torch.float32)
    with torch.no_grad():
        graph_attention(inputs.query, inputs.key, inputs.value, pattern, impl="cpu")
    assert "transposed" not in pattern._cache
