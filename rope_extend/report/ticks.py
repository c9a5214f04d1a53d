"""The labelled values of an axis."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rope_extend.report.chart import Chart

_LEAST, _MOST = math.log(sys.float_info.min), math.log(sys.float_info.max)
"""Logarithms of the smallest and the largest float."""


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


def value_ticks(low: float, high: float, *, logarithmic: bool, most: int = 6) -> list[float]:
    """Round values within a range: 1, 2 and 5 times a power of ten; on a short logarithmic axis evenly."""
    if logarithmic and high > 4 * low:
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if len(ticks) <= most:
                return ticks
        return ticks[:: math.ceil(len(ticks) / most)]
    if low == high:
        return [low]
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


def value_range(chart: Chart, *, logarithmic: bool) -> tuple[float, float]:
    """The range of the vertical axis: the curves that are shown at first, the level, and some room."""
    if chart.limits is not None:
        return chart.limits
    shown = [curve for curve in chart.curves if curve.shown] or list(chart.curves)
    points = [point for curve in shown for point in curve.points if point.finite]
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    values = [value for value in values if math.isfinite(value)]
    values += [] if chart.level is None else [chart.level]
    if logarithmic:
        low, high = math.log(min(values)), math.log(max(values))
        room = 0.06 * (high - low) or 0.05
        return math.exp(max(low - room, _LEAST)), math.exp(min(high + room, _MOST))
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room
