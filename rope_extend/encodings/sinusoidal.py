"""Sinusoidal vectors: the position encoding of the first transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import AbsoluteEncoding, ModelShape


@dataclass(frozen=True)
class Sinusoidal(AbsoluteEncoding):
    """Sinusoidal vectors: each pair of channels is a clock hand that turns at a speed of its own.

    Attributes:
        scale: factor on the vectors, whose channels are within -1 and 1. The first transformer multiplied its
            embeddings by the root of their width to match them; models of today mostly do not, and may need
            less than 1.
        base: of the speeds, `base^(-2i/D)` radians per token.
    """

    scale: float = 1.0
    base: float = 10_000.0

    name: ClassVar[str] = "sinusoidal"
    paper: ClassVar[str] = "1706.03762"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("scale", minimum=0, maximum=1e6, above=True)
        self._check("base", minimum=1, maximum=1e12, above=True)

    def vectors(self, shape: ModelShape, position_ids: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """`sin(p / base^(2i/D))` in channel 2i and `cos` of the same in channel 2i + 1, times `scale`.

        `[..., hidden_size]` float32, D the hidden size; computed in float64 where the device has it.
        """
        exact = torch.float32 if position_ids.device.type == "mps" else torch.float64
        even = torch.arange(0, shape.hidden_size, 2, dtype=exact, device=position_ids.device)
        angles = position_ids[..., None].to(exact) * self.base ** (-even / shape.hidden_size)
        both = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return (self.scale * both[..., : shape.hidden_size]).to(torch.float32)
