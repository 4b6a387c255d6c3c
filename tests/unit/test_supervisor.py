"""`torchgt train`: whatever ends a run, there is a record, an exit code, and no process left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from torchgt.training.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]


def start(tmp_path: Path, store: Path, **changes) -> subprocess.Popen:
    values = {
        "system": "torchgt",
        "store": str(store),
        "epochs": 5,
        "threads": 1,
        "sequence": {"cluster_tokens": 60},
        "plugins": ["tests.plugins.misbehaving"],
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values | changes))
    command = [
        sys.executable,
        "-m",
        "torchgt",
        "train",
        "--config",
        str(file),
        "--out",
        str(tmp_path / "out/record.json"),
    ]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def run(tmp_path: Path, store: Path, **changes) -> tuple[int, str]:
    process = start(tmp_path, store, **changes)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


def record(tmp_path: Path) -> RunRecord:
    return RunRecord.read(tmp_path / "out" / "record.json")


def test_success(tmp_path, block_store):
    code, stderr = run(tmp_path, block_store)
    assert code == 0, stderr
    assert record(tmp_path).status == "ok"
    assert "epoch 5/5" in stderr  # one line an epoch where there is no terminal


def test_out_of_memory_is_a_result(tmp_path, block_store):
    code, stderr = run(tmp_path, block_store, system="hungry", budget={"memory_bytes": 2**30})
    found = record(tmp_path)
    assert (code, found.status) == (0, "oom"), stderr
    assert found.num_params and found.machine_class  # what was known before it died
    assert found.budget["memory_bytes"] == 2**30


def test_timeout_is_a_result(tmp_path, block_store):
    code, stderr = run(tmp_path, block_store, system="sleepy", budget={"seconds": 15})
    found = record(tmp_path)
    assert (code, found.status) == (0, "timeout"), stderr
    assert "15 s" in found.error


def test_refusal_is_a_result(tmp_path, block_store):
    code, _ = run(tmp_path, block_store, system="refusing")
    assert (code, record(tmp_path).status, record(tmp_path).error) == (0, "refused", "no such kernel here")


def test_defect_is_an_error(tmp_path, block_store):
    code, stderr = run(tmp_path, block_store, system="broken")
    assert (code, record(tmp_path).status) == (1, "error")
    assert "a defect" in record(tmp_path).error and "Traceback" in stderr


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"system": "torchgtt"}, ["'torchgtt'", "did you mean 'torchgt'"]),
        ({"model": "gtt"}, ["'gtt'", "graphormer-slim"]),
        ({"split": 2}, ["split: 2"]),
        ({"epoch": 3}, ["'epoch'", "did you mean 'epochs'"]),
    ],
)
def test_invalid_input(tmp_path, block_store, change, parts):
    code, stderr = run(tmp_path, block_store, **change)
    assert code == 2
    assert len(stderr.strip().splitlines()) == 1 and all(part in stderr for part in parts), stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blocks", "run.yaml"]


def test_missing_store(tmp_path):
    code, stderr = run(tmp_path, tmp_path / "absent")
    assert code == 2 and "absent" in stderr and len(stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_half_written_store(tmp_path, block_store):
    (block_store / "x.npy").write_bytes((block_store / "x.npy").read_bytes()[:200])
    code, stderr = run(tmp_path, block_store)
    assert code == 2 and "x.npy" in stderr and len(stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def _wait_for_epoch(tmp_path: Path, process: subprocess.Popen) -> None:
    folder = tmp_path / "out" / "record.run"
    deadline = time.monotonic() + 60
    while not (folder / "checkpoint-000002.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_interrupted_run_resumes(tmp_path, block_store):
    process = start(tmp_path, block_store, system="sleepy")
    _wait_for_epoch(tmp_path, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "resumes" in stderr
    assert not (tmp_path / "out" / "record.json").exists()
    checkpoints = sorted(p.name for p in (tmp_path / "out" / "record.run").glob("checkpoint-*"))
    assert checkpoints[-1] == "checkpoint-000002.pt"


def test_trainer_dies_with_a_killed_supervisor(tmp_path, block_store):
    process = start(tmp_path, block_store, system="sleepy")
    _wait_for_epoch(tmp_path, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert json.loads((tmp_path / "out" / "record.run" / "partial.json").read_text())["status"] == "error"


def test_one_trainer_a_run_folder(tmp_path, block_store):
    first = start(tmp_path, block_store, system="sleepy")
    _wait_for_epoch(tmp_path, first)
    code, stderr = run(tmp_path, block_store, system="sleepy")
    assert code == 1 and "another process" in stderr
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
