"""From a configuration to the runs that it asks for.

`Matrix(config, root)` checks everything that can be checked before a job starts and holds the data sets, training
runs, benchmarks, figures and tables as plain lists. Snakemake's rules only look things up here. Every error is a
MatrixError of one line: the key, the value found, what is allowed, and the nearest match of a misspelt name.

Imports neither torch nor Snakemake: on a cluster, every job parses the workflow again.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from torchgt._version import RESULTS_VERSION
from torchgt.errors import ConfigError, unknown
from torchgt.training.config import RunConfig

SCHEMAS = Path(__file__).parent / "schemas"

SYSTEMS = ("torchgt", "gp-raw", "gp-flash", "gp-sparse", "gcn", "sage", "mlp", "random-blocks")
IMPLEMENTATIONS = ("reference", "scatter", "cpu", "triton", "dense")
BASELINES = "baselines"  # the module that registers all of them but torchgt
# Which module prepares a data set.
SOURCES = {"wordnet": "datasets.wordnet"}
# Named by config/paper.yaml already; no module prepares them yet.
PLANNED_SOURCES = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "amazon")
FIGURES = ("speedup", "sequence_length", "attention", "accuracy", "convergence")
TABLES = ("results",)
DEFAULT_MODEL = "graphormer-slim"


class MatrixError(ValueError):
    """The configuration asks for something that does not exist."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set to prepare: a built-in source, whole or a subset, or a module of the user's."""

    name: str
    source: str | None = None
    nodes: int | None = None
    seed: int | None = None
    whole: str | None = None
    """The configured data set that a subset is cut from, which saves building the whole again."""
    module: str | None = None
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    files: tuple[str, ...] = ()
    """Source files whose edit makes the data set anew."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run or a benchmark: where its files lie, and the configuration that it gets."""

    folder: str
    dataset: str
    system: str
    group: str = ""
    config: dict[str, Any] = field(hash=False)
    files: tuple[str, ...] = ()
    """Source files of a system of the user's, whose edit makes the job anew."""

    @property
    def text(self) -> str:
        """The content of its config.yaml."""
        return yaml.safe_dump(self.config, sort_keys=False)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure or a table: a module that reads the tables."""

    name: str
    module: str
    files: tuple[str, ...] = ()
    builtin: bool = True


class Matrix:
    """Everything that a configuration asks for, checked.

    Args:
        config: the merged configuration of the pipeline; not changed.
        root: the checkout, where the modules of data sets, systems and figures are looked up.

    Raises:
        MatrixError: one line.
    """

    def __init__(self, config: dict[str, Any], root: Path | str = ".") -> None:
        self.root = Path(root)
        config = copy.deepcopy(config)
        check_schema(config, "config.schema.yaml", "config")
        self.config = config
        self.results: str = config["results"].rstrip("/")
        self.threads: int = config["threads"]
        self.datasets = self._datasets()
        self.systems = self._systems()
        self.chosen = self._hyperparameters()
        self.runs = self._unique(self._runs(), "run")
        self.benches = self._unique(self._benches(), "scaling entry")
        self.attention = self._unique(self._attention(), "attention entry")
        self.trials = self._unique(self._trials(), "trial")
        self.figures = self._drawings("figures", FIGURES)
        self.tables = self._drawings("tables", TABLES)

    @property
    def jobs(self) -> dict[str, Job]:
        """Runs, trials and benchmarks by their folder."""
        return self.runs | self.trials | self.benches | self.attention

    @property
    def groups(self) -> list[str]:
        """Groups of runs, in order."""
        return list(dict.fromkeys(job.group for job in (self.runs | self.trials).values()))

    @property
    def planned(self) -> list[str]:
        """Data sets in use that no module prepares yet."""
        used = {job.dataset for job in self.jobs.values()}
        return [d.name for d in self.datasets.values() if d.name in used and d.source in PLANNED_SOURCES]

    # Names --------------------------------------------------------------------------------------------------------

    def _datasets(self) -> dict[str, Dataset]:
        found: dict[str, Dataset] = {}
        # A seed of its own makes another whole: a subset is cut from the source's default one.
        wholes = {
            e.get("source", e["name"]): e["name"] for e in self.config["datasets"] if not {"nodes", "seed"} & {*e}
        }
        for index, entry in enumerate(self.config["datasets"]):
            source = entry.get("source", entry["name"])
            key = f"datasets[{index}].{'source' if 'source' in entry else 'name'}"
            _known(key, "data set", source, [*SOURCES, *PLANNED_SOURCES])
            files = self._module_files(SOURCES[source], key) if source in SOURCES else ()
            whole = wholes.get(source) if "nodes" in entry else None
            _add(found, Dataset(**{**entry, "source": source, "whole": whole, "files": files}), key)
        for index, entry in enumerate(self.config.get("custom_datasets", [])):
            key = f"custom_datasets[{index}].module"
            files = self._module_files(entry["module"], key) + self._option_files(entry.get("options", {}))
            _add(found, Dataset(**entry, files=files), key)
        return found

    def _systems(self) -> dict[str, str | None]:
        """System -> module that registers it; None for torchgt itself."""
        found: dict[str, str | None] = {}
        for index, entry in enumerate(self.config["systems"]):
            key = f"systems[{index}]"
            name, module = entry, entry
            if "." in entry:
                self._module_files(entry, key)
                name = entry.rpartition(".")[2].replace("_", "-")
            else:
                _known(key, "system", entry, SYSTEMS, "an entry with a dot is a module of your own")
                module = None if entry == "torchgt" else BASELINES
            if name in found:
                raise MatrixError(f"{key}: system {name!r} is listed twice")
            found[name] = module
        return found

    def _drawings(self, key: str, builtin: Iterable[str]) -> dict[str, Drawing]:
        shared = [str(path.relative_to(self.root)) for path in sorted((self.root / "figures").glob("*.py"))]
        shared = [path for path in shared if Path(path).stem not in (*FIGURES, *TABLES, "collect")]
        found: dict[str, Drawing] = {}
        for index, entry in enumerate(self.config[key]):
            where = f"{key}[{index}]"
            own = "." in entry
            if not own:
                _known(where, key[:-1], entry, builtin, "an entry with a dot is a module of your own")
            module = entry if own else f"figures.{entry}"
            name = module.rpartition(".")[2]
            if name in found:
                raise MatrixError(f"{where}: {name!r} is listed twice")
            files = (*self._module_files(module, where), *shared)
            found[name] = Drawing(name=name, module=module, files=files, builtin=not own)
        return found

    def _module_files(self, module: str, key: str) -> tuple[str, ...]:
        """The file of a module of the checkout, relative to it; nothing for an installed one."""
        stem = Path(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if (self.root / path).is_file():
                return (path.as_posix(),)
        try:
            if importlib.util.find_spec(module) is not None:
                return ()
        except ModuleNotFoundError:
            pass
        raise MatrixError(f"{key}: no module named {module!r} ({stem}.py in the checkout, or installed)")

    def _option_files(self, value: Any) -> tuple[str, ...]:
        """Files that a data set's options name: it is made anew when one changes."""
        if isinstance(value, dict):
            return tuple(file for item in value.values() for file in self._option_files(item))
        return (value,) if isinstance(value, str) and (self.root / value).is_file() else ()

    def _hyperparameters(self) -> dict[str, dict[str, Any]]:
        """System -> overrides of its run configuration, from the committed search."""
        name = self.config["hyperparameters"]
        if name is None:
            return {}
        try:
            values = yaml.safe_load((self.root / name).read_text(encoding="utf-8"))
        except OSError as error:
            allowed = "a file that `make tune` wrote, or null"
            raise MatrixError(
                f"hyperparameters: {name}: cannot be read ({error.strerror}); allowed: {allowed}"
            ) from None
        except yaml.YAMLError as error:
            raise MatrixError(f"hyperparameters: {name}: not valid YAML ({' '.join(str(error).split())})") from None
        check_schema(values, "hyperparameters.schema.yaml", name)
        return {e["system"]: {"optim": {"lr": e["lr"]}, "dropout": e["dropout"]} for e in values["chosen"]}

    # Jobs ---------------------------------------------------------------------------------------------------------

    def _runs(self) -> Iterable[Job]:
        for index, group in enumerate(self.config["accuracy"]):
            key = f"accuracy[{index}]"
            for system, settings in self._settings(group, key):
                for seed in group["seeds"]:
                    yield self._run(group, group["name"], system, seed, self.chosen.get(system, {}), settings, key)

    def _trials(self) -> Iterable[Job]:
        tune = self.config.get("tune")
        if tune is None:
            return
        for system, settings in self._settings(tune, "tune"):
            for lr, dropout in itertools.product(tune["lr"], tune["dropout"]):
                point = {"optim": {"lr": lr}, "dropout": dropout}
                name = f"tune-lr{lr:g}-dropout{dropout:g}"
                # The point comes last: a setting must not undo what is searched.
                yield self._run(tune, name, system, tune.get("seed", 0), settings, point, "tune")

    def _settings(self, entry: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
        """(system, its settings) of a group; checks the names of its data set and systems."""
        own: dict[str, dict[str, Any]] = {}
        systems = self._entry_systems(entry, key)
        for index, item in enumerate(entry.get("system_settings", [])):
            where = f"{key}.system_settings[{index}].system"
            _known(where, "system", item["system"], systems, "the systems of this entry")
            own[item["system"]] = merge(own.get(item["system"], {}), item["settings"])
        shared = entry.get("settings", {})
        return [(system, merge(shared, own.get(system, {}))) for system in systems]

    def _entry_systems(self, entry: dict[str, Any], key: str) -> list[str]:
        _known(f"{key}.dataset", "data set", entry["dataset"], self.datasets, "what `datasets` lists")
        systems = entry.get("systems", list(self.systems))
        for index, system in enumerate(systems):
            _known(f"{key}.systems[{index}]", "system", system, self.systems, "what `systems` lists")
        return systems

    def _run(
        self,
        entry: dict[str, Any],
        group: str,
        system: str,
        seed: int,
        below: dict[str, Any],
        above: dict[str, Any],
        key: str,
    ) -> Job:
        base = self._base(entry, system) | {"seed": seed, "epochs": entry["epochs"]}
        config = merge(merge(base, below), above)
        try:
            RunConfig.from_dict(config)
        except ConfigError as error:
            raise MatrixError(f"{key}: system {system!r}: {error}") from None
        folder = f"{self.results}/runs/{group}/{config['model']}/{system}/seed-{seed}"
        return self._job(folder, entry["dataset"], system, config, group)

    def _benches(self) -> Iterable[Job]:
        for index, entry in enumerate(self.config["scaling"]):
            for system in self._entry_systems(entry, f"scaling[{index}]"):
                budget = dict(entry["budget"])
                budget["memory_bytes"] = int(budget.pop("memory_gb") * 10**9)
                config = self._base(entry, system) | {
                    "lengths": entry["lengths"],
                    "repeats": entry.get("repeats", 10),
                    "amortise": entry.get("amortise", [5, 10, 50]),
                    "budget": budget,
                }
                config = merge(config, entry.get("settings", {}))
                folder = f"{self.results}/scaling/{entry['dataset']}/{config['model']}/{system}"
                yield self._job(folder, entry["dataset"], system, config)

    def _attention(self) -> Iterable[Job]:
        for index, entry in enumerate(self.config.get("attention", [])):
            key = f"attention[{index}]"
            _known(f"{key}.dataset", "data set", entry["dataset"], self.datasets, "what `datasets` lists")
            files: tuple[str, ...] = ()
            for place, impl in enumerate(entry["impls"]):
                module, _, function = impl.partition(":")
                if function:
                    files += self._module_files(module, f"{key}.impls[{place}]")
                else:
                    note = "module:function is a callable of your own"
                    _known(f"{key}.impls[{place}]", "implementation", impl, IMPLEMENTATIONS, note)
            config = {name: value for name, value in entry.items() if name not in ("name", "dataset")}
            config |= {
                "store": f"{self.results}/stores/{entry['dataset']}",
                "threads": self.threads,
                "results_version": RESULTS_VERSION,
            }
            folder = f"{self.results}/attention/{entry['name']}"
            yield Job(folder=folder, dataset=entry["dataset"], system="", config=config, files=files)

    def _base(self, entry: dict[str, Any], system: str) -> dict[str, Any]:
        module = self.systems[system]
        return {
            "system": system,
            "model": entry.get("model", DEFAULT_MODEL),
            "store": f"{self.results}/stores/{entry['dataset']}",
            "threads": self.threads,
            "results_version": RESULTS_VERSION,
            "plugins": [] if module is None else [module],
        }

    def _job(self, folder: str, dataset: str, system: str, config: dict[str, Any], group: str = "") -> Job:
        # Editing a built-in system raises RESULTS_VERSION where it changes numbers; a user's has no such number.
        module = self.systems[system]
        files = () if module in (None, BASELINES) else self._module_files(module, "systems")
        return Job(folder=folder, dataset=dataset, system=system, group=group, config=config, files=files)

    @staticmethod
    def _unique(jobs: Iterable[Job], kind: str) -> dict[str, Job]:
        found: dict[str, Job] = {}
        for job in jobs:
            if job.folder in found:
                raise MatrixError(f"two entries ask for the same {kind}, {job.folder}; allowed: each once")
            found[job.folder] = job
        return found


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings merged, `above` winning; neither is changed."""
    merged = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


def check_schema(values: Any, schema: str, origin: str) -> None:
    """Check against a schema of this folder; MatrixError says in one line what is wrong first."""
    document = yaml.safe_load((SCHEMAS / schema).read_text(encoding="utf-8"))
    errors = sorted(Draft202012Validator(document).iter_errors(values), key=lambda error: list(map(str, error.path)))
    if errors:
        raise MatrixError(f"{origin}: {_explain(errors[0])}")


def _explain(error: ValidationError) -> str:
    where = _dotted(error.absolute_path)
    if error.validator == "additionalProperties":
        allowed = error.schema["properties"]
        extra = next(key for key in error.instance if key not in allowed)
        prefix = f"{where}: " if where else ""
        return prefix + unknown("key", extra, allowed)
    if error.validator == "enum":
        return f"{where}: {unknown('value', error.instance, error.validator_value)}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        return f"{where + ': ' if where else ''}missing key {missing!r}"
    hint = ""
    if (
        error.validator == "type"
        and isinstance(error.instance, str)
        and re.fullmatch(r"\d+[eE][+-]?\d+", error.instance)
    ):
        hint = f"; YAML reads a number with an exponent only with a point, as {error.instance[0]}.0{error.instance[1:]}"
    return f"{where + ': ' if where else ''}{error.message}{hint}"


def _dotted(path: Iterable[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _known(key: str, kind: str, value: str, allowed: Iterable[str], note: str = "") -> None:
    names = list(allowed)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        allowed_text = ", ".join(names) or "(none)"
        raise MatrixError(
            f"{key}: unknown {kind} {value!r}{hint}; allowed: {allowed_text}" + (f" ({note})" if note else "")
        )


def _add(found: dict[str, Dataset], dataset: Dataset, key: str) -> None:
    if dataset.name in found:
        raise MatrixError(f"{key}: data set {dataset.name!r} is listed twice")
    found[dataset.name] = dataset
