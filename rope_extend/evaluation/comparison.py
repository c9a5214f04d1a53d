"""Comparisons of two rows on the same documents or prompts, paired one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.evaluation.statistics import Difference, RateDifference, paired
from rope_extend.report.tables import Section, interval, signed
from rope_extend.units import format_length

Row = TypeVar("Row", EvaluationRow, RetrievalResult)


@dataclass(frozen=True)
class Comparison:
    """Two rows, and the difference between them at each length that both have."""

    first: EvaluationRow
    second: EvaluationRow
    differences: list[Difference]


class RetrievalChange(NamedTuple):
    """The difference between two rows on the prompts of one task and length."""

    task: str
    length: int
    change: RateDifference


@dataclass(frozen=True)
class RetrievalComparison:
    """Two rows of retrieval, and the differences between them on the same prompts."""

    first: RetrievalResult
    second: RetrievalResult
    changes: list[RetrievalChange]


def compare(first: EvaluationRow, second: EvaluationRow) -> Comparison:
    """Compare two rows at all lengths that both have.

    Raises:
        RopeExtendError: the rows have different tokens or protocols, share no length, or were saved without
            sums by document.
    """
    before, after = first.result, second.result
    for difference, a, b in (
        ("on different texts", before.data, after.data),
        ("by different protocols", protocol_text(first), protocol_text(second)),
    ):
        if a != b:
            raise RopeExtendError(
                f"{first.label!r} and {second.label!r} were measured {difference} ({a} and {b}), so they "
                "cannot be compared; evaluate both with the same data, max_documents, lengths and protocol"
            )
    lengths = sorted(before.ppl.keys() & after.ppl.keys())
    if not lengths:
        raise RopeExtendError(
            f"{first.label!r} and {second.label!r} have no length in common; evaluate both at the same "
            "lengths"
        )
    changes = differences(before, after, lengths)
    if not changes:
        raise RopeExtendError(
            "these results were saved without sums by document; evaluate again to compare them"
        )
    return Comparison(first, second, changes)


def differences(
    first: PerplexityResult, second: PerplexityResult, lengths: Sequence[int]
) -> list[Difference]:
    """Compare two results on the same targets at these lengths; empty without sums by document.

    Raises:
        RopeExtendError: the two scored other targets at one of the lengths.
    """
    if first.document_nll is None or second.document_nll is None or first.document_terms is None:
        return []
    other = [length for length in lengths if not same_terms(first, second, length)]
    if other:
        raise RopeExtendError(
            f"two results scored different targets of the same text at {format_length(other[0])}, so they "
            "cannot be compared; evaluate both with the same protocol, and a stride below the shortest length"
        )
    return [
        paired(n, first.document_nll[n], second.document_nll[n], first.document_terms[n]) for n in lengths
    ]


def same_terms(first: PerplexityResult, second: PerplexityResult, length: int) -> bool:
    """Whether two results scored as many targets of each document; also if one does not say."""
    before, after = first.document_terms, second.document_terms
    return before is None or after is None or before[length] == after[length]


def compare_retrieval(first: RetrievalResult, second: RetrievalResult) -> RetrievalComparison:
    """Compare two rows of retrieval at all tasks and lengths that both have.

    Raises:
        RopeExtendError: they share none, or had different prompts.
    """
    shared = [
        (task, length)
        for task in first.tasks
        for length in first.lengths(task)
        if task in second.tasks and length in second.lengths(task)
    ]
    if not shared:
        raise RopeExtendError(
            f"{first.label!r} and {second.label!r} have no task and length in common; measure both with the "
            "same tasks and lengths"
        )
    changes = []
    for task, length in shared:
        change = second.against(first, task, length)
        if change is None:
            raise RopeExtendError(
                f"{first.label!r} and {second.label!r} had different prompts of {task} at {length} tokens, "
                "so they cannot be compared; measure both with the same depths, trials, seed, data and chat"
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
    """Compare the rows of two runs; arguments and errors are those of `pairs` and `compare`."""
    return [compare(*pair) for pair in pairs(first, second, names=names, rows=rows)]


def pairs(
    first: Sequence[Row], second: Sequence[Row], *, names: tuple[str, str], rows: Sequence[str] = ()
) -> list[tuple[Row, Row]]:
    """Pairs of rows of two runs: those with equal labels, or those with the given labels.

    Args:
        first: rows of one run.
        second: rows of the other run, or of the same one.
        names: names of the runs, which are added to equal labels.
        rows: labels. None: all labels that both runs have, or the only row of each. One: the label in both
            runs. Two: the label in the first run and the label in the second.

    Raises:
        RopeExtendError: no such row, or nothing to pair.
    """
    by_label = [{row.label: row for row in run} for run in (first, second)]
    if len(rows) > 2:
        raise RopeExtendError(f"a comparison has one row or two; got {len(rows)}: {', '.join(rows)}")
    if rows:
        labels = [(rows[0], rows[-1])]
    elif len(first) == len(second) == 1:
        labels = [(first[0].label, second[0].label)]
    else:
        labels = [(label, label) for label in by_label[0] if label in by_label[1]]
    for label, run in ((label, run) for pair in labels for label, run in zip(pair, by_label, strict=True)):
        if label not in run:
            raise RopeExtendError(f"no row {label!r}; choose one of {', '.join(map(repr, run))}")
    if not labels or (names[0] == names[1] and any(a == b for a, b in labels)):
        raise RopeExtendError(
            f"nothing to compare: {names[0]} has {', '.join(map(repr, by_label[0]))}, {names[1]} has "
            f"{', '.join(map(repr, by_label[1]))}; name two rows (--row LABEL --row LABEL)"
        )
    paired_rows = []
    for a, b in labels:
        row, other = by_label[0][a], by_label[1][b]
        if a == b:
            row, other = replace(row, label=f"{a} ({names[0]})"), replace(other, label=f"{b} ({names[1]})")
        paired_rows.append((row, other))
    return paired_rows


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Markdown: both perplexities, their difference with its interval, and their ratio, by pair and length.

    Pairs whose rows both have passkeys within the trained window get a table of these too.
    """
    sections = []
    for pair in comparisons:
        first, second = pair.first, pair.second
        lines = [["length", "first", "second", "difference, nats", "95 % interval", "ratio"]]
        lines += [
            [
                format_length(change.length),
                f"{first.result.ppl[change.length]:.4g}",
                f"{second.result.ppl[change.length]:.4g}",
                signed(change.nats),
                interval(change.low, change.high),
                f"{change.ratio:.4f}",
            ]
            for change in pair.differences
        ]
        heading = (
            f"Perplexity, {second.label} against {first.label}, {pair.differences[0].documents} documents "
            f"(text {first.result.data}, protocol {protocol_text(first)})"
        )
        sections.append(Section(heading, lines))
    note = (
        "Difference: mean loss of the second minus that of the first; below zero the second is better. The "
        "interval is Student's t over documents, and needs three. If it contains zero, there is no clear "
        "difference."
    )
    sections[-1] = replace(sections[-1], notes=[note])
    retrieved = []
    for pair in comparisons:
        before, after = pair.first.retrieval, pair.second.retrieval
        if before is not None and after is not None:
            with contextlib.suppress(RopeExtendError):  # different prompts: only perplexity is compared
                renamed = replace(before, label=pair.first.label), replace(after, label=pair.second.label)
                retrieved.append(compare_retrieval(*renamed))
    text = "\n\n".join(section.markdown() for section in sections) + "\n"
    return text + (f"\n{retrieval_comparison_table(retrieved)}" if retrieved else "")


