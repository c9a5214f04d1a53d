"""Vectors added to the token embeddings by position, instead of RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.checks import choice, number
from rope_extend.encodings.core.alternatives import AbsoluteEncoding, LearnedValues
from rope_extend.encodings.core.shapes import ModelShape, RopeShape, check_length
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Sinusoidal(AbsoluteEncoding):
    """Sinusoidal vectors: sine and cosine of the position, with a different frequency for each channel pair.

    Attributes:
        scale: factor on the vectors, whose channels lie between -1 and 1. The first transformer multiplied
            its embeddings by the square root of their width to match. Most models of today do not, and may
            need a scale below 1.
        base: base of the frequencies, `base^(-2i/D)` radians per token.
    """

    scale: Annotated[float, number(0, 1e6, above=True)] = 1.0
    base: Annotated[float, number(1, 1e12, above=True)] = 10_000.0

    name: ClassVar[str] = "sinusoidal"
    paper: ClassVar[str] = "1706.03762"

    def vectors(self, shape: ModelShape, position_ids: Tensor, learned: LearnedValues) -> Tensor:
        """`sin(p / base^(2i/D))` in channel 2i and `cos` of the same in channel 2i + 1, times `scale`.

        `[..., hidden_size]` float32, D the hidden size; computed in float64 where the device has it.
        """
        dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
        even = torch.arange(0, shape.hidden_size, 2, dtype=dtype, device=position_ids.device)
        angles = position_ids[..., None].to(dtype) * self.base ** (-even / shape.hidden_size)
        both = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return (self.scale * both[..., : shape.hidden_size]).to(torch.float32)


_STANDARD_DEVIATION = 0.02
"""The standard deviation of a new table, as in GPT-2."""
_WITH_LENGTH = ("interpolate", "fresh")
"""The rules past the last row that extend the table to a length."""


@dataclass(frozen=True)
class Learned(AbsoluteEncoding):
    """Learned absolute positions: a vector for each position, with a rule for positions beyond the last.

    Attributes:
        rows: the number of positions with a vector; by default the trained window.
        beyond: the rule past the last row. `refuse` raises; `interpolate` stretches the rows over `length`
            positions, linearly between rows; `tile` starts again at the first; `fresh` adds new rows up to
            `length`, which are learned separately.
        length: the window in tokens that `interpolate` and `fresh` extend to.
    """

    rows: Annotated[int | None, check_length] = None
    beyond: Annotated[str, choice("refuse", "interpolate", "tile", "fresh")] = "refuse"
    length: Annotated[int | None, check_length] = None

    name: ClassVar[str] = "learned"
    paper: ClassVar[str] = "1705.03122"

    def __post_init__(self) -> None:
        super().__post_init__()
        extends = self.beyond in _WITH_LENGTH
        if extends != (self.length is not None):
            needs, has_none = "needs length, the window to extend to", "takes no length; leave it out"
            rule = needs if extends else has_none
            raise RopeExtendError(f"learned: beyond={self.beyond!r} {rule}; got length={self.length!r}")
        if self.rows is not None:
            self._check_length(self.rows)

    def _check_length(self, rows: int) -> None:
        if self.length is not None and self.length <= rows:
            raise RopeExtendError(
                f"learned: length must exceed the {rows} rows that it extends, got {self.length}"
            )

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The table for `target_length` tokens: sets `length` for rules that have one, else `rows`."""
        beyond = parameters.get("beyond", "refuse")
        if beyond != "tile":
            parameters = {"length" if beyond in _WITH_LENGTH else "rows": target_length, **parameters}
        return cls.make(parameters)

    def target_length(self, shape: RopeShape) -> int | None:
        """The number of positions that have a vector; None for `tile`, which has no last one."""
        return None if self.beyond == "tile" else self.length or self.rows or shape.trained_length

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`table` `[rows, hidden_size]`, and for the rule `fresh` the new rows, `fresh`."""
        sizes = {"table": self._rows(shape)}
        if self.beyond == "fresh" and self.length is not None:
            sizes["fresh"] = self.length - sizes["table"]
        generator = torch.Generator().manual_seed(0)
        return {
            name: _STANDARD_DEVIATION * torch.randn(count, shape.hidden_size, generator=generator)
            for name, count in sizes.items()
        }

    def _rows(self, shape: ModelShape) -> int:
        rows = self.rows or shape.trained_length
        self._check_length(rows)
        return rows

    def vectors(self, shape: ModelShape, position_ids: Tensor, learned: LearnedValues) -> Tensor:
        """The table's rows, extended by the rule `beyond`, `[..., hidden_size]` float32."""
        table, rows = learned["table"], self._rows(shape)
        if self.beyond == "tile":
            return table[position_ids % rows]
        last = (self.length or rows) - 1
        if position_ids.numel() and int(position_ids.max()) > last:
            raise RopeExtendError(
                f"learned: position {int(position_ids.max())} is past the last, {last}; extend the table "
                f"with beyond='interpolate' or 'fresh' and a greater length, or with beyond='tile'"
            )
        if self.beyond == "interpolate":
            row = position_ids.to(torch.float32) * ((rows - 1) / last)
            low = row.floor().to(torch.int64).clamp(max=max(rows - 2, 0))
            high = (low + 1).clamp(max=rows - 1)
            return torch.lerp(table[low], table[high], (row - low)[..., None])
        if self.beyond == "fresh":
            table = torch.cat([table, learned["fresh"]])
        return table[position_ids]
