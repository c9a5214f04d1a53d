"""Perplexity of rows by length, and their loss by position."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def plot_perplexity(rows: Sequence[Any], path: str | Path) -> Path:
    """Draw perplexity against length, both logarithmic, with the trained window marked.

    Args:
        rows: `EvaluationRow`s, one line each; for their styles see `line_styles`.
        path: the output file; the suffix gives the format: .png, .svg or .pdf.
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
    scored = [group[~np.isnan(group)] for start, stop in groups for group in [losses[start - 1 : stop - 1]]]
    means = np.array([group.mean() if group.size else np.nan for group in scored])
    return np.array([np.sqrt(start * (stop - 1)) for start, stop in groups]), means
