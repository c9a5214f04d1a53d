"""The style of all pictures: palette, axes, line styles, and the figure that is saved.

Figures are drawn with matplotlib's objects on its Agg canvas: no window, no global state, safe in any thread.
Each method has the colour of `rope_extend.report.colours`. Colour is never the only distinction: each line
has its name at its end, and dashes distinguish untrained from fine-tuned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from rope_extend.errors import RopeExtendError
from rope_extend.files import replacing
from rope_extend.plots.dark import with_dark_colours
from rope_extend.report.colours import HUES, Look, look
from rope_extend.report.colours import PLAIN as PLAIN_LOOK
from rope_extend.units import format_length

Floats = np.ndarray[Any, np.dtype[np.float64]]
Row = TypeVar("Row", bound=Any)
"""A row of results, with a `label`, a `method` and an `adapter`."""

FORMATS = (".png", ".svg", ".pdf")
PALETTE = tuple(light for light, _ in HUES)
"""Colours of lines that are no methods."""
PLAIN = PLAIN_LOOK[0]
"""The colour of plain RoPE and of models that were not changed."""
INK, QUIET, _GRID, _BEYOND = "#222222", "#777777", "#E4E4E4", "#F6F6F6"
_TEXT_HEIGHT = 0.047
"""Height of one line of labels, as a share of the axes."""
MOST_TICKS = 12
"""The largest number of labels that fit next to each other."""
DASHES = {
    "untrained": ((0, (4, 2)), "dashed"),
    "fine-tuned": ("-", "solid"),
    "context cropped": ((0, (1, 1.5)), "dotted"),
}
"""The dashes of each kind of row, for matplotlib and in words."""

LineEnd = tuple[float, float, str, Any]
"""The end of a line in data coordinates, its name, and its colour."""


class Canvas:
    """A figure with a heading and one or two panels.

    Args:
        path: the output file; the suffix gives the format.
        title: the heading.
        subtitle: the line below the heading.
        panels: number of axes, one above the other.
        room: free space between axes and heading, in points.

    Raises:
        RopeExtendError: the suffix is not a known format.
    """

    def __init__(
        self, path: str | Path, title: str, subtitle: str = "", *, panels: int = 1, room: float = 0
    ) -> None:
        self.path = Path(path)
        if self.path.suffix.lower() not in FORMATS:
            raise RopeExtendError(
                f"unknown picture format {self.path.suffix!r}: {str(path)!r} must end in {', '.join(FORMATS)}"
            )
        height = 4.8 if panels == 1 else 6.4
        self.figure = Figure(figsize=(8, height), layout="constrained", facecolor="white")
        FigureCanvasAgg(self.figure)
        grid = self.figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=[3, 2][:panels])
        self.panels: list[Axes] = list(grid[:, 0])
        self.axes = self.panels[0]
        for axes in self.panels:
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(QUIET)
            axes.tick_params(colors=INK, labelsize=9.5)
            axes.grid(axis="y", color=_GRID, linewidth=0.8)
            axes.set_axisbelow(True)
        pad = room + (26 if subtitle else 10)
        self.axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=pad)
        self.axes.annotate(
            subtitle, (0, 1), (0, room + 8), xycoords="axes fraction", textcoords="offset points",
            color=QUIET, fontsize=9.5,
        )  # fmt: skip

    def save(self) -> Path:
        """Write the file, in a directory that is created if missing; returns its path."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as partial:
            write_figure(self.figure, partial, self.path.suffix[1:].lower())
        return self.path


