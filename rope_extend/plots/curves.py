"""Perplexity and loss of rows by length and by position, and pairs of rows by their ratio."""

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
    Canvas,
    Floats,
    draw_line,
    length_axis,
    line_styles,
    mark_window,
    perplexity_axis,
)

MOST_RATIO = 2.0
"""Larger ratios are not drawn. Next to plain RoPE, which fails beyond its window, the others could not be
told apart."""


def plot_perplexity(rows: Sequence[Any], path: str | Path) -> Path:
    """Draw perplexity against length, both logarithmic, with the trained window marked.

    Args:
        rows: `EvaluationRow`s, one line each; for their styles see `line_styles`.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.

    Raises:
        RopeExtendError: there is nothing to draw, or the format is unknown.
    """
    canvas = Canvas(path, "Perplexity against length", room=16)
    axes = canvas.axes
    for row, style in line_styles(rows):
        lengths, values = np.array(sorted(row.result.ppl.items()), dtype=np.float64).T
        draw_line(axes, lengths, values, markersize=5.5, **style)
    perplexity_axis(axes)
    length_axis(axes, sorted({length for row in rows for length in row.result.ppl}), "length, tokens")
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def plot_loss_by_position(rows: Sequence[Any], path: str | Path) -> Path:
    """Draw the mean loss in nats per token against the position of the predicted token.

    Single positions are noisy, so they are averaged in groups, four to each doubling of the position.
    Arguments and errors are those of `plot_perplexity`.
    """
    canvas = Canvas(path, "Loss by position", room=16)
    axes = canvas.axes
    longest = max((len(row.result.nll_by_position) + 1 for row in rows), default=1)
    first = max(1, longest // 256)
    for row, style in line_styles(rows):
        positions, means = loss_by_group(row.result.nll_by_position, first)
        draw_line(axes, positions, means, **{**style, "marker": ""})
    axes.set_ylabel("loss, nats per token", color=INK)
    in_documents = all(row.result.protocol in ("prefix", "cropped") for row in rows)
    powers = [2**n for n in range(longest.bit_length()) if 2**n >= first]
    length_axis(axes, powers, f"position in the {'document' if in_documents else 'window'}, tokens")
    axes.set_xlim(first, longest)
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def loss_by_group(losses: Floats, first: int) -> tuple[Floats, Floats]:
    """The middle of each group of positions and its mean loss, from `first` on, four groups to a doubling.

    Args:
        losses: `[length - 1]` nats; entry p is the loss of the target at position p + 1. NaN: not scored.
        first: the first position.
    """
    last = len(losses) + 1
    edges = first * 2 ** np.arange(0, np.log2(max(last / first, 1)) + 0.25, 0.25)
    groups = list(itertools.pairwise(np.unique(edges.round().astype(np.int64).clip(1, last)).tolist()))
    means = np.array([_mean(losses[start - 1 : stop - 1]) for start, stop in groups])
    return np.array([np.sqrt(start * (stop - 1)) for start, stop in groups]), means


def _mean(losses: Floats) -> float:
    """The mean of the positions that were scored; the others are NaN."""
    scored = losses[~np.isnan(losses)]
    return float(scored.mean()) if scored.size else np.nan


def plot_ratio(comparisons: Sequence[Any], path: str | Path) -> Path:
    """Draw the perplexity of rows divided by that of another row on the same targets, by length.

    The bars are 95 % intervals over documents. Ratios above 2 lie outside the picture, so that those near 1
    can be told apart.

    Args:
        comparisons: `Comparison`s, each with the row in the denominator first.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.

    Raises:
        RopeExtendError: there is nothing to draw, or the format is unknown.
    """
    if not comparisons:
        raise RopeExtendError("nothing to draw: no pairs of rows")
    bases = {pair.first.label for pair in comparisons}
    base = bases.pop() if len(bases) == 1 else "the first row of each pair"
    canvas = Canvas(
        path, "Ratio of perplexities", f"below 1 is better than {base}; bars: 95 % interval over documents",
        room=16,
    )  # fmt: skip
    axes = canvas.axes
    styled = line_styles([pair.second for pair in comparisons])
    for pair, (_, style) in zip(comparisons, styled, strict=True):
        changes = sorted(pair.differences, key=lambda change: change.length)
        lengths = np.array([change.length for change in changes], dtype=np.float64)
        with np.errstate(over="ignore"):
            ratios = np.exp(np.array([change.nats for change in changes]))
        shown = ratios <= MOST_RATIO  # False for NaN
        draw_line(axes, lengths[shown], ratios[shown], markersize=5.5, **style)
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
    return canvas.save()
