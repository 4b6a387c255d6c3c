"""Stores: whole or absent, and every way in which one can be wrong is refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from torchgt import Graph, GraphStore
from torchgt.data import store as store_module
from torchgt.data.store import METRICS, StoreError, metrics_for
from torchgt.training import metrics

SOURCE = {"url": "https://example.org", "sha256": "0" * 64, "licence": "MIT", "version": "1"}


def example(**changes):
    """(meta, arrays) of a ring of 10 nodes with 3 classes, one of them unlabelled."""
    i = torch.arange(10)
    graph = Graph.from_edge_index(torch.stack((i, (i + 1) % 10)), 10, symmetrize=True)
    meta = {
        "name": "ring",
        "task": "node",
        "target": "multiclass",
        "num_classes": 3,
        "metric": "accuracy",
        "splits": [{role: f"split/0-{role}.npy" for role in ("train", "valid", "test")}],
        "split_kind": "official",
        "directed": False,
        "node_shuffle_seed": 0,
        "source": SOURCE,
    }
    arrays = {
        "rowptr": graph.rowptr,
        "col": graph.col,
        "x": torch.randn(10, 4, generator=torch.Generator().manual_seed(0)),
        "y": torch.tensor([0, 1, 2, -1, 0, 1, 2, 0, 1, 2]),
        "split/0-train": torch.arange(0, 6),
        "split/0-valid": torch.tensor([6, 7]),
        "split/0-test": torch.tensor([8, 9]),
    }
    for key, value in changes.items():
        target = arrays if isinstance(value, torch.Tensor | np.ndarray) else meta
        target[key.replace("__", "/0-")] = value
    return meta, arrays


def tasks(y, target="multilabel", metric="f1_micro", **changes):
    meta, arrays = example(y=y, target=target, metric=metric, **changes)
    del meta["num_classes"]
    return meta | {"num_tasks": 1 if y.ndim == 1 else y.shape[1]}, arrays


def write(path, meta_and_arrays, **keywords):
    return GraphStore.write(path, *meta_and_arrays, **keywords)


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "ring", example())
    return tmp_path / "ring"


def edit(path, **changes):
    """Change keys of meta.json; None removes one."""
    meta = json.loads((path / "meta.json").read_text())
    for key, value in changes.items():
        if value is None:
            del meta[key]
        else:
            meta[key] = value
    (path / "meta.json").write_text(json.dumps(meta))


def refused(function, *texts):
    with pytest.raises(StoreError) as error:
        function()
    message = str(error.value)
    assert "\n" not in message
    for text in texts:
        assert text in message, message


def test_what_was_written_comes_back(tmp_path):
    meta, arrays = example(features={"made": "up"}, cell_offsets=np.zeros((0, 3), dtype=np.int8))
    store = write(tmp_path / "deep" / "ring", (meta, arrays)).validate().verify()
    assert (store.name, store.num_outputs, store.meta["features"]) == ("ring", 3, {"made": "up"})
    assert (store.meta["num_nodes"], store.meta["num_edges"], store.meta["num_graphs"]) == (10, 20, 1)
    assert store.graph.digest() == Graph(arrays["rowptr"], arrays["col"]).digest()
    for name, array in arrays.items():
        array = torch.as_tensor(array)
        assert torch.equal(store.array(name), array) and store.array(name).dtype == array.dtype
    assert {role: ids.tolist() for role, ids in store.splits[0].items()} == {
        "train": list(range(6)),
        "valid": [6, 7],
        "test": [8, 9],
    }
    assert "Store('ring'" in repr(store)


def test_equal_content_has_an_equal_digest(tmp_path):
    one, two = write(tmp_path / "a", example()), write(tmp_path / "b", example())
    assert one.digest == two.digest
    assert (one.path / "meta.json").read_bytes() == (two.path / "meta.json").read_bytes()
    other = write(tmp_path / "c", example(y=torch.tensor([0, 1, 2, -1, 0, 1, 2, 0, 1, 1])))
    renamed = write(tmp_path / "d", example(name="other"))
    assert len({one.digest, other.digest, renamed.digest}) == 3


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_arrays_are_mapped_not_read(path):
    x = GraphStore.open(path).x
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path / "x.npy") in line]
    assert mapped and mapped[0].split()[1] == "r--s" and x.shape == (10, 4)


def test_several_named_tests(tmp_path):
    splits = [{"train": "split/0-train.npy", "valid": "split/0-valid.npy", "test": {"a": "split/0-test.npy"}}]
    assert write(tmp_path / "s", example(splits=splits)).splits[0]["test_a"].tolist() == [8, 9]


def test_graph_task(tmp_path):
    edges = torch.tensor([[0, 1, 2, 3, 5], [1, 0, 3, 2, 4]])
    graph = Graph.from_edge_index(edges, 6)
    changes = {
        "task": "graph",
        "rowptr": graph.rowptr,
        "col": graph.col,
        "x": torch.ones(6, 2, dtype=torch.int64),
        "cardinalities": [2, 5],
        "graph_ptr": torch.tensor([0, 2, 4, 6]),
        "directed": True,
        "split__train": torch.tensor([0]),
        "split__valid": torch.tensor([1]),
        "split__test": torch.tensor([2]),
    }
    y = torch.tensor([[0.5], [1.5], [float("nan")]])
    refused(lambda: write(tmp_path / "g", tasks(y, "regression", "mae", **changes)), "test has no labelled member")
    y = torch.tensor([[0.5], [1.5], [-2.0]])
    store = write(tmp_path / "g", tasks(y, "regression", "mae", **changes))
    assert (store.meta["num_graphs"], store.meta["num_nodes"], store.num_outputs) == (3, 6, 1)
    crossing = changes | {"graph_ptr": torch.tensor([0, 2, 3, 6])}
    refused(lambda: write(tmp_path / "h", tasks(y, "regression", "mae", **crossing)), "col.npy", "joins two graphs")
    ended = changes | {"graph_ptr": torch.tensor([0, 2, 4, 5])}
    refused(lambda: write(tmp_path / "h", tasks(y, "regression", "mae", **ended)), "graph_ptr.npy", "0 to 5", "0 to 6")
    del changes["graph_ptr"]
    refused(lambda: write(tmp_path / "h", tasks(y, "regression", "mae", **changes)), "'graph_ptr'")


@pytest.mark.parametrize(
    ("y", "target", "metric"),
    [
        (torch.tensor([0, 1, -1, 1, 0, 1, 0, 1, 0, 1]), "binary", "rocauc"),
        (torch.tensor([[0.0, 1.0]] * 9 + [[float("nan"), 0.0]]), "multilabel", "ap"),
        (torch.ones(10, 3, dtype=torch.bool), "multilabel", "f1_micro"),
        (torch.ones(10, 1, dtype=torch.uint8), "binary", "accuracy"),
        (torch.full((10,), -7.5, dtype=torch.float64), "regression", "mae"),
    ],
)
def test_targets(tmp_path, y, target, metric):
    assert torch.equal(write(tmp_path / "s", tasks(y, target, metric)).y.nan_to_num(9), y.nan_to_num(9))


def test_training_computes_every_metric_that_a_store_may_name():
    for target in METRICS:
        for metric in metrics_for(target):
            y = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
            y = y[:, 1].long() if target == "multiclass" else y
            value = metrics.evaluate(metric, target, torch.tensor([[-9.0, 9.0], [9.0, -9.0]]), y)
            assert value == (8.5 if metric == "mae" else 1.0), (target, metric)
    refused(lambda: metrics_for("multiclas"), "multiclas", "'multiclass'")


# What cannot be written -----------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
RING = torch.arange(0, 21, 2)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"x": torch.full((10, 4), NAN)}, ["x.npy", "row 0, column 0 is nan", "finite"]),
        ({"x": torch.full((10, 4), INF)}, ["x.npy", "inf"]),
        ({"x": torch.ones(9, 4)}, ["x.npy", "[9, 4]", "[10, any]"]),
        ({"x": torch.ones(10)}, ["x.npy", "[10]"]),
        ({"x": torch.ones(10, 4, dtype=torch.bool)}, ["x.npy", "bool"]),
        ({"x": torch.ones(10, 4, dtype=torch.bfloat16)}, ["'x'", "bfloat16", "float32"]),
        ({"x": np.array([["a"] * 4] * 10)}, ["'x'", "float32"]),
        ({"x": torch.ones(10, 2, dtype=torch.int64), "cardinalities": [2, 1]}, ["column 1 is 1", "0..0"]),
        ({"x": torch.ones(10, 2, dtype=torch.int64), "cardinalities": [2]}, ["cardinalities", "2 integers"]),
        ({"y": torch.full((10,), 3)}, ["y.npy", "is 3", "-1..2"]),
        ({"y": torch.full((10,), -2)}, ["y.npy", "is -2", "-1..2"]),
        ({"y": torch.ones(10)}, ["y.npy", "float32", "int64"]),
        ({"y": torch.ones(10, 2, dtype=torch.int64)}, ["y.npy", "[10, 2]", "[10]"]),
        ({"rowptr": RING.flip(0)}, ["rowptr.npy", "0 to 20"]),
        ({"rowptr": torch.tensor([0, 4, 2, 6, 8, 10, 12, 14, 16, 18, 20])}, ["rowptr.npy", "falls after entry 1"]),
        ({"rowptr": RING.int()}, ["rowptr.npy", "int32", "int64"]),
        ({"rowptr": RING + 1}, ["rowptr.npy", "1 to 21"]),
        ({"rowptr": torch.zeros(1, dtype=torch.int64)}, ["num_nodes is 0", "at least 1"]),
        ({"col": torch.full((20,), 10)}, ["col.npy", "is 10", "0..9"]),
        ({"col": torch.full((20,), -1)}, ["col.npy", "is -1", "0..9"]),
        ({"col": torch.ones(20, dtype=torch.int64)}, ["col.npy", "entry 1 is 1 after 1", "rising"]),
        ({"col": torch.ones(20)}, ["col.npy", "float32", "int64"]),
        ({"edge_attr": torch.ones(19, 2)}, ["edge_attr.npy", "[19, 2]", "[20]", "[20, any]"]),
        ({"edge_attr": torch.ones(3), "edge_pair": torch.tensor([0, 20, 1])}, ["edge_pair.npy", "20", "0..19"]),
        ({"split__valid": torch.tensor([5, 6])}, ["split/0-valid.npy", "id 5", "already"]),
        ({"split__valid": torch.tensor([6, 6])}, ["split/0-valid.npy", "repeats"]),
        ({"split__valid": torch.tensor([10])}, ["split/0-valid.npy", "is 10", "0..9"]),
        ({"split__valid": torch.tensor([-1])}, ["split/0-valid.npy", "is -1"]),
        ({"split__valid": torch.tensor([], dtype=torch.int64)}, ["split/0-valid.npy", "empty"]),
        ({"split__valid": torch.tensor([6.0])}, ["split/0-valid.npy", "float32", "int64"]),
        ({"split__train": torch.tensor([3])}, ["split/0-train.npy", "no labelled"]),
        ({"splits": []}, ["splits is []"]),
        ({"splits": [{"train": "split/0-train.npy"}]}, ["splits", "train, valid and test"]),
        ({"splits": [dict.fromkeys(("train", "valid", "test"), "../x.npy")]}, ["train is '../x.npy'"]),
        ({"metric": "rocauc"}, ["metric is 'rocauc'", "accuracy", "'multiclass'"]),
        ({"target": "classes"}, ["'num_tasks' is missing"]),
        ({"target": "classes", "num_tasks": 1}, ["target is 'classes'", "binary"]),
        ({"task": "edge"}, ["task is 'edge'", "node, graph"]),
        ({"name": "a/b"}, ["name is 'a/b'"]),
        ({"num_classes": 0}, ["num_classes is 0", "at least 1"]),
        ({"num_classes": True}, ["num_classes is True"]),
        ({"directed": "no"}, ["directed is 'no'", "true, false"]),
        ({"node_shuffle_seed": "0"}, ["node_shuffle_seed is '0'"]),
        ({"source": {"url": "x"}}, ["source", "licence"]),
        ({"metrics": "accuracy"}, ["'metrics'", "did you mean 'metric'"]),
        ({"num_nodes": 11}, ["rowptr.npy", "[11]", "[12]"]),
        ({"features": {"scale": NAN}}, ["meta.json", "JSON"]),
        ({"../outside": torch.ones(1)}, ["'../outside'", "file name"]),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_left(tmp_path, changes, texts):
    refused(lambda: write(tmp_path / "new", example(**changes)), *texts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("y", "target", "metric", "text"),
    [
        (torch.full((10, 2), 2), "multilabel", "ap", "is 2"),
        (torch.full((10, 2), -2), "multilabel", "ap", "is -2"),
        (torch.full((10, 2), 0.5), "multilabel", "ap", "is 0.5"),
        (torch.full((10,), -1.0), "binary", "ap", "NaN for unlabelled"),
        (torch.full((10,), INF), "regression", "mae", "is inf"),
        (torch.ones(10, dtype=torch.int64), "regression", "mae", "int64"),
        (torch.ones(10, 2), "regression", "ap", "metric is 'ap'"),
        (torch.ones(10, 2), "binary", "f1_micro", "metric is 'f1_micro'"),
    ],
)
def test_labels_that_a_target_does_not_have(tmp_path, y, target, metric, text):
    refused(lambda: write(tmp_path / "new", tasks(y, target, metric)), text)


def test_missing_array(tmp_path):
    meta, arrays = example()
    del arrays["y"]
    refused(lambda: write(tmp_path / "new", (meta, arrays)), "'y' is missing")


def test_a_failure_at_any_point_leaves_nothing(tmp_path, monkeypatch):
    """fsync is called once an array, for meta.json and for the folders: fail at each of them in turn."""
    calls, fail_at, synced = 0, 0, os.fsync

    def failing(descriptor):
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError("disk full")
        assert not (tmp_path / "new").exists() or calls > 10
        synced(descriptor)

    monkeypatch.setattr(store_module.os, "fsync", failing)
    for number in range(1, 11):  # 7 arrays, meta.json, 2 folders
        calls, fail_at = 0, number
        with pytest.raises(OSError, match="disk full"):
            write(tmp_path / "new", example())
        assert list(tmp_path.iterdir()) == []
    fail_at = calls = 0
    write(tmp_path / "new", example())
    assert calls == 11 and [p.name for p in tmp_path.iterdir()] == ["new"]


def test_an_existing_folder_is_replaced_only_if_asked_and_only_if_it_is_a_store(path, tmp_path):
    refused(lambda: write(path, example(name="b")), "a store is there already", "--force")
    assert write(path, example(name="b"), overwrite=True).name == "b"
    (path / "meta.json").unlink()  # as a workflow engine does before it runs a rule again
    assert write(path, example(name="c"), overwrite=True).name == "c"
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty", example()).name == "ring"
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "x.npy").touch()
    refused(lambda: write(thesis, example(), overwrite=True), "not a store")
    assert (thesis / "x.npy").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "ring", "thesis"]


# What cannot be opened ------------------------------------------------------------------------------------------------


def test_no_store(tmp_path):
    refused(lambda: GraphStore.open(tmp_path / "none"), "none", "no such folder")
    refused(lambda: GraphStore.open(tmp_path), "no meta.json")


def test_keys_of_a_later_version_are_kept(path):
    edit(path, colour="blue")
    assert GraphStore.open(path).meta["colour"] == "blue"


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"format": 2}, ["format is 2", "reads 1"]),
        ({"format": "1"}, ["format is '1'"]),
        ({"metric": None, "metrics": "accuracy"}, ["'metric' is missing", "'metrics'"]),
        ({"num_classes": None}, ["'num_classes' is missing"]),
        ({"num_edges": 21}, ["col.npy", "[20]", "[21]"]),
        ({"arrays": {}}, ["arrays lacks 'rowptr'"]),
        ({"arrays": []}, ["arrays is []"]),
        ({"splits": "all"}, ["splits is 'all'"]),
    ],
)
def test_a_description_that_does_not_fit(path, changes, texts):
    edit(path, **changes)
    refused(lambda: GraphStore.open(path), "meta.json" if "col.npy" not in texts else "", *texts)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("dtype", "object", "object"),
        ("shape", [10, -4], "-4"),
        ("shape", [10, 5], "[10, 5]"),
        ("dtype", "int8", "int8"),
    ],
)
def test_a_described_array_that_does_not_fit(path, key, value, text):
    arrays = json.loads((path / "meta.json").read_text())["arrays"]
    arrays["x"][key] = value
    edit(path, arrays=arrays)
    refused(lambda: GraphStore.open(path), "x", text)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_a_broken_description(path, text):
    (path / "meta.json").write_text(text)
    refused(lambda: GraphStore.open(path), "meta.json")


def test_damaged_files(path, tmp_path):
    def damaged(change, *texts):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        change(copy)
        refused(lambda: GraphStore.open(copy), *texts)
        shutil.rmtree(copy)

    whole = (path / "x.npy").read_bytes()
    damaged(lambda p: (p / "x.npy").unlink(), "x.npy", "missing")
    damaged(lambda p: (p / "split/0-test.npy").unlink(), "split/0-test.npy", "missing")
    damaged(
        lambda p: (p / "x.npy").write_bytes(whole[:-1]), "x.npy", f"{len(whole) - 1} bytes", f"{len(whole)} expected"
    )
    damaged(lambda p: (p / "x.npy").write_bytes(whole + b"0"), "x.npy", "bytes")
    damaged(lambda p: (p / "x.npy").write_bytes(whole[:20]), "x.npy", "cannot be read")
    damaged(lambda p: (p / "x.npy").write_bytes(b""), "x.npy", "cannot be read")
    damaged(lambda p: np.save(p / "x.npy", np.zeros((10, 4))), "x.npy", "float64", "float32")
    damaged(lambda p: np.save(p / "x.npy", np.zeros((4, 10), np.float32)), "x.npy", "[4, 10]", "[10, 4]")
    damaged(lambda p: np.save(p / "x.npy", np.zeros((10, 4), np.float32, order="F")), "x.npy", "column-major")
    damaged(lambda p: np.save(p / "x.npy", np.zeros((10, 4), ">f4")), "x.npy", ">f4")
    damaged(lambda p: np.save(p / "x.npy", np.array([{}] * 40).reshape(10, 4)), "x.npy", "object")


def test_values_are_checked_by_validate_and_checksums_by_verify(path):
    np.save(path / "x.npy", np.full((10, 4), 2.0, dtype=np.float32))
    store = GraphStore.open(path).validate()
    refused(store.verify, "x.npy", "sha256", "altered")
    np.save(path / "x.npy", np.full((10, 4), NAN, dtype=np.float32))
    store = GraphStore.open(path)
    refused(store.validate, "x.npy", "nan")


def test_an_undirected_store_must_be_symmetric(tmp_path):
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 10)
    store = write(tmp_path / "s", example(rowptr=graph.rowptr, col=graph.col))
    refused(store.verify, "col.npy", "not symmetric")


def test_checks_look_across_the_seams_of_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_CHUNK", 1)
    monkeypatch.setattr(store_module._chunks, "__defaults__", (1,))
    write(tmp_path / "fine", example()).validate()
    for changes, text in (
        ({"col": torch.ones(20, dtype=torch.int64)}, "entry 1 is 1 after 1"),
        ({"rowptr": torch.tensor([0, 4, 2, 6, 8, 10, 12, 14, 16, 18, 20])}, "falls after entry 1"),
        ({"split__valid": torch.tensor([6, 6])}, "already in this split"),
        ({"x": torch.tensor([[0.0]] * 9 + [[NAN]])}, "row 9, column 0"),
    ):
        refused(lambda changes=changes: write(tmp_path / "new", example(**changes)), text)


def test_unknown_array(path):
    refused(lambda: GraphStore.open(path).array("rowpt"), "'rowpt'", "did you mean 'rowptr'")


def test_a_graph_without_edges(tmp_path):
    graph = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 10)
    store = write(tmp_path / "s", example(rowptr=graph.rowptr, col=graph.col)).verify()
    assert store.graph.num_edges == 0 and store.graph.num_nodes == 10
