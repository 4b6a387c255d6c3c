"""The results table: Markdown for a README, and the CSV behind it.

    python -m figures.results --tables results/tables --out results/tables/results --readme README.md

`--readme` replaces what stands between the lines `<!-- results:begin -->` and `<!-- results:end -->` of that file.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pandas as pd

from figures import speedup, style
from figures.records import Tables, load_tables, main_steps, summarise_runs, write_atomic

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

COLUMNS = ["section", "group", "protocol", "dataset", "model", "system", "label", "seq_len", "metric_name", "eval"]
COLUMNS += ["n", "expected", "mean", "std", "failures", "step_sparse_s", "step_dense_s", "step_s", "epoch_s"]
COLUMNS += ["preprocess_s", "peak_bytes", "num_params", "recall", "speedup", "speedup_tokens", "over_sparse", "note"]


def frame(tables: Tables) -> pd.DataFrame:
    """Section accuracy: one row a group and system. Section step: one row a bar of the longest speed-up panel."""
    return pd.concat([accuracy_rows(tables), step_rows(tables)]).reindex(columns=COLUMNS).reset_index(drop=True)


def accuracy_rows(tables: Tables) -> pd.DataFrame:
    """Test metric, medians over the seeds of the times, largest peak memory, and the speed-up of the model's steps."""
    runs = tables.runs.assign(protocol=tables.runs["protocol"].fillna("standard"))
    speedups = longest_speedups(tables.scaling)
    rows = []
    for row in summarise_runs(tables.runs).to_dict("records"):
        mine = runs.merge(pd.DataFrame([row])[["group", "protocol", "model", "system"]])
        good = mine[mine["status"] == "ok"]
        times = good[["step_sparse_s", "step_dense_s", "epoch_s", "preprocess_s"]].median()
        names = {name: _first(mine[name]) for name in ("metric_name", "eval", "seq_len", "num_params")}
        extra = {"peak_bytes": good["peak_bytes"].max(), "recall": good["recall"].min()}
        faster, length = speedups.get((row["model"], row["system"]), (math.nan, math.nan))
        rows.append(row | names | times.to_dict() | extra | {"speedup": faster, "speedup_tokens": length})
    return pd.DataFrame(rows).assign(section="accuracy")


def longest_speedups(scaling: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    """(model, system) -> speed-up of its own step over gp-flash's and the length: the longest that both have.

    A step is compared with one of the same data set, model, length and class of machine only.
    """
    steps = main_steps(scaling).dropna(subset=["machine_id"])
    base = steps[steps["system"] == speedup.BASE]
    pairs = steps.merge(base, on=["dataset", "model", "seq_len", "machine_id"], suffixes=("", "_base"))
    pairs = pairs.sort_values("seq_len", kind="stable").drop_duplicates(["model", "system"], keep="last")
    return {(row.model, row.system): (row.step_s_base / row.step_s, row.seq_len) for row in pairs.itertuples()}


def step_rows(tables: Tables) -> pd.DataFrame:
    """Step times at the longest length that gp-flash can do, with the speed-ups over gp-flash and over gp-sparse."""
    rows = []
    for (dataset, model), block in tables.scaling.groupby(["dataset", "model"], sort=True):
        for length in speedup.lengths(block)[:1]:
            here = main_steps(block[block["seq_len"] == length]).set_index("system", drop=False)
            for bar in speedup.bars(block, length):
                own = here.loc[bar["system"]] if bar["system"] in here.index else None
                same = own is not None and "gp-sparse" in here.index and "note" not in bar
                if same and here.loc["gp-sparse", "machine_id"] == own["machine_id"]:
                    bar["over_sparse"] = here.loc["gp-sparse", "step_s"] / bar["step_s"]
                if own is not None:
                    bar |= {"peak_bytes": own["peak_bytes"], "recall": own["recall"]}
                rows.append(bar | {"dataset": dataset, "model": model, "seq_len": length})
    return pd.DataFrame(rows).assign(section="step")


def markdown(data: pd.DataFrame, tables: Tables) -> str:
    """The tables as Markdown, one a group, then one a model's steps, then what was measured on."""
    parts = []
    for (group, protocol, model), rows in data[data["section"] == "accuracy"].groupby(
        ["group", "protocol", "model"], sort=False
    ):
        parts.append(_accuracy_table(group, protocol, model, rows))
    for (dataset, model), rows in data[data["section"] == "step"].groupby(["dataset", "model"], sort=False):
        parts.append(_step_table(dataset, model, rows))
    parts = parts or ["No run was recorded."]
    return "\n\n".join([*parts, *_footnotes(data, tables)]) + "\n"


def _accuracy_table(group: str, protocol: str, model: str, rows: pd.DataFrame) -> str:
    label, factor = style.metric(_first(rows["metric_name"]))
    lengths = rows["seq_len"].dropna()
    size = f", sequences of {style.tokens(lengths.max())} tokens" if len(lengths) else ""
    labelled = "" if protocol == "standard" else f", protocol {protocol}"
    lines = []
    for system in style.order(rows["system"]):
        row = rows[rows["system"] == system].iloc[0]
        control = " (control)" if system in style.SYSTEMS and style.SYSTEMS[system].control else ""
        n, expected = int(row["n"]), int(row["expected"])
        count = f"{n}" if n == expected else f"{n} of {expected} (✕ {row['failures']})"
        lines.append(
            [
                f"{system}{control}" + (" †" if row["eval"] == "clusters" else ""),
                _spread(row["mean"] * factor, row["std"] * factor),
                count,
                _steps(row),
                style.seconds(_float(row["epoch_s"])),
                style.size(_float(row["peak_bytes"])),
                _at(row["speedup"], row["speedup_tokens"]),
            ]
        )
    heads = ["system", f"test {label}", "n", "step", "epoch", "peak memory", f"step over {speedup.BASE}"]
    return f"**{group}**: {model}{size}{labelled}\n\n" + _table(heads, lines)


def _step_table(dataset: str, model: str, rows: pd.DataFrame) -> str:
    heads = ["one training step", "time", f"over {speedup.BASE}", "over gp-sparse", "peak memory", "recall"]
    lines = [
        [
            row["label"],
            style.seconds(_float(row["step_s"]))
            if pd.isna(row["note"]) or pd.notna(row["step_s"])
            else f"✕ {row['note']}",
            style.times(_float(row["speedup"])) if pd.isna(row["note"]) else "–",
            style.times(_float(row["over_sparse"])),
            style.size(_float(row["peak_bytes"])),
            "–" if pd.isna(row["recall"]) else f"{row['recall']:.3g}",
        ]
        for _, row in rows.iterrows()
    ]
    length = style.tokens(rows["seq_len"].iloc[0])
    return f"**Step time**: {model}, {length} tokens of {dataset}\n\n" + _table(heads, lines)


def _table(heads: list[str], lines: list[list[str]]) -> str:
    align = [":---"] + ["---:"] * (len(heads) - 1)
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [heads, align, *lines]
    )


