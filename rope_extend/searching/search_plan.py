"""The estimated cost of a search: its forward passes and its gradient steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.forward_plan import ForwardPlan
from rope_extend.loss import default_chunk_bytes, next_token_loss
from rope_extend.memory.meta_device import META
from rope_extend.memory.plan import Need, counter_of, dry_run
from rope_extend.searching.gradient import differentiable
from rope_extend.searching.search_config import RACE
from rope_extend.searching.space import Space
from rope_extend.units import format_bytes, format_duration, format_length


@dataclass(frozen=True)
class SearchPlan:
    """The estimated cost of a search.

    Attributes:
        strategy: name of the strategy.
        passes: the largest number of forward passes, with those over held-out documents.
        forward_tokens: tokens of these passes.
        forward: the memory and time of one pass; None for a family that cannot be estimated.
        gradient_step: the memory of a gradient step; None if the strategy takes none, if the model is spread
            over devices, or for a family that cannot be estimated.
    """

    strategy: str
    passes: int
    forward_tokens: int
    forward: ForwardPlan | None
    gradient_step: Need | None = None

    def check(self) -> None:
        """Refuse a search whose passes or gradient steps do not fit into memory.

        Raises:
            RopeExtendError: they do not fit.
        """
        plan, step = self.forward, self.gradient_step
        if plan is None:
            return
        plan.check()
        if step is not None and not plan.budget.fits(step):
            without = "gradient_steps false" if self.strategy == RACE else "race with gradient_steps false"
            raise RopeExtendError(
                f"a gradient step over {format_length(plan.longest.length)} tokens needs "
                f"{plan.budget.misfit(step)}; use {without}, which takes none"
            )

    def __str__(self) -> str:
        text = (
            f"{self.strategy}: at most {self.passes:,} forward passes, {self.forward_tokens:,} forward tokens"
        )
        if self.forward is None:
            return text
        text += f", about {format_duration(self.passes * (self.forward.longest.seconds or 0))}\n{self.forward}"
        if self.gradient_step is not None:
            text += f"\na gradient step needs {format_bytes(self.gradient_step.total)}, including the weights"
        return text


def gradient_bytes(model: Any, space: Space, tokens: int, device: torch.device) -> int:
    """The peak of a forward and a backward pass over one document, in bytes, without the weights.

    Args:
        model: the model on the meta device.
        space: where the search looks.
        tokens: tokens of the document.
        device: where the search will run.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    counter = counter_of(model, scored=3 * max(1, default_chunk_bytes(device) // (4 * vocabulary)))
    weights = counter.live
    table = torch.ones(space.pairs, dtype=torch.float64, device=META, requires_grad=True)
    factor = torch.ones((), dtype=torch.float64, device=META, requires_grad=True)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=META)
    start = space.table([1.0] * (space.pairs - 1) + [space.factor])
    with dry_run(model, device), differentiable(model, space, start, table, factor), counter:
        loss = next_token_loss(model, ids, ids)
        torch.autograd.grad(loss, (table, factor))
    return counter.peak - weights
