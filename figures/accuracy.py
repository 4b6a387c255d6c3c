"""Test metric of every system: each seed a point, mean and sample standard deviation, n, and the controls.

A seed that failed or is missing lowers n and is named. Published values are of other data sets and stand in a panel of
their own.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style
from figures.records import Tables, reference, summarise_runs

KEY = ["group", "protocol", "model"]
COLUMNS = ["panel", *KEY, "dataset", "metric_name", "system", "seed", "status", "value", "n", "expected", "mean", "std"]
COLUMNS += ["failures", "eval", "seq_len", "majority", "gpu", "pattern", "source"]


def frame(tables: Tables) -> pd.DataFrame:
    """One row a run with its system's mean, std and n beside it; a seed without a record has the status missing."""
    runs = tables.runs.assign(protocol=tables.runs["protocol"].fillna("standard"))
    seeds = runs[[*KEY, "seed"]].drop_duplicates()
    every = runs[[*KEY, "system"]].drop_duplicates().merge(seeds, on=KEY)
    rows = every.merge(runs.drop(columns=["dataset"]), how="left", on=[*KEY, "system", "seed"])
    rows = rows.assign(panel="measured", status=rows["status"].fillna("missing"))
    rows["value"] = rows["test"].where(rows["status"] == "ok")
    rows = rows.merge(summarise_runs(tables.runs), on=[*KEY, "system"])
    return pd.concat([rows, published()]).reindex(columns=COLUMNS).reset_index(drop=True)


def published() -> pd.DataFrame:
    """Published accuracies as fractions, and the one cell that the paper's artifact logs."""
    table = reference("accuracy").query("metric == 'accuracy'")
    table = table.assign(mean=table["value"] / 100, std=table["std"] / 100, value=np.nan)
    cell = reference("table6_cell")
    cell = cell.assign(mean=cell["test_final"] / 100, protocol="artifact")
    return pd.concat([table, cell]).assign(panel="published", metric_name="accuracy", status="ok")


