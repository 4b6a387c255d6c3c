"""What the pipeline does and does not do again."""

from __future__ import annotations

import copy
import json
import re

import pandas as pd
import pytest
import yaml

from tests.workflow.conftest import TINY, job_counts

pytestmark = pytest.mark.timeout(900)

DRAWING = {"figure_accuracy": 1, "table_results": 1}


def test_second_run_does_nothing(finished):
    assert (finished.root / "out/figures/accuracy.png").stat().st_size > 1000
    assert "Nothing to be done" in finished.snakemake("--configfile", "tiny.yaml")


def test_deleting_a_record_redoes_one_run(finished):
    (finished.root / "out/runs/tiny/graphormer-slim/mlp/seed-0/record.json").unlink()
    assert finished.planned("--configfile", "tiny.yaml") == {"train": 1, "collect": 1, **DRAWING}


def test_editing_a_figure_redraws_without_training(finished):
    with (finished.root / "figures/accuracy.py").open("a") as module:
        module.write("# edited\n")
    assert finished.planned("--configfile", "tiny.yaml") == {"figure_accuracy": 1}


def test_editing_the_trainer_does_not_retrain(finished):
    with (finished.root / "torchgt/training/trainer.py").open("a") as module:
        module.write("# edited\n")
    assert finished.planned("--configfile", "tiny.yaml") == {}


def test_raising_the_results_version_redoes_everything_measured(finished):
    version = finished.root / "torchgt/_version.py"
    version.write_text(version.read_text().replace("RESULTS_VERSION = ", "RESULTS_VERSION = 1000 + "))
    counts = finished.planned("--configfile", "tiny.yaml")
    assert counts == {"run_config": 2, "train": 2, "bench_config": 1, "bench_steps": 1, "collect": 1, **DRAWING}


def test_a_changed_setting_redoes_only_its_runs(finished):
    config = copy.deepcopy(TINY)
    config["accuracy"][0]["system_settings"] = [{"system": "mlp", "settings": {"dropout": 0.2}}]
    finished.write("tiny.yaml", config)
    assert finished.planned("--configfile", "tiny.yaml") == {"run_config": 1, "train": 1, "collect": 1, **DRAWING}


def test_another_seed_trains_only_the_new_runs(finished):
    config = copy.deepcopy(TINY)
    config["accuracy"][0]["seeds"] = [0, 1]
    finished.write("tiny.yaml", config)
    output = finished.snakemake("--configfile", "tiny.yaml")
    assert job_counts(output) == {"run_config": 2, "train": 2, "collect": 1, **DRAWING}
    runs = pd.read_csv(finished.root / "out/tables/runs.csv")
    assert sorted(zip(runs["system"], runs["seed"], strict=True)) == [
        ("mlp", 0),
        ("mlp", 1),
        ("torchgt", 0),
        ("torchgt", 1),
    ]


def test_a_run_that_ends_at_its_budget_completes_the_pipeline(finished):
    config = copy.deepcopy(TINY)
    config["accuracy"][0]["system_settings"] = [{"system": "torchgt", "settings": {"budget": {"seconds": 1}}}]
    finished.write("tiny.yaml", config)
    finished.snakemake("--configfile", "tiny.yaml")
    runs = pd.read_csv(finished.root / "out/tables/runs.csv").set_index("system")
    assert runs.loc["torchgt", "status"] == "timeout" and pd.isna(runs.loc["torchgt", "test"])
    assert runs.loc["mlp", "status"] == "ok"


def test_tables_hold_what_the_records_say(finished):
    tables = {name: pd.read_parquet(finished.root / f"out/tables/{name}.parquet") for name in ("runs", "scaling")}
    record = json.loads((finished.root / "out/runs/tiny/graphormer-slim/torchgt/seed-0/record.json").read_text())
    run = tables["runs"].set_index("system").loc["torchgt"]
    assert (run["group"], run["test"]) == ("tiny", record["metric"]["test"])
    assert tables["scaling"]["seq_len"].tolist() == [16, 32, 64]


def test_report_holds_the_figures(finished):
    finished.snakemake("--configfile", "tiny.yaml", "--report", "out/report.html")
    report = (finished.root / "out/report.html").read_text()
    assert "accuracy.png" in report and "Test accuracy at the best validation epoch" in report


def test_tune_chooses_by_validation_and_writes_the_file(finished):
    tune = {"dataset": "wordnet-64", "lr": [0.001, 0.01], "dropout": [0.1], "epochs": 1, "output": "config/hyper.yaml"}
    finished.write("tune.yaml", TINY | {"accuracy": [], "scaling": [], "tune": tune})
    output = finished.snakemake("--configfile", "tune.yaml", "--", "tune")
    assert job_counts(output)["train"] == 4
    finished.write("tiny.yaml", TINY | {"hyperparameters": "config/hyper.yaml"})
    counts = finished.planned("--configfile", "tiny.yaml")
    assert counts == {"run_config": 2, "train": 2, "collect": 1, **DRAWING}


@pytest.mark.parametrize("name", ["config", "quick", "ci", "paper"])
def test_committed_configurations_plan_their_jobs(checkout, name):
    output = checkout.snakemake("--dry-run", "--configfile", f"config/{name}.yaml")
    counts = job_counts(output)
    assert counts["train"] > 0 and counts["bench_steps"] > 0
    figures = {"speedup", "sequence_length", "accuracy", "convergence"} | ({"attention"} if name != "paper" else set())
    assert {f"figure_{figure}" for figure in figures} < set(counts)
    missing = "no module prepares these data sets yet"
    assert (missing in output) == (name == "paper")
    if name == "paper":
        assert "ogbn-arxiv, ogbn-products, amazon, ogbn-papers100M" in output


def test_a_misspelt_key_on_the_command_line_stops_before_any_job(checkout):
    output = checkout.snakemake("--config", "resluts=elsewhere", check=False)
    assert "config: unknown key 'resluts' (did you mean 'results'?)" in output
    assert "Traceback" not in output
    assert not (checkout.root / "results").exists()


def test_profiles_keep_timed_jobs_apart_and_size_every_slurm_job(finished):
    default = yaml.safe_load((finished.root / "profiles/default/config.yaml").read_text())
    assert default["resources"] == ["timed=1"]
    output = finished.snakemake(
        "--workflow-profile", "profiles/slurm", "--configfile", "tiny.yaml", "--dry-run", "--forceall"
    )
    jobs = re.findall(r"^(?:local)?rule (\w+):\n(?:    .*\n)*?    resources: (.*)$", output, flags=re.MULTILINE)
    assert {rule for rule, _ in jobs} >= {"prepare", "train", "bench_steps", "collect", "figure_accuracy"}
    for rule, resources in jobs:
        if rule != "all":
            assert "mem_mb=" in resources and "runtime=" in resources, rule
        assert ("timed=1" in resources) == (rule in ("train", "bench_steps", "bench_attention")), rule
