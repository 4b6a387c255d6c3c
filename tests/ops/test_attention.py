"""Every implementation against the definition of attention: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import (
    PATTERNS,
    attend,
    check_error,
    edges,
    make_inputs,
    random_graph,
    sample,
    with_gradients,
    written_out,
)
from torchgt import AttentionPattern, Graph
from torchgt.attention import graph_attention, graph_attention_with_lse

IMPLS = ["scatter", "dense", "cpu"]
each_pattern = pytest.mark.parametrize("name", PATTERNS)
each_impl = pytest.mark.parametrize("impl", IMPLS)


def assert_close(found: dict, exact: dict) -> None:
    assert found.keys() == exact.keys()
    for name in found:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def exact_results(pattern, inputs):
    """By the oracle, in float64, from the very numbers that the implementation under test was given."""
    return attend(pattern, inputs.to(torch.float64), "reference")


@each_pattern
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_oracle_is_the_definition(name, bias, dropout_p):
    pattern = PATTERNS[name]()
    inputs = make_inputs(pattern, bias=bias, dropout_p=dropout_p)
    assert_close(attend(pattern, inputs, "reference"), with_gradients(lambda x: written_out(pattern, x), inputs))


@pytest.mark.parametrize("name", ["isolated node", "one token", "three globals, isolated nodes", "two graphs, typed"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_oracle_gradients_by_differences(name, dropout_p):
    if name == "three globals, isolated nodes":
        graph = Graph.from_edge_index(edges((0, 1), (1, 0)), 3)
        pattern = AttentionPattern.from_graph(graph, self_loops=False, num_global=3)
    elif name == "two graphs, typed":
        pattern = AttentionPattern.full(torch.tensor([0, 2, 4]), torch.arange(8) % 3)
    else:
        pattern = PATTERNS[name]()
    inputs = make_inputs(pattern, heads=2, dim=2, bias=True)
    named = inputs.tensors()

    def function(*tensors):
        query, key, value, pair_bias, type_bias = tensors
        return graph_attention_with_lse(
            query,
            key,
            value,
            pattern,
            pair_bias=pair_bias,
            type_bias=type_bias,
            dropout_p=dropout_p,
            dropout_seed=torch.tensor(3),
            impl="reference",
        )[0]

    assert torch.autograd.gradcheck(function, tuple(named.values()))
    assert torch.autograd.gradgradcheck(function, tuple(named.values()))


@each_pattern
@each_impl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_equals_the_oracle_in_double(name, impl, bias, dropout_p):
    pattern = PATTERNS[name]()
    inputs = make_inputs(pattern, heads=3, dim=5, bias=bias, dropout_p=dropout_p)
    assert_close(attend(pattern, inputs, impl), exact_results(pattern, inputs))


@each_pattern
@each_impl
@pytest.mark.parametrize(("heads", "dim", "bias", "dropout_p"), [(3, 5, False, 0.0), (8, 8, True, 0.3)])
def test_float32_errs_at_most_twice_as_much_as_plain_pytorch(name, impl, heads, dim, bias, dropout_p):
    pattern, dtype = PATTERNS[name](), torch.float32
    options = {"bias": bias, "dropout_p": dropout_p}
    check_error([sample(pattern, impl, seed, heads, dim, dtype, **options) for seed in range(4)], dtype)


# Not gather/scatter: it adds up in bfloat16, pair by pair. It is a yardstick of speed, not of precision.
@pytest.mark.parametrize("name", ["isolated node", "hub", "three globals, isolated nodes", "two graphs, typed"])
@pytest.mark.parametrize("impl", ["dense", "cpu"])
def test_bfloat16_errs_at_most_twice_as_much_as_plain_pytorch(name, impl):
    pattern, dtype = PATTERNS[name](), torch.bfloat16
    check_error([sample(pattern, impl, seed, 2, 8, dtype, bias=True, dropout_p=0.3) for seed in range(3)], dtype)


def check_shape(heads, dim, dtype, name):
    pattern = PATTERNS[name]()
    if dtype == torch.float64:
        inputs = make_inputs(pattern, heads, dim, bias=True, dropout_p=0.2)
        assert_close(attend(pattern, inputs, "cpu"), exact_results(pattern, inputs))
    else:
        samples = [sample(pattern, "cpu", seed, heads, dim, dtype, bias=True, dropout_p=0.2) for seed in range(2)]
        check_error(samples, dtype)


# Every group of heads (8, 4, 2, 1) with a dimension of its own kernel, of none, of one chunk and of a broken one.
@pytest.mark.parametrize(("heads", "dim"), [(15, 8), (7, 16), (9, 24), (6, 32), (15, 1), (7, 17), (3, 64), (1, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_kernels_of_every_shape(heads, dim, dtype):
    check_shape(heads, dim, dtype, "one global")


@pytest.mark.long
@pytest.mark.parametrize("heads", range(1, 18))
@pytest.mark.parametrize("dim", [1, 3, 7, 8, 9, 15, 16, 23, 24, 31, 32, 40, 65, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["hub", "three globals, isolated nodes", "two graphs, typed"])
def test_cpu_kernels_of_many_shapes(heads, dim, dtype, name):
    check_shape(heads, dim, dtype, name)


def test_cpu_gradients_by_differences():
    pattern = AttentionPattern.from_graph(Graph.from_edge_index(edges((0, 1), (1, 0), (2, 1)), 4), False, num_global=1)
    inputs = make_inputs(pattern, heads=1, dim=2, bias=True)

    def function(query, key, value, pair_bias, type_bias):
        return graph_attention_with_lse(
            query, key, value, pattern, pair_bias=pair_bias, type_bias=type_bias, impl="cpu"
        )

    assert torch.autograd.gradcheck(function, tuple(inputs.tensors().values()))


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_token_without_pairs_gets_zero(impl):
    pattern = PATTERNS["isolated node"]()  # rows 0 and 3 have no pairs: edges point to 1, 0 and 1
    empty = pattern.rowptr.diff() == 0
    assert 0 < empty.sum() < 4
    results = attend(pattern, make_inputs(pattern, bias=True), impl)
    assert (results["out"][empty] == 0).all() and (results["query"][empty] == 0).all()
    assert (results["out"][~empty] != 0).all()
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hub", "one global", "full"])
def test_large_scores_stay_finite(impl, dtype, name):
    pattern = PATTERNS[name]()
    size = 25.0  # scores of this order squared, up to 2000 and more
    samples = [sample(pattern, impl, seed, 2, 8, dtype, size=size) for seed in range(6 if impl == "cpu" else 1)]
    assert all(x.isfinite().all() for x in samples[0][0].values())
    if impl == "cpu":
        check_error(samples, dtype)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("bias", [-1000.0, 1000.0])
def test_large_biases_cancel(impl, bias):
    pattern = PATTERNS["random"]()
    inputs = make_inputs(pattern, dtype=torch.float64)
    shifted = torch.full((pattern.num_pairs, 2), bias, dtype=torch.float64)
    out = graph_attention(inputs.query, inputs.key, inputs.value, pattern, pair_bias=shifted, impl=impl)
    plain = graph_attention(inputs.query, inputs.key, inputs.value, pattern, impl="reference")
    torch.testing.assert_close(out, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_unattended_nan_does_not_leak(impl, poison):
    """Nobody attends to token 3; token 1 alone attends to token 2."""
    pattern = AttentionPattern.from_graph(Graph.from_edge_index(edges((0, 0), (0, 1), (2, 1), (0, 3)), 4), False)
    inputs = make_inputs(pattern, heads=2, dim=8)
    for x in (inputs.key, inputs.value):
        x.data[3] = poison
    results = attend(pattern, inputs, impl)
    assert all(x.isfinite().all() for x in results.values())
    inputs.value.data[2] = torch.nan
    out = attend(pattern, inputs, impl)["out"]
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "scatter", "cpu"])
def test_no_attention_across_graphs(impl):
    pattern = PATTERNS["two graphs, typed"]()
    inputs = make_inputs(pattern)
    out = attend(pattern, inputs, impl)["out"]
    inputs.key.data[9:] = 7.0
    inputs.value.data[9:] = -7.0
    changed = attend(pattern, inputs, impl)["out"]
    assert torch.equal(out[:9], changed[:9]) and not torch.equal(out[9:], changed[9:])


@pytest.mark.parametrize("impl", ["scatter", "cpu"])
@pytest.mark.parametrize("name", ["hub", "isolated node", "three globals, isolated nodes", "two graphs, typed"])
def test_log_sum_exp_and_its_gradient(impl, name):
    pattern = PATTERNS[name]()
    inputs = make_inputs(pattern, heads=8, dim=8, bias=True)

    def run(impl):
        def function(x):
            biases = {"pair_bias": x.pair_bias, "type_bias": x.type_bias}
            out, lse = graph_attention_with_lse(x.query, x.key, x.value, pattern, impl=impl, **biases)
            assert (lse == -torch.inf).any() == (name == "isolated node")
            return out + 0.3 * lse[..., None].tanh()

        return with_gradients(function, inputs)

    assert_close(run(impl), run("reference"))


def test_halves_of_the_keys_merge_to_the_whole():
    whole = AttentionPattern.from_graph(random_graph(40, 200), self_loops=False)
    inputs = make_inputs(whole, heads=4, dim=8)
    outs, lses = [], []
    for keep in (whole.col < 20, whole.col >= 20):
        counts = torch.zeros(40, dtype=torch.int64).index_add(0, whole.row_ids().long(), keep.long())
        rowptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        half = AttentionPattern.from_pairs(rowptr, whole.col[keep])
        out, lse = graph_attention_with_lse(inputs.query, inputs.key, inputs.value, half, impl="cpu")
        outs.append(out)
        lses.append(lse)
    weights = torch.stack(lses).nan_to_num(neginf=-1e9).softmax(0)
    merged = sum(w[..., None] * out for w, out in zip(weights, outs, strict=True))
    exact = graph_attention(inputs.query, inputs.key, inputs.value, whole, impl="reference")
    torch.testing.assert_close(merged, exact)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_any_strides(impl):
    """A joint projection's slices, a transposed tensor and an expanded one give what contiguous copies give."""
    pattern = PATTERNS["one global"]()
    num_tokens = pattern.num_tokens
    joint = torch.randn(num_tokens, 3, 4, 8, dtype=torch.float64)
    strided = [joint[:, 0], joint[:, 1], joint[:, 2]]
    turned = [torch.randn(4, num_tokens, 8, dtype=torch.float64).transpose(0, 1) for _ in range(2)]
    spread = torch.randn(1, 4, 8, dtype=torch.float64).expand(num_tokens, 4, 8)
    for tensors in (strided, [*turned, spread]):
        leaves = [x.clone().requires_grad_() for x in tensors]  # clone keeps dense strides
        inputs = [x.requires_grad_() for x in tensors]
        plain = graph_attention(*(x.contiguous() for x in leaves), pattern, impl=impl)
        out = graph_attention(*inputs, pattern, impl=impl)
        torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
        for a, b in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(plain.sum(), leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_wide_and_narrow_columns_give_the_same_bits():
    narrow = PATTERNS["one global"]()
    assert narrow.col.dtype == torch.int32
    wide = AttentionPattern(
        narrow.rowptr,
        narrow.col.long(),
        narrow.pair_type,
        num_global=narrow.num_global,
        num_pair_types=narrow.num_pair_types,
    )
    inputs = make_inputs(narrow, 8, 8, torch.float32, bias=True, dropout_p=0.2)
    a, b = attend(narrow, inputs, "cpu"), attend(wide, inputs, "cpu")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_scale(impl):
    pattern = PATTERNS["random"]()
    inputs = make_inputs(pattern, dim=4)
    out = graph_attention(inputs.query, inputs.key, inputs.value, pattern, scale=1.5, impl=impl)
    again = graph_attention(3.0 * inputs.query, inputs.key, inputs.value, pattern, impl="reference")  # 3 / sqrt(4)
    torch.testing.assert_close(out, again)


@pytest.mark.parametrize("impl", ["auto", "reference", *IMPLS])
@pytest.mark.parametrize("shape", [(0, 2, 4), (5, 0, 4), (5, 2, 0)])
def test_nothing_in_nothing_out(impl, shape):
    pattern = AttentionPattern.from_graph(Graph.from_edge_index(edges(), shape[0]))
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    type_bias = torch.randn(pattern.num_types, shape[1], requires_grad=True)
    out = graph_attention(*inputs, pattern, type_bias=type_bias, impl=impl)
    assert out.shape == shape
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in inputs) and (type_bias.grad == 0).all()


