"""ALiBi: attention with linear biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import BiasEncoding, ModelShape


@dataclass(frozen=True)
class ALiBi(BiasEncoding):
    """ALiBi: a logit shrinks in proportion to the distance, in each head by a slope of its own."""

    name: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "2108.12409"

    def slopes(self, shape: ModelShape) -> Tensor:
        """`2^(-8h/H)` for head h of H, from 1; `[heads]` float64.

        Where H is no power of two, the slopes of the next smaller power, and then every other one of those
        of twice as many heads, as in the paper's code and in BLOOM.
        """
        whole = 2 ** (shape.heads.bit_length() - 1)
        rest = shape.heads - whole
        return torch.cat([_geometric(whole), _geometric(2 * whole)[::2][:rest]])

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`-slope * distance`, `[heads, ...]` float32."""
        slopes = self.slopes(shape).to(distance.device, torch.float32)
        return -slopes.view(-1, *[1] * distance.dim()) * distance


def _geometric(heads: int) -> Tensor:
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
