"""What an evaluation says about each row in a sentence: what the longer context gives, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.controls import (
    Regression,
    against_cropped,
    cropped_control,
    regressions,
    trained_when_cropped,
)
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.statistics import FEWEST_TO_DECIDE, Difference, ppl
from rope_extend.report.tables import Sentences
from rope_extend.units import format_length

LEAST_FOUND = 0.9
"""Share of passkeys that a row must find at every depth, at the longest length."""
MOST_COST = 1.02
"""Perplexity within the trained window that a row may have, divided by that of plain RoPE."""


@dataclass(frozen=True)
class Verdict:
    """What was measured of a row, in words, and whether that is a success.

    Attributes:
        label: the row.
        gain: the longest length, compared with a cropped context.
        found: passkeys, or other tasks, at the longest length.
        cost: perplexity within the trained window.
        success: whether all three criteria are met; None if one was not measured.
    """

    label: str
    gain: str
    found: str
    cost: str
    success: bool | None

    def __str__(self) -> str:
        outcome = {True: "Success.", False: "No success yet.", None: "Not decided: measure what is missing."}
        return f"{self.label}: {self.gain}; {self.found}; {self.cost}. {outcome[self.success]}"


def verdicts(rows: Sequence[EvaluationRow]) -> list[Verdict]:
    """A verdict on each row that is compared with a cropped context; empty without that control.

    Controls have none: plain RoPE, and its adapters that were trained in the old window.
    """
    costs = {id(regression.row): regression for regression in regressions(rows)}
    found = []
    for comparison in against_cropped(rows):
        row = comparison.second
        longest = max(comparison.differences, key=lambda change: change.length)
        if _is_control(row, rows):
            continue
        gain, used = _gain_over_control(comparison, longest)
        task, finds = _found(row, longest.length)
        cost, cheap = _cost(costs.get(id(row)))
        parts = (used, finds, cheap)
        success = False if False in parts else None if None in parts else True
        found.append(Verdict(row.label, gain, task, cost, success))
    return found


def _is_control(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> bool:
    """Whether a row is plain RoPE without training, or with training in the old window only.

    Rows of earlier versions do not say for which window their adapter was trained. Then an adapter that is
    measured with a cropped context too was trained in the old one.
    """
    if row.is_extended or row.adapter is None:
        return not row.is_extended
    if row.target_length is not None and row.trained_length is not None:
        return row.target_length <= row.trained_length
    return any(other.adapter == row.adapter for other in rows if other.result.cropped)


def control_lines(rows: Sequence[EvaluationRow]) -> list[str]:
    """What each control shows, in a sentence; empty without a cropped context."""
    base = cropped_control(rows)
    if base is None:
        return []
    said = [f"{base.label}, a control: the others are compared with it."]
    for comparison in (*against_cropped(rows), *trained_when_cropped(rows)):
        row = comparison.second
        if not _is_control(row, rows):
            continue
        longest = max(comparison.differences, key=lambda change: change.length)
        gain, _ = _gain_over_control(comparison, longest)
        if row.result.cropped:
            shows = "the same training without a longer context"
        else:
            shows = "no extension" if row.adapter is None else "training in the old window only"
        said.append(f"{row.label}, a control with {shows}: {gain}.")
    return said


def verdict_sentences(rows: Sequence[EvaluationRow]) -> Sentences | None:
    """The verdicts as the first part of a report; None if there are none."""
    said = [str(verdict) for verdict in verdicts(rows)]
    if not said:
        return None
    note = (
        "Success: better than the cropped context with the whole interval, at least "
        f"{LEAST_FOUND:.0%} of the passkeys at every depth at the longest length, and at most "
        f"{MOST_COST - 1:.0%} more perplexity within the trained window."
    )
    return Sentences("In short", [*said, *control_lines(rows), note])


def _gain_over_control(comparison: Comparison, change: Difference) -> tuple[str, bool | None]:
    """As `_gain`; what was measured decides nothing if the control has no finite perplexity."""
    control = comparison.first
    if not math.isfinite(control.result.ppl[change.length]):
        return f"at {format_length(change.length)}, {control.label} has no finite perplexity", None
    return _gain(change)


def _gain(change: Difference) -> tuple[str, bool | None]:
    """The perplexity compared with a cropped context, and whether it is certainly below."""
    at = f"at {format_length(change.length)}"
    if not math.isfinite(change.ratio):
        return f"{at}, perplexity is not finite", False
    percent = 100 * (1 - change.ratio)
    words = f"{abs(percent):.1f} % {'better' if percent >= 0 else 'worse'} than cropping"
    if change.low is None or change.high is None:
        counted = "1 document" if change.documents == 1 else f"{change.documents} documents"
        return f"{at}, {words} ({counted}, so no interval)", None
    ends = sorted(100 * (1 - ppl(nats)) for nats in (change.low, change.high))
    if percent < 0:
        ends = sorted(-end for end in ends)
    unclear = "" if change.clear else ", which may be chance"
    said = f"{at}, {words} ({ends[0]:.1f} to {ends[1]:.1f}, {change.documents} documents){unclear}"
    if change.certain is None and change.nats < 0:
        return f"{said}; {FEWEST_TO_DECIDE} documents decide", None
    return said, bool(change.certain)


def _found(row: EvaluationRow, length: int) -> tuple[str, bool | None]:
    """What the row retrieves at a length, and whether it finds enough at every depth."""
    retrieval = row.retrieval
    tasks = (
        [] if retrieval is None else [task for task in retrieval.tasks if length in retrieval.lengths(task)]
    )
    if retrieval is None or not tasks:
        return f"passkeys at {format_length(length)} not measured", None
    words, enough = [], True
    for task in tasks:
        whole = retrieval.rate(task, length)
        rates = [retrieval.rate(task, length, depth) for depth in retrieval.depths(task)] or [whole]
        shares = [rate.mean for rate in rates if rate is not None]
        assert whole is not None
        worst = f", {min(shares):.0%} at the worst depth" if len(shares) > 1 else ""
        words.append(f"{task} {whole.mean:.0%}{worst}")
        enough &= min(shares) >= LEAST_FOUND
    return ", ".join(words), enough


def _cost(regression: Regression | None) -> tuple[str, bool | None]:
    """The perplexity within the trained window compared with plain RoPE, and whether it is small enough."""
    if regression is None:
        return "texts within the old window not measured", None
    texts = f"texts within {format_length(regression.length)}"
    if not math.isfinite(regression.before):
        return f"{texts} have no finite perplexity with {regression.against}", None
    if not math.isfinite(regression.ratio):
        return f"{texts} have no finite perplexity", False
    percent = 100 * (regression.ratio - 1)
    return f"{texts} {percent:+.1f} % perplexity", regression.ratio <= MOST_COST
