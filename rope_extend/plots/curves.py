"""Perplexity of rows by length, and their loss by position."""

from __future__ import annotations

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
    longest = max(row.result.max_length for row in rows)
    first = max(row.result.block for row in rows)
    for row, style in line_styles(rows):
        draw_line(axes, *loss_by_group(row.result), **{**style, "marker": ""})
    axes.set_ylabel("loss, nats per token", color=INK)
    in_documents = all(row.result.protocol in ("prefix", "cropped") for row in rows)
    powers = [2**n for n in range(longest.bit_length()) if 2**n >= first]
    length_axis(axes, powers, f"position in the {'document' if in_documents else 'window'}, tokens")
    axes.set_xlim(first, longest)
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def loss_by_group(result: Any) -> tuple[Floats, Floats]:
    """The middle of each group of positions and its mean loss in nats, four groups to a doubling.

    Groups are of whole blocks. The first block is left out: there is little context. NaN: nothing was scored.
    """
    count = result.block_nll.shape[1]
    edges = np.unique((2 ** np.arange(0, np.log2(max(count, 1)), 0.25)).round().astype(np.int64))
    if count < 2:
        return np.zeros(0), np.zeros(0)
    sums, terms = (np.add.reduceat(each.sum(0), edges) for each in (result.block_nll, result.block_terms))
    ends = np.append(edges[1:], count)
    means = np.divide(sums, terms, out=np.full(len(sums), np.nan), where=terms > 0)
    return np.sqrt(edges * ends) * result.block, means
