"""A chart as SVG: twice, for wide and for narrow pages, and for each kind of vertical axis.

The page's style sheet shows one of them, and its colours follow the theme of the reader. Points carry their
values, so that the page's script can show them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rope_extend.report.chart import DASHES, Chart, Curve, Point
from rope_extend.report.colours import Look
from rope_extend.report.spreading import spread_apart
from rope_extend.report.ticks import length_ticks, value_range, value_ticks
from rope_extend.units import format_length

_LINE = 15
"""Height of a line of text, in pixels."""


@dataclass(frozen=True)
class Frame:
    """The size of a drawing and the borders of its axes, in pixels."""

    name: str
    width: int
    height: int
    left: int
    right: int
    top: int = 22
    bottom: int = 44
    ticks: int = 12

    @property
    def inner(self) -> tuple[int, int]:
        """Width and height inside the axes."""
        return self.width - self.left - self.right, self.height - self.top - self.bottom


WIDE = Frame("wide", 860, 400, 58, 210)
NARROW = Frame("narrow", 360, 300, 48, 14, ticks=6)


class Scale:
    """Where the values of a chart lie in a frame, in pixels."""

    def __init__(self, chart: Chart, frame: Frame, logarithmic: bool) -> None:
        self.chart, self.frame, self.logarithmic = chart, frame, logarithmic
        self.xs = sorted({point.x for curve in chart.curves for point in curve.points if point.finite})
        self.low, self.high = value_range(chart, logarithmic=logarithmic)

    def x(self, value: float) -> float:
        """The horizontal position of a value."""
        first, last, at = self.xs[0], self.xs[-1], value
        if self.chart.lengths:
            first, last, at = math.log2(first), math.log2(last), math.log2(at)
        share = 0.5 if first == last else (at - first) / (last - first)
        return self.frame.left + 8 + share * (self.frame.inner[0] - 16)

    def y(self, value: float) -> float:
        """The vertical position of a value; values far outside the frame end just outside it."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = max(-1.0, min(2.0, (value - low) / (high - low)))
        return self.frame.top + (1 - share) * self.frame.inner[1]

    @property
    def x_ticks(self) -> list[float]:
        """The labelled values of the horizontal axis."""
        if self.chart.lengths:
            return length_ticks(self.xs, self.frame.ticks)
        return value_ticks(self.xs[0], self.xs[-1], logarithmic=False, most=self.frame.ticks)

    @property
    def y_ticks(self) -> list[float]:
        """The labelled values of the vertical axis."""
        return value_ticks(self.low, self.high, logarithmic=self.logarithmic)


def drawings(chart: Chart, name: str) -> str:
    """The drawings of a chart, as SVG elements: wide and narrow, and with each vertical axis it can have.

    Args:
        chart: a chart with at least one point that can be drawn.
        name: the chart's name on the page; names of clipping paths begin with it.
    """
    axes = [True, False] if can_be_logarithmic(chart) else [False]
    return "\n".join(
        _drawing(Scale(chart, frame, logarithmic), name) for frame in (WIDE, NARROW) for logarithmic in axes
    )


def can_be_logarithmic(chart: Chart) -> bool:
    """Whether all values are positive, and the range is not fixed."""
    values = [point.y for curve in chart.curves for point in curve.points if point.finite]
    return chart.limits is None and min(values) > 0


def swatch(curve: Curve) -> str:
    """The sample of a curve for the legend: its line and its marker."""
    line = f'<path d="M1 8H33" stroke-dasharray="{DASHES[curve.kind]}"/>'
    return (
        f'<svg class="swatch" viewBox="0 0 34 16" {colours(curve.look)}>{line}{_marker(curve, 17, 8)}</svg>'
    )


def colours(look: Look) -> str:
    """The attribute that gives the style sheet the colours of a look."""
    return f'style="--light:{look.light};--dark:{look.dark}"'


def _drawing(scale: Scale, name: str) -> str:
    chart, frame = scale.chart, scale.frame
    axis = "log" if scale.logarithmic else "linear"
    clip = f"{name}-{frame.name}-{axis}"
    width, height = frame.inner
    parts = [
        f'<svg class="drawing {frame.name} {axis}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(chart.heading)}">',
        f'<clipPath id="{clip}"><rect x="{frame.left}" y="{frame.top - 6}" width="{width + 8}" '
        f'height="{height + 12}"/></clipPath>',
        *_window(scale),
        *_axes(scale),
        f'<g clip-path="url(#{clip})">',
        *(_curve(scale, curve) for curve in chart.curves),
        "</g>",
    ]
    if frame is WIDE:
        parts += _names(scale)
    return "\n".join([*parts, "</svg>"])


