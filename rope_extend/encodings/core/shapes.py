"""The numbers of a model that encodings are computed from."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rope_extend.checks import Checked, integer, number
from rope_extend.errors import RopeExtendError

MAX_FACTOR = 65_536.0
"""The largest extension factor that is accepted: 256 tokens to 16M. A larger one is a typing mistake."""
MAX_LENGTH = 2**40
"""The longest window that is accepted, in tokens."""
MAX_DIM = 2**16
"""The most rotated channels per head that are accepted: tables are half as long."""
ZERO_FREQUENCY = 1e-20
"""Radians per token. A channel pair below this frequency does not rotate."""
ZERO_FREQUENCY_DIVISOR = 1e28
"""The divisor that stands for frequency zero in `longrope` lists. No position makes the angle visible."""
check_length: Callable[[str, str, object], int] = integer(1, MAX_LENGTH, " of tokens")
"""Lengths of texts and windows."""


@dataclass(frozen=True)
class RopeShape(Checked):
    """The numbers of a model that its rotary tables are computed from.

    Attributes:
        dim: rotated channels per head; even. Partial-rotary families rotate fewer channels than a head has.
        theta: the base b of the frequencies `b^(-2i/dim)`, as the model was pretrained.
        trained_length: the window the model was pretrained on, in tokens.
    """

    dim: Annotated[int, integer(2, MAX_DIM)]
    theta: Annotated[float, number(1, above=True)]
    trained_length: Annotated[int, check_length]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise RopeExtendError(f"RopeShape: dim must be an even number of channels, got {self.dim}")

    def __str__(self) -> str:
        window, channels = f"a window of {self.trained_length} tokens", f"{self.dim} rotated channels"
        return f"{window}, base {self.theta:g} and {channels}"

    @property
    def exponents(self) -> Tensor:
        """`2i/dim` for each channel pair i, `[dim/2]` float64."""
        return torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim

    def inv_freq(self, theta: float | None = None) -> Tensor:
        """Plain RoPE's frequencies `theta^(-2i/dim)`, `[dim/2]` float64, radians per token (2104.09864)."""
        return (self.theta if theta is None else theta) ** -self.exponents

    def index_with_turns(self, turns: float) -> float:
        """The (fractional) index of the channel pair with `turns` turns within the trained window."""
        return self.dim * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class ExtendedShape(RopeShape):
    """The shape of a model that was extended already, with the table that it was trained under.

    A schedule that is computed for this shape takes that table instead of plain RoPE's, and `trained_length`
    is the window that the model was trained to read under it. So channel pairs count as fast or slow by their
    present frequencies, and the result is the product of both schedules.

    Attributes:
        table: the present frequency of each channel pair, radians per token; at least 0.
    """

    table: tuple[float, ...] = dataclasses.field(repr=False)

    def inv_freq(self, theta: float | None = None) -> Tensor:
        """The present table; with another base, each pair slowed as that base slows it in plain RoPE.

        `[dim/2]` float64, radians per token.
        """
        table = torch.tensor(self.table, dtype=torch.float64)
        return table if theta is None else table * (theta / self.theta) ** -self.exponents

    def index_with_turns(self, turns: float) -> float:
        """The index at which the present table first falls to `turns` turns within its window.

        Between two pairs, and before the first and after the last, logarithms are interpolated.
        """
        goal = math.log(turns * 2 * math.pi / self.trained_length)
        # A pair that does not rotate counts as slower than all others.
        logs = [math.log(max(frequency, ZERO_FREQUENCY)) for frequency in self.table]
        for index, (high, low) in enumerate(itertools.pairwise(logs)):
            if low <= goal < high:
                return index + (high - goal) / (high - low)
        end = 0 if goal >= logs[0] else len(logs) - 1
        step = 2 * math.log(self.theta) / self.dim  # between two neighbours in plain RoPE
        return end + (logs[end] - goal) / step


def critical_range(shape: RopeShape) -> tuple[int, int]:
    """The first pair with at most ten periods in the trained window, and the first with at most one.

    A pair whose period exceeds the trained window never completes a turn in training. In theory the first of
    these is LongRoPE2's critical pair, the first that is interpolated by the whole factor (2502.20082). Pairs
    a little faster are also trained too little, so the search for the real one begins at ten periods. Both
    are at least 1 and at most the last pair.
    """
    last = shape.dim // 2 - 1
    ten, one = (max(1, min(last, math.ceil(shape.index_with_turns(turns)))) for turns in (10, 1))
    return ten, one


@dataclass(frozen=True)
class ModelShape(Checked):
    """The numbers of a model that encodings other than rotary ones are computed from.

    Attributes:
        heads: query heads of a layer.
        hidden_size: channels of a token's embedding.
        trained_length: the window the model was pretrained on, in tokens.
        head_dim: channels of a query and of a key.
    """

    heads: Annotated[int, integer(1, MAX_LENGTH)]
    hidden_size: Annotated[int, integer(1, MAX_LENGTH)]
    trained_length: Annotated[int, check_length]
    head_dim: Annotated[int, integer(1, MAX_LENGTH)] = 64
