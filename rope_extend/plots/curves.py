"""Perplexity of rows by length, and their loss by position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rope_extend.plots.style import (
    INK,
    LINE,
    QUIET,
    Canvas,
    Floats,
    draw_line,
    length_axis,
    line_styles,
    mark_window,
    perplexity_axis,
)
from rope_extend.units import counted, format_length

WITH_CROPPED = "compared with a cropped context"
LEAST_SHOWN, MOST_SHOWN, MOST_OF_BEST = 2, 15, 10_000
"""Bounds in percent up to which the axis goes, unless a gain is larger; the last is that of the best row."""


def plot_perplexity(rows: Sequence[Any], path: str | Path) -> Path:
    """Draw perplexity against length, both logarithmic, with the trained window marked.

    A control that scored a part of the targets is not drawn, because its targets may be harder than all.

    Args:
        rows: `EvaluationRow`s, one line each; for their styles see `line_styles`.
        path: the output file; the suffix gives the format.
    """
    more = "; loss by position compares rows with their control" * any(row.cropped for row in rows)
    canvas = Canvas(path, "Perplexity by length", f"of all tokens{more}", room=16)
    axes = canvas.axes
    for row, style in line_styles(rows):
        if row.cropped and row.result.max_length not in row.result.levels:
            continue
        lengths, values = np.array(sorted(row.result.levels.items()), dtype=np.float64).reshape(-1, 2).T
        draw_line(axes, lengths, values, **style)
    perplexity_axis(axes)
    length_axis(axes, sorted({length for row in rows for length in row.result.ppl}), "length, tokens")
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def plot_loss_by_position(rows: Sequence[Any], path: str | Path) -> Path:
    """Draw what a longer context gives at each position of the predicted token.

    This is perplexity divided by that of the control whose context is cropped, as a change in percent: texts
    differ far more from place to place than rows do in one place. The control is the line “equal”. The title
    says which row is best beyond the window. Rows far above the control leave the picture at its top, so that
    small gains can be seen. Without a control it is the mean loss in nats per token.

    Arguments and errors are those of `plot_perplexity`.
    """
    controls = {id(row): row.control_in(rows) for row in rows}
    compared = [row for row in rows if controls[id(row)] and not row.cropped]
    styled = [(row, style) for row, style in line_styles(rows) if not (compared and row.cropped)]
    best, title, subtitle = _finding(compared, controls) if compared else (None, "Loss by position", "")
    canvas = Canvas(path, title or "Perplexity by position", subtitle, room=16)
    axes = canvas.axes
    longest, lines = max((row.result.max_length for row in rows), default=0), []
    for row, style in styled:
        control, result = controls[id(row)], row.result
        edges, losses, terms = result.block_edges[:-1], result.block_nll, result.block_terms
        if control is not None:
            edges, before, after, terms = result.on_targets_of(control.result)
            losses = after - before
        elif compared:
            losses = losses * math.nan
        positions, means = loss_by_group(edges, losses, terms, result.max_length)
        style |= {"linewidth": 2 * LINE} if row is best else {}
        lines.append((positions, 100 * np.expm1(np.minimum(means, 700)) if compared else means, style))
    top = math.inf
    if compared:
        nearest = next(values for (row, _), (_, values, _) in zip(styled, lines, strict=True) if row is best)
        top = _zoom(axes, np.concatenate([values for _, values, _ in lines]), nearest)
    for positions, values, style in lines:
        if np.nanmax(values, initial=-math.inf) > top:
            style["label"] += " (above)" if np.nanmin(values) > top else " (partly above)"
        draw_line(axes, positions, values, inside=bool(compared), **style)
    axes.set_ylabel("change in perplexity" if compared else "loss, nats per token", color=INK)
    in_documents = all(row.result.cropped or row.result.protocol == "prefix" for row in rows)
    text = f"position in the {'document' if in_documents else 'window'}, tokens"
    length_axis(axes, [longest * n // 8 for n in range(1, 9)], text, linear=True)
    axes.set_xlim(0, longest)
    mark_window(axes, rows[0].trained_length)
    return canvas.save()


def _finding(rows: Sequence[Any], controls: Mapping[int, Any]) -> tuple[Any, str, str]:
    """The row that gains most over its control, a clear gain before all others; and that in words, or none.

    It is an extended row if there is any, and of these one that was trained, as its control. A gain over a
    control that is too weak is no finding, nor one of training over a control without it.
    """

    alone = {id(row) for row in rows if row.adapter and not controls[id(row)].adapter}

    def rank(each: tuple[Any, Any]) -> tuple[bool, float]:
        gain, row = each
        finite, weak = math.isfinite(gain.nats), controls[id(row)].result.is_weak or id(row) in alone
        return not (finite and gain.clear and gain.nats < 0) or weak, gain.nats if finite else math.inf

    extended = [row for row in rows if row.is_extended] or rows
    several = len({id(controls[id(row)]) for row in rows}) > 1
    rows = [row for row in extended if row.adapter and id(row) not in alone] or extended
    gain, row = min(((row.result.against(controls[id(row)].result)[-1], row) for row in rows), key=rank)
    control = controls[id(row)].result
    beyond = f"beyond {format_length(control.window)}"
    label = row.label if len(row.label) <= 30 else f"{row.label[:29]}…"
    before = " before training" if id(row) in alone else ""
    compared = "each compared with its own control" if several else WITH_CROPPED
    subtitle = f"{compared}{before}; {counted(gain.documents, 'document')}; thick line: {label}"
    if before and gain.nats < 0:
        return row, "", f"{subtitle}; a gain may be that of its training alone"
    if control.is_weak:
        return row, "", f"{subtitle}; this control, {control.protocol}, is too weak"
    if gain.clear and gain.nats < 0:
        return row, f"{label}: {100 * (1 - gain.ratio):.1f} % lower perplexity {beyond}", subtitle
    if gain.clear and len(rows) == 1:
        worse = f"{100 * (gain.ratio - 1):.1f} % higher" if gain.ratio < 3 else f"{gain.ratio:,.0f} times the"
        return row, f"{label}: {worse} perplexity {beyond}", subtitle
    if len(rows) < len(extended):
        return row, f"{label}: no clearly lower perplexity {beyond}", subtitle
    return row, f"No row clearly has lower perplexity {beyond}", subtitle


def _zoom(axes: Axes, values: Floats, nearest: Floats) -> float:
    """Make the vertical axis one of changes in percent, with all gains, small losses and the nearest row.

    Returns:
        The top of the axis.
    """
    lowest, highest = np.nanmin(values, initial=0), np.nanmax(values, initial=0)
    most = max(MOST_SHOWN, -lowest, min(np.nanmax(nearest, initial=0), MOST_OF_BEST))
    top = 1.1 * float(np.clip(highest, max(LEAST_SHOWN, -lowest), most))
    axes.set_ylim(min(lowest, -LEAST_SHOWN) - 0.06 * top, top)  # room for half a marker
    axes.axhline(0, color=QUIET, linewidth=1, zorder=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "equal"))
    return top


def loss_by_group(edges: Any, losses: Any, terms: Any, longest: int) -> tuple[Floats, Floats]:
    """The middle of each of at most 16 groups of blocks and its mean loss, for groups that have targets.

    Args:
        edges: int64 `[blocks]`, the first position of each block; the last one ends at `longest`.
        losses: float64 `[documents, blocks]`, sums of losses.
        terms: int64 `[documents, blocks]`, the number of losses in each.
    """
    if not losses.size:
        return np.zeros(0), np.zeros(0)
    starts = np.unique(np.searchsorted(edges, np.linspace(0, longest, 17)[:-1]))
    starts = starts[starts < len(edges)]
    ends = np.append(edges[starts[1:]], longest)
    sums, counts = (np.add.reduceat(each.sum(0), starts) for each in (losses, terms))
    found = counts > 0
    return ((edges[starts] + ends) / 2)[found], sums[found] / counts[found]
