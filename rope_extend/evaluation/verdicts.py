"""What an evaluation says about each row in a sentence: what the longer context gives, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, against_cropped, regressions
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult
from rope_extend.evaluation.statistics import FEWEST_TO_DECIDE, ppl
from rope_extend.report.tables import Section
from rope_extend.units import format_length

LEAST_FOUND = 0.9
"""Share of passkeys that a row must find at every depth, at the longest length."""
MOST_COST = 1.02
"""Perplexity within the trained window that a row may have, divided by that of plain RoPE."""

Criterion = tuple[str, bool | None]
"""What was measured, in words, and whether it is good enough; None if that cannot be said."""


@dataclass(frozen=True)
class Verdict:
    """What was measured of a row, in words, and whether that is a success.

    Attributes:
        label: the row.
        ratio: its perplexity from the trained window to the longest length, divided by that of the control.
        gain: that in words.
        found: passkeys, or other tasks, at the longest length.
        cost: perplexity within the trained window.
        success: whether all three criteria are met; None if one was not measured.
    """

    label: str
    ratio: float
    gain: str
    found: str
    cost: str
    success: bool | None

    def __str__(self) -> str:
        outcome = {True: "Success.", False: "No success yet.", None: "Not decided: measure what is missing."}
        return f"{self.label}: {self.gain}; {self.found}; {self.cost}. {outcome[self.success]}"


def verdicts(rows: Sequence[EvaluationRow], unfinished: Collection[str] = ()) -> list[Verdict]:
    """A verdict on each row that is compared with a cropped context; controls have none.

    Rows whose label is in `unfinished` may lack depths, and are not decided.
    """
    costs = {id(regression.second): regression for regression in regressions(rows)}
    found = []
    for comparison in against_cropped(rows):
        row, longest = comparison.second, comparison.longest
        if _is_control(row):
            continue
        gain, used = _gain(comparison)
        task, finds = _found(row, longest.length)
        cost, cheap = _cost(costs.get(id(row)))
        parts = (used, finds, cheap)
        success = False if False in parts else None if None in parts else True
        success = None if row.label in unfinished else success
        found.append(Verdict(row.label, longest.ratio, gain, task, cost, success))
    return found


def _is_control(row: EvaluationRow) -> bool:
    """Whether a row is plain RoPE without training, or with training in the old window only."""
    if row.is_extended or row.adapter is None:
        return not row.is_extended
    return (row.target_length or 0) <= (row.trained_length or 0)


def verdict_sentences(rows: Sequence[EvaluationRow], unfinished: Collection[str] = ()) -> list[Section]:
    """The verdicts as the first part of a report; empty if there are none."""
    said = [str(verdict) for verdict in verdicts(rows, unfinished)]
    if not said:
        return []
    note = (
        "Success: better than the cropped context beyond doubt (at most 3% of such claims are wrong), "
        f"at least {LEAST_FOUND:.0%} of the passkeys at every depth at the longest length, and at most "
        f"{MOST_COST - 1:.0%} more perplexity within the trained window than plain RoPE before training."
    )
    return [Section("In short", notes=[*said, note])]


def verdict(result: PerplexityResult, control: PerplexityResult) -> str:
    """Say in one sentence whether a longer context is of use, and whether that is certain.

    Args:
        result: what was measured of the extended model, by the protocol `prefix`.
        control: the base model, by the protocol `cropped`, on the same texts and lengths. Only the targets
            beyond its `window` count: before them, both have read the same.

    Raises:
        RopeExtendError: the control was not cropped, no length is beyond its window, or the two were measured
            on different texts, or in other blocks: the window must be one of the lengths.
    """
    differences = result.against(control) if control.cropped else []
    if not differences:
        raise RopeExtendError(
            "verdict compares a result with its control: on the same texts and lengths, of which one is the "
            f"control's window and the longest exceeds it; got {result!r} and {control!r}, window "
            f"{control.window}"
        )
    base = EvaluationRow("the control", result=control, trained_length=control.window)
    change = differences[-1]
    said, useful = _gain(Comparison(base, EvaluationRow("the model", result=result), [change]))
    worse = change.clear and change.nats > 0
    if useful:
        return f"The longer context is of use, certainly: {said}."
    if worse or (useful is False and not math.isfinite(change.ratio)):
        return f"The longer context is of no use: {said}."
    return f"No use of the longer context is certain: {said}."


def _gain(comparison: Comparison) -> Criterion:
    """The perplexity compared with a cropped context, and whether it is certainly below."""
    control, change = comparison.first, comparison.longest
    at = f"from {format_length(comparison.beyond or 0)} to {format_length(change.length)}"
    if not math.isfinite(control.result.ppl[change.length]):
        return f"{at}, {control.label} has no finite perplexity", None
    if not math.isfinite(change.ratio):
        return f"{at}, perplexity is not finite", False
    percent = 100 * (1 - change.ratio)
    words = f"{at}, {abs(percent):.1f} % {'better' if percent >= 0 else 'worse'} than cropping"
    if comparison.second.adapter is not None:
        words += " before training" if control.adapter is None else " after training"
    if change.low is None or change.high is None:
        return f"{words} (too few documents for an interval: {change.documents})", None
    ends = sorted((1 if percent >= 0 else -1) * 100 * (1 - ppl(end)) for end in (change.low, change.high))
    unclear = "" if change.clear else ", which may be chance"
    if change.clear and change.certain is False and change.nats < 0:  # success needs more than the interval
        unclear = ", too uncertain for a success"
    said = f"{words} ({ends[0]:.1f} to {ends[1]:.1f}, {change.documents} documents){unclear}"
    if change.certain is None and (change.nats < 0 or not change.clear):
        return f"{said}; {FEWEST_TO_DECIDE} documents decide", None
    return said, bool(change.certain)


def _found(row: EvaluationRow, length: int) -> Criterion:
    """What the row retrieves at a length, and whether it finds enough at every depth."""
    words, enough = [], True
    for task in row.retrieval.tasks:
        shares = [cell.rate.mean for cell in row.retrieval.at(task, length)]
        if shares:
            words.append(f"{task} {row.retrieval.rate(task, length)}, {min(shares):.0%} at the worst depth")
            enough &= min(shares) >= LEAST_FOUND
    return (", ".join(words), enough) if words else (f"no task at {format_length(length)} was measured", None)


def _cost(regression: Comparison | None) -> Criterion:
    """The perplexity within the trained window compared with plain RoPE, and whether it is small enough."""
    if regression is None or not regression.differences:
        return "texts within the old window not measured", None
    change, plain = regression.longest, regression.first
    texts = f"texts within {format_length(change.length)}"
    if not math.isfinite(plain.result.ppl[change.length]):
        return f"{texts} have no finite perplexity with {plain.label}", None
    if not math.isfinite(change.ratio):
        return f"{texts} have no finite perplexity", False
    return f"{texts} {100 * (change.ratio - 1):+.1f} % perplexity", change.ratio <= MOST_COST
