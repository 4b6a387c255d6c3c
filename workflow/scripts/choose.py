"""Choose each system's learning rate and dropout by the best validation value of its trials."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml


def choose(records: list[dict[str, Any]], search: dict[str, Any]) -> dict[str, Any]:
    """The content of config/hyperparameters.yaml.

    Args:
        records: the records of all trials, the same number for every system.
        search: the `tune` part of the configuration.

    Raises:
        ValueError: a system has no trial with a validation value, or systems differ in their number of trials.
    """
    trials: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        trial = {
            "lr": record["config"]["optim"]["lr"],
            "dropout": record["config"]["dropout"],
            "status": record["status"],
            "valid": (record.get("metric") or {}).get("valid"),
        }
        trials.setdefault(record["system"], []).append(trial)
    expected = len(search["lr"]) * len(search["dropout"])
    chosen = []
    for system, found in trials.items():
        if len(found) != expected:
            raise ValueError(f"system {system!r} has {len(found)} trials, not {expected}")
        found.sort(key=lambda trial: (trial["lr"], trial["dropout"]))
        valued = [trial for trial in found if trial["status"] == "ok" and trial["valid"] is not None]
        if not valued:
            raise ValueError(f"system {system!r}: no trial has a validation value ({found[0]['status']})")
        best = max(valued, key=lambda trial: trial["valid"])
        chosen.append({"system": system, **{key: best[key] for key in ("lr", "dropout", "valid")}, "trials": found})
    return {
        "note": search.get("note", "Written by `make tune`: the best validation value of each system's trials."),
        "dataset": search["dataset"],
        "model": search.get("model", "graphormer-slim"),
        "epochs": search["epochs"],
        "seed": search.get("seed", 0),
        # What a system's trials had in common beyond the grid, and which systems differed in it.
        **{key: search[key] for key in ("settings", "system_settings") if key in search},
        "grid": {"lr": search["lr"], "dropout": search["dropout"]},
        "chosen": chosen,
    }


def main(inputs: list[str], output: str, log: str, search: dict[str, Any]) -> None:
    try:
        content = choose([json.loads(Path(path).read_text(encoding="utf-8")) for path in inputs], search)
    except ValueError as error:
        Path(log).write_text(f"{error}\n")
        sys.exit(str(error))
    content = json.loads(json.dumps(content))  # no shared parts, which YAML would write as references
    Path(output).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    Path(log).write_text("".join(f"{e['system']}: lr {e['lr']}, dropout {e['dropout']}\n" for e in content["chosen"]))


if "snakemake" in globals():
    snakemake = globals()["snakemake"]
    main(list(snakemake.input), snakemake.output[0], snakemake.log[0], snakemake.params.search)
