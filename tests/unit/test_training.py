"""The trainer: it learns, its record is complete, and an interrupted run ends where an uninterrupted one does."""

import dataclasses
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

import torchgt
from tests.conftest import write_block_store
from torchgt.data.store import GraphStore
from torchgt.errors import ConfigError
from torchgt.training.checkpoint import CheckpointStore
from torchgt.training.config import RunConfig
from torchgt.training.metrics import better, evaluate, loss_sum
from torchgt.training.trainer import Interrupted, Trainer, learning_rate, train


def config(store, **changes) -> RunConfig:
    values = {
        "system": "torchgt",
        "store": str(store),
        "epochs": 6,
        "threads": 1,
        "optim": {"lr": 5e-3, "warmup_epochs": 1},
        "schedule": {"dense_every": 3, "dense_tokens": 120},
        "sequence": {"cluster_tokens": 30},
    }
    return RunConfig.from_dict(values | changes)


def test_learns_and_records(block_store, tmp_path):
    record = train(config(block_store, epochs=40), tmp_path / "run")
    assert record.status == "ok"
    assert record.metric["name"] == "accuracy"
    assert record.metric["test"] > 0.6  # chance is 0.25, the features alone reach about 0.45
    assert len(record.history) == 40
    assert record.history[-1]["loss"] < 0.6 * record.history[0]["loss"]
    assert record.pattern["dense_steps"] == 13 and record.pattern["sparse_steps"] == 27
    assert set(record.time["step_s"]) == {"sparse", "dense", "amortised"}
    low, high = sorted(record.time["step_s"][kind]["median"] for kind in ("sparse", "dense"))
    assert low <= record.time["step_s"]["amortised"] <= high
    best = max(record.history, key=lambda entry: entry["valid"])
    assert record.metric["best_epoch"] == best["epoch"] and record.metric["test"] == best["test"]
    assert record.pattern["conditions"]["action"] in ("none", "augment")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == record.num_params
    assert record.memory["peak_bytes"] > 0 and record.seq_len == 240
    assert record.to_dict()  # JSON-ready


@pytest.mark.parametrize("sequence", [{"kind": "full"}, {"kind": "clusters", "tokens": 90}])
def test_resumed_equals_uninterrupted_bit_for_bit(block_store, tmp_path, monkeypatch, sequence):
    run = config(block_store, sequence={"cluster_tokens": 30, **sequence}, dropout=0.2)
    whole = train(run, tmp_path / "whole")

    original = Trainer._train_epoch

    def dies_in_the_fourth_epoch(self, epoch):
        if epoch == 3:
            raise Interrupted("stopped by SIGINT")
        return original(self, epoch)

    monkeypatch.setattr(Trainer, "_train_epoch", dies_in_the_fourth_epoch)
    with pytest.raises(Interrupted):
        train(run, tmp_path / "parts")
    monkeypatch.setattr(Trainer, "_train_epoch", original)
    torch.rand(7)  # a resumed process has another random state
    resumed = train(run, tmp_path / "parts")
    keys = ("epoch", "loss", "train", "valid", "test")
    assert [[e[k] for k in keys] for e in resumed.history] == [[e[k] for k in keys] for e in whole.history]
    assert resumed.pattern["dense_steps"] == whole.pattern["dense_steps"]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_truncated_newest_checkpoint_falls_back(block_store, tmp_path, caplog):
    run = config(block_store)
    train(run, tmp_path)
    store = CheckpointStore(tmp_path)
    older, newest = store.paths()
    newest.write_bytes(newest.read_bytes()[:1000])
    state = store.load(run.sha256(), GraphStore.open(block_store).digest)
    assert state["epoch"] == 5 and older.name == "checkpoint-000005.pt"
    assert "not a whole checkpoint" in caplog.text
    again = train(run, tmp_path)
    assert len(again.history) == 6 and len(store.paths()) == 2


def test_checkpoint_of_another_configuration_is_not_used(block_store, tmp_path):
    train(config(block_store), tmp_path)
    digest = GraphStore.open(block_store).digest
    assert CheckpointStore(tmp_path).load(config(block_store).sha256(), digest) is not None
    assert CheckpointStore(tmp_path).load(config(block_store, seed=1).sha256(), digest) is None


def test_checkpoint_of_a_store_prepared_anew_is_not_used(tmp_path, caplog):
    path = tmp_path / "store"
    run = config(write_block_store(path))
    before = train(run, tmp_path / "run")
    shutil.rmtree(path)
    write_block_store(path, y=(torch.arange(240) + 1) % 4)
    after = train(run, tmp_path / "run")
    assert "another store_sha256" in caplog.text
    assert after.store_sha256 != before.store_sha256 and len(after.history) == len(before.history)
    assert after.history != before.history


