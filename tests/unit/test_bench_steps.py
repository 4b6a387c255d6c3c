"""The step benchmark: rows that say what was measured, and where a budget ended a system."""

import pytest

from tests.conftest import write_block_store
from torchgt.bench.steps import BenchConfig, StepBudget, _predicted_timeout, bench_steps
from torchgt.errors import ConfigError
from torchgt.training.config import build
from torchgt.training.record import RunRecord


def config(store, **changes) -> BenchConfig:
    values = {
        "system": "torchgt",
        "store": str(store),
        "lengths": [64, 128],
        "threads": 1,
        "repeats": 3,
        "warmup": 1,
        "amortise": [2, 10],
        "schedule": {"dense_tokens": 64},
        "plugins": ["baselines", "tests.plugins.misbehaving"],
        "budget": {"step_s": 60, "measure_s": 0.5, "memory_bytes": 2**31},
    }
    return build(BenchConfig, values | changes)


def test_rows(block_store):
    result = bench_steps(config(block_store, lengths=[64, 500, "all"]))
    assert result["kind"] == "bench-steps"
    rows = [RunRecord.from_dict(row) for row in result["rows"]]
    assert [row.error for row in rows] == [None, None]
    assert [row.seq_len for row in rows] == [64, 240]  # 500 is beyond the store
    for row in rows:
        assert row.status == "ok" and row.machine_class["threads"] == 1
        steps = row.time["step_s"]
        assert all(steps[kind]["n"] >= 3 and steps[kind]["median"] > 0 for kind in ("sparse", "dense"))
        sparse, dense = steps["sparse"]["median"], steps["dense"]["median"]
        assert steps["amortised"]["2"] == pytest.approx((sparse + dense) / 2)
        assert steps["amortised"]["10"] == pytest.approx((9 * sparse + dense) / 10)
        assert row.memory["peak_bytes"] > 0 and row.pattern["pairs"] > row.seq_len
    assert set(RunRecord.from_dict(rows[0].to_dict()).time["step_s"]) == {"sparse", "dense", "amortised"}


def test_memory_budget_ends_the_range(block_store):
    rows = bench_steps(config(block_store, system="hungry"))["rows"]
    assert [row["status"] for row in rows] == ["oom"]
    assert rows[0]["seq_len"] == 64 and rows[0]["budget"]["memory_bytes"] == 2**31


def test_time_budget_ends_the_range(block_store):
    slow = {"step_s": 1e-4, "measure_s": 0.5, "memory_bytes": 2**31}
    rows = bench_steps(config(block_store, system="gp-flash", budget=slow))["rows"]
    assert [row["status"] for row in rows] == ["timeout"]


def test_hopeless_lengths_are_not_tried(tmp_path):
    run = config(tmp_path, budget={"step_s": 60})
    assert _predicted_timeout(run, 32768, [(8192, 13.0), (16384, 52.0)])["status"] == "timeout"
    assert _predicted_timeout(run, 16384, [(4096, 3.2), (8192, 13.0)]) is None  # 52 s: it might just do
    assert _predicted_timeout(run, 8192, [(4096, 13.0)]) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lengths": []}, "lengths: empty"),
        ({"lengths": [0]}, "lengths: 0"),
        ({"lengths": [5000]}, "has 240 nodes"),
        ({"repeats": 2}, "repeats: 2"),
        ({"systm": "x"}, "did you mean 'system'"),
        ({"system": "gp-flsh"}, "did you mean 'gp-flash'"),
    ],
)
def test_invalid(block_store, change, match):
    with pytest.raises(ConfigError, match=match):
        bench_steps(config(block_store, **change))


def test_subset_keeps_splits_and_labels(tmp_path):
    import torchgt
    from torchgt.bench.steps import SubsetStore

    store = torchgt.GraphStore.open(write_block_store(tmp_path / "blocks"))
    part = SubsetStore.cut(store, 100, seed=0)
    assert part.graph.num_nodes == 100 and len(part.x) == len(part.y) == 100
    ids = torchgt.connected_subset(store.graph, 100, 0)
    for name, members in part.splits[0].items():
        assert set(ids[members].tolist()) == set(ids.tolist()) & set(store.splits[0][name].tolist())
    assert StepBudget().step_s > 0
