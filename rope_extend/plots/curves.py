"""Perplexity of rows by length, and their loss by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter

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

    Rows with a control whose context is cropped are drawn as their difference from theirs, on an axis that is
    logarithmic beyond 0.1 nats: texts differ far more from place to place than rows do in one place.
    Arguments and errors are those of `plot_perplexity`.
    """
    canvas = Canvas(path, "Loss by position", room=16)
    axes, label = canvas.axes, "loss, nats per token"
    longest = max((row.result.max_length for row in rows), default=1)
    controls = {id(row): row.control_in(rows) for row in rows}
    for row, style in line_styles(rows):
        control, result = controls[id(row)], row.result
        edges, losses, terms = result.block_edges[:-1], result.block_nll, result.block_terms
        if control is not None:
            edges, before, losses, terms = result.on_targets_of(control.result)
            losses = losses - before
        elif any(controls.values()):
            losses = losses * math.nan
        draw_line(axes, *loss_by_group(edges, losses, terms, result.max_length), **style)
    if any(controls.values()):
        label = f"{label}, minus that of the cropped context"
        axes.set_yscale("symlog", linthresh=0.1)
        axes.yaxis.set_major_locator(FixedLocator([-10, -1, -0.1, -0.05, 0, 0.05, 0.1, 1, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(label, color=INK)
    in_documents = all(row.result.cropped or row.result.protocol == "prefix" for row in rows)
    text = f"position in the {'document' if in_documents else 'window'}, tokens"
    length_axis(axes, [longest * n // 8 for n in range(1, 9)], text, linear=True)
    axes.set_xlim(0, longest)
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def loss_by_group(edges: Any, losses: Any, terms: Any, longest: int) -> tuple[Floats, Floats]:
    """The middle of each of at most 24 groups of blocks and its mean loss, for groups that have targets.

    Args:
        edges: int64 `[blocks]`, the first position of each block; the last one ends at `longest`.
        losses: float64 `[documents, blocks]`, sums of losses.
        terms: int64 `[documents, blocks]`, the number of losses in each.
    """
    if not losses.size:
        return np.zeros(0), np.zeros(0)
    starts = np.unique(np.searchsorted(edges, np.linspace(0, longest, 25)[:-1]))
    starts = starts[starts < len(edges)]
    ends = np.append(edges[starts[1:]], longest)
    sums, counts = (np.add.reduceat(each.sum(0), starts) for each in (losses, terms))
    found = counts > 0
    return ((edges[starts] + ends) / 2)[found], sums[found] / counts[found]
