"""Perplexity and loss by length, by position and by step; and pairs of rows with their difference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rope_extend.errors import RopeExtendError
from rope_extend.plots.style import (
    INK,
    QUIET,
    Canvas,
    Floats,
    draw_line,
    legend,
    length_axis,
    line_styles,
    mark_window,
    name_ends,
    perplexity_axis,
)

MOST_RATIO = 2.0
"""Larger ratios are not drawn. Next to plain RoPE, which fails beyond its window, the others could not be
told apart."""


def _is_cropped(row: Any) -> bool:
    return row.result.cropped


def plot_perplexity(
    rows: Sequence[Any], trained_length: int, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw perplexity against length, both logarithmic, with the trained window marked.

    Args:
        rows: `EvaluationRow`s, one line each, in the colour of its method. Untrained rows are dashed,
            fine-tuned rows solid, and rows with a cropped context dotted.
        trained_length: the window the model was pretrained with, in tokens.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
        title: the heading.

    Raises:
        RopeExtendError: there is nothing to draw, or the format is unknown.
    """
    canvas = Canvas(path, title or "Perplexity against length", legend(rows, _is_cropped), room=16)
    axes = canvas.axes
    ends = []
    for row, style in line_styles(rows, _is_cropped):
        lengths, values = np.array(sorted(row.result.ppl.items()), dtype=np.float64).T
        ends += draw_line(axes, lengths, values, row.label, markersize=5.5, **style)
    perplexity_axis(axes)
    lengths = sorted({length for row in rows for length in row.result.ppl})
    length_axis(axes, lengths, "length, tokens")
    mark_window(axes, trained_length)
    name_ends(axes, ends)
    return canvas.save()


