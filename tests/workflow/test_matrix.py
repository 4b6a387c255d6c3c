"""The configuration's checks, and the runs that it asks for."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
import typing
from pathlib import Path

import pytest
import yaml
from matrix import (
    FIGURES,
    PLANNED_SOURCES,
    SCHEMAS,
    SOURCES,
    SYSTEMS,
    TABLES,
    Matrix,
    MatrixError,
    check_schema,
    merge,
)

from tests.workflow.conftest import ROOT, TINY

SCHEMA = yaml.safe_load((SCHEMAS / "config.schema.yaml").read_text())
CONFIGS = sorted(path.stem for path in (ROOT / "config").glob("*.yaml") if path.stem != "hyperparameters")


def changed(path: str, value: object) -> dict:
    """TINY with one value changed; path like "accuracy.0.name"."""
    config = copy.deepcopy(TINY)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = config
    for part in parents:
        place = place[part]
    place[last] = value
    return config


def matrix(config: dict, root: Path = ROOT) -> Matrix:
    return Matrix(config, root)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("reslts", "x", "config: unknown key 'reslts' (did you mean 'results'?); allowed: accuracy, "),
        ("datasets.0.node", 5, "config: datasets[0]: unknown key 'node' (did you mean 'nodes'?); allowed: name, "),
        (
            "accuracy.0.epoch",
            5,
            "config: accuracy[0]: unknown key 'epoch' (did you mean 'epochs'?); allowed: dataset, ",
        ),
        (
            "accuracy.0.settings",
            {"optim": {"learning_rate": 1}},
            "config: accuracy[0].settings.optim: unknown key 'learning_rate'",
        ),
        (
            "accuracy.0.settings",
            {"schedule": {"dense_evry": 1}},
            "unknown key 'dense_evry' (did you mean 'dense_every'?); allowed: dense_bias, dense_every, ",
        ),
        ("accuracy.0.settings", {"seed": 1}, "config: accuracy[0].settings: unknown key 'seed'"),
        ("accuracy.0.system_settings", [{"system": "mlp", "setting": {}}], "(did you mean 'settings'?)"),
        ("scaling.0.budget.step", 1, "config: scaling[0].budget: unknown key 'step' (did you mean 'step_s'?)"),
        ("scaling.0.settings", {"drop": 0.1}, "scaling[0].settings: unknown key 'drop' (did you mean 'dropout'?)"),
        (
            "custom_datasets",
            [{"name": "a", "modul": "b"}],
            "custom_datasets[0]: unknown key 'modul' (did you mean 'mod",
        ),
        ("tune", {"leaning": 1}, "config: tune: unknown key 'leaning'"),
        ("accuracy.0.model", "graphormer-slin", "unknown value 'graphormer-slin' (did you mean 'graphormer-slim'?)"),
        ("accuracy.0.seeds", 3, "config: accuracy[0].seeds: 3 is not of type 'array'"),
        (
            "accuracy.0.settings",
            {"optim": {"lr": "5e-3"}},
            "'5e-3' is not of type 'number'; YAML reads a number with an exponent only with a point, as 5.0e-3",
        ),
        ("threads", "two", "config: threads: 'two' is not of type 'integer'"),
        (
            "datasets.0.source",
            "wordnett",
            "datasets[0].source: unknown data set 'wordnett' (did you mean 'wordnet'?); allowed: wordnet, ogbn-arxiv",
        ),
        (
            "accuracy.0.dataset",
            "wordnet-46",
            "accuracy[0].dataset: unknown data set 'wordnet-46' (did you mean 'wordnet-64'?); allowed: wordnet-64",
        ),
        ("systems.1", "mpl", "systems[1]: unknown system 'mpl' (did you mean 'mlp'?); allowed: torchgt, gp-raw, "),
        (
            "accuracy.0.systems",
            ["sage"],
            "accuracy[0].systems[0]: unknown system 'sage'; allowed: torchgt, mlp (what `systems` lists)",
        ),
        (
            "accuracy.0.system_settings",
            [{"system": "mpl", "settings": {}}],
            "accuracy[0].system_settings[0].system: unknown system 'mpl' (did you mean 'mlp'?)",
        ),
        ("figures.0", "acuracy", "figures[0]: unknown figure 'acuracy' (did you mean 'accuracy'?); allowed: speedup, "),
        ("figures.0", "own.nowhere", "figures[0]: no module named 'own.nowhere' (own/nowhere.py in the checkout"),
        ("systems.1", "own.nowhere", "systems[1]: no module named 'own.nowhere'"),
        ("systems.1", "torchgt", "systems[1]: system 'torchgt' is listed twice"),
        ("tables.0", "result", "tables[0]: unknown table 'result' (did you mean 'results'?); allowed: results"),
        ("hyperparameters", "config/none.yaml", "hyperparameters: config/none.yaml: cannot be read (No such file"),
        (
            "accuracy.0.settings",
            {"sequence": {"kind": "clusters"}},
            "accuracy[0]: system 'torchgt': sequence.tokens: 0 with kind 'clusters'; allowed: at least 1",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(path, value, message):
    with pytest.raises(MatrixError) as caught:
        matrix(changed(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_key_is_named():
    config = copy.deepcopy(TINY)
    del config["accuracy"][0]["seeds"]
    with pytest.raises(MatrixError, match=re.escape("config: accuracy[0]: missing key 'seeds'")):
        matrix(config)


def test_two_entries_for_one_run_are_refused():
    config = copy.deepcopy(TINY)
    config["accuracy"].append(config["accuracy"][0] | {"seeds": [1]})
    assert len(matrix(config).runs) == 4
    config["accuracy"][1]["seeds"] = [0]
    with pytest.raises(MatrixError, match="two entries ask for the same run, out/runs/tiny/graphormer-slim/torchgt"):
        matrix(config)


def test_every_level_of_the_schema_refuses_unknown_keys():
    def check(node: object, where: str) -> None:
        if isinstance(node, dict):
            if "properties" in node:
                assert node.get("additionalProperties") is False, where
            for key, value in node.items():
                check(value, f"{where}.{key}")
        elif isinstance(node, list):
            for index, value in enumerate(node):
                check(value, f"{where}[{index}]")

    for path in SCHEMAS.glob("*.yaml"):
        check(yaml.safe_load(path.read_text()), path.name)


def fields(cls: type, without: set[str] = frozenset()) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} - without


def test_schema_lists_the_keys_of_the_run_configuration():
    from torchgt.training.config import RunConfig

    settings = SCHEMA["$defs"]["settings"]["properties"]
    by_the_pipeline = {"system", "store", "model", "seed", "threads", "plugins", "results_version"}
    assert set(settings) == fields(RunConfig, by_the_pipeline)
    hints = typing.get_type_hints(RunConfig)
    for key, value in settings.items():
        if dataclasses.is_dataclass(hints[key]):
            part = SCHEMA["$defs"]["schedule"] if "$ref" in value else value
            assert set(part["properties"]) == fields(hints[key]), key


def test_schema_lists_the_keys_of_the_benchmark_configuration():
    from torchgt.bench.steps import BenchConfig, StepBudget

    entry = SCHEMA["properties"]["scaling"]["items"]["properties"]
    settings = SCHEMA["$defs"]["bench_settings"]["properties"]
    by_the_pipeline = {"system", "store", "threads", "plugins", "results_version"}
    assert set(settings) | (set(entry) - {"dataset", "systems", "settings"}) == fields(BenchConfig, by_the_pipeline)
    assert {key.replace("memory_gb", "memory_bytes") for key in entry["budget"]["properties"]} == fields(StepBudget)


def test_benchmark_configurations_are_accepted_by_the_benchmark():
    from torchgt.bench.steps import BenchConfig
    from torchgt.training.config import build

    for name in CONFIGS:
        for job in matrix(yaml.safe_load((ROOT / f"config/{name}.yaml").read_text())).benches.values():
            build(BenchConfig, yaml.safe_load(job.text))
    (job,) = matrix(changed("scaling.0.budget.memory_gb", 1.5)).benches.values()
    assert build(BenchConfig, yaml.safe_load(job.text)).budget.memory_bytes == 1_500_000_000


ATTENTION = {"name": "length", "dataset": "wordnet-64", "impls": ["cpu", "baselines.attention:pyg_transformer_conv"]}


def test_attention_benchmarks_are_accepted_by_the_benchmark():
    from torchgt.bench.attention import AttentionBenchConfig
    from torchgt.training.config import build

    entry = SCHEMA["properties"]["attention"]["items"]["properties"]
    by_the_pipeline = {"store", "synthetic", "threads", "results_version"}
    assert set(entry) - {"name", "dataset"} == fields(AttentionBenchConfig, by_the_pipeline)
    for name in CONFIGS:
        for job in matrix(yaml.safe_load((ROOT / f"config/{name}.yaml").read_text())).attention.values():
            build(AttentionBenchConfig, yaml.safe_load(job.text))
    (job,) = matrix(TINY | {"attention": [ATTENTION]}).attention.values()
    assert job.folder == "out/attention/length" and job.files == ("baselines/attention.py",)
    assert job.config["store"] == "out/stores/wordnet-64"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "wordnet-65"}, "attention[0].dataset: unknown data set 'wordnet-65' (did you mean 'wordnet-64'?)"),
        ({"impls": ["cup"]}, "attention[0].impls[0]: unknown implementation 'cup' (did you mean 'cpu'?)"),
        ({"impls": ["no.such:thing"]}, "attention[0].impls[0]: no module named 'no.such'"),
        ({"shapes": [[8]]}, "attention[0].shapes[0]"),
    ],
)
def test_bad_attention_benchmarks(changes, message):
    with pytest.raises(MatrixError, match=re.escape(message)):
        matrix(TINY | {"attention": [ATTENTION | changes]})


def test_implementations_are_those_of_the_library():
    from matrix import IMPLEMENTATIONS

    from torchgt.attention import available_impls

    assert set(IMPLEMENTATIONS) == set(available_impls())


def test_names_of_systems_models_and_sources_exist():
    from datasets import prepare
    from torchgt.models.config import MODEL_NAMES
    from torchgt.training.registry import system_names

    importlib.import_module("baselines")
    assert set(SYSTEMS) <= set(system_names())
    assert set(SCHEMA["$defs"]["model"]["enum"]) == set(MODEL_NAMES)
    assert prepare.SOURCES == SOURCES
    assert not set(PLANNED_SOURCES) & set(SOURCES)
    for name in (*FIGURES, *TABLES):
        assert (ROOT / f"figures/{name}.py").is_file()
        assert (ROOT / f"workflow/report/{name}.rst").is_file()


def test_readme_explains_every_key():
    text = (ROOT / "config/README.md").read_text()
    explained = set(re.findall(r"`([a-z_0-9]+)`", text))

    def keys(node: object) -> set[str]:
        found = set()
        if isinstance(node, dict):
            found |= set(node.get("properties", {})) if isinstance(node.get("properties"), dict) else set()
            for value in node.values():
                found |= keys(value)
        return found

    assert keys(SCHEMA) <= explained, keys(SCHEMA) - explained


@pytest.mark.parametrize("name", CONFIGS)
def test_committed_configurations_are_whole(name):
    """Each stands alone: what it leaves out would silently come from the default."""
    config = yaml.safe_load((ROOT / f"config/{name}.yaml").read_text())
    assert set(SCHEMA["properties"]) - set(config) <= {"tune"}
    matrix(config)
    others = {n: yaml.safe_load((ROOT / f"config/{n}.yaml").read_text())["results"] for n in CONFIGS if n != name}
    assert config["results"] not in others.values()


def test_default_compares_what_it_promises():
    made = matrix(yaml.safe_load((ROOT / "config/config.yaml").read_text()))
    runs = {(run.group, run.system, run.config["seed"]) for run in made.runs.values()}
    assert {system for group, system, _ in runs if group == "2k"} == set(SYSTEMS)
    assert {seed for group, _, seed in runs if group == "2k"} == {0, 1, 2}
    assert {system for group, system, _ in runs if group == "whole"} == {"torchgt", "sage", "mlp", "random-blocks"}
    assert all(run.config.get("attention_dropout", 0) == 0 for run in made.runs.values())
    lengths = {(b.config["model"], b.system): b.config["lengths"] for b in made.benches.values()}
    assert 16384 in lengths["graphormer-slim", "gp-flash"] and 8192 in lengths["gt", "gp-flash"]
    assert lengths["graphormer-slim", "torchgt"][-1] == "all"


def test_hyperparameters_lie_below_settings(tmp_path):
    chosen = {"grid": {"lr": [0.1], "dropout": [0.3]}, "chosen": [{"system": "mlp", "lr": 0.1, "dropout": 0.3}]}
    (tmp_path / "hyper.yaml").write_text(yaml.safe_dump(chosen))
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    (tmp_path / "figures").symlink_to(ROOT / "figures")
    config = TINY | {"hyperparameters": "hyper.yaml"}
    config["accuracy"] = [config["accuracy"][0] | {"settings": {"dropout": 0.2, "optim": {"weight_decay": 0.5}}}]
    runs = {run.system: run.config for run in matrix(config, tmp_path).runs.values()}
    assert (runs["mlp"]["optim"], runs["mlp"]["dropout"]) == ({"lr": 0.1, "weight_decay": 0.5}, 0.2)
    assert runs["torchgt"]["optim"] == {"weight_decay": 0.5}


def test_trials_give_every_system_the_same_grid():
    made = matrix(yaml.safe_load((ROOT / "config/tune.yaml").read_text()))
    points = {}
    for trial in made.trials.values():
        points.setdefault(trial.system, set()).add((trial.config["optim"]["lr"], trial.config["dropout"]))
    assert set(points) == set(SYSTEMS)
    assert len(set(map(frozenset, points.values()))) == 1


def test_a_part_is_cut_from_the_whole_where_both_are_asked_for():
    config = TINY | {"datasets": [{"name": "wordnet"}, *TINY["datasets"]]}
    assert matrix(config).datasets["wordnet-64"].whole == "wordnet"
    assert matrix(TINY).datasets["wordnet-64"].whole is None


def test_an_own_module_and_the_files_it_reads_are_inputs(tmp_path):
    for part in ("datasets", "figures"):
        (tmp_path / part).symlink_to(ROOT / part)
    for file in ("own/mlp.py", "own/data.py", "own/edges.txt", "own/train.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    options = {"edges": "own/edges.txt", "split": {"train": "own/train.txt"}, "symmetrize": True, "note": "text"}
    config = TINY | {"systems": ["torchgt", "own.mlp"], "scaling": []}
    config["custom_datasets"] = [{"name": "mine", "module": "own.data", "options": options}]
    made = matrix(config, tmp_path)
    assert made.datasets["mine"].files == ("own/data.py", "own/edges.txt", "own/train.txt")
    assert {run.system: run.files for run in made.runs.values()} == {"torchgt": (), "mlp": ("own/mlp.py",)}
    assert {run.system: run.config["plugins"] for run in made.runs.values()} == {"torchgt": [], "mlp": ["own.mlp"]}


def test_merge_leaves_its_arguments_alone():
    below, above = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}
    assert merge(below, above) == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert below == {"a": {"b": 1, "c": 2}, "d": [1]} and above == {"a": {"b": 3}, "d": [2]}


def test_committed_hyperparameters_are_valid():
    check_schema(yaml.safe_load((ROOT / "config/hyperparameters.yaml").read_text()), "hyperparameters.schema.yaml", "")
