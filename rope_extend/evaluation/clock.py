"""Time to go, from estimates that are corrected by what was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rope_extend.units import format_duration


class Clock:
    """The time that some pieces of work take.

    The seconds of a piece are its estimate times a correction: seconds measured divided by seconds estimated,
    of the pieces of the same kind if some are finished, else of all finished ones.

    Args:
        work: the kind of each piece, and its estimated seconds or any measure in proportion to them.
        budget: seconds after which no piece shall run; None for no limit.
        in_seconds: whether the estimates are seconds. Others say nothing before a piece is finished.
    """

    def __init__(
        self, work: Sequence[tuple[str, float]], budget: float | None = None, *, in_seconds: bool = True
    ) -> None:
        self.work, self.budget = list(work), budget
        self.unmeasured = 1.0 if in_seconds else 0.0
        self.started = time.perf_counter()
        self.done: set[int] = set()
        self.measured: dict[str, list[float]] = {}

    def finished(self, number: int, seconds: float) -> None:
        """Note the seconds that a piece took."""
        kind, estimate = self.work[number]
        self.done.add(number)
        if estimate > 0:
            self.measured.setdefault(kind, []).append(seconds / estimate)

    def seconds(self, number: int) -> float:
        """The estimated seconds of a piece."""
        kind, estimate = self.work[number]
        ratios = self.measured.get(kind) or [ratio for each in self.measured.values() for ratio in each]
        return estimate * (sum(ratios) / len(ratios) if ratios else self.unmeasured)

    @property
    def to_go(self) -> float:
        """The estimated seconds of all pieces that are not finished."""
        return sum(self.seconds(number) for number in range(len(self.work)) if number not in self.done)

    def has_time(self, number: int) -> bool:
        """Whether a piece can be finished within the budget."""
        spent = time.perf_counter() - self.started
        return self.budget is None or spent + self.seconds(number) <= self.budget

    def __str__(self) -> str:
        return f"{format_duration(self.to_go)} to go" if len(self.done) < len(self.work) else "done"
