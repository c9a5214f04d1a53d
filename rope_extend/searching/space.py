"""The space of a search: one divisor for each channel pair, and an attention factor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rope_extend.encodings import LongRoPE, RopeEncoding, RopeShape

STEP = 100
"""Divisors are multiples of 1/100, as in LongRoPE (2402.13753, table 4)."""
HEAD_ROOM = 2
"""The largest divisor, divided by the factor."""


@dataclass(frozen=True)
class Table:
    """One candidate of a search.

    Attributes:
        divisors: the divisor of each channel pair's frequency, the fastest pair first; multiples of 0.01.
        attention_factor: the factor on cos and sin.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Space:
    """Where a search looks: non-decreasing divisors from 1 to `largest`, in steps of 0.01.

    Attributes:
        shape: the rotary shape of the model as it was pretrained.
        target_length: the window to reach, in tokens.
    """

    shape: RopeShape
    target_length: int

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
        return int(HEAD_ROOM * self.factor * STEP + 1e-6)

    def encoding(self, table: Table) -> LongRoPE:
        """A candidate as an encoding with one table for all lengths."""
        return LongRoPE(
            self.factor,
            long_factor=table.divisors,
            short_factor=table.divisors,
            attention_scale=table.attention_factor,
        )

    def table(self, divisors: Iterable[float], attention_factor: float = 1.0) -> Table:
        """The nearest candidate: non-decreasing divisors, rounded to the step and limited to the range."""
        steps = (min(self.largest, max(STEP, round(divisor * STEP))) for divisor in divisors)
        # Rounded, because a factor with all its digits would make equal candidates differ.
        return Table(tuple(step / STEP for step in steps), round(attention_factor, 4))

    def of_encoding(self, encoding: RopeEncoding, attention_factor: float) -> Table:
        """The candidate nearest to a static rotary method, with another attention factor."""
        divisors = self.shape.inv_freq() / encoding.inv_freq(self.shape, self.target_length)
        return self.table(divisors.tolist(), attention_factor)
