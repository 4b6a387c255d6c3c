"""Training on two processes under torchrun gives the losses of one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import write_block_store
from torchgt.training.config import RunConfig
from torchgt.training.trainer import train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
DROPOUT = {"model": "gt", "dropout": 0.2, "input_dropout": 0.1, "attention_dropout": 0.1}


def torchrun(config: RunConfig, folder: Path, processes: int = 2) -> tuple[int, str, Path]:
    folder.mkdir()
    file, out = folder / "run.yaml", folder / "record.json"
    file.write_text(yaml.safe_dump(config.to_dict()))
    # --standalone picks a free port, so that two runs on one host do not collide.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "torchgt", "train", "--config", str(file), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr, out


def config(store: Path, **changes) -> RunConfig:
    values = {
        "system": "torchgt",
        "store": str(store),
        "epochs": STEPS,
        "threads": 1,
        "schedule": {"dense_every": 5, "dense_tokens": 100},
        "sequence": {"cluster_tokens": 30},
        "dropout": 0.0,
        "input_dropout": 0.0,
    }
    return RunConfig.from_dict(values | changes)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"precision": "fp64"}, 1e-10),
        ({"precision": "fp64", **DROPOUT}, 1e-10),
        # At the default rate AdamW amplifies a rounding error a hundredfold over these steps.
        ({"optim": {"lr": 1e-3}, **DROPOUT}, 1e-5),
    ],
    ids=["float64, no dropout", "float64, dropout", "float32, dropout"],
)
def test_two_processes_equal_one(tmp_path, changes, tolerance):
    # 241 nodes: the shares are uneven.
    store = write_block_store(tmp_path / "store", num_nodes=241)
    run = config(store, **changes)
    one = train(run)
    code, stderr, out = torchrun(run, tmp_path / "two")
    assert code == 0, stderr
    two = json.loads(out.read_text())
    assert two["world_size"] == 2 and two["parallel"] == "all_to_all"
    assert two["traffic"]["bytes_sent_per_step_per_rank"]["attention"] > 0
    losses = [[entry["loss"] for entry in history] for history in (one.history, two["history"])]
    assert len(losses[0]) == STEPS
    for a, b in zip(*losses, strict=True):
        assert b == pytest.approx(a, rel=tolerance)
    assert one.history[-1]["valid"] == pytest.approx(two["history"][-1]["valid"], abs=0.05)


def test_more_ranks_than_tokens(tmp_path):
    store = write_block_store(tmp_path / "store", num_nodes=240)
    run = config(store, system="mlp", plugins=["baselines"])  # one sequence, and every rank wants its own
    code, stderr, out = torchrun(run, tmp_path / "two")
    assert code != 0 and "2 ranks for 1 sequences" in stderr
    assert not out.exists()
