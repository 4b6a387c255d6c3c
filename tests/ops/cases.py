"""Patterns and inputs for the attention tests, and attention written out densely as the independent definition.

Legend: N tokens, H heads, D head dimension, E stored pairs, T pair types.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchgt import AttentionPattern, Graph
from torchgt.attention import graph_attention, hashing


def edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()


def random_graph(num_nodes: int, num_edges: int, seed: int = 0, hub: int | None = None) -> Graph:
    """Random directed edges; a third of them into `hub` if one is named. The last nodes are isolated."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(max(1, num_nodes - 3), (2, num_edges), generator=generator)
    if hub is not None:
        edge_index[1, ::3] = hub
    return Graph.from_edge_index(edge_index, num_nodes)


def _random_types(num_pairs: int, num_types: int) -> Tensor:
    return torch.randint(num_types, (num_pairs,), generator=torch.Generator().manual_seed(1))


PATTERNS = {
    "isolated node": lambda: AttentionPattern.from_graph(
        Graph.from_edge_index(edges((0, 1), (1, 0), (2, 1)), 4), self_loops=False
    ),
    "no pairs": lambda: AttentionPattern.from_graph(Graph.from_edge_index(edges(), 5), self_loops=False),
    "one token": lambda: AttentionPattern.from_graph(Graph.from_edge_index(edges(), 1)),
    "one token, no pair": lambda: AttentionPattern.from_graph(Graph.from_edge_index(edges(), 1), self_loops=False),
    "hub": lambda: AttentionPattern.from_graph(random_graph(230, 700, hub=7)),
    "random": lambda: AttentionPattern.from_graph(random_graph(50, 150), self_loops=False, hamiltonian_path=True),
    "one global": lambda: AttentionPattern.from_graph(random_graph(60, 100), num_global=1),
    "three globals, isolated nodes": lambda: AttentionPattern.from_graph(
        random_graph(60, 100), self_loops=False, num_global=3
    ),
    "globals only": lambda: AttentionPattern.from_graph(Graph.from_edge_index(edges(), 0), num_global=2),
    "full": lambda: AttentionPattern.full(torch.tensor([0, 70])),
    "full, typed": lambda: AttentionPattern.full(torch.tensor([0, 20]), _random_types(400, 7)),
    "two graphs, typed": lambda: AttentionPattern.full(torch.tensor([0, 9, 9, 21]), _random_types(225, 3)),
    "equal graphs": lambda: AttentionPattern.full(torch.tensor([0, 6, 12, 18])),
}


@dataclass(frozen=True)
class Inputs:
    """The differentiable arguments of one attention call, and its dropout."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    pair_bias: Tensor | None = None
    type_bias: Tensor | None = None
    dropout_p: float = 0.0

    def tensors(self) -> dict[str, Tensor]:
        named = {"query": self.query, "key": self.key, "value": self.value}
        named |= {"pair_bias": self.pair_bias, "type_bias": self.type_bias}
        return {name: x for name, x in named.items() if x is not None}

    def keywords(self) -> dict:
        return {
            "pair_bias": self.pair_bias,
            "type_bias": self.type_bias,
            "dropout_p": self.dropout_p,
            "dropout_seed": torch.tensor(11),
        }

    def to(self, dtype: torch.dtype) -> Inputs:
        cast = {name: x.detach().to(dtype).requires_grad_() for name, x in self.tensors().items()}
        return replace(self, grad_out=self.grad_out.to(dtype), **cast)


def make_inputs(pattern, heads=2, dim=4, dtype=torch.float64, bias=False, dropout_p=0.0, size=1.0, seed=0) -> Inputs:
    """Normal inputs, quantised to `dtype`; `size` is the standard deviation of queries and keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return x.to(dtype).requires_grad_()

    shape = (pattern.num_tokens, heads, dim)
    return Inputs(
        query=normal(*shape, scale=size),
        key=normal(*shape, scale=size),
        value=normal(*shape),
        grad_out=normal(*shape).detach(),
        pair_bias=normal(pattern.num_pairs, heads) if bias else None,
        type_bias=normal(pattern.num_types, heads) if bias else None,
        dropout_p=dropout_p,
    )


