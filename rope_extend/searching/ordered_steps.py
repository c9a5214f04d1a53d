"""Gradient steps on the logarithms of all divisors, which are put in order again after each step.

`gradient` keeps divisors in order by sums of softplus terms. Such a sum reaches a plateau, as LongRoPE's
tables have them, only after many steps. Here each divisor moves by itself. The race has few steps, so this is
its last stage.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rope_extend.searching.gradient import PASSES_OF_A_STEP, take_step
from rope_extend.searching.space import Space, Table
from rope_extend.searching.strategies import Context

RATE = 0.1
"""Rate of Adam at the first step, in logarithms of divisors; it falls to zero on a line."""
ATTENTION_RATE = 0.015
"""The same for the logarithm of the attention factor."""
BETAS = (0.8, 0.95)
"""Adam's decay rates: there are few steps, so both averages are short."""
SMOOTH_PERIODS = 1
"""Pairs with more periods within the trained window move less, so that no phase changes by more than others.

The loss is not smooth in the divisors of fast pairs.
"""
AVERAGED = 1 / 3
"""The share of the last steps whose mean is a candidate too."""


class OrderedPoint:
    """The numbers that are moved: the logarithm of each divisor but the first, and of the attention factor.

    Args:
        start: the table that the steps start from.
        space: where the search looks.
    """

    def __init__(self, start: Table, space: Space) -> None:
        logs = torch.tensor(start.divisors, dtype=torch.float64).log()
        self.lower = logs[:1]
        self.numbers = logs[1:].clone().requires_grad_()
        self.attention = torch.tensor(start.attention_factor, dtype=torch.float64).log().requires_grad_()
        self.largest = math.log(space.head_room * space.factor)
        periods = space.shape.trained_length * space.shape.inv_freq()[1:] / (2 * math.pi)
        self.share = (SMOOTH_PERIODS / periods).clamp(max=1)

    def divisors(self) -> Tensor:
        """The divisor of each pair, float64 `[dim/2]`."""
        return torch.cat((self.lower, self.numbers)).exp()

    def table(self, space: Space) -> Table:
        """The nearest candidate."""
        with torch.no_grad():
            return space.table(self.divisors().tolist(), float(self.attention.exp()))

    @torch.no_grad()
    def settle(self, before: Tensor) -> None:
        """After a step: shorten the moves of fast pairs, and put the divisors in order and into their range.

        The ordered values are the mean of the least that is above all earlier ones and the largest that is
        below all later ones.
        """
        moved = before + (self.numbers - before) * self.share
        rising = moved.cummax(0).values
        falling = moved.flip(0).cummin(0).values.flip(0)
        self.numbers.copy_(((rising + falling) / 2).clamp(float(self.lower[0]), self.largest))


def ordered_steps(context: Context, start: Table, passes: int) -> list[Table]:
    """The best tables of gradient steps from a table, the best first; measured on all documents.

    Args:
        context: the search.
        start: the table to start from, which is measured already.
        passes: documents that may be measured; a step counts as three for each part of the fitness.

    Raises:
        RopeExtendError: as `take_step`.
    """
    config, space = context.config, context.space
    steps = (passes - 2 * config.documents) // (PASSES_OF_A_STEP * len(config.weights()))
    if steps < 1 or space.pairs < 2:
        return [start]
    point = OrderedPoint(start, space)
    optimizer = torch.optim.Adam(
        [
            {"params": [point.numbers], "initial_lr": RATE},
            {"params": [point.attention], "initial_lr": ATTENTION_RATE},
        ],
        lr=RATE,
        betas=BETAS,
    )
    last: list[tuple[Tensor, float]] = []
    for step in range(steps):
        before = point.numbers.detach().clone()
        take_step(context, point, start, optimizer, step, steps)
        point.settle(before)
        if step >= steps - max(1, round(AVERAGED * steps)):
            last.append((point.divisors().detach().log(), float(point.attention.detach())))
    mean = torch.stack([logs for logs, _ in last]).mean(0).exp()
    factor = math.exp(math.fsum(value for _, value in last) / len(last))
    return context.ranked([start, point.table(space), space.table(mean.tolist(), factor)])