def test_seeds(block_store):
    losses = [[e["loss"] for e in train(config(block_store, seed=seed)).history] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_unlabelled_nodes_count_nowhere(tmp_path):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 4
    hidden = torch.rand(240, generator=generator) < 0.5
    store = write_block_store(tmp_path / "half", y=torch.where(hidden, -1, y))
    trainer = Trainer(config(store), torchgt.SequenceParallel(None), None)
    assert not trainer.system.is_train_N[hidden].any()
    record = trainer.run()
    logits = torch.randn(240, 4)
    expected = (logits.argmax(1) == y)[~hidden].double().mean().item()
    assert evaluate("accuracy", "multiclass", logits, torch.where(hidden, -1, y)) == pytest.approx(expected)
    assert record.status == "ok"


def test_early_stopping(block_store):
    record = train(config(block_store, epochs=50, optim={"lr": 0.0, "end_lr": 0.0, "patience": 3}))
    assert len(record.history) == 4  # nothing improves on the first evaluation


def test_bf16_and_random_sequences(block_store):
    record = train(config(block_store, precision="bf16", sequence={"kind": "random", "tokens": 100}))
    assert record.precision == "bf16" and 0.0 < record.pattern["edges_kept"] < 1.0
    assert record.metric["test"] is not None


@pytest.mark.parametrize("policy", ["augment", "dense", "sparse"])
def test_policies_where_conditions_fail(tmp_path, policy):
    graph = torchgt.Graph.from_edge_index(torch.tensor([[0, 2], [1, 3]]), 240, symmetrize=True)
    store = write_block_store(tmp_path / "sparse", rowptr=graph.rowptr, col=graph.col)
    record = train(config(store, model="gt", schedule={"dense_every": 0, "on_conditions_fail": policy}))
    conditions = record.pattern["conditions"]
    assert conditions["satisfied"] is False and conditions["action"] == policy and conditions["reasons"]
    if policy == "augment":
        assert record.pattern["num_global"] == 1 and record.pattern["pairs"] > 240 + 4
    elif policy == "dense":
        assert record.pattern["sparse_steps"] == 0
    else:
        assert record.pattern["num_global"] == 0 and record.pattern["dense_steps"] == 0


def test_augmented_biases_start_low(block_store):
    trainer = Trainer(config(block_store), torchgt.SequenceParallel(None), None)
    trainer.system.prepare()
    model = trainer.system.build_model()
    table = next(value for name, value in model.named_parameters() if "type_bias" in name)
    added = -math.log(120)  # dense_tokens
    assert table[:, 0].tolist() == pytest.approx([0.0, 0.0, -4.0, added, 0.0, -4.0])


@pytest.mark.parametrize("bias", [True, False])
def test_fully_connected_step(block_store, bias):
    run = config(block_store, schedule={"dense_every": 1, "dense_tokens": 60, "dense_bias": bias})
    trainer = Trainer(run, torchgt.SequenceParallel(None), None)
    system = trainer.system
    system.prepare()
    batch = system.train_batch(system.sampler.whole(), "dense", 0)
    n, g = len(batch.nodes), system.model_config.num_global
    assert n <= 60 < system.num_nodes and len(batch.x) == n
    assert batch.pattern.to_dense().all() and batch.pattern.num_tokens == n + g
    assert batch.use_type_bias == bias
    if bias:  # the graph's own pairs keep their type
        types = batch.pattern.pair_type.reshape(n, n)
        inside = system.graph.subgraph(batch.nodes)
        rows = torch.repeat_interleave(torch.arange(n), inside.degrees())
        assert (types.diagonal() == 0).all()
        assert (types[rows, inside.col.long()] <= 1).all()
        assert (types == 3).sum() == n * n - (types <= 2).sum() > 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"system": "torchgtt"}, "did you mean 'torchgt'"),
        ({"model": "graphormer-slimm"}, "did you mean 'graphormer-slim'"),
        ({"split": 3}, "split: 3"),
        ({"evaluation": {"metric": "rocauc"}}, "allowed: accuracy"),
        ({"options": {"width": 3}}, "'width'"),
        ({"plugins": ["no_such_module"]}, "no_such_module"),
    ],
)
def test_invalid_runs_leave_nothing(block_store, tmp_path, change, match):
    with pytest.raises(ConfigError, match=match):
        train(config(block_store, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_learning_rate_warms_up_and_decays_to_the_end(block_store):
    run = config(block_store, epochs=10, optim={"lr": 1.0, "end_lr": 0.1, "warmup_epochs": 2})
    assert [round(learning_rate(run, e), 6) for e in (0.5, 1, 2, 6, 10)] == [0.25, 0.5, 1.0, 0.55, 0.1]
    short = dataclasses.replace(run, epochs=2)
    assert learning_rate(short, 1.0) == 1.0  # the warm-up takes at most half


def test_metrics():
    logits = torch.tensor([[2.0, -1.0], [-1.0, 3.0], [0.5, -2.0]])
    y = torch.tensor([[1.0, 0.0], [0.0, float("nan")], [1.0, 0.0]])
    assert evaluate("f1_micro", "multilabel", logits, y) == 1.0
    assert evaluate("rocauc", "multilabel", logits, y) == 1.0  # the second task has one class and is skipped
    assert evaluate("mae", "regression", torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, float("nan")])) == 1.0
    assert better("mae", 1.0, 2.0) and not better("accuracy", float("nan"), None)
    total, count = loss_sum("multiclass", torch.zeros(3, 4), torch.tensor([0, -1, 2]))
    assert count == 2 and total.item() == pytest.approx(2 * torch.log(torch.tensor(4.0)).item())
