"""The numbers of a model that encodings are computed from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rope_extend.encodings.core.checks import (
    MAX_DIM,
    MAX_LENGTH,
    ZERO_FREQUENCY,
    Checked,
    check_length,
    check_number,
    number,
    whole,
)
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class RopeShape(Checked):
    """The numbers of a model that its rotary tables are computed from.

    Attributes:
        dim: rotated channels per head; even. Partial-rotary families rotate fewer channels than a head has.
        theta: the base b of the frequencies `b^(-2i/dim)`, as the model was pretrained.
        trained_length: the window the model was pretrained on, in tokens.
    """

    dim: Annotated[int, whole(2, MAX_DIM)]
    theta: Annotated[float, number(1, above=True)]
    trained_length: Annotated[int, check_length]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise RopeExtendError(f"RopeShape: dim must be an even number of channels, got {self.dim}")

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

    def turns_at(self, index: float) -> float:
        """The turns within the trained window at a (fractional) index; inverse of `index_with_turns`."""
        return float(self.trained_length * self.theta ** (-2 * index / self.dim) / (2 * math.pi))


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.table) != self.dim // 2:
            raise RopeExtendError(
                f"ExtendedShape: the table needs {self.dim // 2} frequencies, one for each channel pair, got "
                f"{len(self.table)}"
            )
        for pair, frequency in enumerate(self.table):
            check_number("ExtendedShape", f"table[{pair}]", frequency, minimum=0)

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
        logs = self._logs()
        for index, (low, high) in enumerate(zip(logs[1:], logs[:-1], strict=True)):
            if low <= goal < high:
                return index + (high - goal) / (high - low)
        end, at = (0, logs[0]) if goal >= logs[0] else (len(logs) - 1, logs[-1])
        return end + (at - goal) / self._step

    def turns_at(self, index: float) -> float:
        """The turns of the present table within its window at a (fractional) index."""
        logs = self._logs()
        whole = min(max(math.floor(index), 0), len(logs) - 1)
        following = logs[whole + 1] if 0 <= index < len(logs) - 1 else logs[whole] - self._step
        log = logs[whole] + (index - whole) * (following - logs[whole])
        return self.trained_length * math.exp(log) / (2 * math.pi)

    @property
    def _step(self) -> float:
        """The difference of the logarithms of two neighbours in plain RoPE."""
        return 2 * math.log(self.theta) / self.dim

    def _logs(self) -> list[float]:
        """Logarithms of the frequencies; a pair that does not rotate counts as slower than all others."""
        return [math.log(max(frequency, ZERO_FREQUENCY)) for frequency in self.table]


@dataclass(frozen=True)
class ModelShape(Checked):
    """The numbers of a model that encodings other than rotary ones are computed from.

    Attributes:
        heads: query heads of a layer.
        hidden_size: channels of a token's embedding.
        trained_length: the window the model was pretrained on, in tokens.
        head_dim: channels of a query and of a key.
        value_dim: channels of a value.
    """

    heads: Annotated[int, whole(1, MAX_LENGTH)]
    hidden_size: Annotated[int, whole(1, MAX_LENGTH)]
    trained_length: Annotated[int, check_length]
    head_dim: Annotated[int, whole(1, MAX_LENGTH)] = 64
    value_dim: Annotated[int, whole(1, MAX_LENGTH)] = 64
