"""The rows that figures draw, as Protocols, so that `plots` does not import `evaluation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Row(Protocol):
    """A model with an encoding."""

    @property
    def label(self) -> str:
        """The name of its line."""
        ...

    @property
    def method(self) -> str:
        """The name of its method; methods have colours."""
        ...

    @property
    def adapter(self) -> str | None:
        """The adapter; None for an untrained model."""
        ...

    @property
    def trained_length(self) -> int | None:
        """The window of pretraining, in tokens, if known."""
        ...


class PerplexityCurve(Protocol):
    """Perplexities of a row."""

    @property
    def ppl(self) -> Mapping[int, float]:
        """Perplexity by length in tokens."""
        ...

    @property
    def nll_by_position(self) -> Floats:
        """`[longest - 1]` mean loss by position, in nats per token."""
        ...

    @property
    def protocol(self) -> str:
        """How documents were cut into windows."""
        ...

    @property
    def cropped(self) -> bool:
        """Whether the context was cropped."""
        ...


class PerplexityRow(Row, Protocol):
    """A row with its perplexities, in `result`."""

    @property
    def result(self) -> PerplexityCurve:
        """The perplexities."""
        ...


class Difference(Protocol):
    """The difference of the losses of two rows at one length."""

    @property
    def length(self) -> int:
        """In tokens."""
        ...

    @property
    def nats(self) -> float:
        """The difference of the mean loss."""
        ...

    @property
    def low(self) -> float | None:
        """The lower end of its 95 % interval over documents; None for a single document."""
        ...

    @property
    def high(self) -> float | None:
        """The upper end."""
        ...


class ComparedRows(Protocol):
    """A pair of rows, with their differences by length."""

    @property
    def first(self) -> PerplexityRow:
        """The first row."""
        ...

    @property
    def second(self) -> PerplexityRow:
        """The second row."""
        ...

    @property
    def differences(self) -> Sequence[Difference]:
        """The second row minus the first, by length."""
        ...


class SolvedShare(Protocol):
    """The share of trials solved, `mean`, with its 95 % interval from `low` to `high`."""

    @property
    def mean(self) -> float:
        """The share, from 0 to 1."""
        ...

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        ...

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        ...


class RetrievalRow(Row, Protocol):
    """A row with the results of retrieval tasks."""

    @property
    def crop(self) -> int | None:
        """The window to which the context was cropped, in tokens; None if it was not."""
        ...

    @property
    def tasks(self) -> Sequence[str]:
        """The names of its tasks."""
        ...

    def lengths(self, task: str) -> list[int]:
        """The lengths of a task, in tokens."""
        ...

    def depths(self, task: str) -> list[float]:
        """The depths of a task, from 0 to 1; empty if it has none."""
        ...

    def rate(self, task: str, length: int, depth: float | None = None) -> SolvedShare | None:
        """The share of trials solved; None if there were none."""
        ...
