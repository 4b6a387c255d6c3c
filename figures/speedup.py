"""Speed-up of a training step over gp-flash, absolute times printed on the bars.

One panel a (data set, model) at the longest sequence that gp-flash can do, and a second one at a shorter length where
more systems have a step time. Only steps timed by one class of machine are divided by each other. Published values
stand in a panel of their own: they come from another machine, and from attention to random blocks.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures import style
from figures.records import (
    REASONS,
    MachineMismatch,
    Tables,
    amortised_columns,
    ended,
    main_steps,
    ratio,
    reference,
)

BASE = "gp-flash"
WORDS = {"fontsize": 8, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8}}
PANEL = ["dataset", "model", "seq_len"]
COLUMNS = [
    "panel",
    *PANEL,
    "system",
    "label",
    "every",
    "step_s",
    "base_s",
    "speedup",
    "note",
    "gpu",
    "pattern",
    "source",
]


def frame(tables: Tables) -> pd.DataFrame:
    """The bars. `panel` is measured or published; `every` is the k of an amortised step; `note` says why no ratio."""
    blocks = []
    for (dataset, model), rows in tables.scaling.groupby(["dataset", "model"], sort=True):
        for length in lengths(rows):
            blocks += [{"dataset": dataset, "model": model, "seq_len": length} | bar for bar in bars(rows, length)]
    ours = pd.DataFrame(blocks).assign(panel="measured") if blocks else pd.DataFrame()
    return pd.concat([ours, published()]).reindex(columns=COLUMNS).reset_index(drop=True)


def lengths(rows: pd.DataFrame) -> list[int]:
    """The longest length with a gp-flash step, then the longest one at which the most systems have a step."""
    steps = main_steps(rows)
    count = steps.groupby("seq_len")["system"].nunique()
    common = count[count.index.isin(steps.loc[steps["system"] == BASE, "seq_len"])]
    if common.empty:
        return []
    longest = int(common.index.max())
    fullest = int(common[common == common.max()].index.max())
    return [longest] if common[longest] == common[fullest] else [longest, fullest]


def bars(rows: pd.DataFrame, length: int) -> list[dict]:
    """One bar a system and kind of step at `length`; a system without a step there keeps its place and says why."""
    here = main_steps(rows[rows["seq_len"] == length]).set_index("system", drop=False)
    base, gone = here.loc[BASE], ended(rows)
    found = []
    for system in style.order(rows["system"]):
        if system not in here.index:
            found.append({"system": system, "label": _name(system), "note": _absence(gone, system, length)})
            continue
        row = here.loc[system]
        kinds = [(None, row["step_s"])]
        if row["kind"] == "sparse":
            kinds += [(k, row[name]) for k, name in amortised_columns(rows).items() if pd.notna(row[name])]
        for k, step_s in kinds:
            label = f"{system}, a dense step in {k}" if k else _name(system, several=len(kinds) > 1)
            bar = {"system": system, "label": label, "every": k, "step_s": step_s, "base_s": base["step_s"]}
            try:
                bar["speedup"] = ratio(base, row) * row["step_s"] / step_s
            except MachineMismatch:
                bar["note"] = "another machine"
            found.append(bar)
    return found


def _name(system: str, several: bool = False) -> str:
    control = system in style.SYSTEMS and style.SYSTEMS[system].control
    return f"{system}, sparse step" if several else f"{system} (control)" if control else system


def _absence(gone: pd.DataFrame, system: str, length: int) -> str:
    mine = gone[gone["system"] == system]
    if mine.empty:
        return "not measured at this length"
    last = mine.iloc[-1]
    reason = REASONS.get(last["status"], last["status"])
    at = "" if pd.isna(last["seq_len"]) or last["seq_len"] == length else f" at {style.tokens(last['seq_len'])} tokens"
    return f"{reason} budget met{at}" if last["status"] in ("oom", "timeout") else f"{reason}{at}"


def published() -> pd.DataFrame:
    """The published attention times over gp-flash's of the same table, and the headline."""
    table = reference("fig11a_attention_ms")
    base = table[table["system"] == BASE].set_index("seq_len")["ms"]
    base_ms = table["seq_len"].map(base)
    attention = table.assign(
        panel="published",
        label=table["system"] + ", " + table["seq_len"].map(style.tokens) + " tokens",
        step_s=table["ms"] / 1e3,
        base_s=base_ms / 1e3,
        speedup=base_ms / table["ms"],
        note="attention only",
    )
    claim = reference("headline").query("unit == 'times'")
    headline = claim.assign(panel="published", system="torchgt", label=claim["claim"], speedup=claim["value"])
    headline = headline.assign(note="headline")
    return pd.concat([attention[attention["system"] != BASE], headline])


