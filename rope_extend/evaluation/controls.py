"""Controls of an evaluation: the gain over a cropped context, and the cost within the trained window.

Perplexity that falls with the length says little, because later parts of a text are easier for any working
model. So each row is compared with the same model whose context is cropped to the trained window. And a
method may do worse on short texts, for which the model needed no extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, differences, same_terms
from rope_extend.evaluation.results import EvaluationRow, or_none
from rope_extend.evaluation.statistics import Difference, RateDifference


@dataclass(frozen=True)
class Regression:
    """A row compared with plain RoPE within the trained window.

    Attributes:
        row: the row.
        against: label of the row with plain RoPE.
        length: the trained window in tokens.
        before: perplexity of plain RoPE within the window.
        after: perplexity of the row within the window.
        difference: difference of the losses, with its interval; None if the window was not measured as a
            length.
        retrieval: by task, the difference of the rates on the same prompts.
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
        """Perplexity after divided by perplexity before; above 1 the row is worse within the window."""
        return self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, without the row."""
        return {
            "length": self.length,
            "against": self.against,
            "before": or_none(self.before),
            "after": or_none(self.after),
            "difference": self.difference.to_dict() if self.difference else None,
            "retrieval": {task: change.to_dict() for task, change in self.retrieval.items()},
        }


def regressions(rows: Sequence[EvaluationRow]) -> list[Regression]:
    """Compare each other row with plain RoPE within the trained window.

    Plain RoPE is the first untrained row with it, cropped or not, because both are equal within the window;
    else the row with the checkpoint's own encoding. Empty without such a row, or without others on the same
    text.
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
    compared = []
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
                rates = row.retrieval.against(retrieved, task, trained)
                changes |= {task: rates} if rates is not None else {}
        compared.append(
            Regression(row, base.label, trained, before, after, change[0] if change else None, changes)
        )
    return compared


def against_cropped(rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """Compare each row with the untrained model whose context is cropped, beyond the trained window.

    Empty if that control was not measured.
    """
    base = cropped_control(rows)
    if base is None or all(row.result.cropped for row in rows):
        return []
    return _compared(base, [row for row in rows if not row.result.cropped])


def cropped_control(rows: Sequence[EvaluationRow]) -> EvaluationRow | None:
    """The row of the untrained model whose context is cropped; None if it was not measured."""
    controls = [row for row in rows if row.result.cropped and row.adapter is None and row.method == "none"]
    return controls[0] if controls and rows[0].trained_length is not None else None


def trained_when_cropped(rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """Compare the adapters of plain RoPE, with their context cropped too, with the untrained model.

    They show what the training gives without a longer context.
    """
    base = cropped_control(rows)
    cropped = [row for row in rows if row.result.cropped and row.adapter is not None]
    return [] if base is None else _compared(base, cropped)


def against_trained_control(rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """Compare each other adapter with one of plain RoPE that was trained and cropped within the old window.

    They show what a longer context gives beyond the training. Empty if that control was not measured.
    """
    controls = [row for row in rows if row.result.cropped and row.adapter is not None]
    if not controls:
        return []
    others = [row for row in rows if row.adapter not in (None, controls[0].adapter)]
    return _compared(controls[0], [row for row in others if not row.result.cropped])


def _compared(base: EvaluationRow, rows: Sequence[EvaluationRow]) -> list[Comparison]:
    """Compare rows on the targets of a control, beyond its trained window; others are left out."""
    trained = base.trained_length
    assert trained is not None
    compared = []
    for row in rows:
        if row.result.data != base.result.data or _protocol(row) != _protocol(base):
            continue
        both = sorted(n for n in row.result.ppl.keys() & base.result.ppl.keys() if n > trained)
        shared = [n for n in both if same_terms(base.result, row.result, n)]
        changes = differences(base.result, row.result, shared)
        if changes:
            compared.append(Comparison(base, row, changes))
    return compared


def _protocol(row: EvaluationRow) -> tuple[str, int | None, int | None]:
    """The scored targets: `cropped` has those of `prefix`."""
    name = row.result.protocol
    return "prefix" if name == "cropped" else name, row.result.stride, row.result.last


def _within(row: EvaluationRow, trained: int) -> float | None:
    """Perplexity within the trained window: that of the length, if measured, else from the longest pass."""
    if trained in row.result.ppl:
        return row.result.ppl[trained]
    if row.result.protocol not in ("prefix", "cropped"):  # positions count from the start of a window
        return None
    try:
        return row.result.within(trained)
    except RopeExtendError:
        return None
