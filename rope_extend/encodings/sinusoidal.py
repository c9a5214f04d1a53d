"""Sinusoidal vectors: the position encoding of the first transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.alternatives import AbsoluteEncoding
from rope_extend.encodings.core.shapes import ModelShape


@dataclass(frozen=True)
class Sinusoidal(AbsoluteEncoding):
    """Sinusoidal vectors: sine and cosine of the position, with a different frequency for each channel pair.

    Attributes:
        scale: factor on the vectors, whose channels lie between -1 and 1. The first transformer multiplied
            its embeddings by the square root of their width to match. Most models of today do not, and may
            need a scale below 1.
        base: base of the frequencies, `base^(-2i/D)` radians per token.
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
        dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
        even = torch.arange(0, shape.hidden_size, 2, dtype=dtype, device=position_ids.device)
        angles = position_ids[..., None].to(dtype) * self.base ** (-even / shape.hidden_size)
        both = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return (self.scale * both[..., : shape.hidden_size]).to(torch.float32)
