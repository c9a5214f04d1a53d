"""FIRE: a learned function of the distance, relative to the position of the query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.alternatives import BiasEncoding
from rope_extend.encodings.core.shapes import ModelShape
from rope_extend.errors import RopeExtendError

_EPSILON = 1e-6
"""Added to the normaliser to keep it above 0, as in the paper's code."""


@dataclass(frozen=True)
class FIRE(BiasEncoding):
    """FIRE: a bias from a small network of the distance relative to the query's position, on a log scale.

    `f(psi(r) / psi(max(i, L)))` for distance r and query position i, with `psi(x) = ln(c x + 1)`. Distances
    longer than in training are thus mapped to relative distances that were seen.

    Attributes:
        width: units in the hidden layer of f, which uses ReLU.
        per_layer: whether each layer learns its own f, c and L, as in the paper; False is its FIRE-S.
    """

    width: int = 32
    per_layer: bool = True

    name: ClassVar[str] = "fire"
    paper: ClassVar[str] = "2310.04418"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("width", minimum=1, maximum=4096)
        if self.width != int(self.width):
            raise RopeExtendError(f"{self.name}: width must be a whole number, got {self.width!r}")
        object.__setattr__(self, "width", int(self.width))

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """The two layers of f, c, and L as a share of the trained window.

        As in the paper's code: c starts at 0.1 and L at the trained window. The layers start as torch
        initialises linear layers, from a fixed seed.
        """
        generator = torch.Generator().manual_seed(0)

        def random(*size: int, fan_in: int) -> Tensor:
            return (2 * torch.rand(*size, generator=generator) - 1) / math.sqrt(fan_in)

        return {
            "weight1": random(self.width, fan_in=1),
            "bias1": random(self.width, fan_in=1),
            "weight2": random(shape.heads, self.width, fan_in=self.width),
            "bias2": random(shape.heads, fan_in=self.width),
            "c": torch.tensor(0.1),
            "share": torch.tensor(1.0),
        }

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`f(psi(r) / psi(max(i, L)))`, `[heads, ...]` float32.

        f is piecewise linear and is computed that way: one line per head between each two points at which a
        unit of its hidden layer switches on or off, instead of all units at every distance.
        """
        threshold = self._threshold(shape, learned)
        c = learned["c"].abs()
        reach = torch.log1p(c * torch.maximum(query.to(torch.float32), threshold)) + _EPSILON
        share = torch.log1p(c * distance.to(torch.float32)) / reach
        switches, slope, height = _lines(learned)
        piece = torch.searchsorted(switches, share.detach().contiguous()).flatten()
        size = (shape.heads, *share.shape)
        return torch.addcmul(
            height.index_select(1, piece).view(size), slope.index_select(1, piece).view(size), share
        )

    def distance_only_until(self, shape: ModelShape, learned: Mapping[str, Tensor]) -> Tensor:
        """L: all queries up to this position have the same normaliser."""
        return self._threshold(shape, learned).detach()

    @staticmethod
    def _threshold(shape: ModelShape, learned: Mapping[str, Tensor]) -> Tensor:
        """L in tokens."""
        return (learned["share"] * shape.trained_length).abs()


def _lines(learned: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Where units switch, `[width]` ascending; and f's slope and height between, each `[heads, width + 1]`.

    A unit with a positive weight is on after its switch, and one with a negative weight before it. A unit
    with weight 0 is always on or always off.
    """
    weight, bias = learned["weight1"], learned["bias1"]
    with torch.no_grad():
        switches, order = torch.where(weight == 0, torch.inf, -bias / weight).sort()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        passed = torch.arange(len(order) + 1, device=order.device)[:, None] > rank
        on = torch.where(weight == 0, bias > 0, passed == (weight > 0)).to(weight.dtype)
    out = learned["weight2"]
    return switches, (out * weight) @ on.T, (out * bias) @ on.T + learned["bias2"][:, None]
