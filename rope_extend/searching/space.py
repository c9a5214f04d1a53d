"""The space of a search: one divisor for each channel pair, start tokens, and an attention factor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rope_extend.encodings import LongRoPE, RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.models.current_table import CurrentTable

STEP = 100
"""Divisors are multiples of 1/100, as in LongRoPE (2402.13753, table 4)."""
START_TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""LongRoPE's values of n-hat, the number of first positions that keep plain RoPE."""


@dataclass(frozen=True)
class Table:
    """One candidate of a search.

    Attributes:
        divisors: the divisor of each channel pair's frequency, the fastest pair first; multiples of 0.01.
        start_tokens: positions below this keep plain RoPE's angles.
        attention_factor: the factor on cos and sin.
    """

    divisors: tuple[float, ...]
    start_tokens: int = 0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Space:
    """Where a search looks: non-decreasing divisors from 1 to `largest`, in steps of 0.01.

    Attributes:
        shape: the rotary shape that divisors are relative to: of the pretrained model, or of `current`.
        target_length: the window to reach, in tokens.
        head_room: the largest divisor, divided by the factor.
        current: the schedule that candidates are multiplied with, in a search on an extended model.
        original_short: whether texts within the trained window keep plain RoPE's frequencies in the result.
    """

    shape: RopeShape
    target_length: int
    head_room: float
    current: CurrentTable | None = None
    original_short: bool = False

    @property
    def pairs(self) -> int:
        """The number of channel pairs."""
        return self.shape.dim // 2

    @property
    def factor(self) -> float:
        """Target length divided by trained length."""
        return self.target_length / self.shape.trained_length

    @property
    def largest(self) -> int:
        """The largest divisor, in hundredths."""
        return int(self.head_room * self.factor * STEP + 1e-6)

    @property
    def pretrained(self) -> RopeShape:
        """The rotary shape of the model as it was pretrained."""
        return self.shape if self.current is None else self.current.pretrained

    @property
    def keeps_short(self) -> bool:
        """Whether the result has another list for texts within the trained window, which is not searched."""
        return self.original_short or (self.current is not None and self.current.short is not None)

    def encoding(self, table: Table) -> LongRoPE:
        """A candidate as an encoding of the pretrained model, with one table for all lengths."""
        if self.current is None:
            return LongRoPE(
                self.factor,
                long_factor=table.divisors,
                short_factor=table.divisors,
                start_tokens=table.start_tokens,
                attention_scale=table.attention_factor,
            )
        product = self.shape.inv_freq() / torch.tensor(table.divisors, dtype=torch.float64)
        factor = self.current.attention_factor * table.attention_factor
        return replace(self.current, short=None).with_table(product, factor, self.target_length)

    def result(self, table: Table) -> LongRoPE:
        """A candidate as a search writes it, with the list that the model has for other texts."""
        encoding = self.encoding(table)
        if self.original_short:
            return replace(encoding, short_factor=None)
        if self.current is None or self.current.short is None:
            return encoding
        return replace(encoding, short_factor=self.current.short)

    def table(self, divisors: Iterable[float], attention_factor: float = 1.0, start_tokens: int = 0) -> Table:
        """The nearest candidate: divisors rounded to the step and limited to the range.

        Raises:
            RopeExtendError: as `check`.
        """
        steps = (min(self.largest, max(STEP, round(divisor * STEP))) for divisor in divisors)
        # Rounded, because a factor with all its digits would make equal candidates differ.
        table = Table(tuple(step / STEP for step in steps), start_tokens, round(attention_factor, 4))
        self.check(table)
        return table

    def of_encoding(self, encoding: RopeEncoding, attention_factor: float) -> Table:
        """The candidate nearest to a static rotary method, with another attention factor."""
        divisors = self.shape.inv_freq() / encoding.inv_freq(self.shape, self.target_length)
        return self.table(divisors.tolist(), attention_factor)

    def check(self, table: Table) -> None:
        """Refuse a candidate outside the space.

        Raises:
            RopeExtendError: the number of divisors, their order, their range or the start tokens are wrong.
        """
        steps = steps_of(table)
        inside = (
            len(steps) == self.pairs
            and all(low <= high for low, high in itertools.pairwise(steps))
            and steps[0] >= STEP
            and steps[-1] <= self.largest
            and table.divisors == tuple(step / STEP for step in steps)
            and table.start_tokens in START_TOKENS
            and 0 < table.attention_factor <= 100
        )
        if not inside:
            raise RopeExtendError(
                f"a candidate needs {self.pairs} non-decreasing divisors from 1 to {self.largest / STEP:g} "
                f"in steps of {1 / STEP}, start tokens of {START_TOKENS}, and an attention factor above 0; "
                f"got {table}"
            )


def steps_of(table: Table) -> list[int]:
    """The divisors of a candidate, in hundredths."""
    return [round(divisor * STEP) for divisor in table.divisors]
