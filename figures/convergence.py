"""Validation metric against wall time. A curve starts where preprocessing and compilation ended.

Evaluation is not counted: systems may be scored more or less often without looking slower or faster for it.
"""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import style
from figures.records import REASONS, Tables

KEY = ["group", "model"]
RUN = [*KEY, "system", "seed"]
COLUMNS = [
    "group",
    "dataset",
    "model",
    "metric_name",
    "system",
    "seed",
    "status",
    "epoch",
    "seconds",
    "wall_s",
    "valid",
]


def frame(tables: Tables) -> pd.DataFrame:
    """One row a scored epoch; a run without one keeps a single row with its status and no epoch."""
    runs = tables.runs[[*RUN, "dataset", "metric_name", "status"]].drop_duplicates(RUN)
    scored = tables.history.dropna(subset=["valid"]).drop(columns=["dataset"])
    data = runs.merge(scored, how="left", on=RUN).reindex(columns=COLUMNS)
    return data.sort_values([*RUN, "epoch"], kind="stable", ignore_index=True)


def draw(tables: Tables) -> tuple[Figure, pd.DataFrame]:
    """Draw the validation metric against training time, a panel a group."""
    data = frame(tables)
    look = style.palette(tables.systems)
    blocks = list(data.groupby(KEY, sort=False))
    columns = max(1, min(2, len(blocks)))
    fig, axes = style.panels(max(1, -(-len(blocks) // columns)), columns, height=3.4)
    for ax, (key, block) in zip(axes.flat, blocks, strict=False):
        _group(ax, block, look)
        ax.set_title(f"{key[0]}: {key[1]}")
    for ax in axes.flat[len(blocks) :]:
        ax.set_visible(False)
    if not blocks:
        axes[0, 0].set_visible(True)
        style.explain(axes[0, 0], "No run was recorded.", "Validation accuracy against wall time")
    drawn = style.order(data.dropna(subset=["valid"])["system"])
    handles = [Line2D([], [], label=system, **_look(look[system])) for system in drawn]
    if handles:
        lines = -(-len(handles) // 8)
        fig.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // lines))
    return fig, data


def _look(own: style.Style) -> dict:
    line = "--" if own.control else "-"
    return {"color": own.color, "marker": own.marker, "markerfacecolor": own.fill, "linestyle": line}


def _group(ax: Axes, block: pd.DataFrame, look: dict[str, style.Style]) -> None:
    names = block["metric_name"].dropna()
    label, factor = style.metric(names.iloc[0] if len(names) else None)
    lost: dict[str, list[str]] = {}
    for (system, seed), rows in block.groupby(["system", "seed"], sort=True):
        status = rows["status"].iloc[0]
        curve = rows.dropna(subset=["valid", "wall_s"])
        if status != "ok":
            lost.setdefault(f"{system}: {REASONS.get(status, status)}", []).append(str(seed))
        if curve.empty:
            continue
        times, values = curve["wall_s"].astype(float), curve["valid"].astype(float) * factor
        ax.plot(times, values, **_look(look[system]) | {"linewidth": 1.2}, markevery=[len(curve) - 1], alpha=0.85)
        if status != "ok":
            ax.annotate(
                "✕", (times.iloc[-1], values.iloc[-1]), ha="center", va="center", fontsize=12, fontweight="bold"
            )
    if not ax.lines:
        style.explain(ax, "\n".join(["No run of this group was scored.", *_lines(lost)]))
        return
    style.unit_axis(ax, style.seconds, "x")
    ax.set_xlabel("\n".join(["wall time of preprocessing and training", *_lines(lost)]))
    ax.set_ylabel(f"validation {label}")


def _lines(lost: dict[str, list[str]], width: int = 60) -> list[str]:
    """What happened to the runs that did not finish, in lines of at most `width` characters."""
    words = [f"{what} (seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)})" for what, seeds in lost.items()]
    return textwrap.wrap("✕ " + "; ".join(words), width, break_on_hyphens=False) if words else []


if __name__ == "__main__":
    style.main(draw)
