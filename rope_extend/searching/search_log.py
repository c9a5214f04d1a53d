"""The log of a search: a journal with one line for each evaluation, from which a search is resumed.

A line has a candidate, the losses of the documents that were measured, and what that cost.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rope_extend.checks import number
from rope_extend.encodings.core.shapes import check_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.statistics import or_none
from rope_extend.journal import Identity, Journal
from rope_extend.searching.fitness import Loss, Losses
from rope_extend.searching.space import Table

LOG = "evaluations.jsonl"
"""Name of the file."""


@dataclass(frozen=True)
class Cost:
    """What evaluations cost.

    Attributes:
        evaluations: the number of candidates that were measured, each counted once for each set of documents.
        passes: forward passes.
        forward_tokens: tokens of these passes.
        seconds: wall time.
    """

    evaluations: int = 0
    passes: int = 0
    forward_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cost:
        """From the keys of a line.

        Raises:
            KeyError: one of them is missing.
            RopeExtendError: one of them is not a finite number of at least 0.
        """
        for name in cls.__dataclass_fields__:
            _check_number("cost", name, values[name])
        return cls(*(values[name] for name in cls.__dataclass_fields__))

    def plus(self, other: Cost) -> Cost:
        """The sum of two costs."""
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))


class SearchLog:
    """The evaluations of a search, in memory and on disk.

    Args:
        file: path of the file; None keeps the evaluations in memory only.
        identity: everything that the evaluations depend on.

    Raises:
        RopeExtendError: as `Journal`, or a line is not an evaluation.
    """

    def __init__(self, file: Path | None, identity: Identity) -> None:
        advice = "give the settings of that search, use another directory, or overwrite=True"
        self.file = file
        self.losses: dict[tuple[Table, str], Losses] = {}
        self.cost = Cost()
        self._journal = Journal(file, identity, holds="evaluations", advice=advice)
        try:
            for number, record in enumerate(self._journal.records, start=2):
                try:
                    self._keep(record)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise RopeExtendError(
                        f"line {number} of {str(file)!r} is not an evaluation ({error}); delete the line"
                    ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock; what was read and measured stays in memory."""
        self._journal.close()

    def add(self, table: Table, names: Sequence[str], losses: Sequence[Losses], cost: Cost) -> None:
        """Add an evaluation, and write its line; a loss that is not finite becomes infinity.

        Args:
            table: the candidate.
            names: the documents that were measured, such as `search 3`.
            losses: their losses.
            cost: what they cost; its number of evaluations is set to 1.
        """
        by_name = {
            name: {part: [or_none(loss.total), loss.terms] for part, loss in parts.items()}
            for name, parts in zip(names, losses, strict=True)
        }
        self._journal.append({**vars(table), "losses": by_name, **vars(replace(cost, evaluations=1))})
        self._keep(self._journal.records[-1])  # as it will be read again

    def _keep(self, record: Mapping[str, Any]) -> None:
        cost = Cost.from_dict(record)
        table = Table(tuple(record["divisors"]), record["start_tokens"], record["attention_factor"])
        for each in (*table.divisors, table.start_tokens, table.attention_factor):
            _check_number("table", "a value", each)
        for name, parts in record["losses"].items():
            self.losses[table, name] = {part: _loss(part, *loss) for part, loss in parts.items()}
        self.cost = self.cost.plus(cost)


def _check_number(owner: str, field: str, value: Any, minimum: float = 0) -> None:
    """Refuse anything but a number; settings also take text such as 2e-4, which a log never has."""
    number(minimum)(owner, field, None if isinstance(value, str) else value)


def _loss(part: str, total: Any, terms: Any) -> Loss:
    """A loss of a line; None as its total is infinity."""
    if total is not None:
        _check_number("losses", part, total, -math.inf)
    return Loss(math.inf if total is None else float(total), check_length("losses", part, terms))
