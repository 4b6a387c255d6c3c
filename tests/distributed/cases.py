"""What the workers of tests/distributed check. Started by torchrun: `cases.py FOLDER` writes one JSON file a worker.

Every worker computes the one-process result for itself and compares its share with it. A case makes all its exchanges
before it asserts, so that a failure on one worker does not leave the others waiting.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchgt import AttentionPattern, Graph, ModelConfig, graph_attention
from torchgt.models import Batch, build_model
from torchgt.parallel import SequenceParallel, init_distributed, shutdown_distributed
from torchgt.parallel.gradients import all_reduce_gradients

CASES: dict[str, Callable[[SequenceParallel], None]] = {}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
SEED = torch.tensor(77)


def case(function: Callable[[SequenceParallel], None]) -> Callable[[SequenceParallel], None]:
    CASES[function.__name__] = function
    return function


def assert_equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative to the largest expected value, as rounding is."""
    assert found.shape == expected.shape, f"{name}: {found.shape} instead of {expected.shape}"
    if expected.numel():
        error = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
        assert error <= TOLERANCE[expected.dtype], f"{name}: relative error {error:.1e}"


def even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def shares(num_tokens: int, world_size: int, how: str) -> list[int]:
    """Tokens of each worker."""
    if how == "even":
        return even(num_tokens, world_size)
    if how == "uneven":
        sizes = [2 + 3 * rank for rank in range(world_size - 1)]
        return [*sizes, num_tokens - sum(sizes)]
    assert how == "last holds all"
    return [*[0] * (world_size - 1), num_tokens]


def random_graph(num_nodes: int) -> Graph:
    edge_index = torch.randint(num_nodes, (2, 60), generator=torch.Generator().manual_seed(3))
    return Graph.from_edge_index(edge_index, num_nodes)


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Attention:
    """One call of attention, whole and split, with the gradients of all its arguments."""

    heads: int = 4
    head_dim: int = 3
    num_nodes: int = 22
    num_global: int = 0
    split: str = "even"
    dtype: torch.dtype = torch.float64
    type_bias: bool = False
    pair_bias: bool = False
    dropout_p: float = 0.0
    full: bool = False
    impl: str = "auto"

    def pattern(self) -> AttentionPattern:
        if self.full:
            return AttentionPattern.full(torch.tensor([0, 5, self.num_nodes]))
        return AttentionPattern.from_graph(random_graph(self.num_nodes), self_loops=False, num_global=self.num_global)

    def arguments(self, pattern: AttentionPattern) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The whole sequence's tensors and the gradient of its output."""
        generator = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=self.dtype, generator=generator)

        tokens = (pattern.num_tokens, self.heads, self.head_dim)
        whole = {"query": draw(*tokens), "key": draw(*tokens), "value": draw(*tokens)}
        if self.type_bias:
            whole["type_bias"] = draw(pattern.num_types, self.heads)
        if self.pair_bias:
            whole["pair_bias"] = draw(pattern.num_pairs, self.heads)
        return whole, draw(*tokens)

    def __call__(self, sp: SequenceParallel) -> None:
        pattern = self.pattern()
        whole, grad_out = self.arguments(pattern)
        sizes = shares(pattern.num_tokens, sp.world_size, self.split)
        rows = slice(sum(sizes[: sp.rank]), sum(sizes[: sp.rank + 1]))
        pairs = slice(int(pattern.rowptr[rows.start]), int(pattern.rowptr[rows.stop]))
        mine = {"query": rows, "key": rows, "value": rows, "type_bias": slice(None), "pair_bias": pairs}
        keywords = {"dropout_p": self.dropout_p, "dropout_seed": SEED, "impl": self.impl}

        expected_leaves = {name: x.clone().requires_grad_() for name, x in whole.items()}
        expected = graph_attention(pattern=pattern, **expected_leaves, **keywords)
        expected.backward(grad_out)

        leaves = {name: x[mine[name]].clone().requires_grad_() for name, x in whole.items()}
        sp.reset_traffic()
        out = sp.attention(pattern=pattern, **leaves, **keywords)
        out.backward(grad_out[rows])
        self.check_traffic(sp, sizes, even(self.heads, sp.world_size), pattern)
        if self.type_bias:  # replicated: each worker's gradient is its part of a sum
            leaves["type_bias"].grad = sp.all_reduce_sum(leaves["type_bias"].grad)

        assert_equal("output", out, expected[rows])
        for name, leaf in leaves.items():
            assert_equal(f"gradient of {name}", leaf.grad, expected_leaves[name].grad[mine[name]])

    def check_traffic(
        self, sp: SequenceParallel, tokens: list[int], heads: list[int], pattern: AttentionPattern
    ) -> None:
        """Three tensors out and one back in the forward pass, the same mirrored in the backward pass."""
        if sp.world_size == 1:
            assert sum(sp.traffic.bytes_sent.values()) == sum(sp.traffic.calls.values()) == 0
            return
        me, size = sp.rank, torch.finfo(self.dtype).bits // 8
        my_tokens_their_heads = tokens[me] * (sum(heads) - heads[me])
        their_tokens_my_heads = (sum(tokens) - tokens[me]) * heads[me]
        attention = 4 * (my_tokens_their_heads + their_tokens_my_heads) * self.head_dim * size
        starts = [sum(tokens[:rank]) for rank in range(sp.world_size + 1)]
        pairs = [int(n) for n in pattern.rowptr[starts].diff()]
        bias = pairs[me] * (sum(heads) - heads[me]) + (sum(pairs) - pairs[me]) * heads[me]
        expected = {"attention": attention, "global": 0, "bias": bias * size * self.pair_bias, "parameters": 0}
        assert sp.traffic.bytes_sent == expected, f"{sp.traffic.bytes_sent} instead of {expected}"
        assert sp.traffic.calls == {"attention": 8, "global": 0, "bias": 2 * self.pair_bias, "parameters": 0}


