"""How learning rate and dropout are chosen."""

from __future__ import annotations

import runpy

import pytest
from matrix import check_schema

from tests.workflow.conftest import ROOT

choose = runpy.run_path(str(ROOT / "workflow/scripts/choose.py"))["choose"]
SEARCH = {"dataset": "d", "epochs": 1, "lr": [0.1, 0.2], "dropout": [0.5]}


def record(system: str, lr: float, valid: float | None, status: str = "ok") -> dict:
    return {
        "system": system,
        "status": status,
        "config": {"optim": {"lr": lr}, "dropout": 0.5},
        "metric": {"valid": valid, "test": 1 - (valid or 0)},
    }


def test_best_validation_value_wins_and_failures_do_not():
    records = [record("a", 0.1, 0.7), record("a", 0.2, 0.6), record("b", 0.1, 0.9, "oom"), record("b", 0.2, 0.1)]
    chosen = {entry["system"]: entry for entry in choose(records, SEARCH)["chosen"]}
    assert (chosen["a"]["lr"], chosen["b"]["lr"]) == (0.1, 0.2)
    assert [trial["status"] for trial in chosen["b"]["trials"]] == ["oom", "ok"]


def test_settings_that_set_a_system_apart_are_written_down():
    apart = [{"system": "a", "settings": {"epochs": 2}}]
    content = choose([record("a", 0.1, 0.7), record("a", 0.2, 0.6)], SEARCH | {"system_settings": apart})
    assert content["system_settings"] == apart
    check_schema(content, "hyperparameters.schema.yaml", "written")


def test_a_system_without_any_value_is_named():
    with pytest.raises(ValueError, match="system 'a': no trial has a validation value"):
        choose([record("a", 0.1, None, "oom"), record("a", 0.2, None, "oom")], SEARCH)


def test_systems_must_have_the_whole_grid():
    with pytest.raises(ValueError, match="system 'a' has 1 trials, not 2"):
        choose([record("a", 0.1, 0.5)], SEARCH)
