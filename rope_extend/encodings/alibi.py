"""ALiBi: attention with linear biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.alternatives import BiasEncoding
from rope_extend.encodings.core.shapes import ModelShape
from rope_extend.encodings.core.transfers import to_device


@dataclass(frozen=True)
class ALiBi(BiasEncoding):
    """ALiBi: each logit is lowered in proportion to the distance, with a different slope for each head."""

    name: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "2108.12409"

    def slopes(self, shape: ModelShape) -> Tensor:
        """`2^(-8h/H)` for head h of H, from 1; `[heads]` float64.

        If H is not a power of two: the slopes for the next smaller power, then every other slope for twice
        that power, as in the paper's code and in BLOOM.
        """
        power = 2 ** (shape.heads.bit_length() - 1)
        rest = shape.heads - power
        return torch.cat([_geometric(power), _geometric(2 * power)[::2][:rest]])

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`-slope * distance`, `[heads, ...]` float32."""
        slopes = to_device(self.slopes(shape), distance.device, torch.float32)
        return -slopes.view(-1, *[1] * distance.dim()) * distance


def _geometric(heads: int) -> Tensor:
    """The slopes for a power of two heads, `[heads]` float64."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
