"""Step time and peak memory against sequence length, and where a budget ended a system.

Both axes are logarithmic, so a cost proportional to N^a is a line of slope a. The exponent in the legend is fitted
over the upper half of a system's lengths, three at least: the short ones measure overheads that do not grow. Published
values stand in panels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from figures import style
from figures.records import REASONS, Tables, amortised_columns, ended, main_steps, reference

DEFAULT_EVERY = 10
"""Which of the measured schedules is drawn beside the sparse step, if it is among them; else the middle one."""

SMALL = {"fontsize": 7.5, "color": style.MUTED}

QUANTITIES = {"time": ("step_s", "budget_s"), "memory": ("peak_bytes", "budget_bytes")}
COLUMNS = ["panel", "dataset", "model", "system", "label", "every", "quantity", "seq_len", "value", "low", "high"]
COLUMNS += ["status", "budget", "exponent", "fit_from", "fit_to", "gpus", "gpu", "pattern", "source"]


def frame(tables: Tables) -> pd.DataFrame:
    """Points and ends of every curve.

    `value` is seconds or bytes (tokens where published), empty where the status is not ok; `low` and `high` are
    quartiles; `exponent` was fitted over `fit_from` <= N <= `fit_to` and is the same along a curve.
    """
    blocks = [published()]
    steps, gone = main_steps(tables.scaling), ended(tables.scaling)
    for quantity, (column, budget) in QUANTITIES.items():
        points = steps.assign(quantity=quantity, value=steps[column], every=np.nan, budget=steps[budget])
        if quantity == "time":
            points = pd.concat([points.assign(low=steps["q25"], high=steps["q75"]), _amortised(points)])
        ends = gone.assign(quantity=quantity, value=np.nan, every=np.nan, budget=gone[budget])
        blocks += [points[points["value"] > 0], ends]
    data = pd.concat(blocks).assign(panel=lambda d: d["panel"].fillna("measured")).reindex(columns=COLUMNS)
    data["label"] = [_label(row) for row in data.itertuples()]
    key = ["panel", "dataset", "model", "quantity", "label"]
    curves = [_fitted(curve) for _, curve in data.groupby(key, sort=False, dropna=False)]
    return pd.concat(curves).sort_values([*key, "seq_len"], kind="stable", ignore_index=True)


def _amortised(points: pd.DataFrame) -> pd.DataFrame:
    """The mean step of one schedule with dense steps, as further curves."""
    columns = amortised_columns(points)
    if not columns:
        return points.iloc[:0]
    every = DEFAULT_EVERY if DEFAULT_EVERY in columns else list(columns)[len(columns) // 2]
    return points.assign(value=points[columns[every]], every=every).dropna(subset=["value"])


def _label(row: tuple) -> str:
    return row.system if pd.isna(row.every) else f"{row.system}, a dense step in {row.every:.0f}"


def _fitted(curve: pd.DataFrame) -> pd.DataFrame:
    slope, low, high = fit(curve["seq_len"], curve["value"])
    return curve.assign(exponent=slope, fit_from=low, fit_to=high)


def fit(lengths: pd.Series, values: pd.Series) -> tuple[float, float, float]:
    """Least-squares exponent in log-log over the upper half of the lengths, at least three, and their range."""
    points = pd.DataFrame({"n": lengths.astype(float), "value": values.astype(float)}).dropna().sort_values("n")
    upper = points.tail(max(3, -(-len(points) // 2)))
    if len(upper) < 3:
        return np.nan, np.nan, np.nan
    slope = np.polyfit(np.log(upper["n"]), np.log(upper["value"]), 1)[0]
    return float(slope), upper["n"].min(), upper["n"].max()


def published() -> pd.DataFrame:
    """Published attention times and longest sequences."""
    attention = reference("fig11a_attention_ms")
    attention = attention.assign(quantity="attention time", value=attention["ms"] / 1e3)
    longest = reference("fig8a_max_sequence")
    longest = longest.assign(quantity="longest sequence", value=longest["max_tokens"], seq_len=np.nan)
    return pd.concat([attention, longest]).assign(panel="published", status="ok", every=np.nan)


def draw(tables: Tables) -> tuple[Figure, pd.DataFrame]:
    """Draw step time and peak memory against sequence length."""
    data = frame(tables)
    look = style.palette([*tables.systems, *data["system"]])
    blocks = list(data[data["panel"] == "measured"].groupby(["dataset", "model"], sort=True))
    heights = [3.1 + 0.09 * block["label"].nunique() for _, block in blocks] or [2.0]
    fig = Figure(figsize=(style.WIDTH, sum(heights) + 3.4), layout="constrained")
    parts = fig.subfigures(len(heights) + 1, 1, height_ratios=[*heights, 3.4], squeeze=False)[:, 0]
    for part, (key, block) in zip(parts, blocks, strict=False):
        _measured(part, key, block, look)
    if not blocks:
        style.explain(parts[0].subplots(), "No step was measured.", "Training step and peak memory")
    times, lengths = parts[-1].subplots(1, 2)
    _published_times(times, data, look)
    _published_lengths(lengths, data, look)
    return fig, data


def _measured(part: SubFigure, key: tuple[str, str], block: pd.DataFrame, look: dict[str, style.Style]) -> None:
    """One model: its times, its memory, and one legend for both."""
    axes = part.subplots(1, 2)
    titles = (f"{key[1]} on {key[0]}: training step", "peak memory")
    for ax, quantity, unit, title in zip(axes, QUANTITIES, (style.seconds, style.size), titles, strict=True):
        ax.set_title(title)
        _curves(ax, block[block["quantity"] == quantity], look, unit)
    curves = list(_by_label(block, look))
    handles = [Line2D([], [], **_look(look[c["system"].iloc[0]], c)) for _, c in curves]
    labels = [_legend(label, curve) for label, curve in curves]
    part.legend(handles, labels, loc="outside lower center", ncols=2, columnspacing=2.0, handlelength=2.4)


def _by_label(block: pd.DataFrame, look: dict[str, style.Style]) -> Iterator[tuple[str, pd.DataFrame]]:
    rank = block["system"].map({name: place for place, name in enumerate(style.order(look))}).rename("rank")
    for (_, label), curve in block.groupby([rank, "label"], sort=True):
        yield label, curve


def _look(own: style.Style, curve: pd.DataFrame) -> dict:
    dashed = curve["every"].notna().any()
    hollow = "white" if dashed else own.fill
    return {"color": own.color, "marker": own.marker, "markerfacecolor": hollow, "linestyle": "--" if dashed else "-"}


def _curves(ax: Axes, block: pd.DataFrame, look: dict[str, style.Style], unit: Callable[[float], str]) -> None:
    if block["seq_len"].isna().all():
        style.explain(ax, "No length was measured.", ax.get_title(loc="left"))
        return
    for _, curve in _by_label(block, look):
        own, good = look[curve["system"].iloc[0]], curve.dropna(subset=["value"])
        ax.plot(good["seq_len"].astype(float), good["value"].astype(float), **_look(own, curve))
        spread = good.dropna(subset=["low", "high"])
        bars = spread["seq_len"].astype(float), spread["low"].astype(float), spread["high"].astype(float)
        ax.vlines(*bars, color=own.color, linewidth=2.5, alpha=0.4)
    style.length_axis(ax, block["seq_len"].dropna())
    _ends(ax, block, look, unit)
    style.unit_axis(ax, unit)


def _legend(label: str, curve: pd.DataFrame) -> str:
    """The exponents of time and memory and from which length on they were fitted."""
    if curve["value"].isna().all():
        return f"{label}: {REASONS.get(curve['status'].iloc[0], curve['status'].iloc[0])}"
    fits = curve.dropna(subset=["exponent"]).drop_duplicates("quantity").sort_values("quantity", ascending=False)
    if fits.empty:
        return f"{label}: too few lengths for a fit"
    slopes = ", ".join(f"{row.quantity} N^{row.exponent:.2f}" for row in fits.itertuples())
    return f"{label}: {slopes} (N ≥ {style.tokens(fits['fit_from'].max())})"


def _ends(ax: Axes, block: pd.DataFrame, look: dict[str, style.Style], unit: Callable[[float], str]) -> None:
    """A cross where a budget or an error ended a system, on the line of the budget, named above it."""
    ends = block[(block["status"] != "ok") & block["seq_len"].notna()].sort_values(["seq_len", "system"])
    lengths = ends.groupby("seq_len")["seq_len"]
    ends = ends.assign(nth=lengths.cumcount(), of=lengths.transform("size").astype(int))
    if ends.empty:
        return
    ax.set_yscale("log")
    low, high = ax.get_ylim() if block["value"].notna().any() else (np.nan, np.nan)
    budgets = block["budget"].dropna()
    level = float(budgets.max()) if len(budgets) else high if np.isfinite(high) else 1.0
    low, high = np.nanmin([low, level / 100]), np.nanmax([high, level])
    room = (16 + 10 * len(ends)) / 190  # of the axes' height, for a line of words an end
    ax.set_ylim(low, high * (high / low) ** (room / (1 - room)))
    if len(budgets):
        ax.axhline(level, color=style.MUTED, linewidth=0.9, linestyle=":")
        ax.text(
            0.01, level, f"budget {style.short(unit(level))}", transform=ax.get_yaxis_transform(), va="bottom", **SMALL
        )
    left, right = ax.get_xlim()
    for place, row in enumerate(ends.itertuples()):
        at = (float(row.seq_len), level)
        own = {"color": look[row.system].color, "textcoords": "offset points"}
        aside = 10.0 * (row.nth - (row.of - 1) / 2)  # side by side where several ended at one length
        ax.annotate("✕", at, xytext=(aside, 0), ha="center", va="center", fontsize=11, fontweight="bold", **own)
        side = "left" if np.log(at[0] / left) < 0.5 * np.log(right / left) else "right"
        words = f"{row.system}: {REASONS.get(row.status, row.status)}"
        ax.annotate(words, at, xytext=(0, 8 + 10 * place), ha=side, va="bottom", fontsize=7.5, **own)


def _published_times(ax: Axes, data: pd.DataFrame, look: dict[str, style.Style]) -> None:
    block = data[data["quantity"] == "attention time"]
    for system in style.order(block["system"]):
        curve = block[block["system"] == system]
        label = f"{system} ({curve['pattern'].iloc[0]}): N^{curve['exponent'].iloc[0]:.2f}"
        ax.plot(curve["seq_len"], curve["value"], color=look[system].color, marker=look[system].marker, label=label)
    style.length_axis(ax, block["seq_len"])
    style.unit_axis(ax, style.seconds)
    ax.set_title("Published: attention only, one RTX 3090")
    ax.legend(loc="upper left", fontsize=7.5)
    ax.set_ylim(top=block["value"].max() * 12)
    style.note(ax, block["source"].iloc[0])


def _published_lengths(ax: Axes, data: pd.DataFrame, look: dict[str, style.Style]) -> None:
    block = data[data["quantity"] == "longest sequence"]
    gpus = sorted(block["gpus"].unique())
    systems = style.order(block["system"])
    for index, system in enumerate(systems):
        rows = block[block["system"] == system].sort_values("gpus")
        places = np.arange(len(gpus)) + 0.4 * (index - (len(systems) - 1) / 2)
        bars = ax.bar(
            places, rows["value"], 0.36, color=look[system].color, label=f"{system} ({rows['pattern'].iloc[0]})"
        )
        ax.bar_label(bars, [f"{value / 1e3:,.0f}" for value in rows["value"]], fontsize=7.5, padding=1)
    ax.set_yscale("log")
    ax.set_ylim(top=block["value"].max() * 8)
    ax.set_ylabel("longest sequence (1,000 tokens)")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e3:,.0f}"))
    ax.set_xticks(range(len(gpus)), [f"{count:.0f}" for count in gpus])
    ax.set_xlabel("number of RTX 3090 (24 GB)")
    ax.set_title("Published: graphormer-slim on ogbn-products")
    ax.legend(loc="upper left", fontsize=7.5)
    style.note(ax, block["source"].iloc[0])


if __name__ == "__main__":
    style.main(draw)
