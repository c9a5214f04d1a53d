"""A line chart as data: what a page draws, without a drawing library."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rope_extend.report.colours import Look, look
from rope_extend.units import format_length

DASHES = {"untrained": "6 4", "fine-tuned": "", "context cropped": "1.5 3.5"}
"""The dashes of each kind of row, as in SVG; empty is a solid line."""
MOST_SHOWN = 5
"""Number of curves that a chart shows at first."""
MOST_RATIO = 2.0
"""Larger ratios of perplexities are not shown at first. Next to plain RoPE, which fails beyond its window,
the others could not be told apart."""


@dataclass(frozen=True)
class Point:
    """One measured value, with its 95 % interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None

    @property
    def finite(self) -> bool:
        """Whether it can be drawn."""
        return math.isfinite(self.x) and math.isfinite(self.y)


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: its name, which is also that of its row in the tables of the page.
        points: its points, by ascending x.
        look: its colours and marker.
        kind: a key of `DASHES`.
        shown: whether it is visible at first; a reader can turn it on and off.
    """

    name: str
    points: Sequence[Point]
    look: Look
    kind: str = "fine-tuned"
    shown: bool = True


@dataclass(frozen=True)
class Chart:
    """A line chart with a heading.

    Attributes:
        heading: what it shows, or what it says.
        curves: its lines; points that are not finite are left out.
        x_label: the horizontal axis, with its unit.
        y_label: the vertical axis, with its unit.
        note: a sentence below the heading.
        lengths: whether x is a length in tokens: the axis is then logarithmic, and labelled `4k`.
        logarithmic: whether y is logarithmic at first; a reader can change it if all values are positive.
        level: value of a horizontal line, such as 1 for ratios.
        window: the trained window in tokens, which is marked; lengths beyond it are shaded.
        limits: the range of y, if it is not that of the curves.
        percent: whether y is a share from 0 to 1, written in percent.
    """

    heading: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    note: str = ""
    lengths: bool = True
    logarithmic: bool = False
    level: float | None = None
    window: int | None = None
    limits: tuple[float, float] | None = None
    percent: bool = False

    def text_of_x(self, value: float) -> str:
        """A label of the horizontal axis."""
        return format_length(round(value)) if self.lengths else f"{value:,.6g}"

    def text_of_y(self, value: float) -> str:
        """A value as text, with four digits."""
        return f"{value:.0%}" if self.percent else f"{value:,.4g}"

    def text_of(self, point: Point) -> str:
        """A point's value with its interval."""
        ends = (
            ""
            if point.low is None or point.high is None
            else f" ({self.text_of_y(point.low)} to {self.text_of_y(point.high)})"
        )
        return self.text_of_y(point.y) + ends


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


def show_only(curves: Sequence[Curve], names: Sequence[str]) -> list[Curve]:
    """The curves, of which those named are shown at first."""
    return [replace(curve, shown=curve.name in names) for curve in curves]
