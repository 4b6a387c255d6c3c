"""The attention benchmark: verified before timed, floors, made-up graphs, bad input."""

from dataclasses import replace

import pytest
import torch

from tests.ops.cases import random_graph
from torchgt import AttentionPattern
from torchgt.attention import graph_attention
from torchgt.bench.attention import AttentionBenchConfig, bench_attention, make_inputs
from torchgt.bench.floors import Rates, attention_work, measure_rates
from torchgt.bench.verify import errors, run, take_sample, verify
from torchgt.cli import main
from torchgt.data.synthetic import synthetic_graph
from torchgt.errors import ConfigError
from torchgt.training.config import build

SMALL = {"synthetic": {"nodes": 300, "pairs": 900}, "threads": 1, "repeats": 3, "warmup": 1, "shapes": [[2, 4]]}


def off_by_a_bit(query, key, value, pattern, **keywords):
    """Right but for one sampled element."""
    out = graph_attention(query, key, value, pattern, impl="scatter", **keywords)
    return out * (1.0 + 1e-3 * (torch.arange(out.shape[0]) % 2)[:, None, None])


def refuses(query, key, value, pattern, **keywords):
    """Takes nothing."""
    raise ValueError("no, thanks")


def test_rows():
    values = SMALL | {"impls": ["reference", "scatter", f"{__name__}:refuses"], "bias": "both", "dropout": 0.2}
    result = bench_attention(build(AttentionBenchConfig, values))
    assert result["kind"] == "bench-attention"
    rows = {(row["impl"].rpartition(":")[2], row["phase"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 9
    for impl in ("reference", "scatter"):
        forward, backward, total = (rows[impl, phase] for phase in ("forward", "backward", "total"))
        assert total["n"] >= 3 and total["q25"] <= total["median"] <= total["q75"]
        assert forward["median"] < total["median"] and backward["median"] < total["median"]
        assert forward["floor_s"] < total["floor_s"] and total["memory_bytes"] >= 0
        assert set(total["errors"]) == {"out", "query", "key", "value", "pair_bias", "type_bias"}
    assert rows["refuses", "total"]["status"] == "refused" and rows["refuses", "total"]["error"] == "no, thanks"
    assert "median" not in rows["refuses", "total"]


def test_nothing_wrong_is_timed():
    config = build(AttentionBenchConfig, SMALL | {"impls": ["scatter", f"{__name__}:off_by_a_bit"]})
    with pytest.raises(ArithmeticError, match=r"off_by_a_bit, 2 heads x 4: out errs by"):
        bench_attention(config)


@pytest.mark.parametrize("max_pairs", [200, 10**9])
def test_a_sample_is_checked_like_the_whole(max_pairs):
    pattern = AttentionPattern.from_graph(random_graph(400, 1500, seed=3))
    config = build(AttentionBenchConfig, SMALL | {"bias": "both", "dropout": 0.3})
    inputs = make_inputs(config, pattern, 2, 4)
    found = run(graph_attention, inputs, pattern, impl="reference")
    sample = take_sample(pattern, max_pairs=max_pairs)
    assert (sample.pattern is pattern) == (max_pairs > 10**6)
    assert len(sample.columns) > 1
    measured = verify(found, inputs, pattern, sample)
    limits = {name: 1e-4 if name == "type_bias" else 1e-6 for name in measured}  # a sum over all pairs
    assert all(max(measured[name]) < limit for name, limit in limits.items())
    # Every result is looked at: an error in any of them shows.
    for name in measured:
        where = {"out": sample.rows, "query": sample.rows, "pair_bias": sample.pairs}.get(name, sample.columns)
        index = 0 if name == "type_bias" else int(where[-1])
        wrong = dict(found) | {name: found[name].clone()}
        wrong[name][index] += 0.1
        assert errors(wrong, inputs, pattern, sample)[name][0] > 1e-3
        with pytest.raises(ArithmeticError, match=name):
            verify(wrong, inputs, pattern, sample)


def test_work_by_hand():
    work = attention_work(10, 40, 2, 4, 4, type_bias=True)
    tensor, sums, index = 10 * 2 * 4 * 4, 10 * 2 * 4, 11 * 8 + 40 * 5
    assert work["forward"].bytes == 4 * tensor + sums + index
    assert work["backward"].bytes == 8 * tensor + sums + index
    assert work["forward"].flop == 2 * 2 * 40 * 2 * 4 and work["total"].flop == 7 * 2 * 40 * 2 * 4
    assert work["total"].floor_s(Rates(100.0, 1e12)) == work["total"].bytes / 100.0
    assert work["total"].floor_s(Rates(1e12, 100.0)) == work["total"].flop / 100.0


def test_rates_are_rates():
    rates = measure_rates(torch.device("cpu"))
    assert 1e8 < rates.bytes_per_s < 1e13 and 1e8 < rates.flop_per_s < 1e15


def test_synthetic_graph():
    graph = synthetic_graph(5000, 60_000, seed=1)
    degrees = graph.degrees()
    assert 55_000 < graph.num_edges <= 60_000
    assert int(degrees.max()) > 4 * float(degrees.double().mean())  # long-tailed
    rows = torch.repeat_interleave(torch.arange(5000), degrees)
    near = ((graph.col - rows).abs() <= 512).double().mean()
    assert 0.88 < float(near) < 0.95
    assert not bool((graph.col == rows).any())
    again = synthetic_graph(5000, 60_000, seed=1)
    assert torch.equal(graph.col, again.col) and torch.equal(graph.rowptr, again.rowptr)
    assert not torch.equal(graph.col, synthetic_graph(5000, 60_000, seed=2).col)


def test_synthetic_graph_of_blocks_is_valid(monkeypatch):
    import torchgt.data.synthetic as module

    monkeypatch.setattr(module, "_BLOCK_PAIRS", 100)
    graph = synthetic_graph(700, 2000, seed=4)
    graph = type(graph)(graph.rowptr, graph.col)  # checks sorted and distinct
    assert graph.num_nodes == 700
    assert synthetic_graph(1, 0).num_nodes == 1 and synthetic_graph(2, 1).num_nodes == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 0, "num_pairs": 0}, "num_nodes is 0"),
        ({"num_nodes": 10, "num_pairs": 46}, "N \\(N - 1\\) / 2 = 45"),
        ({"num_nodes": 10, "num_pairs": 4, "local": 1.5}, "local is 1.5"),
    ],
)
def test_synthetic_graph_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic_graph(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": "somewhere"}, "store, synthetic: allowed: exactly one"),
        ({"impls": ["cpus"]}, "did you mean 'cpu'"),
        ({"impls": []}, "at least one"),
        ({"shapes": [[8]]}, r"shapes: \[8\]; allowed: \[heads, head dimension\]"),
        ({"lengths": [1]}, "lengths: 1; allowed"),
        ({"bias": "tpye"}, "did you mean 'type'"),
        ({"precision": "fp16"}, "precision: unknown value 'fp16'"),
        ({"dropout": 1.0}, "dropout: 1.0"),
        ({"repeats": 2}, "repeats: 2"),
        ({"synthetic": {"nodes": 1, "pairs": 3}}, "synthetic: nodes 1"),
    ],
)
def test_bad_configuration(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(AttentionBenchConfig, SMALL | changes)


def test_impl_that_does_not_exist():
    with pytest.raises(ConfigError, match="no_such_module:f"):
        bench_attention(build(AttentionBenchConfig, SMALL | {"impls": ["no_such_module:f"]}))


def test_length_beyond_the_graph(block_store):
    config = build(AttentionBenchConfig, SMALL | {"lengths": [301], "impls": ["reference"]})
    with pytest.raises(ConfigError, match="lengths: 301; the synthetic graph has 300 nodes"):
        bench_attention(config)
    config = replace(config, synthetic=None, store=str(block_store))
    with pytest.raises(ConfigError, match=r"lengths: 301; the store .* has 240 nodes"):
        bench_attention(config)


def test_command(tmp_path, capsys, block_store):
    out = tmp_path / "rows.json"
    options = ["--store", str(block_store), "--length", "100", "--shape", "2x3", "--impl", "scatter", "--bias", "type"]
    assert main(["bench", "attention", *options, "--threads", "1", "--repeats", "3", "--out", str(out)]) == 0
    assert out.exists()
    assert main(["bench", "attention", "--synthetic", "10-20"]) == 2
    assert "--synthetic: '10-20'; allowed: two whole numbers" in capsys.readouterr().err
    assert main(["bench", "attention", "--synthetic", "10:20", "--impl", "nope"]) == 2
    assert "unknown implementation 'nope'" in capsys.readouterr().err
