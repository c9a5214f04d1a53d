"""The estimated cost of a search."""

from __future__ import annotations

from dataclasses import dataclass

from rope_extend.evaluation.forward_plan import ForwardPlan
from rope_extend.units import format_duration


@dataclass(frozen=True)
class SearchPlan:
    """The estimated cost of a search.

    Attributes:
        strategy: name of the strategy.
        passes: the largest number of forward passes, with those over held-out documents.
        forward_tokens: tokens of these passes.
        forward: the memory and time of one pass; None for a family that cannot be estimated.
    """

    strategy: str
    passes: int
    forward_tokens: int
    forward: ForwardPlan | None

    def check(self) -> None:
        """Refuse a search whose passes do not fit into memory.

        Raises:
            RopeExtendError: they do not fit.
        """
        if self.forward is not None:
            self.forward.check()

    def __str__(self) -> str:
        text = (
            f"{self.strategy}: at most {self.passes:,} forward passes, {self.forward_tokens:,} forward tokens"
        )
        if self.forward is None:
            return text
        seconds = self.passes * self.forward.longest.seconds
        return f"{text}, about {format_duration(seconds)}\n{self.forward}"