BIASES = {"type_bias": True, "pair_bias": True}
CASES |= {
    "attention_plain": Attention(),
    "attention_uneven_tokens_and_heads": Attention(heads=5, split="uneven", **BIASES),
    "attention_one_head": Attention(heads=1, num_global=1, dropout_p=0.4, **BIASES),
    "attention_last_worker_holds_all": Attention(heads=3, split="last holds all", **BIASES),
    "attention_one_token": Attention(num_nodes=1, heads=2, **BIASES),
    "attention_global_tokens": Attention(num_global=2, type_bias=True),
    "attention_dropout": Attention(heads=6, num_global=1, split="uneven", dropout_p=0.4),
    "attention_everything": Attention(heads=7, num_global=2, split="uneven", dropout_p=0.3, **BIASES),
    "attention_reference": Attention(impl="reference", num_global=1, dropout_p=0.3, **BIASES),
    "attention_full": Attention(full=True, heads=3, split="uneven", **BIASES),
    "attention_full_dense": Attention(full=True, impl="dense"),
    "attention_float32": Attention(dtype=torch.float32, heads=5, num_global=1, split="uneven", dropout_p=0.3, **BIASES),
}


@case
def traffic_of_even_shares_is_as_published(sp: SequenceParallel) -> None:
    """About 4 (S / P) d (P - 1) / P elements a layer and worker in the forward pass."""
    world, heads, width, tokens = sp.world_size, 6 * sp.world_size, 2, 5 * sp.world_size
    pattern = AttentionPattern.full(torch.tensor([0, tokens]))
    x = torch.randn(tokens // world, heads, width)
    sp.reset_traffic()
    sp.attention(x, x, x, pattern)
    hidden = heads * width
    assert sp.traffic.bytes_sent["attention"] * world == 4 * (tokens // world) * hidden * (world - 1) * 4
    assert sp.traffic.calls["attention"] == (4 if world > 1 else 0)
    sp.reset_traffic()
    assert sp.traffic_totals()["attention"] == (0, 0)


@case
def bfloat16_travels(sp: SequenceParallel) -> None:
    pattern = AttentionPattern.from_graph(random_graph(12))
    whole = torch.randn(12, 4, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    mine = whole[sp.local_slice(12)]
    out = sp.attention(mine, mine, mine, pattern)
    expected = graph_attention(whole, whole, whole, pattern)[sp.local_slice(12)]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


# Whole models ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Model:
    """Logits, gradients of the features and of every parameter of a model, whole and split."""

    name: str
    split: str = "even"
    options: dict = field(default_factory=dict)
    dropout: bool = True
    pair_bias: bool = False
    full: bool = False
    dtype: torch.dtype = torch.float64

    def __call__(self, sp: SequenceParallel) -> None:
        num_nodes, generator = 23, torch.Generator().manual_seed(5)
        sizes = {"in_features": 6, "num_outputs": 3, "layers": 2, "hidden": 20, "heads": 5, "ffn": 12}
        rates = {"dropout": 0.2, "input_dropout": 0.1, "attention_dropout": 0.3}
        config = ModelConfig.preset(self.name, **sizes, **rates, **self.options)
        torch.manual_seed(6)
        model = build_model(config).to(self.dtype).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if self.full:
            pattern = AttentionPattern.full(torch.tensor([0, config.num_global + num_nodes]))
        else:
            pattern = AttentionPattern.from_graph(random_graph(num_nodes), num_global=config.num_global)
        x = torch.randn(num_nodes, 6, dtype=self.dtype, generator=generator)
        grad_out = torch.randn(num_nodes, 3, dtype=self.dtype, generator=generator)
        bias = torch.randn(pattern.num_pairs, 5, dtype=self.dtype, generator=generator) if self.pair_bias else None
        common = {
            "pattern": pattern,
            "dropout_seed": SEED if self.dropout else None,
            "use_type_bias": not self.full,
        }

        def run(rows: slice, **fields: object) -> tuple[torch.Tensor, torch.Tensor]:
            model.zero_grad(set_to_none=True)
            features = x[rows].clone().requires_grad_()
            logits = model(Batch(x=features, **common, **fields))
            (logits * grad_out[rows]).sum().backward()
            return logits.detach(), features.grad

        expected_logits, expected_grad = run(slice(0, num_nodes), pair_bias=bias)
        expected = {name: p.grad for name, p in model.named_parameters()}

        per_worker = shares(num_nodes, sp.world_size, self.split)
        rows = slice(sum(per_worker[: sp.rank]), sum(per_worker[: sp.rank + 1]))
        # Global tokens have no stored pairs, so worker 0's rows of pair_bias are those of its nodes.
        first, last = (
            int(pattern.rowptr[config.num_global + rows.start]),
            int(pattern.rowptr[config.num_global + rows.stop]),
        )
        my_bias = None if bias is None else bias[first:last]
        logits, grad = run(rows, pair_bias=my_bias, token_offset=rows.start, parallel=sp)
        sp.all_reduce_gradients(model.parameters())

        assert_equal("logits", logits, expected_logits[rows])
        assert_equal("gradient of x", grad, expected_grad[rows])
        for name, parameter in model.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None, f"{name} has a gradient, on one process it has none"
            else:
                assert_equal(f"gradient of {name}", parameter.grad, expected[name])


CASES |= {
    "graphormer": Model(name="graphormer-slim"),
    "graphormer_uneven": Model(name="graphormer-slim", split="uneven", options={"num_global": 2}),
    "graphormer_last_worker_holds_all": Model(name="graphormer-slim", split="last holds all"),
    "graphormer_plain": Model(name="graphormer-slim", dropout=False, options={"num_global": 0, "type_bias": False}),
    "graphormer_pair_bias": Model(name="graphormer-slim", split="uneven", pair_bias=True),
    "graphormer_checkpointing": Model(
        name="graphormer-slim", split="uneven", options={"activation_checkpointing": True}
    ),
    "graphormer_dense_step": Model(name="graphormer-slim", full=True),
    "graphormer_float32": Model(name="graphormer-slim", split="uneven", dtype=torch.float32),
    "gt": Model(name="gt"),
    "gt_global_token": Model(name="gt", split="uneven", options={"num_global": 1}),
    "gt_plain": Model(name="gt", dropout=False, split="last holds all", options={"type_bias": False}),
    "gt_float32": Model(name="gt", dtype=torch.float32),
}


# Gradients, objects, errors -------------------------------------------------------------------------------------------


@case
def gradients_sum_and_stay_missing_only_if_all_miss_them(sp: SequenceParallel) -> None:
    shapes = [(3, 2), (5,), (2, 2), ()]
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    parameters.append(torch.nn.Parameter(torch.zeros(4)))  # another dtype, its own bucket
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    last = sp.world_size - 1
    for index, parameter in enumerate(parameters):
        if index == 2 or (index == 1 and sp.rank != last):
            continue
        parameter.grad = torch.full_like(parameter, float(10 * index + sp.rank + 1))
    sp.reset_traffic()
    if sp.world_size > 1:
        # A limit of 60 bytes parts the first (48 bytes) from the second (40) and joins the third to it no more.
        all_reduce_gradients([*parameters, frozen], sp.group, sp.traffic, bucket_bytes=60)
    else:
        sp.all_reduce_gradients([*parameters, frozen])
    ranks = range(sp.world_size)
    expected = [sum(10 * i + r + 1 for r in ranks) if i != 1 else 10 + last + 1 for i in range(5)]
    for index, parameter in enumerate(parameters):
        if index == 2:
            assert parameter.grad is None
        else:
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.shape == parameter.shape
            assert (parameter.grad == expected[index]).all(), f"{index}: {parameter.grad} != {expected[index]}"
    assert frozen.grad is None
    if sp.world_size > 1:
        # Buckets hold 6; 5; 4 and 1; 4 numbers, and a flag for each parameter.
        sent = sum(2 * (sp.world_size - 1) * n * size // sp.world_size for n, size in [(7, 8), (6, 8), (7, 8), (5, 4)])
        assert sp.traffic_totals()["parameters"] == (sent, 4)


@case
def objects_and_errors_of_worker_0_reach_all(sp: SequenceParallel) -> None:
    assert sp.broadcast_object(lambda: {"rank": sp.rank, "x": torch.arange(3)})["rank"] == 0

    def fail() -> None:
        raise ValueError(f"from worker {sp.rank}")

    try:
        sp.broadcast_object(fail)
    except ValueError as error:
        assert str(error) == "from worker 0"
    else:
        raise AssertionError("no error")


def refused(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except ValueError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"no error that names {words}")


@case
def arguments_that_do_not_fit_are_refused_by_every_worker(sp: SequenceParallel) -> None:
    """Also by the workers whose own arguments are right: otherwise they would wait for ever."""
    pattern = AttentionPattern.from_graph(random_graph(12))
    sizes, last = even(12, sp.world_size), sp.rank == sp.world_size - 1
    rows = sizes[sp.rank]
    pairs = int(pattern.rowptr[sum(sizes[: sp.rank + 1])] - pattern.rowptr[sum(sizes[: sp.rank])])

    def qkv(n: int, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.zeros(n, heads, 2, dtype=dtype)] * 3

    refused(lambda: sp.attention(*qkv(rows + last), pattern), "pattern")
    bias = torch.zeros(pairs + last, 4)
    refused(lambda: sp.attention(*qkv(rows), pattern, pair_bias=bias), "pair_bias")
    refused(lambda: sp.attention(*qkv(rows), pattern, type_bias=torch.zeros(6, 4 + last)), "type_bias")
    refused(lambda: sp.attention(*qkv(rows)[:2], torch.zeros(rows, 4, 2 + last), pattern), "value")
    if sp.world_size > 1:
        refused(lambda: sp.attention(*qkv(rows, heads=4 + last), pattern), "H")
        refused(lambda: sp.attention(*qkv(rows, dtype=torch.float64 if last else torch.float32), pattern), "dtype")
        refused(lambda: sp.gather_sizes(rows, sum(sizes[: sp.rank]) + last, pattern), "token_offset")
        refused(lambda: sp.gather_sizes(rows + last, sum(sizes[: sp.rank]), pattern), "pattern", "tokens")
    # The group works on after all these refusals.
    assert sp.attention(*qkv(rows), pattern).shape == (rows, 4, 2)


@case
def the_group_is_that_of_torchrun(sp: SequenceParallel) -> None:
    assert init_distributed() is sp.group
    assert (sp.group is None) == (sp.world_size == 1)
    assert sum(sp.shard_sizes(11)) == 11


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    group = init_distributed(device="cpu", timeout_s=60.0)
    sp = SequenceParallel(group)
    results = {}
    for name, check in CASES.items():
        try:
            check(sp)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    (folder / f"{sp.world_size}-{sp.rank}.json").write_text(json.dumps(results))
    shutdown_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
