"""What all figures share: look of a system, units, explanatory panels, saving, and the command line.

Importing this module sets Matplotlib's defaults for the process. A figure of one's own is a function from tables to a
figure and the data frame behind it:

    from figures import style

    def draw(tables):
        fig, ax = style.panels(1, 1)
        ...
        return fig, data

    if __name__ == "__main__":
        style.main(draw)
"""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from figures.records import Tables, load_tables, write_atomic

WIDTH = 9.0
"""Inches. A README shows a figure some 850 pixels wide, so that 9 points are about 12 pixels there."""

DPI = 160

INK, MUTED, FAINT = "#1a1a1a", "#666666", "#d9d9d9"

matplotlib.rcParams.update(
    {
        "font.family": "DejaVu Sans",  # comes with Matplotlib, hence the same everywhere
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.5,
        "pdf.fonttype": 42,
        "figure.dpi": DPI,
    }
)


@dataclass(frozen=True)
class Style:
    """Colour and marker of one system, the same in every figure. Controls are drawn hollow and hatched."""

    color: str
    marker: str
    control: bool = False

    @property
    def fill(self) -> str:
        return "white" if self.control else self.color


# Okabe and Ito's colours for the systems that meet most often, Paul Tol's "muted" for the rest: told apart with any
# colour vision, and never by colour alone, for every system has a marker of its own.
SYSTEMS = {
    "torchgt": Style("#D55E00", "o"),
    "gp-flash": Style("#0072B2", "s"),
    "gp-sparse": Style("#009E73", "^"),
    "gp-raw": Style("#CC79A7", "D"),
    "sage": Style("#E69F00", "v"),
    "gcn": Style("#56B4E9", "P"),
    "gat": Style("#882255", "<"),
    "gin": Style("#117733", ">"),
    "nodeformer": Style("#332288", "p"),
    "mlp": Style("#555555", "d", control=True),
    "random-blocks": Style("#000000", "h", control=True),
}

_OTHERS = [Style(c, m) for c, m in zip(("#999933", "#AA4499", "#44AA99", "#661100", "#6699CC"), "*X8H^", strict=True)]


def palette(systems: Iterable[str]) -> dict[str, Style]:
    """The style of each system; names that are not built in take the remaining colours in alphabetical order.

    Pass all systems of the tables (`tables.systems`), so that a user's system looks the same in every figure.
    """
    names = list(dict.fromkeys(systems))
    unknown = sorted(name for name in names if name not in SYSTEMS)
    own = {name: _OTHERS[index % len(_OTHERS)] for index, name in enumerate(unknown)}
    return {name: SYSTEMS[name] if name in SYSTEMS else own[name] for name in names}


def order(systems: Iterable[str]) -> list[str]:
    """Built-in systems in their usual order with the controls last, a user's own systems before the controls."""
    names = sorted(set(systems))
    built_in = list(SYSTEMS)
    return sorted(names, key=lambda n: (n in SYSTEMS and SYSTEMS[n].control, built_in.index(n) if n in SYSTEMS else 99))


def seconds(value: float) -> str:
    """A duration with three significant digits and its unit: 850 µs, 12.3 ms, 1.20 s, 12.5 min."""
    if not math.isfinite(value):
        return "–"
    if value < 0.9995e-3:
        return f"{_digits(value * 1e6)} µs"
    if value < 0.9995:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value)} s" if value < 600 else f"{_digits(value / 60)} min"


def size(value: float) -> str:
    """Bytes with three significant digits and a binary unit: 512 KiB, 1.50 GiB."""
    if not math.isfinite(value):
        return "–"
    power = next((power for power in range(4) if value < 999.5 * 1024**power), 4)
    return f"{_digits(value / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def times(value: float) -> str:
    """A ratio: 118×, 3.42×, 0.87×."""
    return f"{_digits(value)}×" if math.isfinite(value) else "–"


def _digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{float(f'{value:.3g}') if abs(value) < 1000 else value:,.{decimals}f}"


def metric(name: str | None) -> tuple[str, float]:
    """Label of a metric's axis and the factor to its unit; shares are shown in percent."""
    if name in ("mae", "rmse", "mse", "loss"):
        return str(name), 1.0
    return f"{name or 'metric'} (%)", 100.0


