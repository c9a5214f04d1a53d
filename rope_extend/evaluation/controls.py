"""The controls that keep a comparison honest: a cropped context, and what became of short texts.

A perplexity that falls with the length says little: later parts of a text are easier for any model that does
not break. So each is held against the same model with its context cropped to the trained window. And what a
method gains on long texts it may pay for on those within the window, where the model needed no help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, differences
from rope_extend.evaluation.results import EvaluationRow, or_none
from rope_extend.evaluation.statistics import Difference, RateDifference


@dataclass(frozen=True)
class Regression:
    """What a row reads like within the trained window, before and after.

    Attributes:
        row: after.
        against: label of the row of plain RoPE that it is held against.
        length: the trained window, in tokens.
        before: perplexity of plain RoPE there.
        after: that of the row.
        difference: of their losses, with its interval; None where the window itself was not measured.
        retrieval: by task, the rates on the same prompts.
    """

    row: EvaluationRow
    against: str
    length: int
    before: float
    after: float
    difference: Difference | None
    retrieval: dict[str, RateDifference]

    @property
    def ratio(self) -> float:
        """Perplexity after over perplexity before; above 1 the window got worse."""
        return self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, without the row."""
        return {
            "length": self.length,
            "against": self.against,
            "before": or_none(self.before),
            "after": or_none(self.after),
            "difference": self.difference.to_dict() if self.difference else None,
            "retrieval": {task: one.to_dict() for task, one in self.retrieval.items()},
        }


def regressions(rows: Sequence[EvaluationRow]) -> list[Regression]:
    """What each other row costs within the trained window, against plain RoPE.

    Before is the first untrained row of plain RoPE, cropped or not, as both read the same within the window;
    else the model as it is. Without such a row, or any other on the same text, there is none.
    """
    trained = rows[0].trained_length if rows else None
    untrained = [row for row in rows if row.adapter is None and row.method == "none"]
    plain = [row for row in untrained if row.encoding is not None] or untrained
    before = _within(plain[0], trained) if plain and trained is not None else None
    if trained is None or before is None:
        return []
    base = plain[0]
    retrieved = next((row.retrieval for row in plain if row.retrieval is not None), None)
    protocol = _protocol(base)
    found = []
    for row in rows:
        if row in plain or row.result.cropped or _protocol(row) != protocol:
            continue
        after = _within(row, trained)
        if after is None or row.result.data != base.result.data:
            continue
        both = trained in row.result.ppl and trained in base.result.ppl
        change = differences(base.result, row.result, [trained]) if both else []
        changes: dict[str, RateDifference] = {}
        if retrieved is not None and row.retrieval is not None:
            for task in row.retrieval.tasks:
                one = row.retrieval.against(retrieved, task, trained)
                changes |= {task: one} if one is not None else {}
        found.append(
            Regression(row, base.label, trained, before, after, change[0] if change else None, changes)
        )
    return found


def against_cropped(rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """What a longer context is worth: each row against the untrained model with its context cropped.

    At the lengths beyond the trained window. Empty where that control was not measured.
    """
    trained = rows[0].trained_length if rows else None
    controls = [row for row in rows if row.result.cropped and row.adapter is None and row.method == "none"]
    if trained is None or not controls or all(row.result.cropped for row in rows):
        return []
    base = controls[0]
    found = []
    for row in rows:
        if row.result.cropped or row.result.data != base.result.data or _protocol(row) != _protocol(base):
            continue
        shared = [n for n in sorted(row.result.ppl) if n in base.result.ppl and n > trained]
        changes = differences(base.result, row.result, shared)
        if changes:
            found.append(Comparison(base, row, changes))
    return found


def _protocol(row: EvaluationRow) -> tuple[str, int | None, int | None]:
    """What is scored: the targets of `cropped` are those of `prefix`."""
    name = row.result.protocol
    return "prefix" if name == "cropped" else name, row.result.stride, row.result.last


def _within(row: EvaluationRow, trained: int) -> float | None:
    """Perplexity within the trained window: as read at it, where it was; else from the longest pass."""
    if trained in row.result.ppl:
        return row.result.ppl[trained]
    if row.result.protocol not in ("prefix", "cropped"):  # whose positions are those in a window
        return None
    try:
        return row.result.within(trained)
    except RopeExtendError:
        return None
