"""The log of a search: a journal with one line for each evaluation, from which a search is resumed.

A line has a candidate, the losses of the documents that were measured, and what that cost.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rope_extend.checks import number, require, whole
from rope_extend.evaluation.statistics import or_none
from rope_extend.journal import Identity, Journal
from rope_extend.searching.space import Table

LOG = "evaluations.jsonl"
"""Name of the file."""


class Loss(NamedTuple):
    """A sum of losses in nats, and their number."""

    total: float
    terms: int


Losses = Mapping[int, Loss]
"""The losses of a document, by length in tokens."""


class Cost(NamedTuple):
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


class SearchLog:
    """The evaluations of a search, in memory and on disk.

    Args:
        file: path of the file; None keeps the evaluations in memory only.
        identity: everything that the evaluations depend on.

    Raises:
        RopeExtendError: as `Journal`.
    """

    def __init__(self, file: Path | None, identity: Identity) -> None:
        advice = "give the settings of that search, use another directory, or overwrite=True"
        self.losses: dict[tuple[Table, str], Losses] = {}
        self.cost = Cost()
        self._lengths = {str(length) for length in identity.get("lengths", ())}
        self._journal = Journal(file, identity, holds="evaluations", advice=advice, check=self._keep)

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
            cost: what they cost.
        """
        by_name = {
            name: {length: [or_none(loss.total), loss.terms] for length, loss in by_length.items()}
            for name, by_length in zip(names, losses, strict=True)
        }
        self._journal.append({**vars(table), "losses": by_name, **cost._asdict()})
        self._keep(self._journal.records[-1])  # as it will be read again

    def _keep(self, record: Mapping[str, Any]) -> None:
        divisors = tuple(map(_number, record["divisors"]))
        table = Table(divisors, int(_number(record["start_tokens"])), _number(record["attention_factor"]))
        for name, losses in record["losses"].items():
            require(losses.keys() >= self._lengths)
            self.losses[table, name] = {
                int(length): Loss(
                    math.inf if total is None else _number(total, -math.inf), int(whole(1).parse(terms))
                )
                for length, (total, terms) in losses.items()
            }
        evaluations, passes, tokens, seconds = (_number(record[name]) for name in Cost._fields)
        cost = Cost(int(evaluations), int(passes), int(tokens), seconds)
        self.cost = Cost(*map(operator.add, self.cost, cost))


def _number(value: Any, minimum: float = 0) -> float:
    """A finite number; settings also take text such as 2e-4, which a log never has."""
    require(not isinstance(value, str))
    found: float = number(minimum).parse(value)
    return found