def with_gradients(function, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients by name of `function(inputs)`."""
    out = function(inputs)
    named = inputs.tensors()
    grads = torch.autograd.grad(out, list(named.values()), inputs.grad_out, allow_unused=True)
    results = {"out": out.detach()}
    for (name, x), grad in zip(named.items(), grads, strict=True):
        results[name] = torch.zeros_like(x) if grad is None else grad
    return results


def attend(pattern, inputs: Inputs, impl: str) -> dict[str, Tensor]:
    """Output and gradients of `graph_attention`."""
    return with_gradients(
        lambda x: graph_attention(x.query, x.key, x.value, pattern, impl=impl, **x.keywords()), inputs
    )


def written_out(pattern, inputs: Inputs) -> Tensor:
    """Attention by its definition: a dense score matrix in the inputs' dtype, a mask, torch's softmax.

    It uses none of the package's attention code but the dropout hash, and is what "eager PyTorch" means in the tests.
    """
    num_tokens, num_heads, dim = inputs.query.shape
    allowed_NN = pattern.to_dense()
    score_HNN = torch.einsum("ihd,jhd->hij", inputs.query, inputs.key) * dim**-0.5
    if inputs.pair_bias is not None:
        rows, cols = pattern.row_ids().long(), pattern.col.long()
        bias_NNH = torch.zeros(num_tokens, num_tokens, num_heads, dtype=inputs.pair_bias.dtype)
        bias_NNH = bias_NNH.index_put((rows, cols), inputs.pair_bias)
        type_NN = torch.zeros(num_tokens, num_tokens, dtype=torch.int64)
        type_NN[rows, cols] = pattern.pair_type.long()
        type_NN[:, : pattern.num_global] = pattern.num_types - 1
        type_NN[: pattern.num_global] = pattern.num_types - 2
        score_HNN = score_HNN + bias_NNH.permute(2, 0, 1) + inputs.type_bias[type_NN].permute(2, 0, 1)
    empty_N = ~allowed_NN.any(1)
    score_HNN = score_HNN.masked_fill(~(allowed_NN | empty_N[:, None]), -torch.inf)
    weight_HNN = score_HNN.softmax(-1)
    if inputs.dropout_p:
        i_NN = torch.arange(num_tokens)[:, None].expand(num_tokens, num_tokens)
        keep_NNH = hashing.keep_pairs(torch.tensor(11), i_NN, i_NN.t(), num_heads, inputs.dropout_p)
        weight_HNN = weight_HNN * keep_NNH.permute(2, 0, 1) / (1 - inputs.dropout_p)
    out = torch.einsum("hij,jhd->ihd", weight_HNN, inputs.value)
    return out.masked_fill(empty_N[:, None, None], 0.0)


def check_error(samples, dtype: torch.dtype) -> None:
    """Everything found errs at most twice as much as plain PyTorch in the same precision, against float64.

    `samples`: one (found, eager, exact) for each of several random inputs. The error is the root mean square over all
    of them; the worst single element, a matter of luck, may be four times as bad. One unit in the last place of the
    largest exact value (all are sums of products of its order) is granted beyond, where plain PyTorch is exact.
    """
    unit = torch.finfo(dtype).eps * max(float(x.abs().max()) for *_, e in samples for x in e.values() if x.numel())
    for name in samples[0][2]:
        assert all(found[name].dtype == dtype and found[name].shape == exact[name].shape for found, _, exact in samples)
        ours = torch.cat([(found[name].double() - exact[name].double()).flatten() for found, _, exact in samples])
        eager = torch.cat([(plain[name].double() - exact[name].double()).flatten() for _, plain, exact in samples])
        if ours.numel() == 0:
            continue
        assert not ours.isnan().any(), name
        mean, eager_mean = (float(x.square().mean().sqrt()) for x in (ours, eager))
        worst, eager_worst = (float(x.abs().max()) for x in (ours, eager))
        assert mean <= 2 * eager_mean + unit, f"{name}: mean error {mean:.3g}, of plain PyTorch {eager_mean:.3g}"
        assert worst <= 4 * eager_worst + unit, f"{name}: error {worst:.3g}, of plain PyTorch {eager_worst:.3g}"


def sample(pattern, impl: str, seed: int, heads: int, dim: int, dtype: torch.dtype, **options):
    """(found, eager, exact) for `check_error`. The oracle gets, in float64, the very numbers that `impl` is given."""
    inputs = make_inputs(pattern, heads, dim, dtype, seed=seed, **options)
    eager = with_gradients(lambda x: written_out(pattern, x), inputs)
    return attend(pattern, inputs, impl), eager, attend(pattern, inputs.to(torch.float64), "reference")