def test_only_the_wanted_gradients():
    """A frozen query and a constant bias; a value alone."""
    pattern = PATTERNS["random"]()
    inputs = make_inputs(pattern, bias=True)
    exact = attend(pattern, inputs, "reference")
    frozen = graph_attention(
        inputs.query.detach(),
        inputs.key,
        inputs.value.detach(),
        pattern,
        pair_bias=inputs.pair_bias.detach(),
        type_bias=inputs.type_bias,
        impl="cpu",
    )
    grads = torch.autograd.grad(frozen, [inputs.key, inputs.type_bias], inputs.grad_out)
    torch.testing.assert_close(grads[0], exact["key"])
    torch.testing.assert_close(grads[1], exact["type_bias"])


def test_types_of_a_wide_table():
    """The largest pair type, 253 stored types and the two of the global tokens after them."""
    graph = random_graph(30, 90)
    stored = AttentionPattern.from_graph(graph, self_loops=False, num_global=1)
    kinds = torch.randint(256, (stored.num_pairs,))
    kinds[0] = 255
    pattern = AttentionPattern.from_pairs(stored.rowptr, stored.col, kinds, num_global=1)
    assert pattern.num_types == 258
    inputs = make_inputs(pattern, 8, 8, bias=True)
    for impl in IMPLS:
        assert_close(attend(pattern, inputs, impl), exact_results(pattern, inputs))


