"""Sandwich: the inner products of sinusoidal vectors as a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.alternatives import BiasEncoding
from rope_extend.encodings.core.shapes import ModelShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Sandwich(BiasEncoding):
    """Sandwich: the inner product of the sinusoidal vectors of query and key as a bias; nothing is learned.

    Attributes:
        dim: number of channels of the sinusoidal vectors, even.
    """

    dim: int = 128

    name: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = "2212.10356"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("dim", minimum=2, maximum=65_536)
        if self.dim % 2:
            raise RopeExtendError(f"{self.name}: dim must be an even whole number, got {self.dim!r}")
        object.__setattr__(self, "dim", int(self.dim))

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`H / (8h) * (sum_k cos(r / 10000^(2k/dim)) - dim/2)` in head h of H, `[heads, ...]` float32.

        k runs from 0 to `dim/2 - 1`. The paper does not subtract `dim/2`. Softmax ignores the constant, and
        subtracting it keeps the bias small at short distances.
        """
        # Apple's GPUs have no float64; there, the fastest channels are slightly inexact at long distances.
        dtype = torch.float32 if distance.device.type == "mps" else torch.float64
        far = distance.to(dtype)
        total = torch.zeros_like(far)
        for k in range(self.dim // 2):
            total += torch.cos(far * 10_000.0 ** (-2 * k / self.dim)) - 1
        heads = torch.arange(1, shape.heads + 1, dtype=dtype, device=distance.device)
        scale = (shape.heads / (8 * heads)).view(-1, *[1] * distance.dim())
        return (scale * total).to(torch.float32)