def draw(tables: Tables) -> tuple[Figure, pd.DataFrame]:
    """Draw the test metric by group and system."""
    data = frame(tables)
    look = style.palette([*tables.systems, *data["system"].dropna()])
    blocks = list(data[data["panel"] == "measured"].groupby(KEY, sort=False))
    rows = max(1, -(-len(blocks) // 2))
    tallest = [max([3, *(block["system"].nunique() for _, block in blocks[2 * r : 2 * r + 2])]) for r in range(rows)]
    inches = [0.9 + 0.36 * count for count in tallest]
    other = data[data["panel"] == "published"]
    heights = [sum(inches), 0.2 * len(other) + 1.1]
    fig = Figure(figsize=(style.WIDTH, sum(heights)), layout="constrained")
    upper, lower = fig.subfigures(2, 1, height_ratios=heights)  # laid out apart: their margins differ
    grid = upper.add_gridspec(rows, 2, height_ratios=inches)
    for index, (_, block) in enumerate(blocks):
        last = index == len(blocks) - 1 and index % 2 == 0
        _group(upper.add_subplot(grid[index // 2, slice(None) if last else index % 2]), block, look)
    if not blocks:
        style.explain(upper.add_subplot(grid[0, :]), "No run was recorded.", "Test accuracy")
    _published(lower.subplots(), other, look)
    return fig, data


def _group(ax: Axes, block: pd.DataFrame, look: dict[str, style.Style]) -> None:
    """The systems of one group, one row each."""
    systems = style.order(block["system"])
    names = block["metric_name"].dropna()
    label, factor = style.metric(names.iloc[0] if len(names) else None)
    for place, system in enumerate(systems):
        rows, own = block[block["system"] == system], look[system]
        _row(ax, place, rows["value"].astype(float).to_numpy() * factor, rows.iloc[0], own, factor)
        if own.control:
            ax.axhspan(place - 0.5, place + 0.5, color="#f2f2f2", zorder=0)
    majority = ""
    if block["value"].notna().any():
        _widen(ax)
        majority = _majority(ax, block["majority"].dropna() * factor)
    else:
        ax.set_xticks([])
    clusters = block[block["eval"] == "clusters"]["system"].unique()
    marks = ["†" if system in clusters else "" for system in systems]
    control = ["\n(control)" if look[system].control else "" for system in systems]
    ax.set_yticks(range(len(systems)), [f"{s}{m}{c}" for s, m, c in zip(systems, marks, control, strict=True)])
    ax.set_ylim(len(systems) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.set_title(_title(block))
    ax.set_xlabel(f"test {label}{majority}" + ("; † scored by clusters" if len(clusters) else ""))


def _row(ax: Axes, place: int, values: np.ndarray, summary: pd.Series, own: style.Style, factor: float) -> None:
    good = values[np.isfinite(values)]
    look = {"color": own.color, "marker": own.marker, "markerfacecolor": own.fill}
    ax.plot(good, np.full(len(good), place - 0.12), linestyle="none", markersize=5, alpha=0.75, **look)
    if len(good):
        spread = summary["std"] * factor if pd.notna(summary["std"]) else None
        # Below the points, which it would hide where the seeds lie close together.
        bar = {"color": style.INK, "capsize": 2.5, "elinewidth": 1.1, "marker": "|", "markersize": 8}
        ax.errorbar(summary["mean"] * factor, place + 0.22, xerr=spread, **bar)
    else:
        ax.text(
            0.5, place, "✕ no value", transform=ax.get_yaxis_transform(), ha="center", va="center", color=style.MUTED
        )
    ax.text(1.015, place, _numbers(summary, factor), transform=ax.get_yaxis_transform(), va="center", fontsize=8)


def _numbers(summary: pd.Series, factor: float) -> str:
    """Mean ± std and n, the failures in a second line."""
    n, expected = int(summary["n"]), int(summary["expected"])
    count = f"n = {n}" if n == expected else f"n = {n} of {expected}\n✕ {summary['failures']}"
    if not n:
        return count
    spread = f" ± {summary['std'] * factor:.1f}" if pd.notna(summary["std"]) else ""
    return f"{summary['mean'] * factor:.1f}{spread}  {count}"


def _widen(ax: Axes) -> None:
    """At least one unit on either side of the data, so that equal values do not fill the panel."""
    low, high = ax.get_xlim()
    margin = max(1.0, 0.06 * (high - low))
    ax.set_xlim(low - margin, high + margin)


def _majority(ax: Axes, values: pd.Series) -> str:
    """The share of the most frequent class: a line unless it lies far off the data, and words for the axis label."""
    if values.empty:
        return ""
    value, (low, high) = float(values.iloc[0]), ax.get_xlim()
    if not low - 0.5 * (high - low) <= value <= high:
        return f"; majority class: {value:.1f}"
    ax.set_xlim(min(low, value - 1), high)
    ax.axvline(value, color=style.MUTED, linestyle=":", linewidth=1.2)
    return f"; majority class (dotted): {value:.1f}"


def _title(block: pd.DataFrame) -> str:
    first, lengths = block.iloc[0], block["seq_len"].dropna()
    size = f", {style.tokens(lengths.max())} tokens" if len(lengths) else ""
    protocol = "" if first["protocol"] == "standard" else f" (protocol {first['protocol']}: best epoch on test)"
    return f"{first['group']}: {first['model']}{size}{protocol}"


def _published(ax: Axes, rows: pd.DataFrame, look: dict[str, style.Style]) -> None:
    for place, row in enumerate(rows.itertuples()):
        own = look[row.system]
        spread = None if pd.isna(row.std) else row.std * 100
        keywords = {"color": own.color, "marker": own.marker, "markerfacecolor": own.fill, "capsize": 2.5}
        ax.errorbar(row.mean * 100, place, xerr=spread, **keywords)
        number = f"{row.mean * 100:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
        words = f"{number}   {row.source}" if pd.isna(row.protocol) else f"{number} *"
        ax.text(1.01, place, words, transform=ax.get_yaxis_transform(), va="center", fontsize=7.5)
    ax.set_yticks(range(len(rows)), [f"{row.dataset} · {row.system}" for row in rows.itertuples()])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.set_title("Published, other data sets (GPU not stated unless named)")
    ax.set_xlabel("test accuracy (%)")
    cell = reference("table6_cell").iloc[0]
    style.note(
        ax,
        f"* protocol artifact (random split), {cell['gpus']} × {cell['gpu']}, {cell['pattern']};\n"
        f"   {cell['test_best']} when the epoch is chosen on test. {cell['source']}",
    )


if __name__ == "__main__":
    style.main(draw)
