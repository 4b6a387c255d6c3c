"""Collect the records of runs and benchmarks into tidy tables, each as CSV and Parquet.

    python -m figures.collect --out results/tables --records-file list.txt

The list names one `record.json` or `rows.json` a line. A run that failed is a row like any other, with its status and
without the values it never had. A file of another format version stops the collection: guessing at its meaning would
put wrong numbers into figures.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from figures.records import ATTENTION, SCHEMAS, Tables, conform, write_atomic

FORMAT = 1
STATUSES = ("ok", "oom", "timeout", "error", "refused")


def read(path: str | Path) -> dict[str, Any]:
    """Read a record or rows file. ValueError names the file if it is not one of this format version."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: format {found!r}; this version reads {FORMAT}")
    return content


def collect(paths: list[str]) -> Tables:
    """Read every file and return the tables, sorted, so that the order of `paths` does not matter."""
    rows: dict[str, list[dict]] = {name: [] for name in SCHEMAS}
    for path in paths:
        content = read(path)
        if content.get("kind") == "bench-attention":
            rows["attention"] += [attention_row(row, path) for row in content["rows"]]
        elif "rows" in content:
            for row in content["rows"]:
                rows["scaling"] += scaling_rows(row, path)
        else:
            run = run_row(content, path)
            rows["runs"].append(run)
            rows["history"] += history_rows(content, run)
    frames = {name: _frame(name, found) for name, found in rows.items()}
    return Tables(**frames)


def write(tables: Tables, folder: str | Path) -> None:
    """Write each table as CSV and Parquet, each file whole or not at all."""
    for name in SCHEMAS:
        frame = getattr(tables, name)
        write_atomic(Path(folder) / f"{name}.csv", frame.to_csv(index=False).encode())
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        write_atomic(Path(folder) / f"{name}.parquet", buffer.getvalue())


def run_row(record: dict, path: str) -> dict:
    """The row of one training run. The group is the folder that the pipeline put the record in."""
    group, model, system, seed = _folders(path, 4)
    config, metric, pattern = (_part(record, key) for key in ("config", "metric", "pattern"))
    time, step = _part(record, "time"), _part(record, "time", "step_s")
    history = record.get("history") or []
    return {
        "group": group or record.get("dataset"),
        "dataset": record.get("dataset"),
        "system": record.get("system", system),
        "model": record.get("model", model),
        "seed": record.get("seed", seed.removeprefix("seed-") or None),
        "status": _status(record, path),
        "error": record.get("error"),
        "epochs": len(history) or None,
        "num_params": record.get("num_params"),
        "seq_len": record.get("seq_len"),
        "world_size": record.get("world_size"),
        "device": record.get("device"),
        "precision": record.get("precision"),
        "threads": record.get("threads"),
        "metric_name": metric.get("name"),
        "train": _number(metric.get("train")),
        "valid": _number(metric.get("valid")),
        "test": _number(metric.get("test")),
        "best_epoch": metric.get("best_epoch"),
        "eval": metric.get("eval"),
        "step_sparse_s": _part(step, "sparse").get("median"),
        "step_dense_s": _part(step, "dense").get("median"),
        "step_amortised_s": _number(step.get("amortised")),
        "epoch_s": time.get("epoch_s"),
        "eval_s": time.get("eval_s"),
        "preprocess_s": time.get("preprocess_s"),
        "total_s": time.get("total_s"),
        "tokens_per_s": _part(record, "throughput").get("tokens_per_s"),
        "peak_bytes": _part(record, "memory").get("peak_bytes"),
        "pairs": pattern.get("pairs"),
        "edges_kept": pattern.get("edges_kept"),
        "recall": pattern.get("recall"),
        "dense_steps": pattern.get("dense_steps"),
        "sparse_steps": pattern.get("sparse_steps"),
        "lr": _part(config, "optim").get("lr"),
        "dropout": config.get("dropout"),
        "protocol": record.get("protocol"),
        "majority": metric.get("majority"),
        "results_version": record.get("results_version"),
        **_machine(record, path),
    }


