"""What a reader should take from docs/results.md, in a few sentences computed from the results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from results_lines import SEARCH
from results_rows import Results, machines, results_of, seconds

from rope_extend.evaluation.comparison import Comparison, compare
from rope_extend.evaluation.controls import against_cropped, against_trained_control, regressions
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.results import RetrievalResult
from rope_extend.evaluation.statistics import Difference, ppl
from rope_extend.report.tables import number
from rope_extend.units import format_duration, format_length

FEW_BOOKS = 5
"""Below this number, resampled books give intervals that are too narrow."""
PARTS = ("multi_value", "variable_tracking", "common_words", "frequent_words")
"""Tasks whose prompts have several answers; the score of a prompt is the share that is found."""
FEW_NAMES = 3
"""Up to this number, rows with the same result are named."""


def says(results: Results) -> dict[str, str]:
    """What to take from the results, by subject, as far as something is measured."""
    if not results.rows:
        return {}
    parts = {
        "Without training": _best_untrained, "With training": _best_trained, "Short texts": _short_texts,
        "Tasks": _prompts, "Cost": _cost, "What did not work": _failed,
    }  # fmt: skip
    said = {subject: " ".join(part(results)) for subject, part in parts.items()}
    return {subject: text for subject, text in said.items() if text}


def _at(results: Results, gain: Comparison) -> str:
    """The perplexity of a row at the longest length."""
    return number(gain.second.result.ppl[results.longest])


def _gains(results: Results, *, tuned: bool) -> list[Comparison]:
    """The rows against the cropped context, the best first, without plain RoPE and infinite ratios."""
    found = [
        gain
        for gain in against_cropped(results.rows)
        if (gain.second.adapter is not None) == tuned
        and gain.second.label != "none"
        and math.isfinite(gain.differences[-1].ratio)
    ]
    return sorted(found, key=lambda gain: gain.differences[-1].ratio)


def _best_untrained(results: Results) -> Iterator[str]:
    if gains := _gains(results, tuned=False):
        best, longest = gains[0], format_length(results.longest)
        plain = next((row for row in results.rows if row.label == "none"), None)
        beyond = (
            "" if plain is None else f", where plain RoPE has {number(plain.result.ppl[results.longest])}"
        )
        own = best.second.result.ppl[results.longest]
        lowest = plain is None or own <= (plain.result.ppl[results.longest] or math.inf)
        yield (
            f"`{best.second.label}` has the lowest perplexity {'' if lowest else 'of all extensions '}at "
            f"{longest}: {_at(results, best)}{beyond}. This is {by(best.differences[-1])} the same text "
            "cropped to the old window."
        )
        yield from _ties(results, gains)
        yield from _beyond(results)


def _beyond(results: Results) -> Iterator[str]:
    """The best extension at each longer target."""
    for length in sorted(target for target in results.other_targets if target > results.longest):
        longer = results_of(results.lines, length)
        if gains := _gains(longer, tuned=False):
            best = gains[0]
            yield (
                f"At {format_length(length)}, over {longer.books}, `{best.second.label}` is the best "
                f"extension: {_at(longer, best)}, which is {by(best.differences[-1])} cropping."
            )


def _ties(results: Results, gains: list[Comparison]) -> Iterator[str]:
    """The rows that the books do not tell from the best one."""
    books = len(results.collected.texts)
    if books == 1:
        yield "This is one book, which gives no intervals: another book may have another order."
        return
    if books < FEW_BOOKS:
        yield f"Intervals over {books} books are little more than the range of these books."
    best = gains[0].second
    changes = {gain.second.label: compare(best, gain.second).differences[-1] for gain in gains[1:]}
    ties = [f"`{label}`" for label, change in changes.items() if change.low is not None and change.low <= 0]
    if ties:
        yield f"{books} books do not show that it is better than {', '.join(ties)}."


def by(change: Difference) -> str:
    """`0.4 % worse (95 %: -0.1 to 0.9 %) than`, or that no difference is shown."""
    percent = 100 * (change.ratio - 1)
    said = f"{abs(percent):.1f} % {'worse' if percent > 0 else 'better'}"
    if change.low is None or change.high is None:
        return f"{said} than"
    low, high = (f"{100 * (ppl(bound) - 1):+.1f}" for bound in (change.low, change.high))
    shown = "" if change.low > 0 or change.high < 0 else ", so no difference is shown"
    return f"{said} (95 %: {low} to {high} %{shown}) than"


def _best_trained(results: Results) -> Iterator[str]:
    if gains := _gains(results, tuned=True):
        best = gains[0]
        yield (
            f"With the whole context, `{best.second.label}`{_table_of(results, best)} has the lowest "
            f"perplexity: {_at(results, best)}. This is {by(best.differences[-1])} cropping."
        )
        for gain in against_trained_control(results.rows):
            if gain.second.label == best.second.label:
                yield (
                    f"It is {by(gain.differences[-1])} a control with the same training within the old "
                    f"window, and the text cropped: `{gain.first.label}`."
                )
                return
        inside = {each.row.label: each.ratio for each in regressions(results.rows)}
        if (ratio := inside.get(best.second.label, 1)) < 1:
            yield (
                f"This is not all due to the longer context: the control was not trained, and within the old "
                f"window too, `{best.second.label}` is {100 * (1 - ratio):.1f} % better than plain RoPE."
            )


def _table_of(results: Results, gain: Comparison) -> str:
    """Which searched table a row was trained with, if any: its label does not say it."""
    name = Path(gain.second.adapter or "").name
    searched = any(line["name"] == name for line in results.of_kind(SEARCH))
    return f", trained with the table of `{name}`," if searched else ""


def _short_texts(results: Results) -> Iterator[str]:
    costs = [
        each for each in regressions(results.rows) if each.row.adapter is None and math.isfinite(each.ratio)
    ]
    if costs:
        free = [f"`{each.row.label}`" for each in costs if abs(each.ratio - 1) < 5e-4]
        worst = max(costs, key=lambda each: each.ratio)
        percent = f"{100 * (worst.ratio - 1):+.1f} %"
        said = f"Texts within the old window pay most under `{worst.row.label}`: {percent}."
        if worst.ratio < 1:
            said = (
                f"No row makes texts within the old window worse; `{worst.row.label}` gains least: {percent}."
            )
        yield said + (f" They pay less than 0.05 % under {', '.join(free)}." if free else "")


def _prompts(results: Results) -> Iterator[str]:
    """What the best rows solve of each task at the longest length, and plain RoPE within the old window."""
    answered = results.collected.retrieval
    short, long = format_length(results.trained), format_length(results.longest)
    for task in dict.fromkeys(task for each in answered for task in each.tasks):
        solved = {each.label: _solved(each, task, results.longest) for each in answered}
        count = max(map(len, solved.values()))
        if not count:
            continue
        solved = {label: scores for label, scores in solved.items() if len(scores) == count}
        most = max(map(sum, solved.values()))
        best = [f"`{label}`" for label, scores in solved.items() if sum(scores) == most]
        names = f" ({', '.join(best)})" if most and len(best) <= FEW_NAMES else ""
        of = f"{count} {'prompt' if count == 1 else 'prompts'} of `{task}` at {long}"
        if has_parts(task):
            said = f"Of the answers to {of}, the most that a row finds is {most / count:.0%}{names}."
        else:
            said = f"Of {of}, the most that a row solves is {most:g}{names}."
        within = next((_solved(each, task, results.trained) for each in answered if each.label == PLAIN), [])
        if not within:
            yield f"{said} How many are solved within the old window was not measured."
        elif has_parts(task):
            yield f"{said} At {short}, plain RoPE finds {sum(within) / len(within):.0%}."
        else:
            yield f"{said} At {short}, plain RoPE solves {sum(within):g} of {len(within)}."


def has_parts(task: str) -> bool:
    """Whether a prompt of a task has several answers, so that its score can be a part of one."""
    return task in PARTS


def _solved(result: RetrievalResult, task: str, length: int) -> list[float]:
    """The score of each prompt of a task at a length."""
    return [score for cell in result.at(task, length) for score in cell.scores]


def _cost(results: Results) -> Iterator[str]:
    took, where = format_duration(seconds(results.lines)), " and ".join(machines(results.lines))
    yield f"All measurements so far took {took} of computing on {where}."


def _failed(results: Results) -> Iterator[str]:
    for tuned, when in ((False, ""), (True, " after training")):
        worse = [gain for gain in _gains(results, tuned=tuned) if _is_worse(gain)]
        if not worse:
            continue
        names = ", ".join(f"`{gain.second.label}` ({gain.differences[-1].ratio:.3f})" for gain in worse)
        where = "on this book" if len(results.collected.texts) == 1 else "with the whole interval"
        yield f"Worse than cropping the text{when}, {where}: {names}."


def _is_worse(gain: Comparison) -> bool:
    """Whether a row is worse than the cropped context, with its whole interval if there is one."""
    change = gain.differences[-1]
    return change.ratio > 1 if change.low is None else change.low > 0