def _steps(row: pd.Series) -> str:
    """The step of each kind that the run had."""
    sparse, dense = _float(row["step_sparse_s"]), _float(row["step_dense_s"])
    if math.isfinite(sparse) and math.isfinite(dense):
        return f"{style.seconds(sparse)}; dense {style.seconds(dense)}"
    return style.seconds(sparse if math.isfinite(sparse) else dense)


def _spread(mean: float, std: float) -> str:
    if pd.isna(mean):
        return "–"
    return f"{mean:.1f}" + ("" if pd.isna(std) else f" ± {std:.1f}")


def _at(faster: float, length: float) -> str:
    return "–" if pd.isna(faster) else f"{style.times(faster)} at {style.tokens(length)}"


def _footnotes(data: pd.DataFrame, tables: Tables) -> list[str]:
    lines = [
        "Test values at the best validation epoch, mean ± sample standard deviation over n seeds; a failed seed lowers "
        "n. Steps and epochs are medians, preprocessing is not in them; memory is the peak beyond the imports."
    ]
    if (data["eval"] == "clusters").any():
        lines.append("† Scored by disjoint cluster sequences, not in one pass over the whole graph.")
    machines = pd.concat([tables.runs, tables.scaling])[
        ["cpu_model", "gpu_model", "threads", "torch"]
    ].drop_duplicates()
    found = [_machine(row) for _, row in machines.dropna(how="all").iterrows()]
    return [*lines, *(["Measured on " + "; ".join(sorted(set(found))) + "."] if found else [])]


def _machine(row: pd.Series) -> str:
    names = [str(row[name]) for name in ("gpu_model", "cpu_model") if pd.notna(row[name])]
    names += [f"{row['threads']} threads"] if pd.notna(row["threads"]) else []
    return ", ".join(names + ([f"torch {row['torch']}"] if pd.notna(row["torch"]) else []))


def _first(values: pd.Series) -> object:
    values = values.dropna()
    return values.iloc[0] if len(values) else None


def _float(value: object) -> float:
    return math.nan if pd.isna(value) else float(value)


def replace_between(text: str, content: str, origin: object = "README") -> str:
    """`text` with `content` between its marker lines. ValueError if a marker is missing, doubled or out of order."""
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise ValueError(f"{origin}: {text.count(marker)} times {marker!r}; it takes exactly one")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if end < start:
        raise ValueError(f"{origin}: {END!r} stands before {BEGIN!r}")
    return f"{text[:start]}\n{content.strip()}\n{text[end:]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m figures.results", description="Write the results table.")
    parser.add_argument("--tables", required=True, help="folder with runs.csv, scaling.csv and history.csv")
    parser.add_argument("--out", required=True, help="path of the table without its suffix; .md and .csv are written")
    parser.add_argument("--readme", help="file whose marked part is replaced by the table")
    options = parser.parse_args(arguments)
    try:
        tables = load_tables(options.tables)
        data = frame(tables)
        text = markdown(data, tables)
        write_atomic(f"{options.out}.md", text.encode())
        write_atomic(f"{options.out}.csv", data.to_csv(index=False).encode())
        if options.readme:
            old = Path(options.readme).read_text(encoding="utf-8")
            write_atomic(options.readme, replace_between(old, text, options.readme).encode())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