def scaling_rows(row: dict, path: str) -> list[dict]:
    """A row for each kind of step that one length of a benchmark timed; one row without a kind if none was."""
    dataset, model, system = _folders(path, 3)
    step, memory = _part(row, "time", "step_s"), _part(row, "memory")
    pattern, budget = _part(row, "pattern"), _part(row, "budget")
    amortised = step.get("amortised") if isinstance(step.get("amortised"), dict) else {}
    shared = {
        "dataset": row.get("dataset", dataset),
        "system": row.get("system", system),
        "model": row.get("model", model),
        "seq_len": row.get("seq_len"),
        "status": _status(row, path),
        "error": row.get("error"),
        "peak_bytes": memory.get("peak_bytes"),
        "baseline_bytes": memory.get("baseline_bytes"),
        "pairs": pattern.get("pairs"),
        "recall": pattern.get("recall"),
        "budget_s": budget.get("seconds", budget.get("step_s")),
        "budget_bytes": budget.get("memory_bytes"),
        "threads": row.get("threads"),
        **{f"amortised_{k}": seconds for k, seconds in amortised.items()},
        **_machine(row, path),
    }
    kinds = [kind for kind in ("sparse", "dense") if _part(step, kind).get("median") is not None]
    if not kinds:
        return [shared | dict.fromkeys(("kind", "step_s", "q25", "q75", "n"))]
    return [
        shared | {"kind": kind, "step_s": step[kind]["median"]} | {q: step[kind].get(q) for q in ("q25", "q75", "n")}
        for kind in kinds
    ]


def attention_row(row: dict, path: str) -> dict:
    """One implementation, sequence, shape and phase. The benchmark is the folder that the pipeline put the rows in."""
    (bench,) = _folders(path, 1)
    kept = {name: row.get(name) for name in ATTENTION if name in row}
    impl = str(row.get("impl", "")).rpartition(":")[2]
    return kept | {"bench": bench, "impl": impl, "status": _status(row, path)} | _machine(row, path)


def history_rows(record: dict, run: dict) -> list[dict]:
    """The epochs of one run. `seconds` counts training since its start, `wall_s` adds what came before it."""
    key = {name: run[name] for name in ("group", "dataset", "system", "model", "seed")}
    offset = sum(_part(record, "time").get(part) or 0.0 for part in ("preprocess_s", "compile_s"))
    rows, seconds = [], 0.0
    for entry in record.get("history") or []:
        seconds += entry.get("seconds") or 0.0
        values = {name: _number(entry.get(name)) for name in ("loss", "train", "valid")}
        rows.append(key | {"epoch": entry.get("epoch"), **values, "seconds": seconds, "wall_s": offset + seconds})
    return rows


def machine_id(machine_class: dict | None) -> str | None:
    """Twelve hex digits that agree exactly where two measurements may be divided by each other."""
    if not machine_class:
        return None
    return hashlib.sha256(json.dumps(machine_class, sort_keys=True).encode()).hexdigest()[:12]


def _machine(record: dict, path: str) -> dict:
    machine = _part(record, "machine_class")
    return {
        "cpu_model": machine.get("cpu_model", machine.get("cpu")),
        "gpu_model": machine.get("gpu_model", machine.get("gpu")),
        "torch": machine.get("torch"),
        "machine_id": machine_id(machine),
        "record": Path(path).as_posix(),
    }


def _status(record: dict, path: str) -> str:
    status = record.get("status")
    if status not in STATUSES:
        raise ValueError(f"{path}: status {status!r}; allowed: {', '.join(STATUSES)}")
    return status


def _part(record: dict, *keys: str) -> dict:
    """A nested mapping, empty where a failed run has none."""
    for key in keys:
        value = record.get(key)
        record = value if isinstance(value, dict) else {}
    return record


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _folders(path: str, count: int) -> list[str]:
    """The last `count` folders above a file, padded in front if it lies less deep."""
    names = [part for part in Path(path).parent.parts if part not in ("/", ".", "..")]
    return ([""] * count + names)[-count:]


def _frame(name: str, rows: list[dict]) -> pd.DataFrame:
    """A table with its columns in their order, whatever the rows have, sorted by what identifies a row."""
    frame = pd.DataFrame(rows)
    extra = [column for column in frame.columns if column not in SCHEMAS[name]]
    extra.sort(key=lambda column: (len(column), column))  # amortised_5 before amortised_10
    frame = conform(frame.reindex(columns=[*SCHEMAS[name], *extra]), name)
    last = {"runs": [], "scaling": ["seq_len", "kind"], "history": ["epoch"]}
    last["attention"] = ["bench", "num_tokens", "heads", "head_dim", "impl", "phase"]
    last = last[name]
    keys = [key for key in ("group", "dataset", "model", "system", "seed") if key in frame.columns] + last
    return frame.sort_values(keys, kind="stable", ignore_index=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m figures.collect", description="Records into tidy tables.")
    parser.add_argument("--out", required=True, help="folder of the tables")
    parser.add_argument("--records-file", required=True, help="text file with one path of a record a line")
    options = parser.parse_args(arguments)
    try:
        lines = Path(options.records_file).read_text(encoding="utf-8").splitlines()
        tables = collect([line.strip() for line in lines if line.strip()])
        write(tables, options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{len(getattr(tables, name))} rows of {name}" for name in SCHEMAS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
