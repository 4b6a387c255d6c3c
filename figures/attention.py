"""Attention alone: time forward and backward, and extra memory, against sequence length and against width.

One row of panels a benchmark. The dotted line is the floor: the time in which the hardware, as measured in the same
run, could move every operand once or do the operations, whichever takes longer. Memory is what an implementation needs
beyond inputs, output and gradients.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import style
from figures.records import REASONS, Tables

COLUMNS = ["bench", "impl", "num_tokens", "heads", "head_dim", "pairs", "phase", "status", "median", "q25", "q75", "n"]
COLUMNS += ["floor_s", "memory_bytes", "precision", "bias", "threads", "cpu_model", "machine_id"]
NAMES = {"pyg_transformer_conv": "PyG TransformerConv", "cpu": "torchgt (impl cpu)", "scatter": "gather/scatter"}
LOOKS = {"cpu": "torchgt", "triton": "torchgt", "scatter": "gp-sparse", "dense": "gp-flash"}
LOOKS |= {"pyg_transformer_conv": "sage", "reference": "gp-raw"}
PANELS = (("forward", "median"), ("backward", "median"), ("total", "memory_bytes"))
TITLES = {"forward": "forward", "backward": "backward", "total": "extra memory"}


def frame(tables: Tables) -> pd.DataFrame:
    """The points, in the order of the benchmarks. Empty where a trial met its budget or was refused."""
    return tables.attention.reindex(columns=COLUMNS).reset_index(drop=True)


def draw(tables: Tables) -> tuple[Figure, pd.DataFrame]:
    """Draw time and memory of attention alone."""
    data = frame(tables)
    blocks = [_place(block) for _, block in data.groupby("bench", sort=True)]
    fig = Figure(figsize=(style.WIDTH, 3.2 * max(1, len(blocks))), layout="constrained")
    if not blocks:
        style.explain(fig.subplots(), "No attention was measured.", "Attention alone")
        return fig, data
    parts = fig.subfigures(len(blocks), 1, squeeze=False)[:, 0]
    for part, block in zip(parts, blocks, strict=True):
        axes = part.subplots(1, 3)
        for ax, (phase, column) in zip(axes, PANELS, strict=True):
            _panel(ax, block[block["phase"] == phase], column)
            ax.set_title(TITLES[phase])
        impls = list(dict.fromkeys(block["impl"]))
        handles = [Line2D([], [], **_look(impl)) for impl in impls]
        labels = [_legend(impl, block) for impl in impls]
        handles.append(Line2D([], [], color=style.MUTED, linestyle=":"))
        part.legend(handles, [*labels, "floor"], loc="outside lower center", ncols=len(handles))
        part.suptitle(_title(block), fontsize=9.5, x=0.01, ha="left")
    return fig, data


def _place(block: pd.DataFrame) -> pd.DataFrame:
    """Where a row stands: by length where lengths differ, else by shape."""
    lengths = block["num_tokens"].nunique() > 1
    shapes = block[["heads", "head_dim"]].drop_duplicates().sort_values(["heads", "head_dim"])
    if lengths:  # one shape a curve would need another legend: the shape with most rows is drawn
        heads, dim = block.groupby(["heads", "head_dim"]).size().idxmax()
        block = block[(block["heads"] == heads) & (block["head_dim"] == dim)]
        return block.assign(x=block["num_tokens"].astype(float), by="length")
    order = {tuple(shape): place for place, shape in enumerate(_by_width(shapes))}
    places = [order[heads, dim] for heads, dim in zip(block["heads"], block["head_dim"], strict=True)]
    return block.assign(x=[float(place) for place in places], by="width")


def _by_width(shapes: pd.DataFrame) -> list[tuple[int, int]]:
    pairs = list(shapes.itertuples(index=False, name=None))
    return sorted(pairs, key=lambda shape: (shape[0] * shape[1], shape))


def _panel(ax: Axes, rows: pd.DataFrame, column: str) -> None:
    for impl, curve in rows.groupby("impl", sort=False):
        curve = curve.dropna(subset=[column]).sort_values("x")
        values = curve[column].clip(lower=1.0) if column == "memory_bytes" else curve[column]
        ax.plot(curve["x"], values.astype(float), **_look(impl))
        if column == "median":
            spread = curve["x"], curve["q25"].astype(float), curve["q75"].astype(float)
            ax.vlines(*spread, color=_look(impl)["color"], linewidth=2.5, alpha=0.4)
    if column == "median":
        floor = rows.drop_duplicates("x").sort_values("x")
        ax.plot(floor["x"], floor["floor_s"].astype(float), color=style.MUTED, linestyle=":", linewidth=1.2)
    style.unit_axis(ax, style.seconds if column == "median" else style.size)
    if rows["by"].iloc[0] == "length":
        style.length_axis(ax, rows["x"])
        ax.xaxis.set_tick_params(labelsize=7.5)
    else:
        shapes = rows.drop_duplicates("x").sort_values("x")
        labels = [f"{row.heads}×{row.head_dim}" for row in shapes.itertuples()]
        ax.set_xticks(shapes["x"], labels)
        ax.set_xlabel("heads × head dimension")


def _look(impl: str) -> dict:
    own = style.palette([*LOOKS.values(), impl])[LOOKS.get(impl, impl)]
    return {"color": own.color, "marker": own.marker}


def _legend(impl: str, block: pd.DataFrame) -> str:
    name = NAMES.get(impl, impl)
    bad = block.loc[(block["impl"] == impl) & (block["status"] != "ok"), "status"]
    return f"{name} ({REASONS.get(bad.iloc[0], bad.iloc[0])} from some point on)" if len(bad) else name


def _title(block: pd.DataFrame) -> str:
    first = block.iloc[0]
    if first["by"] == "length":
        return f"Attention against sequence length: {first['heads']} heads × {first['head_dim']}, {first['precision']}"
    return f"Attention against width: {first['num_tokens']:,} tokens, {first['pairs']:,.0f} pairs, {first['precision']}"


if __name__ == "__main__":
    style.main(draw)
