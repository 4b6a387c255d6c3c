"""The tidy tables between records and figures: their columns, how they are read, and what may be compared.

Four tables, one folder:

* `runs`     one row a training run,
* `scaling`  one row a (system, model, data set, sequence length, kind of step) of a step benchmark; what belongs to the
             whole record (peak memory, pairs, recall, status) is repeated for each kind,
* `history`  one row a (run, epoch),
* `attention` one row a (benchmark, implementation, sequence, shape, phase) of attention alone.

A value that was not measured is empty, never 0. Shares and metrics are fractions, times seconds, memory bytes.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

TEXT, NUMBER, WHOLE = "str", "float64", "Int64"

_RUN = {"group": TEXT, "dataset": TEXT, "system": TEXT, "model": TEXT, "seed": WHOLE}
_MACHINE = {"cpu_model": TEXT, "gpu_model": TEXT, "torch": TEXT, "machine_id": TEXT, "record": TEXT}

RUNS = {
    **_RUN,
    "status": TEXT,
    "error": TEXT,
    "epochs": WHOLE,
    "num_params": WHOLE,
    "seq_len": WHOLE,
    "world_size": WHOLE,
    "device": TEXT,
    "precision": TEXT,
    "threads": WHOLE,
    "metric_name": TEXT,
    "train": NUMBER,
    "valid": NUMBER,
    "test": NUMBER,
    "best_epoch": WHOLE,
    "eval": TEXT,
    "step_sparse_s": NUMBER,
    "step_dense_s": NUMBER,
    "step_amortised_s": NUMBER,
    "epoch_s": NUMBER,
    "eval_s": NUMBER,
    "preprocess_s": NUMBER,
    "total_s": NUMBER,
    "tokens_per_s": NUMBER,
    "peak_bytes": NUMBER,
    "pairs": NUMBER,
    "edges_kept": NUMBER,
    "recall": NUMBER,
    "dense_steps": WHOLE,
    "sparse_steps": WHOLE,
    "lr": NUMBER,
    "dropout": NUMBER,
    **_MACHINE,
    "protocol": TEXT,
    "majority": NUMBER,
    "results_version": WHOLE,
}

# Columns amortised_<k> follow the schedule's k and are therefore not listed: see `amortised_columns`.
SCALING = {
    "dataset": TEXT,
    "system": TEXT,
    "model": TEXT,
    "seq_len": WHOLE,
    "status": TEXT,
    "error": TEXT,
    "kind": TEXT,
    "step_s": NUMBER,
    "q25": NUMBER,
    "q75": NUMBER,
    "n": WHOLE,
    "peak_bytes": NUMBER,
    "baseline_bytes": NUMBER,
    "pairs": NUMBER,
    "recall": NUMBER,
    "budget_s": NUMBER,
    "budget_bytes": NUMBER,
    "threads": WHOLE,
    **_MACHINE,
}

HISTORY = {
    **_RUN,
    "epoch": WHOLE,
    "loss": NUMBER,
    "train": NUMBER,
    "valid": NUMBER,
    "seconds": NUMBER,
    "wall_s": NUMBER,
}

ATTENTION = {
    "bench": TEXT,
    "impl": TEXT,
    "num_tokens": WHOLE,
    "pairs": NUMBER,
    "heads": WHOLE,
    "head_dim": WHOLE,
    "precision": TEXT,
    "bias": TEXT,
    "phase": TEXT,
    "status": TEXT,
    "error": TEXT,
    "median": NUMBER,
    "q25": NUMBER,
    "q75": NUMBER,
    "n": WHOLE,
    "floor_s": NUMBER,
    "bytes": NUMBER,
    "flop": NUMBER,
    "memory_bytes": NUMBER,
    "threads": WHOLE,
    **_MACHINE,
}

SCHEMAS = {"runs": RUNS, "scaling": SCALING, "history": HISTORY, "attention": ATTENTION}

REFERENCE = Path(__file__).parent / "reference"

REASONS = {"oom": "memory", "timeout": "time", "error": "error", "refused": "refused", "missing": "missing"}
"""How a status other than ok is named in figures and tables."""


class MachineMismatch(ValueError):
    """A ratio of measurements of two classes of machine was asked for."""


@dataclass(frozen=True)
class Tables:
    """The tidy tables as data frames."""

    runs: pd.DataFrame
    scaling: pd.DataFrame
    history: pd.DataFrame
    attention: pd.DataFrame

    @property
    def systems(self) -> list[str]:
        """Every system that any table names, sorted."""
        names = pd.concat([self.runs["system"], self.scaling["system"], self.history["system"]])
        return sorted(names.dropna().unique())


def amortised_columns(frame: pd.DataFrame) -> dict[int, str]:
    """k -> name of the column with the mean step time when every k-th step is dense, ascending."""
    found = (re.fullmatch(r"amortised_(\d+)", str(name)) for name in frame.columns)
    return dict(sorted((int(match[1]), match[0]) for match in found if match))


def conform(frame: pd.DataFrame, name: str, origin: object = "table") -> pd.DataFrame:
    """Give `frame` the column types of table `name`; other columns stay. ValueError names a column that is missing."""
    schema = dict(SCHEMAS[name])
    missing = [column for column in schema if column not in frame.columns]
    if missing:
        raise ValueError(f"{origin}: no column {missing[0]!r}; a {name} table has {', '.join(schema)}")
    schema |= dict.fromkeys(amortised_columns(frame).values(), NUMBER)
    typed = {}
    for column, kind in schema.items():
        values = frame[column]
        try:
            # Through float, because a whole number beside an empty field is read or built as 3.0.
            typed[column] = (
                values.astype(kind) if kind == TEXT else pd.to_numeric(values).astype("float64").astype(kind)
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{origin}: column {column!r} is not {kind} ({error})") from None
    return frame.assign(**typed)


def load_tables(folder: str | Path) -> Tables:
    """Read one CSV file a table from `folder`. ValueError names what is missing."""
    tables = {}
    for name, schema in SCHEMAS.items():
        path = Path(folder) / f"{name}.csv"
        text = {column: str for column, kind in schema.items() if kind == TEXT}
        try:
            frame = pd.read_csv(path, dtype=text, keep_default_na=False, na_values=[""])
        except FileNotFoundError:
            raise ValueError(f"{path}: no such table; `python -m figures.collect` writes it") from None
        except (OSError, pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a readable table ({error})") from None
        tables[name] = conform(frame, name, path)
    return Tables(**tables)


def reference(name: str) -> pd.DataFrame:
    """A table of published values, `figures/reference/<name>.csv`; every row names its gpu, pattern and source."""
    return pd.read_csv(REFERENCE / f"{name}.csv", comment="#", dtype={"gpu": str, "pattern": str, "source": str})


def measured(scaling: pd.DataFrame) -> pd.DataFrame:
    """Rows with a step time."""
    return scaling[(scaling["status"] == "ok") & scaling["step_s"].notna()]


def main_steps(scaling: pd.DataFrame) -> pd.DataFrame:
    """One measured row a (data set, model, system, length): the sparse step if there is one, else the dense."""
    key = ["dataset", "model", "system", "seq_len"]
    rows = measured(scaling)
    order = rows["kind"].map({"sparse": 0, "dense": 1}).fillna(2)
    rows = rows.assign(_order=order).sort_values([*key, "_order"], kind="stable")
    return rows.drop_duplicates(key).drop(columns="_order")


def ended(scaling: pd.DataFrame) -> pd.DataFrame:
    """One row a failed length, up to the first failure beyond a system's last measured length.

    Longer lengths than the one that ended a system say nothing more, whether a benchmark lists them or not.
    """
    kept = []
    for _, rows in scaling.groupby(["dataset", "model", "system"], sort=True):
        last = measured(rows)["seq_len"].max()
        good = set(measured(rows)["seq_len"])
        failed = rows[(rows["status"] != "ok") & ~rows["seq_len"].isin(good)]
        failed = failed.drop_duplicates("seq_len").sort_values("seq_len")
        beyond = failed if pd.isna(last) else failed[failed["seq_len"] > last]
        first = beyond["seq_len"].min()
        kept.append(failed if pd.isna(first) else failed[failed["seq_len"] <= first])
    return pd.concat(kept) if kept else scaling.iloc[:0]


def ratio(base: pd.Series, other: pd.Series) -> float:
    """How many times faster `other`'s step is than `base`'s. MachineMismatch unless one class of machine timed both."""
    for key in ("machine_id", "dataset", "model", "seq_len"):
        if pd.isna(base[key]) or pd.isna(other[key]) or base[key] != other[key]:
            raise MachineMismatch(
                f"no ratio of {other['system']} to {base['system']}: {key} {other[key]} and {base[key]} differ"
            )
    return float(base["step_s"]) / float(other["step_s"])


def summarise_runs(runs: pd.DataFrame, value: str = "test") -> pd.DataFrame:
    """One row a (group, protocol, model, system): n, expected, mean and sample standard deviation of `value`, failures.

    `n` counts the seeds with a value, `expected` the seeds that any system of the group has. `failures` says what
    happened to the others, "1 memory, 1 missing". `std` is empty for n = 1.
    """
    rows = []
    for key, block in runs.assign(protocol=runs["protocol"].fillna("standard")).groupby(
        ["group", "protocol", "model"], sort=True
    ):
        expected = block["seed"].nunique()
        for system, mine in block.groupby("system", sort=True):
            good = mine[(mine["status"] == "ok") & mine[value].notna()]
            bad = mine.drop(good.index)
            reasons = [REASONS.get(s, "no value" if s == "ok" else str(s)) for s in bad["status"]]
            reasons += ["missing"] * (expected - mine["seed"].nunique())
            counts = [f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons))]
            rows.append(
                dict(zip(("group", "protocol", "model"), key, strict=True))
                | {"system": system, "dataset": mine["dataset"].iloc[0], "n": len(good), "expected": expected}
                | {"mean": good[value].mean(), "std": good[value].std(ddof=1), "failures": ", ".join(counts)}
            )
    columns = ["group", "protocol", "model", "system", "dataset", "n", "expected", "mean", "std", "failures"]
    return pd.DataFrame(rows, columns=columns)


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write beside `path`, flush to the disk and rename, so that a reader sees the old file or the new one, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
