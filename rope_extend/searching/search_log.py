"""The log of a search: one JSON line for each evaluation, from which an interrupted search is resumed.

The first line says which search the file belongs to. Every other line has a candidate, the losses of the
documents that were measured, and what that cost. Numbers are written with all their digits. So a resumed
search takes the same decisions as one that was not interrupted, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from rope_extend.encodings.core.checks import check_length, check_number
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import or_none
from rope_extend.journal import Identity, check_same
from rope_extend.searching.fitness import Loss, Losses
from rope_extend.searching.space import Table

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOG = "evaluations.jsonl"
"""Name of the file."""
IDENTITY = "search"
"""Key of the first line: what the evaluations depend on."""
GRADIENT_AT = "at"
"""Key of a line with a gradient: the point and the document that it belongs to."""


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
            check_number("cost", name, values[name], minimum=0)
        return cls(*(values[name] for name in cls.__dataclass_fields__))

    def plus(self, other: Cost) -> Cost:
        """The sum of two costs."""
        return Cost(
            self.evaluations + other.evaluations,
            self.passes + other.passes,
            self.forward_tokens + other.forward_tokens,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Evaluation:
    """One line of the log.

    Attributes:
        table: the candidate.
        losses: the losses of each document that was measured, by its name, such as `search 3`.
        cost: what the line cost.
    """

    table: Table
    losses: Mapping[str, Losses]
    cost: Cost

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON; a loss that is not finite becomes None."""
        return {
            "divisors": list(self.table.divisors),
            "start_tokens": self.table.start_tokens,
            "attention_factor": self.table.attention_factor,
            "losses": {
                name: {part: [or_none(loss.total), loss.terms] for part, loss in parts.items()}
                for name, parts in self.losses.items()
            },
            **vars(self.cost),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Inverse of `to_dict`; None becomes infinity.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: the values are not those of `to_dict`.
        """
        table = Table(tuple(values["divisors"]), values["start_tokens"], values["attention_factor"])
        for number in (*table.divisors, table.start_tokens, table.attention_factor):
            check_number("table", "a value", number, minimum=0)
        losses = {
            name: {part: _loss(part, *loss) for part, loss in parts.items()}
            for name, parts in values["losses"].items()
        }
        return cls(table, losses, Cost.from_dict(values))


def _loss(part: str, total: Any, terms: Any) -> Loss:
    """A loss of a line; None as its total is infinity."""
    if total is not None:
        check_number("losses", part, total, minimum=-math.inf)
    return Loss(math.inf if total is None else float(total), check_length("losses", part, terms))


class SearchLog:
    """The evaluations of a search, in memory and on disk.

    Nothing is written before the first evaluation. A last line that an interruption cut short is dropped.
    The file is locked until `close`, so that two searches never share it. Where the file system has no locks,
    and on Windows, only the start of two searches at once is noticed.

    Args:
        file: path of the file; None keeps the evaluations in memory only.
        identity: everything that the evaluations depend on.

    Raises:
        RopeExtendError: the file belongs to another search, another search is writing it, it cannot be
            opened, or a line is damaged.
    """

    def __init__(self, file: Path | None, identity: Identity) -> None:
        self.file, self.identity = file, identity
        self.losses: dict[tuple[Table, str], Losses] = {}
        self.gradients: dict[str, list[float]] = {}
        """Gradients by the text of the point and document that they belong to."""
        self.cost = Cost()
        self._stream: BinaryIO | None = None
        self._has_identity = False
        if file is not None and file.exists():
            self._stream = self._open(file, "r+b")
            try:
                self._read(file, self._stream)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock; what was read and measured stays in memory."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @staticmethod
    def _open(file: Path, mode: str) -> BinaryIO:
        """Open the file for this search alone: `xb` makes it, `r+b` opens it where it is."""
        in_use = (
            f"another search has begun in {str(file.parent)!r}; use another directory, or wait until that "
            "search has ended"
        )
        try:
            stream: BinaryIO = file.open(mode)  # type: ignore[assignment]
        except FileExistsError as error:
            raise RopeExtendError(in_use) from error
        except OSError as error:
            raise RopeExtendError(f"cannot write {str(file)!r}: {error}; use another directory") from error
        if fcntl is not None:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                stream.close()
                raise RopeExtendError(in_use) from error
            except OSError:  # this file system has no locks
                pass
        return stream

    def _read(self, file: Path, stream: BinaryIO) -> None:
        content = stream.read()
        complete = content[: content.rfind(b"\n") + 1]
        stream.truncate(len(complete))
        stream.seek(len(complete))
        if not complete:
            return
        self._has_identity = True
        first, *lines = complete.splitlines()
        check_same(
            self._parsed(file, 1, first).get(IDENTITY),
            self.identity,
            what=f"{str(file)!r} holds evaluations",
            advice="give the settings of that search, use another directory, or overwrite=True",
        )
        for number, line in enumerate(lines, start=2):
            values = self._parsed(file, number, line)
            try:
                if GRADIENT_AT in values:
                    self._keep_gradient(values)
                else:
                    self._keep(Evaluation.from_dict(values))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise RopeExtendError(
                    f"line {number} of {str(file)!r} is not an evaluation ({error}); delete the line"
                ) from error

    @staticmethod
    def _parsed(file: Path, number: int, line: bytes) -> dict[str, Any]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise RopeExtendError(
                f"line {number} of {str(file)!r} is not JSON ({error}); delete the line"
            ) from error
        return values if isinstance(values, dict) else {}

    def _keep(self, evaluation: Evaluation) -> None:
        for name, losses in evaluation.losses.items():
            self.losses[evaluation.table, name] = losses
        self.cost = self.cost.plus(evaluation.cost)

    def _keep_gradient(self, values: Mapping[str, Any]) -> None:
        gradient = [math.nan if value is None else float(value) for value in values["gradient"]]
        self.gradients[str(values[GRADIENT_AT])] = gradient
        self.cost = self.cost.plus(Cost.from_dict(values))

    def add_gradient(self, key: str, gradient: Sequence[float], cost: Cost) -> None:
        """Add a gradient, and write its line.

        Args:
            key: the point and the document, as text.
            gradient: its values; what is not finite is kept as NaN.
            cost: what it cost.
        """
        values = {GRADIENT_AT: key, "gradient": list(map(or_none, gradient)), **vars(cost)}
        self._write(values)
        self._keep_gradient(values)

    def add(self, table: Table, names: Sequence[str], losses: Sequence[Losses], cost: Cost) -> None:
        """Add an evaluation, and write its line.

        Args:
            table: the candidate.
            names: the documents that were measured.
            losses: their losses.
            cost: what they cost; its number of evaluations is set to 1.
        """
        evaluation = Evaluation(table, dict(zip(names, losses, strict=True)), replace(cost, evaluations=1))
        # As it will be read again: what is not finite is infinity.
        evaluation = Evaluation.from_dict(json.loads(json.dumps(evaluation.to_dict())))
        self._write(evaluation.to_dict())
        self._keep(evaluation)

    def _write(self, values: Mapping[str, Any]) -> None:
        """Write a line; the first one makes the file, with the identity before it."""
        if self.file is None:
            return
        if self._stream is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._open(self.file, "xb")
        lines = [values] if self._has_identity else [{IDENTITY: self.identity}, values]
        self._stream.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._stream.flush()
        self._has_identity = True
