"""The style of all pictures: palette, axes, line styles, and the figure that is saved.

Figures are drawn with matplotlib's objects on its Agg canvas: no window, no global state, safe in any thread.
The hues follow Okabe and Ito, and have a contrast of at least 3:1 on white. Colour is never the only
distinction: lines have markers, and dashes distinguish untrained from fine-tuned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any
from zlib import crc32

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from rope_extend.files import replacing
from rope_extend.method_names import method_names
from rope_extend.units import format_length

Floats = np.ndarray[Any, np.dtype[np.float64]]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07a00", "#6f4ba8", "#00707a", "#8a4b2d")
PLAIN = "#5f5f5f"
"""The colour of plain RoPE and of models that were not changed."""
MARKERS = ("o", "s", "^", "D", "v", "P")
METHODS = (  # of each colour of the palette: those of a report by default differ for the colour-blind too
    "jet_long alibi learned power sinusoidal",
    "ntk clipped linear_attention rerope string",
    "yarn drope logn resonance t5_bias",
    "self_extend sandwich truncated",
    "dual_chunk dynamic_linear nope sinks xpos",
    "dynamic_ntk longrope fire ntk_by_parts shaw",
    "linear llama3 near_far ntk_mixed short_original",
    "dynamic_yarn abf kerple p_rope",
)
INK, QUIET, _GRID = "#222222", "#777777", "#E4E4E4"
SIZE = (5.8, 3.6)
"""Width and height of a picture in inches, without its legend. Its words can still be read on a phone."""
TITLE_TEXT, TEXT = 13.0, 9.5
"""Sizes of the heading and of all other text, in points."""
LINE_OF_TITLE, LINE_OF_TEXT = 46, 72
"""Characters of these that fit into the width of a picture."""
LINE, MARKER, INTERVAL = 1.8, 5.5, 4.0
"""Widths of lines, of their markers and of intervals, in points."""
MOST_TICKS = 12
"""The largest number of labels that fit next to each other."""
UNTRAINED, TUNED, CROPPED = "--", "-", ":"
"""The dashes of each kind of row."""


class Canvas:
    """A figure with a heading.

    Args:
        path: the output file; the suffix gives the format, `.png` or `.svg`.
        title: the heading.
        subtitle: the line below the heading.
        room: free space between axes and heading, in points.
    """

    def __init__(self, path: str | Path, title: str, subtitle: str = "", *, room: float = 0) -> None:
        self.path = Path(path)
        self.figure = Figure(figsize=SIZE, layout="constrained", facecolor="white")
        FigureCanvasAgg(self.figure)
        self.axes: Axes = self.figure.subplots()
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.spines[["left", "bottom"]].set_color(QUIET)
        self.axes.tick_params(colors=INK, labelsize=TEXT)
        self.axes.grid(axis="y", color=_GRID, linewidth=0.8)
        self.axes.set_axisbelow(True)
        below = fill(subtitle, LINE_OF_TEXT)
        pad = room + 10 + 14 * len(below.splitlines())
        title = "\n".join(fill(line, LINE_OF_TITLE) for line in title.splitlines())
        self.axes.set_title(title, loc="left", color=INK, fontsize=TITLE_TEXT, fontweight="bold", pad=pad)
        self.axes.annotate(
            below, (0, 1), (0, room + 8), xycoords="axes fraction", textcoords="offset points",
            color=QUIET, fontsize=TEXT, parse_math=False,
        )  # fmt: skip

    def save(self) -> Path:
        """Write the file, in a directory that is created if missing; returns its path.

        The legend is below the axes, and the picture is higher by its lines.
        """
        handles, labels = self.axes.get_legend_handles_labels()
        if labels:
            columns = max(1, min(3, 84 // (max(map(len, labels)) + 8)))
            width, height = self.figure.get_size_inches()
            self.figure.set_size_inches(width, height + 0.2 * math.ceil(len(labels) / columns))
            shown = self.figure.legend(
                handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=TEXT,
                labelcolor=INK,
            )  # fmt: skip
            for text in shown.get_texts():
                text.set_parse_math(False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as partial:
            write_figure(self.figure, partial, self.path.suffix[1:].lower())
        return self.path


def write_figure(figure: Figure, path: Path, kind: str) -> None:
    """Write a figure as `png` or `svg`, whatever the suffix; an equal figure makes an equal file."""
    unstated = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
    # Text as text, and names in an SVG file that are not random.
    with rc_context({"svg.hashsalt": "rope_extend", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=200, format=kind, metadata=unstated)


def method_colour(method: str) -> str:
    """The colour of a method in every picture; of a composition such as `resonance(yarn)`, the outer's."""
    return _method_style(method)[0]


