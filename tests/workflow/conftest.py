"""A copy of the checkout to run the pipeline in, and a stand-in for the trainer.

The stand-in writes a record in no time and leaves everything else real: the configuration's checks, Snakemake, the
collection and the drawing. What it cannot show, the trainer's own work, is shown by test_extending.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "workflow"))  # as Snakemake does: tests import `matrix`
PARTS = ("Snakefile", "workflow", "config", "profiles", "torchgt", "baselines", "datasets", "figures")

STAND_IN = """
import json, pathlib, sys
import yaml

arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
config = yaml.safe_load(pathlib.Path(arguments["--config"]).read_text())
shared = {"system": config["system"], "model": config["model"], "dataset": pathlib.Path(config["store"]).name,
          "status": "ok", "error": None, "machine_class": {"cpu": "stand-in"}, "memory": {"peak_bytes": 10**6}}
if sys.argv[1] == "train":
    record = {"format": 1, **shared, "seed": config["seed"], "config": config,
              "time": {"preprocess_s": 1.0, "step_s": {"sparse": {"median": 0.1, "n": 10}, "amortised": 0.1}},
              "metric": {"name": "accuracy", "train": 0.6, "valid": 0.5, "test": 0.4, "best_epoch": 1, "eval": "whole"},
              "history": [{"epoch": 1, "loss": 1.0, "seconds": 0.1, "train": 0.6, "valid": 0.5}]}
    budget = (config.get("budget") or {}).get("seconds")
    if budget:
        record |= {"status": "timeout", "error": f"stopped at the budget of {budget} s", "metric": {}, "history": []}
else:
    record = {"format": 1, "kind": "bench-steps", "rows": [
        {**shared, "seq_len": n, "time": {"step_s": {"sparse": {"median": n * 1e-6, "q25": 0, "q75": 1, "n": 10}}},
         "pattern": {"pairs": n, "recall": 1.0}} for n in config["lengths"]]}
pathlib.Path(arguments["--out"]).write_text(json.dumps(record))
"""
STAND_IN_PREPARE = """
import pathlib, sys
store = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
store.mkdir(parents=True, exist_ok=True)
(store / "meta.json").write_text("{}")
"""

TINY = {
    "results": "out",
    "threads": 1,
    "datasets": [{"name": "wordnet-64", "source": "wordnet", "nodes": 64}],
    "systems": ["torchgt", "mlp"],
    "accuracy": [{"name": "tiny", "dataset": "wordnet-64", "seeds": [0], "epochs": 1}],
    "scaling": [
        {
            "dataset": "wordnet-64",
            "systems": ["torchgt"],
            "lengths": [16, 32, 64],
            "budget": {"step_s": 1, "memory_gb": 1},
        }
    ],
    "attention": [],
    "figures": ["accuracy"],
    "tables": ["results"],
    "hyperparameters": None,
}


class Checkout:
    """A copy of the checkout in which a test may edit whatever it likes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, content: str | dict) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return target

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        """Run Snakemake here; what it printed."""
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = subprocess.run(
            command,
            cwd=self.root,
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check:
            assert result.returncode == 0, result.stdout
        else:
            assert result.returncode != 0, result.stdout
        return result.stdout

    def planned(self, *arguments: str) -> dict[str, int]:
        """Rule -> number of its jobs that a run would start."""
        return job_counts(self.snakemake("--dry-run", *arguments))


def job_counts(output: str) -> dict[str, int]:
    tables = re.findall(r"^job +count\n[- ]+\n((?:\S+ +\d+\n)+)", output, flags=re.MULTILINE)
    counts = dict(line.split() for line in tables[-1].splitlines()) if tables else {}
    return {rule: int(count) for rule, count in counts.items() if rule not in ("total", "all")}


def copy_checkout(target: Path) -> Checkout:
    target.mkdir(parents=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / part)
    return Checkout(target)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """The real thing."""
    return copy_checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = copy_checkout(tmp_path_factory.mktemp("finished") / "checkout")
    made.write("torchgt/__main__.py", STAND_IN)
    made.write("datasets/prepare.py", STAND_IN_PREPARE)
    made.write("tiny.yaml", TINY)
    made.snakemake("--configfile", "tiny.yaml")
    return made


@pytest.fixture
def finished(finished_once: Checkout, tmp_path: Path) -> Checkout:
    """A checkout in which the pipeline of `TINY` has finished, with the stand-in for the trainer."""
    shutil.copytree(finished_once.root, tmp_path / "checkout")
    return Checkout(tmp_path / "checkout")