def _axes(scale: Scale) -> list[str]:
    chart, frame = scale.chart, scale.frame
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for tick in scale.y_ticks:
        y = scale.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{right}"/>')
        label = escape(chart.text_of_y(tick))
        parts.append(f'<text x="{frame.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in scale.x_ticks:
        x, label = scale.x(tick), escape(chart.text_of_x(tick))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    if chart.level is not None:
        parts.append(f'<path class="level" d="M{frame.left} {scale.y(chart.level):.1f}H{right}"/>')
    parts.append(f'<path class="axis" d="M{frame.left} {frame.top}V{bottom}H{right}"/>')
    middle = (frame.left + right) / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{frame.height - 6}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
    )
    parts.append(f'<text class="label" x="2" y="13">{escape(chart.y_label)}</text>')
    return parts


def _window(scale: Scale) -> list[str]:
    """The part of the axis beyond the trained window, shaded."""
    chart, frame = scale.chart, scale.frame
    if chart.window is None or not scale.xs[0] <= chart.window < scale.xs[-1]:
        return []
    x, right, (_, height) = scale.x(chart.window), frame.width - frame.right, frame.inner
    text = f"beyond the trained window of {format_length(chart.window)}"
    parts = [f'<rect class="beyond" x="{x:.1f}" y="{frame.top}" width="{right - x:.1f}" height="{height}"/>']
    if frame is WIDE:
        parts.append(f'<text class="quiet" x="{right}" y="13" text-anchor="end">{escape(text)}</text>')
    return parts


def _curve(scale: Scale, curve: Curve) -> str:
    points = [point for point in curve.points if point.finite]
    if not points:
        return ""
    places = [(scale.x(point.x), scale.y(point.y)) for point in points]
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    bars = "".join(
        f"M{x:.1f} {scale.y(point.low):.1f}V{scale.y(point.high):.1f}"
        for (x, _), point in zip(places, points, strict=True)
        if point.low is not None and point.high is not None
    )
    few = len(points) <= 2 * scale.frame.ticks  # more markers would hide the line
    marks = "".join(
        _point(scale, curve, point, place, few) for point, place in zip(points, places, strict=True)
    )
    return (
        f'<g class="curve{"" if curve.shown else " off"}" data-row="{escape(curve.name)}" '
        f'{colours(curve.look)}><path class="line" stroke-dasharray="{DASHES[curve.kind]}" d="M{line}"/>'
        + (f'<path class="bars" d="{bars}"/>' if bars else "")
        + f"{marks}</g>"
    )


def _point(scale: Scale, curve: Curve, point: Point, place: tuple[float, float], visible: bool) -> str:
    """A marker with what the page shows next to the pointer."""
    value, at = escape(scale.chart.text_of(point)), escape(scale.chart.text_of_x(point.x))
    mark = _marker(curve, *place) if visible else f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="0"/>'
    return (
        f'<g class="point" data-x="{place[0]:.1f}" data-at="{at}" data-value="{value}">{mark}'
        f"<title>{escape(curve.name)}, {at}: {value}</title></g>"
    )


def _marker(curve: Curve, x: float, y: float) -> str:
    """A marker, filled if the row was fine-tuned."""
    shapes = {
        "s": "M-3.6-3.6h7.2v7.2h-7.2z",
        "^": "M0-4.6L4.4 3.6H-4.4z",
        "v": "M0 4.6L4.4-3.6H-4.4z",
        "D": "M0-4.8L4.8 0L0 4.8L-4.8 0z",
        "P": "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    }
    filled = "mark" if curve.kind == "fine-tuned" else "mark hollow"
    if curve.look.marker == "o":
        return f'<circle class="{filled}" cx="{x:.1f}" cy="{y:.1f}" r="3.8"/>'
    shape = shapes[curve.look.marker]
    return f'<path class="{filled}" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>'


def _names(scale: Scale) -> list[str]:
    """The name of each curve that is shown at first, next to its end, moved apart from the others."""
    frame = scale.frame
    height = frame.inner[1]
    ends = []
    for curve in scale.chart.curves:
        inside = [
            (scale.x(point.x), scale.y(point.y))
            for point in curve.points
            if point.finite and scale.low <= point.y <= scale.high
        ]
        if inside and curve.shown:
            ends.append((curve, inside[-1]))
    heights = spread_apart([1 - (y - frame.top) / height for _, (_, y) in ends], _LINE / height)
    return [_name(frame, curve, end, share) for (curve, end), share in zip(ends, heights, strict=True)]


def _name(frame: Frame, curve: Curve, end: tuple[float, float], share: float) -> str:
    x, y = frame.width - frame.right + 22, frame.top + (1 - share) * frame.inner[1]
    return (
        f'<g class="name" data-row="{escape(curve.name)}" {colours(curve.look)}>'
        f'<path d="M{end[0] + 7:.1f} {end[1]:.1f}L{x - 4} {y:.1f}"/>'
        f'<text x="{x}" y="{y + 4:.1f}">{escape(_short(curve.name))}</text></g>'
    )


def _short(name: str, most: int = 30) -> str:
    """A name that fits next to the axes; the legend has it in full."""
    return name if len(name) <= most else name[: most - 1] + "…"


def names_of(curves: Sequence[Curve]) -> list[str]:
    """The names of the curves that have a point that can be drawn."""
    return [curve.name for curve in curves if any(point.finite for point in curve.points)]
