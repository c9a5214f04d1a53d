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
        positions, means = loss_by_group(row.result)
        if any(controls.values()):
            control = controls[id(row)]
            means = means - (loss_by_group(control.result)[1] if control else math.nan)
        draw_line(axes, positions, means, **style)
    if any(controls.values()):
        label = f"{label}, minus that of the cropped context"
        axes.set_yscale("symlog", linthresh=0.1)
        axes.yaxis.set_major_locator(FixedLocator([-10, -1, -0.1, -0.05, 0, 0.05, 0.1, 1, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(label, color=INK)
    in_documents = all(row.result.protocol in ("prefix", "cropped") for row in rows)
    text = f"position in the {'document' if in_documents else 'window'}, tokens"
    length_axis(axes, [longest * n // 8 for n in range(1, 9)], text, linear=True)
    axes.set_xlim(0, longest)
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def loss_by_group(result: Any) -> tuple[Floats, Floats]:
    """The middle of each of at most 24 groups of blocks, and its mean loss; NaN if nothing was scored."""
    if not result.block_nll.size:
        return np.zeros(0), np.zeros(0)
    edges = result.block_edges
    starts = np.unique(np.searchsorted(edges, np.linspace(0, result.max_length, 25)[:-1]))
    ends = np.append(starts[1:], len(edges) - 1)
    sums, terms = (np.add.reduceat(each.sum(0), starts) for each in (result.block_nll, result.block_terms))
    means = np.divide(sums, terms, out=np.full(len(sums), np.nan), where=terms > 0)
    return (edges[starts] + edges[ends]) / 2, means
