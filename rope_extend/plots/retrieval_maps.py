"""Retrieval: trials solved against length, and over depth and length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rope_extend.plots.style import (
    INK,
    INTERVAL,
    MOST_TICKS,
    PALETTE,
    TEXT,
    Canvas,
    draw_line,
    length_axis,
    line_styles,
    mark_window,
    note,
)
from rope_extend.units import format_length


def plot_accuracy(rows: Sequence[Any], task: str, path: str | Path) -> Path:
    """Draw the share of trials solved against length, with 95 % intervals and the trained window marked.

    At each length, the rows are next to each other, so that none hides another.

    Args:
        rows: `EvaluationRow`s, one line each; those without the task are left out.
        task: the name of the task.
        path: the output file; the suffix gives the format.
    """
    rows = [row for row in rows if task in row.retrieval.tasks]
    solved = any(any(each.scores) for row in rows for each in row.retrieval.cells if each.task == task)
    title = f"Retrieval against length: {task}" if solved else f"{task}: no row solves any trial"
    canvas = Canvas(path, title, room=16)
    axes = canvas.axes
    measured = sorted({n for row in rows for n in row.retrieval.lengths(task)})
    nearest = min([2, *(after / before for before, after in pairwise(measured))])
    spread = min(0.6, 0.08 * len(rows))
    for number, (row, style) in enumerate(line_styles(rows)):
        lengths = row.retrieval.lengths(task)
        shift = nearest ** (spread * ((number + 0.5) / len(rows) - 0.5))
        rates = [rate for length in lengths if (rate := row.retrieval.rate(task, length)) is not None]
        x, y = shift * np.array(lengths, dtype=np.float64), np.array([100 * rate.mean for rate in rates])
        axes.vlines(
            x, [100 * rate.low for rate in rates], [100 * rate.high for rate in rates], color=style["color"],
            linewidth=INTERVAL, alpha=0.18, zorder=2,
        )  # fmt: skip
        draw_line(axes, x, y, **style)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("trials solved, %", color=INK)
    length_axis(axes, measured, "length, tokens")
    axes.set_xlim(measured[0] / nearest**0.6, measured[-1] * nearest**0.6)
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def plot_heat_map(row: Any, task: str, path: str | Path) -> Path:
    """Draw the share of trials solved over depth and length, the trained window marked between columns.

    Args:
        row: the `EvaluationRow` of one model.
        task: a task that has depths.
        path: the output file; the suffix gives the format.
    """
    result = row.retrieval
    lengths, depths = result.lengths(task), result.depths(task)
    subtitle = f"{row.label} · trials solved, %"
    canvas = Canvas(path, f"Retrieval by depth: {task}", subtitle, room=16)
    axes = canvas.axes
    rates = [[result.rate(task, length, depth) for length in lengths] for depth in depths]
    shares = np.array([[np.nan if rate is None else 100 * rate.mean for rate in each] for each in rates])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    image = axes.imshow(np.ma.masked_invalid(shares), cmap="cividis", vmin=0, vmax=100, aspect="auto")
    canvas.figure.colorbar(image, ax=axes, pad=0.02).outline.set_visible(False)
    has_room = max(shares.shape) <= 2 * MOST_TICKS
    for (line, column), share in np.ndenumerate(shares):
        if np.isfinite(share) and has_room:
            colour = "white" if share < 55 else INK  # legible on cividis
            axes.text(column, line, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=TEXT)
    for set_ticks, values in (
        (axes.set_xticks, [*map(format_length, lengths)]),
        (axes.set_yticks, [f"{100 * depth:.0f} %" for depth in depths]),
    ):
        step = math.ceil(len(values) / MOST_TICKS)
        set_ticks(range(0, len(values), step), values[::step])
    axes.tick_params(length=0)
    axes.set_xlabel("length, tokens", color=INK)
    axes.set_ylabel("depth of the needle", color=INK)
    trained = row.trained_length
    if trained is not None:
        edge = sum(length <= trained for length in lengths) - 0.5
        axes.axvline(edge, color=PALETTE[1], linewidth=2.5, clip_on=False)
        note(axes, f"trained window, {format_length(trained)}", edge, ha="center")
    return canvas.save()
