"""The examples of docs/extending.md, run as they stand through the pipeline with the real trainer."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from tests.workflow.conftest import ROOT, Checkout, copy_checkout, job_counts

pytestmark = pytest.mark.timeout(900)  # real training, on a machine that may be busy

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
BLOCKS = {
    path: code
    for path, code in re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
}


def test_examples_are_short_and_there_is_one_of_each():
    assert set(BLOCKS) == {"own/ring.py", "own/smooth_linear.py", "own/parameters.py", "own/config.yaml"}
    assert PAGE.count("```python") + PAGE.count("```yaml") == len(BLOCKS)
    for path, code in BLOCKS.items():
        assert len(code.splitlines()) < 40, path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = copy_checkout(tmp_path_factory.mktemp("extending") / "checkout")
    for path, code in BLOCKS.items():
        checkout.write(path, code)
    checkout.snakemake("--configfile", "own/config.yaml")
    return checkout


def test_examples_run_through_the_pipeline(made):
    tables = made.root / "results-own/tables"
    runs = pd.read_csv(tables / "runs.csv").set_index("system")
    assert set(runs.index) == {"torchgt", "mlp", "smooth-linear"}
    assert (runs["status"] == "ok").all() and (runs["dataset"] == "ring").all()
    # Smoothing sees through the noise that a node's own features are full of.
    assert runs.loc["smooth-linear", "test"] > runs.loc["mlp", "test"] + 0.1
    drawn = pd.read_csv(made.root / "results-own/figures/parameters.csv")
    assert sorted(drawn["system"]) == sorted(runs.index)
    for kind in ("png", "pdf"):
        assert (made.root / f"results-own/figures/parameters.{kind}").stat().st_size > 1000


def test_editing_an_own_module_redoes_what_it_makes(made):
    for module, expected in (
        ("own/parameters.py", {"figure_parameters": 1}),
        ("own/smooth_linear.py", {"train": 1, "collect": 1}),
        ("own/ring.py", {"prepare": 1, "train": 3, "collect": 1}),
    ):
        path = made.root / module
        before = path.read_text()
        path.write_text(before + "# edited\n")
        counts = made.planned("--configfile", "own/config.yaml")
        drawing = {rule: n for rule, n in counts.items() if rule.startswith(("figure", "table"))}
        assert {rule: n for rule, n in counts.items() if rule not in drawing or rule in expected} == expected
        path.write_text(before)


def test_an_edited_system_trains_anew_instead_of_resuming(made):
    path = made.root / "own/smooth_linear.py"
    before = pd.read_csv(made.root / "results-own/tables/runs.csv").set_index("system")["test"]
    path.write_text(path.read_text().replace("range(self.hops)", "range(0)"))
    output = made.snakemake("--configfile", "own/config.yaml")
    assert job_counts(output)["train"] == 1
    after = pd.read_csv(made.root / "results-own/tables/runs.csv").set_index("system")["test"]
    assert after["smooth-linear"] < before["smooth-linear"] - 0.1
    assert after["mlp"] == before["mlp"]


def test_a_run_that_the_supervisor_ends_is_a_result(made):
    group = {"name": "ring", "dataset": "ring", "systems": ["mlp"], "seeds": [0], "epochs": 100_000}
    group["settings"] = {"budget": {"seconds": 6}}
    made.write("short.yaml", {"results": "results-short", "accuracy": [group]})
    output = made.snakemake("--configfile", "own/config.yaml", "short.yaml")
    assert job_counts(output)["train"] == 1
    run = pd.read_csv(made.root / "results-short/tables/runs.csv").iloc[0]
    assert run["status"] == "timeout" and "6 s" in run["error"]
