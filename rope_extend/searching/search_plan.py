"""The estimated cost of a search."""

from __future__ import annotations

from dataclasses import dataclass

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.forward_plan import ForwardPlan
from rope_extend.memory.budget import usable_share
from rope_extend.searching.search_config import RACE
from rope_extend.units import format_bytes, format_duration, format_length


@dataclass(frozen=True)
class SearchPlan:
    """The estimated cost of a search.

    Attributes:
        strategy: name of the strategy.
        passes: the largest number of forward passes, with those over held-out documents.
        forward_tokens: tokens of these passes.
        forward: the memory and time of one pass; None for a family that cannot be estimated.
        gradient_step: bytes that a gradient step needs in addition to the weights; None if the strategy takes
            none, if the model is spread over devices, or for a family that cannot be estimated.
    """

    strategy: str
    passes: int
    forward_tokens: int
    forward: ForwardPlan | None
    gradient_step: int | None = None

    def check(self) -> None:
        """Refuse a search whose passes or gradient steps do not fit into memory.

        Raises:
            RopeExtendError: they do not fit.
        """
        plan = self.forward
        if plan is None:
            return
        plan.check()
        if self.gradient_step is None:
            return
        needed = plan.weights + self.gradient_step
        if needed > usable_share(plan.device) * plan.available:
            without = "gradient_steps false" if self.strategy == RACE else "race with gradient_steps false"
            raise RopeExtendError(
                f"a gradient step over {format_length(plan.longest.length)} tokens needs about "
                f"{format_bytes(needed)}, {format_bytes(plan.weights)} of it for weights, but only "
                f"{format_bytes(plan.available)} are available on {plan.device}; use {without}, which takes "
                "none"
            )

    def __str__(self) -> str:
        text = (
            f"{self.strategy}: at most {self.passes:,} forward passes, {self.forward_tokens:,} forward tokens"
        )
        if self.forward is None:
            return text
        seconds = self.passes * self.forward.longest.seconds
        text = f"{text}, about {format_duration(seconds)}\n{self.forward}"
        if self.gradient_step is not None:
            memory = format_bytes(self.forward.weights + self.gradient_step)
            text += f"\na gradient step needs {memory}, including the weights"
        return text