def plot_loss_by_position(
    rows: Sequence[Any], trained_length: int, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw the mean loss in nats per token against the position of the predicted token.

    Single positions are noisy, so they are averaged in groups, four to each doubling of the position.
    Arguments and errors are those of `plot_perplexity`.
    """
    canvas = Canvas(path, title or "Loss by position", legend(rows, _is_cropped), room=16)
    axes = canvas.axes
    longest = max((len(row.result.nll_by_position) + 1 for row in rows), default=1)
    first = max(1, longest // 256)
    ends = []
    for row, style in line_styles(rows, _is_cropped):
        positions, means = loss_by_group(row.result.nll_by_position, first)
        ends += draw_line(axes, positions, means, row.label, **{**style, "marker": ""})
    axes.set_ylabel("loss, nats per token", color=INK)
    in_documents = all(row.result.protocol in ("prefix", "cropped") for row in rows)
    unit = "document" if in_documents else "window"
    powers = [2**n for n in range(longest.bit_length()) if 2**n >= first]
    length_axis(axes, powers, f"position in the {unit}, tokens")
    axes.set_xlim(first, longest)
    mark_window(axes, trained_length)
    name_ends(axes, ends)
    return canvas.save()


def loss_by_group(losses: Floats, first: int) -> tuple[Floats, Floats]:
    """The middle of each group of positions and its mean loss, from `first` on, four groups to a doubling.

    Args:
        losses: `[length - 1]` nats; entry p is the loss of the target at position p + 1. NaN: not scored.
        first: the first position.
    """
    last = len(losses) + 1
    edges = first * 2 ** np.arange(0, np.log2(last / first) + 0.25, 0.25)
    groups = list(itertools.pairwise(np.unique(edges.round().astype(np.int64).clip(1, last)).tolist()))
    means = np.array([_mean(losses[start - 1 : stop - 1]) for start, stop in groups])
    return np.array([np.sqrt(start * (stop - 1)) for start, stop in groups]), means


def _mean(losses: Floats) -> float:
    """The mean of the positions that were scored; the others are NaN."""
    scored = losses[~np.isnan(losses)]
    return float(scored.mean()) if scored.size else np.nan


def plot_comparison(
    comparisons: Sequence[Any], trained_length: int, path: str | Path, *, title: str | None = None
) -> Path:
    """Draw the perplexities of pairs of rows, and below the difference of the second from the first.

    The band is the 95 % interval of the difference over documents. Where it contains zero, the difference is
    not significant. Arguments and errors are those of `plot_perplexity`.
    """
    if not comparisons:
        raise RopeExtendError("nothing to draw: no pairs of rows")
    rows = {id(row): row for pair in comparisons for row in (pair.first, pair.second)}
    difference_text = "second − first"
    if len(comparisons) == 1:
        difference_text = f"{comparisons[0].second.label} − {comparisons[0].first.label}"
    subtitle = f"below: {difference_text}, with its 95 % interval over documents"
    canvas = Canvas(path, title or "Perplexity, and the difference", subtitle, panels=2, room=16)
    upper, lower = canvas.panels
    ends = []
    styles = {id(row): style for row, style in line_styles(list(rows.values()), _is_cropped)}
    for key, style in styles.items():
        row = rows[key]
        lengths, values = np.array(sorted(row.result.ppl.items()), dtype=np.float64).T
        ends += draw_line(upper, lengths, values, row.label, markersize=5.5, **style)
    for pair in comparisons:
        colour = styles[id(pair.second)]["color"]
        lengths = np.array([difference.length for difference in pair.differences], dtype=np.float64)
        nats = np.array([difference.nats for difference in pair.differences])
        draw_line(lower, lengths, nats, "", color=colour, marker="o")
        if all(difference.low is not None for difference in pair.differences):
            low, high = ([getattr(each, end) for each in pair.differences] for end in ("low", "high"))
            lower.fill_between(lengths, low, high, color=colour, alpha=0.18, linewidth=0)
    lower.axhline(0, color=QUIET, linewidth=1, zorder=1)
    lower.set_ylabel("difference of loss, nats", color=INK)
    perplexity_axis(upper)
    measured = sorted({length for row in rows.values() for length in row.result.ppl})
    length_axis(lower, measured, "length, tokens")
    mark_window(upper, trained_length)
    name_ends(upper, ends)
    return canvas.save()


def plot_ratio(comparisons: Sequence[Any], path: str | Path) -> Path:
    """Draw the perplexity of rows divided by that of a control on the same targets, by length.

    The bars are 95 % intervals over documents. Below 1, the longer context helps. Ratios above 2 lie outside
    the picture, so that those near 1 can be told apart.

    Args:
        comparisons: `Comparison`s of the rows, each with the control first.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.

    Raises:
        RopeExtendError: there is nothing to draw, or the format is unknown.
    """
    if not comparisons:
        raise RopeExtendError("nothing to draw: no pairs of rows")
    rows = {id(pair.second): pair for pair in comparisons}
    subtitle = f"below 1 is better than {comparisons[0].first.label}; bars: 95 % interval over documents"
    canvas = Canvas(path, "Perplexity divided by that of the cropped context", subtitle, room=16)
    axes, ends = canvas.axes, []
    for row, style in line_styles([pair.second for pair in rows.values()], _is_cropped):
        changes = sorted(rows[id(row)].differences, key=lambda change: change.length)
        lengths = np.array([change.length for change in changes], dtype=np.float64)
        with np.errstate(over="ignore"):
            ratios = np.exp(np.array([change.nats for change in changes]))
        shown = ratios <= MOST_RATIO  # False for NaN
        if not shown.any():
            continue
        ends += draw_line(axes, lengths[shown], ratios[shown], row.label, markersize=5.5, **style)
        bars = [
            (change.length, math.exp(change.low), math.exp(min(change.high, math.log(MOST_RATIO))))
            for change, inside in zip(changes, shown, strict=True)
            if inside and change.low is not None and change.high is not None
        ]
        if bars:
            axes.vlines(*zip(*bars, strict=True), color=style["color"], linewidth=1.2, alpha=0.7)
    axes.axhline(1, color=INK, linewidth=1.2, zorder=1)
    axes.set_ylabel("ratio of perplexities (lower is better)", color=INK)
    measured = sorted({change.length for pair in comparisons for change in pair.differences})
    length_axis(axes, measured, "length, tokens")
    name_ends(axes, ends)
    return canvas.save()