def draw(tables: Tables) -> tuple[Figure, pd.DataFrame]:
    """Draw the speed-up of a step over gp-flash, by model and sequence length."""
    data = frame(tables)
    look = style.palette([*tables.systems, *data["system"].dropna()])
    blocks = list(data[data["panel"] == "measured"].groupby(PANEL, sort=False))
    rows = [blocks[start : start + 2] for start in range(0, len(blocks), 2)] or [[]]
    heights = [0.9 + 0.23 * max([6, *(len(block) for _, block in row)]) for row in rows] + [2.5]
    fig = Figure(figsize=(style.WIDTH, sum(heights)), layout="constrained")
    grid = fig.add_gridspec(len(heights), 2, height_ratios=heights)
    several = len({dataset for (dataset, _, _), _ in blocks}) > 1
    for place, row in enumerate(rows):
        for column, ((dataset, model, length), block) in enumerate(row):
            ax = fig.add_subplot(grid[place, column if len(row) == 2 else slice(None)])
            _bars(ax, block, look)
            ax.set_title(f"{model}, {style.tokens(length)} tokens" + (f", {dataset}" if several else ""))
            ax.set_xlabel(f"times faster than {BASE} (one training step)")
    if not blocks:
        style.explain(fig.add_subplot(grid[0, :]), f"No step of {BASE} was measured:\nno speed-up to show.", "Measured")
    _published(fig.add_subplot(grid[-1, :]), data, look)
    return fig, data


def _published(ax: Axes, data: pd.DataFrame, look: dict[str, style.Style]) -> None:
    rows = data[(data["panel"] == "published") & (data["note"] == "attention only")]
    _bars(ax, rows.assign(note=None).sort_values(["system", "seq_len"]), look)
    ax.set_title("Published: attention only, one RTX 3090")
    ax.set_xlabel(f"times faster than {BASE} (attention, forward + backward)")
    headline = data[data["note"] == "headline"].iloc[0]
    pattern = rows.loc[rows["system"] == "torchgt", "pattern"].iloc[0]
    style.note(
        ax,
        f"torchgt attends to {pattern} there, not to the graph's pairs.\n"
        "Source: TorchGT (SC'24) Fig. 11(a), data of the public artifact.\n"
        f"Headline of the abstract: training up to {headline['speedup']:g}× (GPU and pattern not stated).",
    )


def _bars(ax: Axes, block: pd.DataFrame, look: dict[str, style.Style]) -> None:
    """Horizontal bars from 1 to the speed-up on a log axis; the words beside a bar are its ratio and absolute time."""
    places = np.arange(len(block))
    ratios = block["speedup"].astype(float).to_numpy()
    styles = [look[system] for system in block["system"]]
    known = np.where(np.isfinite(ratios), ratios, 1.0)
    for place, value, own, every in zip(places, known, styles, block["every"], strict=True):
        # A lighter bar is the same system with dense steps in between.
        kind = {"color": own.fill, "edgecolor": own.color, "hatch": "////" if own.control else None}
        ax.barh(
            place, value - 1.0, left=1.0, height=0.68, alpha=0.55 if pd.notna(every) else 1.0, linewidth=0.8, **kind
        )
    ax.axvline(1.0, color=style.INK, linewidth=0.9)
    low, high = min(1.0, np.min(known)), max(1.0, np.max(known))
    span = max(high / low, 10.0)
    ax.set_xlim(low / span**0.03, low * span**1.9)  # the right part is for the words
    style.unit_axis(ax, style.times, "x")
    for place, value, words in zip(places, known, _words(block), strict=True):
        ax.annotate(words, (max(value, 1.0), place), xytext=(4, 0), textcoords="offset points", va="center", **WORDS)
    ax.set_yticks(places, block["label"])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")


def _words(block: pd.DataFrame) -> list[str]:
    words = []
    for faster, step_s, reason in zip(block["speedup"], block["step_s"], block["note"], strict=True):
        parts = [style.times(faster)] if pd.notna(faster) else []
        parts += [style.seconds(step_s)] if pd.notna(step_s) else []
        parts += [f"✕ {reason}"] if pd.notna(reason) else []
        words.append("  ·  ".join(parts))
    return words


if __name__ == "__main__":
    style.main(draw)
