"""FIRE: a learned function of the distance, relative to how far the query could look back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import BiasEncoding, ModelShape
from rope_extend.errors import RopeExtendError

_EPSILON = 1e-6
"""What keeps the normaliser from 0, as in the paper's code."""


@dataclass(frozen=True)
class FIRE(BiasEncoding):
    """FIRE: a small network reads the distance as a share of the query's own position, on a log scale.

    `f(psi(r) / psi(max(i, L)))` for distance r and query position i, with `psi(x) = ln(c x + 1)`. Distances
    beyond those of training are so mapped onto shares that were seen.

    Attributes:
        width: of the hidden layer of f, which has ReLU.
        per_layer: whether each layer learns its own f, c and L, as in the paper; without, its FIRE-S.
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
        """The two layers of f, c, and the share of the trained window that is L.

        As in the paper's code: c starts at 0.1, L at the trained window, and the layers as torch makes linear
        layers, drawn from a fixed seed.
        """
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int, fan_in: int) -> Tensor:
            return (2 * torch.rand(*size, generator=generator) - 1) / math.sqrt(fan_in)

        return {
            "weight1": drawn(self.width, fan_in=1),
            "bias1": drawn(self.width, fan_in=1),
            "weight2": drawn(shape.heads, self.width, fan_in=self.width),
            "bias2": drawn(shape.heads, fan_in=self.width),
            "c": torch.tensor(0.1),
            "share": torch.tensor(1.0),
        }

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`f(psi(r) / psi(max(i, L)))`, `[heads, ...]` float32.

        f is piecewise linear, and is computed as such: one line per head for each stretch between the points
        at which a unit of its hidden layer turns on or off, instead of the units themselves at every place.
        """
        threshold = self._threshold(shape, learned)
        c = learned["c"].abs()
        reach = torch.log1p(c * torch.maximum(query.to(torch.float32), threshold)) + _EPSILON
        share = torch.log1p(c * distance.to(torch.float32)) / reach
        turns, slope, height = _lines(learned)
        stretch = torch.searchsorted(turns, share.detach().contiguous()).flatten()
        size = (shape.heads, *share.shape)
        return torch.addcmul(
            height.index_select(1, stretch).view(size), slope.index_select(1, stretch).view(size), share
        )

    def same_until(self, shape: ModelShape, learned: Mapping[str, Tensor]) -> float:
        """L, within which every query normalises alike."""
        return float(self._threshold(shape, learned).detach())

    @staticmethod
    def _threshold(shape: ModelShape, learned: Mapping[str, Tensor]) -> Tensor:
        """L in tokens."""
        return (learned["share"] * shape.trained_length).abs()


def _lines(learned: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Where units turn, `[width]` ascending; and f's slope and height between, each `[heads, width + 1]`.

    A unit with a positive weight is on after its turn, one with a negative weight before it, and one without
    a weight always or never.
    """
    weight, bias = learned["weight1"], learned["bias1"]
    with torch.no_grad():
        turns, order = torch.where(weight == 0, torch.inf, -bias / weight).sort()
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        passed = torch.arange(len(order) + 1, device=order.device)[:, None] > rank
        on = torch.where(weight == 0, bias > 0, passed == (weight > 0)).to(weight.dtype)
    out = learned["weight2"]
    return turns, (out * weight) @ on.T, (out * bias) @ on.T + learned["bias2"][:, None]
