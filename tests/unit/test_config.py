"""A configuration that makes no sense is refused where it is made, in one line that names the key."""

import dataclasses
import subprocess
import sys

import pytest

from torchgt.errors import ConfigError
from torchgt.training.config import RunConfig, build
from torchgt.training.record import RunRecord

BASE = {"system": "torchgt", "store": "somewhere"}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"lerning_rate": 1}, ["'lerning_rate'"]),
        ({"optim": {"lrr": 1}}, ["'optim.lrr'", "did you mean 'optim.lr'", "optim.weight_decay"]),
        ({"schedule": {"dense_evry": 1}}, ["did you mean 'schedule.dense_every'"]),
        ({"optim": 3}, ["optim", "mapping"]),
        ({"epochs": "many"}, ["epochs", "'many'", "int"]),
        ({"epochs": True}, ["epochs", "bool", "int"]),
        ({"epochs": 0}, ["epochs", "0"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": float("nan")}, ["dropout", "nan"]),
        ({"optim": {"lr": -1}}, ["optim.lr", "-1"]),
        ({"precision": "fp8"}, ["precision", "'fp8'", "bf16"]),
        ({"sequence": {"kind": "clusters"}}, ["sequence.tokens", "at least 1"]),
        ({"budget": {"seconds": 0}}, ["budget.seconds", "positive"]),
        ({"plugins": [1]}, ["plugins"]),
        ({"results_version": 0}, ["results_version", "0"]),
    ],
)
def test_refused_by_name(change, parts):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(BASE | change)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_missing_key():
    with pytest.raises(ConfigError, match="missing key 'store'"):
        RunConfig.from_dict({"system": "torchgt"})


def test_numbers_as_yaml_writes_them(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("system: torchgt\nstore: s\noptim: {lr: 1e-3, warmup_epochs: 2}\nbudget: {memory_bytes: 8e9}\n")
    config = RunConfig.from_yaml(file)
    assert config.optim.lr == 1e-3  # PyYAML reads 1e-3 as a string
    assert config.optim.warmup_epochs == 2.0
    assert config.budget.memory_bytes == 8_000_000_000


def test_file_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    for text in ("system: [", "- 1", "system: torchgt\nstore: s\nepoch: 3\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=str(file)):
            RunConfig.from_yaml(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_yaml(tmp_path / "absent.yaml")


def test_round_trip_and_digest():
    config = RunConfig.from_dict(BASE | {"optim": {"lr": 0.1}})
    assert build(RunConfig, config.to_dict()) == config
    assert config.sha256() == build(RunConfig, config.to_dict()).sha256()
    assert config.sha256() != dataclasses.replace(config, seed=1).sha256()


def test_supervising_side_needs_no_torch():
    code = "import sys, torchgt.cli, torchgt.training.supervisor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_record_round_trip(tmp_path):
    record = RunRecord(status="ok", system="mlp", model="gt", metric={"test": float("nan"), "valid": 0.5})
    record.write(tmp_path / "deep" / "record.json")
    again = RunRecord.read(tmp_path / "deep" / "record.json")
    assert again.metric == {"test": None, "valid": 0.5}  # JSON has no NaN
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["record.json"]


def test_record_refuses_other_formats(tmp_path):
    file = tmp_path / "record.json"
    for text in ('{"format": 2}', "{", '{"format": 1, "status": "fine", "system": "a", "model": "b"}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="record.json"):
            RunRecord.read(file)