def write_figure(figure: Figure, path: Path, kind: str, dpi: int = 200) -> None:
    """Write a figure; an equal figure makes an equal file. SVG files have colours for dark pages too.

    Args:
        figure: the figure.
        path: the file; its suffix does not matter.
        kind: `png`, `svg` or `pdf`.
        dpi: dots per inch of a PNG file.
    """
    unstated: dict[str, dict[str, None]] = {
        "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
        "pdf": {"CreationDate": None},
    }
    # Text as text, and names in an SVG file that are not random.
    with rc_context({"svg.hashsalt": "rope_extend", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=dpi, format=kind, metadata=unstated.get(kind))
    if kind == "svg":
        path.write_text(with_dark_colours(path.read_text("utf-8")), "utf-8")


def legend(rows: Sequence[Row], cropped: Callable[[Row], bool]) -> str:
    """The meaning of the dashes, if there is more than one kind of row."""
    kinds = {_kind(row, cropped) for row in rows}
    return " · ".join(
        f"{name}: {kind}" for kind, (_, name) in DASHES.items() if kind in kinds and len(kinds) > 1
    )


def kind_of(adapter: str | None, *, cropped: bool) -> str:
    """The kind of a row, a key of `DASHES`; `adapter` is None for an untrained model."""
    if cropped:
        return "context cropped"
    return "untrained" if adapter is None else "fine-tuned"


def looks_of_rows(rows: Sequence[tuple[str, str]]) -> list[Look]:
    """The look of each row, given as `(method, kind)`: rows that would look the same get other shades."""
    seen: Counter[tuple[str, str]] = Counter()
    looks = []
    for method, kind in rows:
        looks.append(look(method).shaded(seen[method, kind]))
        seen[method, kind] += 1
    return looks


def _kind(row: Row, cropped: Callable[[Row], bool]) -> str:
    return kind_of(row.adapter, cropped=cropped(row))


def method_colour(method: str) -> str:
    """The colour of a method, in every picture."""
    return look(method).colour


def line_styles(rows: Sequence[Row], cropped: Callable[[Row], bool]) -> list[tuple[Row, dict[str, Any]]]:
    """Each row with the style of its line: the colour of its method, and the dashes of its kind.

    Further rows of one method and kind have other shades and markers.

    Args:
        rows: one line each.
        cropped: whether the context of a row was cropped.

    Raises:
        RopeExtendError: there are no rows.
    """
    if not rows:
        raise RopeExtendError("no rows to draw")
    kinds = [_kind(row, cropped) for row in rows]
    looks = looks_of_rows([(row.method, kind) for row, kind in zip(rows, kinds, strict=True)])
    styled = []
    for row, kind, found in zip(rows, kinds, looks, strict=True):
        style = {
            "color": found.colour,
            "marker": found.marker,
            "linestyle": DASHES[kind][0],
            "linewidth": 1.8,
        }
        if row.adapter is None:
            style["markerfacecolor"] = "white"
        styled.append((row, style))
    return styled


def draw_line(axes: Axes, x: Floats, y: Floats, label: str, **style: Any) -> list[LineEnd]:
    """Draw the finite part of a line; returns its end, or an empty list if no value is finite."""
    finite = np.isfinite(y)
    if len(x) > 2 * MOST_TICKS:  # markers would hide the line
        style["marker"] = ""
    axes.plot(x[finite], y[finite], label=label, clip_on=False, zorder=3, **style)
    return [(x[finite][-1], y[finite][-1], label, style["color"])] if finite.any() else []


def name_ends(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Write the name of each line next to its end. Names that would overlap are moved apart."""
    if not ends:
        return
    axes.set_ylim(axes.get_ylim())  # fix the limits: the heights below are shares of them
    to_axes = axes.transData + axes.transAxes.inverted()
    shares = [float(to_axes.transform((x, y))[1]) for x, y, _, _ in ends]
    heights = spread_apart(shares, _TEXT_HEIGHT)
    for (x, y, label, colour), share in zip(ends, heights, strict=True):
        axes.annotate(
            label, (x, y), (1.035, share), textcoords="axes fraction", va="center", fontsize=9.5,
            color=tuple(0.75 * part for part in to_rgb(colour)),  # darker, as thin strokes look paler
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.6, "shrinkB": 3,
                        "relpos": (0, 0.5)},
            annotation_clip=False,
        )  # fmt: skip


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in 0 … 1 apart to at least `gap`, with the least squared movement, in the same order.

    With q_i = height_i − i · gap, the condition is that q does not fall. This is isotonic regression, which
    pooling adjacent violators solves exactly.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([heights[i] - rank * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [fmean(pool) for pool in pools for _ in pool]
    highest = max(0.0, 1 - (len(heights) - 1) * gap)
    spread = [0.0] * len(heights)
    for rank, i in enumerate(order):
        spread[i] = min(max(flat[rank], 0.0), highest) + rank * gap
    return spread


def perplexity_axis(axes: Axes) -> None:
    """Make the vertical axis one of perplexities, logarithmic."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_ylabel("perplexity (lower is better)", color=INK)


def length_axis(axes: Axes, lengths: Sequence[int], label: str) -> None:
    """Make the horizontal axis one of lengths in tokens, logarithmic."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(length_ticks(lengths, MOST_TICKS)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_length(round(value))))
    axes.set_xlabel(label, color=INK)


def length_ticks(lengths: Sequence[float], most: int) -> list[float]:
    """The lengths whose labels fit next to each other on a logarithmic axis: powers of two first.

    Args:
        lengths: the measured lengths, in tokens.
        most: the largest number of labels that fit.
    """
    logs = {length: math.log2(length) for length in sorted(set(lengths), reverse=True)}
    room = (max(logs.values()) - min(logs.values())) / most
    powers = [length for length in logs if length == round(length) and round(length).bit_count() == 1]
    kept: list[float] = []
    for length in powers if len(logs) > most and len(powers) > 2 else [*powers, *logs]:
        if all(abs(logs[other] - logs[length]) >= room for other in kept if other != length):
            kept.append(length)
    return sorted(set(kept))


def mark_window(axes: Axes, trained_length: int) -> None:
    """Mark the trained window, in tokens, on an axis of lengths, and shade the part beyond it."""
    left, right = axes.get_xlim()
    axes.set_xlim(left, right)  # fix the limits
    at, text = (float(trained_length), 1), f"trained window, {format_length(trained_length)}"
    if left <= trained_length <= right:
        axes.axvline(trained_length, color=QUIET, linewidth=1, zorder=1)
    else:
        text = f"{'beyond' if trained_length < left else 'within'} the {text}"
        at = (left, 1)
    axes.axvspan(max(left, trained_length), max(right, trained_length), color=_BEYOND, zorder=0, linewidth=0)
    axes.annotate(
        text, at, (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET,
        fontsize=9,
    )  # fmt: skip