def panels(
    rows: int, columns: int, *, height: float = 3.0, width: float = WIDTH, **keywords
) -> tuple[Figure, np.ndarray]:
    """A figure of `rows` x `columns` panels, each `height` inches high; axes as a 2-d array."""
    fig = Figure(figsize=(width, height * rows), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **keywords)


def explain(ax: Axes, text: str, title: str = "") -> None:
    """Turn `ax` into a panel of words: what would stand here, and why it does not."""
    ax.clear()
    ax.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    ax.set_title(title)
    for spine in ax.spines.values():
        spine.set(visible=True, color=FAINT)
    ax.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, transform=ax.transAxes, wrap=True)


def note(ax: Axes, text: str) -> None:
    """A line of small print below the axis label: source, GPU, pattern."""
    label = ax.get_xlabel()
    ax.set_xlabel(label)
    ax.annotate(
        text,
        (0, 0),
        xytext=(0, -33 if label else -20),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=7.5,
        color=MUTED,
    )


def length_axis(ax: Axes, lengths: Iterable[float]) -> None:
    """A log axis of sequence lengths that names the lengths measured, or every second one where they are many."""
    ax.set_xscale("log", base=2)
    ticks = sorted({float(length) for length in lengths})
    ticks = ticks[:: -(-len(ticks) // 6)] if ticks else ticks
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [tokens(tick) for tick in ticks])
    ax.set_xlabel("sequence length (tokens)")


def tokens(value: float) -> str:
    """A sequence length in full, because K is 1,000 in some papers and 1,024 in others."""
    return f"{value:,.0f}"


def unit_axis(ax: Axes, text: Callable[[float], str], which: str = "y") -> None:
    """A log axis whose ticks carry their own unit: `text` is `seconds`, `size` or `times`. Call it after plotting."""
    base = 2 if text is size else 10
    axis = getattr(ax, f"{which}axis")
    getattr(ax, f"set_{which}scale")("log", base=base)
    low, high = getattr(ax, f"get_{which}lim")()
    subs = (1,)
    if high < (200 if base == 10 else 6) * low:  # a short range holds too few powers
        subs = (1, 2, 5) if base == 10 else (1, 1.25, 1.5, 1.75)
    axis.set_major_locator(LogLocator(base, subs=subs, numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(text(value))))
    axis.set_minor_locator(NullLocator())


def short(text: str) -> str:
    """A quantity without trailing zeros, for round values: 20.0 s -> 20 s, 0.100× -> 0.1×."""
    return re.sub(r"(\.\d*?)0+(?!\d)", lambda match: match[1].rstrip("."), text)


def save(fig: Figure, data: pd.DataFrame, prefix: str | Path) -> list[Path]:
    """Write PREFIX.png, .pdf and .csv, byte for byte the same for the same figure; each file whole or not at all."""
    _freeze(fig)
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None, "Producer": None})):
        buffer = io.BytesIO()
        fig.savefig(buffer, format=suffix[1:], dpi=DPI, metadata=metadata, facecolor="white")
        written.append((suffix, buffer.getvalue()))
    written.append((".csv", data.to_csv(index=False).encode()))
    paths = []
    for suffix, content in written:
        paths.append(Path(f"{prefix}{suffix}"))
        write_atomic(paths[-1], content)
    return paths


def _freeze(fig: Figure) -> None:
    """Lay out once and round: the layout's solver leaves a noise of 1e-16, which now and then moves a pixel."""
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for ax in fig.axes:
        ax.set_position([round(side, 6) for side in ax.get_position().bounds])


def main(draw: Callable[[Tables], tuple[Figure, pd.DataFrame]], arguments: list[str] | None = None) -> None:
    """The command line of a figure: `--tables DIR --out PREFIX`. Exits with 2 and one line if the tables are unfit."""
    parser = argparse.ArgumentParser(description=(draw.__doc__ or "Draw a figure.").splitlines()[0])
    parser.add_argument("--tables", required=True, help="folder with runs.csv, scaling.csv and history.csv")
    parser.add_argument("--out", required=True, help="path of the figure without its suffix")
    options = parser.parse_args(arguments)
    try:
        save(*draw(load_tables(options.tables)), options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
