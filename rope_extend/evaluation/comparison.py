"""Comparisons of two rows on the same documents or prompts, paired one by one; and those with the controls.

Later parts of a text are easier for any working model, so each row is compared with the model whose context
is cropped to the trained window. And a method may do worse on short texts, so each is compared with plain
RoPE within the trained window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.evaluation.statistics import Difference, RateDifference, paired
from rope_extend.units import format_length


class RetrievalChange(NamedTuple):
    """The difference between two rows on the prompts of one task and length."""

    task: str
    length: int
    change: RateDifference


@dataclass(frozen=True)
class Comparison:
    """Two rows, and the differences between them.

    Attributes:
        first: the row that the other is compared with.
        second: the other row.
        differences: the difference of the losses at each length that both have; with a control, on its
            targets from its window to that length.
        changes: the difference of the scores in each task and length with the same prompts.
    """

    first: EvaluationRow
    second: EvaluationRow
    differences: list[Difference]
    changes: Sequence[RetrievalChange] = ()

    @property
    def label(self) -> str:
        """Both labels."""
        return f"{self.second.label} against {self.first.label}"

    @property
    def longest(self) -> Difference:
        """The difference of the losses at the longest length."""
        return max(self.differences, key=lambda change: change.length)

    @property
    def before_training(self) -> bool:
        """Whether the second row is trained and the first is not, so that training alone may be the gain."""
        return self.second.adapter is not None and self.first.adapter is None

    @property
    def beyond(self) -> int | None:
        """The window of the control, if the differences are on the targets beyond it; else None."""
        window, least = self.first.result.window, min((each.length for each in self.differences), default=0)
        return window if window is not None and not self.second.result.cropped and least > window else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "first": self.first.label,
            "second": self.second.label,
            "differences": [change.to_dict() for change in self.differences],
            "changes": [
                {"task": task, "length": length, **asdict(change)} for task, length, change in self.changes
            ],
        }


def compare(first: EvaluationRow, second: EvaluationRow) -> Comparison:
    """Compare two rows at all lengths that both have, and in all tasks whose prompts both have.

    If one row has a cropped context, it is the first, and the other is compared with it beyond its window.
    """
    rows = f"{first.label!r} and {second.label!r}"
    if second.result.cropped and not first.result.cropped:
        first, second = second, first
    beyond = second.result.against(first.result) if not second.result.cropped else []
    for what, a, b in (
        ("on different texts", first.result.data, second.result.data),
        ("by different protocols", first.result.measured_by, second.result.measured_by),
    ):
        if first.result and second.result and a != b and not beyond:
            raise RopeExtendError(
                f"{rows} were measured {what} ({a} and {b}), so they cannot be compared; evaluate both with "
                "the same data, max_documents, lengths and protocol"
            )
    lengths = sorted(first.result.ppl.keys() & second.result.ppl.keys())
    found = beyond or differences(first.result, second.result, lengths)
    changes = _changes(first.retrieval, second.retrieval)
    if not found and not changes:
        raise RopeExtendError(
            f"{rows} have no length, and no prompts, in common; measure both with the same lengths, tasks, "
            "depths, trials, seed, data and chat"
        )
    return Comparison(first, second, found, changes)


def differences(
    first: PerplexityResult, second: PerplexityResult, lengths: Sequence[int]
) -> list[Difference]:
    """Compare two results on the same targets at these lengths; empty without sums by document."""
    known = [n for n in lengths if n in first.document_nll and n in second.document_nll]
    for length in known:
        if first.document_terms[length] != second.document_terms[length]:
            raise RopeExtendError(
                f"two results scored different targets of the same text at {format_length(length)}, so they "
                "cannot be compared; evaluate both with the same protocol, and a stride below the shortest "
                "length"
            )
    return [paired(n, first.document_nll[n], second.document_nll[n], first.document_terms[n]) for n in known]


def within_window(result: PerplexityResult, control: PerplexityResult) -> Difference | None:
    """The difference from a control within its window, where both see the same; None if it is unknown."""
    found = differences(control, result, [control.window or 0]) if result.same_targets(control) else []
    return found[0] if found else None


def pairs(
    first: Sequence[EvaluationRow],
    second: Sequence[EvaluationRow],
    *,
    names: Sequence[str],
    rows: Sequence[str] = (),
) -> list[tuple[EvaluationRow, EvaluationRow]]:
    """Pairs of rows of two runs: those with equal labels, or those with the labels `rows` of `compare_saved`.

    `names` are those of the two runs, which are added to equal labels.
    """
    by_label = [{row.label: row for row in run} for run in (first, second)]
    if len(rows) > 2:
        raise RopeExtendError(f"a comparison has one row or two; got {len(rows)}: {', '.join(rows)}")
    labels = [(label, label) for label in by_label[0] if label in by_label[1]]
    if rows:
        labels = [(rows[0], rows[-1])]
    elif len(first) == len(second) == 1:
        labels = [(first[0].label, second[0].label)]
    found = []
    for a, b in labels:
        for label, run in zip((a, b), by_label, strict=True):
            if label not in run:
                raise RopeExtendError(f"no row {label!r}; choose one of {', '.join(map(repr, run))}")
        row, other = by_label[0][a], by_label[1][b]
        if a == b:
            row, other = replace(row, label=f"{a} ({names[0]})"), replace(other, label=f"{b} ({names[1]})")
        if row.label != other.label:  # else it is the same row of the same run
            found.append((row, other))
    if not found:
        raise RopeExtendError(
            f"nothing to compare: {names[0]} has {', '.join(map(repr, by_label[0]))}, {names[1]} has "
            f"{', '.join(map(repr, by_label[1]))}; name two rows (--row LABEL --row LABEL)"
        )
    return found


def regressions(rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """Compare each other row with plain RoPE within the trained window: that length alone.

    Plain RoPE is the first untrained row with it, cropped or not, because both are equal within the window;
    else the row with the checkpoint's own encoding. Empty without such a row, or without others on the same
    text or prompts.
    """
    trained = rows[0].trained_length if rows else None
    untrained = [row for row in rows if row.adapter is None and row.method == "none"]
    bases = [row for row in untrained if row.encoding is not None] or untrained
    if trained is None or not bases:
        return []
    base = bases[0]
    retrieved = next((row.retrieval for row in bases if row.retrieval), base.retrieval)
    compared = []
    for row in rows:
        if row in bases or row.cropped:
            continue
        same = row.result.same_targets(base.result)
        found = differences(base.result, row.result, [trained]) if same else []
        changes = _changes(retrieved, row.retrieval, [trained])
        if found or (changes and not row.result):
            compared.append(Comparison(base, row, found, changes))
    return compared


def _changes(
    first: RetrievalResult, second: RetrievalResult, lengths: Sequence[int] | None = None
) -> list[RetrievalChange]:
    """The differences of the scores in all tasks with the same prompts, at some lengths or at all."""
    return [
        RetrievalChange(task, length, change)
        for task in first.tasks
        for length in first.lengths(task)
        if (lengths is None or length in lengths)
        and (change := second.against(first, task, length)) is not None
    ]


def against_cropped(rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """Compare each row with its control, on the control's targets beyond its window.

    See `PerplexityResult.against`. Empty without a control. Rows on other texts or of other protocols are
    left out.
    """
    return [
        Comparison(control, row, row.result.against(control.result))
        for row in rows
        if not row.cropped and (control := row.control_in(rows)) is not None
    ]