@pytest.mark.parametrize("num_global", [0, 1])
def test_hub_rows_and_columns_are_split(num_global):
    """A row and a column of more pairs than one thread takes in one go, and a hub that attends to itself."""
    num_nodes, hub = 9001, 4500
    others = torch.arange(num_nodes)
    edge_index = torch.cat((torch.stack((others, others.new_full((num_nodes,), hub))), edges((3, 5), (8, 5))), 1)
    graph = Graph.from_edge_index(edge_index, num_nodes, symmetrize=True)
    pattern = AttentionPattern.from_graph(graph, num_global=num_global)
    assert int(pattern.rowptr.diff().max()) > 8192
    for dtype, options in ((torch.float64, {"bias": True, "dropout_p": 0.3}), (torch.float32, {"bias": True})):
        inputs = make_inputs(pattern, 2, 8, dtype, **options)
        found, exact = attend(pattern, inputs, "cpu"), exact_results(pattern, inputs)
        if dtype == torch.float64:
            assert_close(found, exact)
        else:
            eager = attend(pattern, inputs, "scatter")
            check_error([(found, eager, exact)], dtype)
        with_lse = graph_attention_with_lse(
            inputs.query, inputs.key, inputs.value, pattern, impl="cpu", type_bias=inputs.type_bias
        )
        plain = graph_attention_with_lse(
            inputs.query, inputs.key, inputs.value, pattern, impl="scatter", type_bias=inputs.type_bias
        )
        torch.testing.assert_close(with_lse[1], plain[1], rtol=1e-5, atol=1e-5)
