"""The charts and heat maps of a report's page, from rows of results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult
from rope_extend.evaluation.statistics import ppl
from rope_extend.plots.grouping import loss_by_group
from rope_extend.report.chart import (
    MOST_RATIO,
    MOST_SHOWN,
    Chart,
    Curve,
    Point,
    kind_of,
    looks_of_rows,
    show_only,
)
from rope_extend.report.colours import Look
from rope_extend.report.html import HeatMap
from rope_extend.units import format_length


def perplexity_chart(rows: Sequence[EvaluationRow]) -> Chart:
    """Perplexity by length with intervals; at first the rows of `main_rows`."""
    curves = []
    for row, look in zip(rows, _looks(rows), strict=True):
        points = []
        for length, value in sorted(row.result.ppl.items()):
            low, high = row.result.interval(length) or (None, None)
            points.append(Point(length, value, low, high))
        curves.append(Curve(row.label, points, look, _kind(row)))
    return Chart(
        "Perplexity by length",
        show_only(curves, main_rows(rows)),
        "length, tokens",
        "perplexity (lower is better)",
        note=f"{_WORDS} Bars: 95 % interval over documents.",
        logarithmic=True,
        window=rows[0].trained_length,
    )


def ratio_chart(comparisons: Sequence[Comparison]) -> Chart:
    """The perplexity of rows divided by that of the cropped context, on the same targets, with intervals."""
    rows = [comparison.second for comparison in comparisons]
    curves = []
    for comparison, look in zip(comparisons, _looks(rows), strict=True):
        points = [
            Point(
                change.length,
                change.ratio,
                None if change.low is None else ppl(change.low),
                None if change.high is None else ppl(change.high),
            )
            for change in sorted(comparison.differences, key=lambda change: change.length)
        ]
        row = comparison.second
        curves.append(Curve(row.label, points, look, _kind(row)))
    near = sorted((curve.points[-1].y, curve.name) for curve in curves if curve.points[-1].y <= MOST_RATIO)
    if near:
        curves = show_only(curves, [name for _, name in near[:MOST_SHOWN]])
    return Chart(
        f"Perplexity divided by that of {comparisons[0].first.label}",
        curves,
        "length, tokens",
        "ratio of perplexities (lower is better)",
        note="Below 1, the longer context helps. Bars: 95 % interval over documents, paired.",
        level=1.0,
    )


def position_chart(rows: Sequence[EvaluationRow]) -> Chart:
    """The mean loss by position, in groups of positions."""
    longest = max(len(row.result.nll_by_position) + 1 for row in rows)
    first = max(1, longest // 256)
    curves = []
    for row, look in zip(rows, _looks(rows), strict=True):
        positions, means = loss_by_group(row.result.nll_by_position, first)
        points = [Point(float(x), float(y)) for x, y in zip(positions, means, strict=True)]
        curves.append(Curve(row.label, points, look, _kind(row)))
    in_documents = all(row.result.protocol in ("prefix", "cropped") for row in rows)
    return Chart(
        "Loss by position",
        show_only(curves, main_rows(rows)),
        f"position in the {'document' if in_documents else 'window'}, tokens",
        "loss, nats per token",
        note=_WORDS,
        window=rows[0].trained_length,
    )


def accuracy_chart(results: Sequence[RetrievalResult], task: str) -> Chart:
    """The share of trials of a task that each row solves, by length, with intervals."""
    rows = [result for result in results if task in result.tasks]
    kinds = [kind_of(row.adapter, cropped=row.crop is not None) for row in rows]
    looks = looks_of_rows([(row.method, kind) for row, kind in zip(rows, kinds, strict=True)])
    curves = []
    for row, kind, look in zip(rows, kinds, looks, strict=True):
        rates = [(length, row.rate(task, length)) for length in row.lengths(task)]
        points = [Point(length, rate.mean, rate.low, rate.high) for length, rate in rates if rate is not None]
        curves.append(Curve(row.label, points, look, kind))
    trained = next((row.trained_length for row in rows if row.trained_length), None)
    return Chart(
        f"{task}: trials solved",
        curves,
        "length, tokens",
        "trials solved (higher is better)",
        note=f"{_WORDS} Bars: 95 % interval.",
        window=trained,
        limits=(0.0, 1.02),
        percent=True,
    )


def heat_maps(results: Sequence[RetrievalResult]) -> list[HeatMap]:
    """A heat map for each task and each row that has trials of the task with a depth."""
    tasks = dict.fromkeys(task for result in results for task in result.tasks)
    return [_heat_map(result, task) for task in tasks for result in results if result.depths(task)]


def _heat_map(result: RetrievalResult, task: str) -> HeatMap:
    """The share of trials solved by depth and length."""
    lengths = result.lengths(task)
    rows = []
    for depth in result.depths(task):
        rates = [result.rate(task, length, depth) for length in lengths]
        rows.append((f"{depth:.0%}", [None if rate is None else rate.mean for rate in rates]))
    trained = result.trained_length
    window = "" if trained is None else f" Trained window: {format_length(trained)}."
    return HeatMap(
        f"{task}, {result.label}: trials solved, %",
        ["depth", *map(format_length, lengths)],
        rows,
        f"Depth: 0 % is the start of the text.{window}",
    )


def main_rows(rows: Sequence[EvaluationRow]) -> list[str]:
    """The labels of at most five rows: plain RoPE, the cropped control, and the best at the end."""
    longest = max(length for row in rows for length in row.result.ppl)
    plain = [row for row in rows if row.adapter is None and row.method == "none"]
    first = [
        *[row for row in plain if not row.result.cropped][:1],
        *[row for row in plain if row.result.cropped][:1],
    ]
    others = [row for row in rows if row not in first and np.isfinite(row.result.ppl.get(longest, np.nan))]
    others.sort(key=lambda row: (row.result.cropped, row.result.ppl[longest]))
    chosen = [row.label for row in [*first, *others][:MOST_SHOWN]]
    return chosen or [row.label for row in rows[:MOST_SHOWN]]


_WORDS = "Dashed: untrained; solid: fine-tuned; dotted: context cropped."


def _kind(row: EvaluationRow) -> str:
    return kind_of(row.adapter, cropped=row.result.cropped)


def _looks(rows: Sequence[EvaluationRow]) -> list[Look]:
    return looks_of_rows([(row.method, _kind(row)) for row in rows])