def retrieval_comparison_table(comparisons: Sequence[RetrievalComparison]) -> str:
    """Markdown: both rates, and their difference with its interval, by pair, task and length."""
    sections = []
    for pair in comparisons:
        lines = [["task", "length", "first", "second", "difference", "95 % interval"]]
        lines += [
            [
                task,
                format_length(length),
                str(change.first),
                str(change.second),
                f"{signed(100 * change.change, '+.0f')} points",
                interval(100 * change.low, 100 * change.high, "+.0f"),
            ]
            for task, length, change in pair.changes
        ]
        sections.append(Section(f"Retrieval, {pair.second.label} against {pair.first.label}", lines))
    note = (
        "Difference: share of prompts that the second solves minus that of the first; above zero the second "
        "is better. The interval is Newcombe's for paired proportions. If it contains zero, there is no "
        "clear difference."
    )
    sections[-1] = replace(sections[-1], notes=[note])
    return "\n\n".join(section.markdown() for section in sections) + "\n"


def protocol_text(row: EvaluationRow) -> str:
    """The protocol of a row with its settings, such as `sliding stride=256`."""
    result = row.result
    settings = {"window": result.window, "stride": result.stride, "last": result.last}
    return " ".join([result.protocol, *(f"{k}={v}" for k, v in settings.items() if v is not None)])
