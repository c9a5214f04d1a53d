"""Two measured rows on the same tokens or prompts, one by one: how two methods should be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.evaluation.statistics import Difference, RateDifference, paired
from rope_extend.evaluation.tables import Section, interval, signed

Row = TypeVar("Row", EvaluationRow, RetrievalResult)


@dataclass(frozen=True)
class Comparison:
    """Two rows, and at each length that both have how the second differs from the first."""

    first: EvaluationRow
    second: EvaluationRow
    differences: list[Difference]


class RetrievalChange(NamedTuple):
    """How the answers to the prompts of one task and length changed."""

    task: str
    length: int
    change: RateDifference


@dataclass(frozen=True)
class RetrievalComparison:
    """Two rows of retrieval, and how the second differs from the first on the same prompts."""

    first: RetrievalResult
    second: RetrievalResult
    changes: list[RetrievalChange]


def compare(first: EvaluationRow, second: EvaluationRow) -> Comparison:
    """Compare two rows at all lengths that both were measured at.

    Raises:
        RopeExtendError: they are of other tokens or another protocol, share no length, or were saved without
            sums by document.
    """
    one, other = first.result, second.result
    for what, a, b in (
        ("other text", one.data, other.data),
        ("another protocol", _protocol(first), _protocol(second)),
    ):
        if a != b:
            raise RopeExtendError(
                f"{first.label!r} and {second.label!r} were measured on {what} ({a} and {b}), so their "
                "difference would say nothing; evaluate both with the same --data, --documents, --lengths "
                "and --protocol"
            )
    lengths = sorted(one.ppl.keys() & other.ppl.keys())
    if not lengths:
        raise RopeExtendError(f"{first.label!r} and {second.label!r} share no length")
    found = differences(one, other, lengths)
    if not found:
        raise RopeExtendError(
            "these results were saved without sums by document; evaluate again to compare them"
        )
    return Comparison(first, second, found)


def differences(
    first: PerplexityResult, second: PerplexityResult, lengths: Sequence[int]
) -> list[Difference]:
    """Compare two results of the same targets at these lengths; none if they keep no sums by document."""
    if first.document_nll is None or second.document_nll is None or first.document_terms is None:
        return []
    return [
        paired(n, first.document_nll[n], second.document_nll[n], first.document_terms[n]) for n in lengths
    ]


def compare_retrieval(first: RetrievalResult, second: RetrievalResult) -> RetrievalComparison:
    """Compare two rows of retrieval at all tasks and lengths that both were measured at.

    Raises:
        RopeExtendError: they share none, or were asked other prompts.
    """
    shared = [
        (task, length)
        for task in first.tasks
        for length in first.lengths(task)
        if task in second.tasks and length in second.lengths(task)
    ]
    if not shared:
        raise RopeExtendError(f"{first.label!r} and {second.label!r} share no task and length")
    changes = []
    for task, length in shared:
        change = second.against(first, task, length)
        if change is None:
            raise RopeExtendError(
                f"{first.label!r} and {second.label!r} were asked other prompts of {task} at {length} "
                "tokens, so their difference would say nothing; measure both with the same --depths, "
                "--trials, --seed, --data and --chat"
            )
        changes.append(RetrievalChange(task, length, change))
    return RetrievalComparison(first, second, changes)


def compare_runs(
    first: Sequence[EvaluationRow],
    second: Sequence[EvaluationRow],
    *,
    names: tuple[str, str],
    rows: Sequence[str] = (),
) -> list[Comparison]:
    """Compare the rows of two runs; arguments and errors are those of :func:`pairs` and :func:`compare`."""
    return [compare(one, other) for one, other in pairs(first, second, names=names, rows=rows)]


def pairs(
    first: Sequence[Row], second: Sequence[Row], *, names: tuple[str, str], rows: Sequence[str] = ()
) -> list[tuple[Row, Row]]:
    """The rows of two runs that have the same label, or those that are named.

    Args:
        first: rows of one run.
        second: rows of the other, or of the same one.
        names: what tells the runs apart where labels are equal.
        rows: none: all labels that both have, or the only row of each; one label: that of both; two: the
            first's and the second's.

    Raises:
        RopeExtendError: no such row, or nothing to pair.
    """
    by_label = [{row.label: row for row in run} for run in (first, second)]
    if len(rows) > 2:
        raise RopeExtendError(f"a comparison is of one row or two, got {len(rows)}: {', '.join(rows)}")
    if rows:
        labels = [(rows[0], rows[-1])]
    elif len(first) == len(second) == 1:
        labels = [(first[0].label, second[0].label)]
    else:
        labels = [(label, label) for label in by_label[0] if label in by_label[1]]
    for label, run in ((label, run) for pair in labels for label, run in zip(pair, by_label, strict=True)):
        if label not in run:
            raise RopeExtendError(f"no row {label!r}; there are {', '.join(map(repr, run))}")
    if not labels or (names[0] == names[1] and any(a == b for a, b in labels)):
        raise RopeExtendError(
            f"nothing to compare: {names[0]} has {', '.join(map(repr, by_label[0]))}, {names[1]} has "
            f"{', '.join(map(repr, by_label[1]))}; name two rows with --row LABEL --row LABEL"
        )
    found = []
    for a, b in labels:
        one, other = by_label[0][a], by_label[1][b]
        if a == b:
            one, other = replace(one, label=f"{a} ({names[0]})"), replace(other, label=f"{b} ({names[1]})")
        found.append((one, other))
    return found


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Markdown: for each pair and length both perplexities, the difference with its interval, the ratio.

    And the passkeys within the trained window, where both rows have them.
    """
    sections = []
    for pair in comparisons:
        first, second = pair.first, pair.second
        lines = [["length", "first", "second", "difference, nats", "95 % interval", "ratio"]]
        lines += [
            [
                format_length(one.length),
                f"{first.result.ppl[one.length]:.4g}",
                f"{second.result.ppl[one.length]:.4g}",
                signed(one.nats),
                interval(one.low, one.high),
                f"{one.ratio:.4f}",
            ]
            for one in pair.differences
        ]
        heading = (
            f"Perplexity, {second.label} against {first.label}, {pair.differences[0].documents} documents "
            f"(text {first.result.data}, protocol {_protocol(first)})"
        )
        sections.append(Section(heading, lines))
    note = (
        "Difference: mean loss of the second less that of the first; below zero the second is better. The "
        "interval is a bootstrap over documents; where it holds zero, the rows cannot be told apart."
    )
    sections[-1] = replace(sections[-1], notes=[note])
    retrieved = []
    for pair in comparisons:
        one, other = pair.first.retrieval, pair.second.retrieval
        if one is not None and other is not None:
            with contextlib.suppress(RopeExtendError):  # other prompts: then only perplexity is compared
                named = replace(one, label=pair.first.label), replace(other, label=pair.second.label)
                retrieved.append(compare_retrieval(*named))
    text = "\n\n".join(section.markdown() for section in sections) + "\n"
    return text + (f"\n{retrieval_comparison_table(retrieved)}" if retrieved else "")


def retrieval_comparison_table(comparisons: Sequence[RetrievalComparison]) -> str:
    """Markdown: for each pair, task and length both rates, and the difference with its interval."""
    sections = []
    for pair in comparisons:
        lines = [["task", "length", "first", "second", "difference", "95 % interval"]]
        lines += [
            [
                one.task,
                format_length(one.length),
                str(one.change.first),
                str(one.change.second),
                f"{signed(100 * one.change.change, '+.0f')} points",
                interval(100 * one.change.low, 100 * one.change.high, "+.0f"),
            ]
            for one in pair.changes
        ]
        sections.append(Section(f"Retrieval, {pair.second.label} against {pair.first.label}", lines))
    note = (
        "Difference: share of the same prompts that the second solves less that of the first; above zero the "
        "second is better. The interval is Newcombe's for paired shares; where it holds zero, the rows "
        "cannot be told apart."
    )
    sections[-1] = replace(sections[-1], notes=[note])
    return "\n\n".join(section.markdown() for section in sections) + "\n"


def _protocol(row: EvaluationRow) -> str:
    result = row.result
    settings = {"window": result.window, "stride": result.stride, "last": result.last}
    return " ".join([result.protocol, *(f"{k}={v}" for k, v in settings.items() if v is not None)])