def _method_style(method: str) -> tuple[str, int]:
    """The colour of a method and the number of its marker, which differs from others of this colour.

    A method that is not in `METHODS` has them by its name, so that it changes no other method's.
    """
    name = method.partition("(")[0].strip()
    if name == "none" or name not in method_names():
        return PLAIN, len(MARKERS) - 1
    for number, names in enumerate(METHODS):
        if name in (listed := names.split()):
            return PALETTE[number], number + listed.index(name)
    number = crc32(name.encode()) % len(PALETTE)
    return PALETTE[number], number


def line_styles(rows: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Each `EvaluationRow` with the style of its line: the colour of its method, the dashes of its kind.

    Untrained rows are dashed, fine-tuned rows solid, and rows with a cropped context dotted. Further rows of
    one method and kind have other shades and markers.
    """
    seen: Counter[tuple[str, str]] = Counter()
    styled = []
    for row in rows:
        dashes = CROPPED if row.cropped else UNTRAINED if row.adapter is None else TUNED
        (colour, number), step = _method_style(row.method), seen[row.method, dashes]
        seen[row.method, dashes] += 1
        shade = to_hex([(1 - min(step, 3) / 5) * channel for channel in to_rgb(colour)])
        style = {
            "color": shade, "marker": MARKERS[(number + step) % len(MARKERS)], "linestyle": dashes,
            "linewidth": LINE, "markersize": MARKER, "label": f" {row.label:.60}",
            "markerfacecolor": "white" if row.adapter is None else shade,
        }  # fmt: skip
        styled.append((row, style))
    return styled


def draw_line(axes: Axes, x: Floats, y: Floats, *, inside: bool = False, **style: Any) -> None:
    """Draw the finite part of a line, if need be only `inside` the axes; one without is not in the legend."""
    finite = np.isfinite(y)
    if len(x) > 2 * MOST_TICKS:  # markers would hide the line
        style["marker"] = ""
    if finite.any():
        axes.plot(x[finite], y[finite], clip_on=inside, zorder=3, **style)


def perplexity_axis(axes: Axes) -> None:
    """Make the vertical axis one of perplexities, logarithmic."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    few = MaxNLocator(6) if high < 5 * low else LogLocator(subs=(1, 2, 5) if high < 200 * low else (1, 3))
    axes.yaxis.set_major_locator(few)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_ylabel("perplexity (lower is better)", color=INK)


def length_axis(axes: Axes, lengths: Sequence[int], label: str, *, linear: bool = False) -> None:
    """Make the horizontal axis one of lengths in tokens; many are labelled by powers of two.

    Args:
        linear: not logarithmic.
    """
    few = len(lengths) <= MOST_TICKS
    if not linear:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths) if few else LogLocator(2, numticks=MOST_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_length(round(value))))
    axes.set_xlabel(label, color=INK)


def mark_window(axes: Axes, trained_length: int | None) -> None:
    """Mark the trained window, in tokens, on an axis of lengths, if it is on it."""
    left, right = axes.get_xlim()
    if trained_length is not None and left <= trained_length <= right:
        axes.axvline(trained_length, color=QUIET, linewidth=1, zorder=1)
        note(axes, f"trained window, {format_length(trained_length)}", trained_length)


def note(axes: Axes, text: str, at: float, **options: Any) -> None:
    """A quiet text above the axes, at a value of the horizontal axis."""
    axes.annotate(
        text, (at, 1), (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=QUIET,
        fontsize=TEXT - 0.5, **options,
    )  # fmt: skip
