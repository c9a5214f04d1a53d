"""T5's relative bias: a learned number for each range of distances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.alibi import ALiBi
from rope_extend.encodings.core.alternatives import BiasEncoding
from rope_extend.encodings.core.shapes import ModelShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class T5Bias(BiasEncoding):
    """T5's relative bias: one learned number per head for each range of distances, shared by all layers.

    T5 itself does not scale its logits. Here they keep the scale of the pretrained model.

    Attributes:
        buckets: number of ranges; each range of the nearer half holds one distance.
        max_distance: the distance in tokens from which all distances are in the last range.
        start: the first values: `alibi`, ALiBi's bias at the nearest distance of each range, or `zeros`,
            with which the model cannot tell distances apart until it has learned to.
    """

    buckets: int = 32
    max_distance: int = 128
    start: str = "alibi"

    name: ClassVar[str] = "t5_bias"
    paper: ClassVar[str] = "1910.10683"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("buckets", minimum=2, maximum=4096)
        self._check("max_distance", minimum=2, maximum=2**24)
        for field in ("buckets", "max_distance"):
            if (value := getattr(self, field)) != int(value):
                raise RopeExtendError(f"{self.name}: {field} must be a whole number, got {value!r}")
            object.__setattr__(self, field, int(value))
        if self.max_distance <= self.buckets // 2:
            raise RopeExtendError(
                f"{self.name}: max_distance must exceed half the buckets, {self.buckets // 2}, got "
                f"{self.max_distance}"
            )
        if self.start not in ("alibi", "zeros"):
            raise RopeExtendError(f"{self.name}: start must be 'alibi' or 'zeros', got {self.start!r}")

    def bucket(self, distance: Tensor) -> Tensor:
        """The range of each distance, int64 `[...]`.

        Computed in float32 as in T5, so that every distance is in the same range as there.
        """
        exact = self.buckets // 2
        far = exact + (
            torch.log(distance.clamp(min=exact).float() / exact)
            / math.log(self.max_distance / exact)
            * (self.buckets - exact)
        ).to(torch.int64)
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`table` `[buckets, heads]`."""
        table = torch.zeros(self.buckets, shape.heads)
        if self.start == "alibi":
            ranges = self.bucket(torch.arange(self.max_distance + 1))
            nearest = torch.searchsorted(ranges, torch.arange(self.buckets))
            table = -(nearest[:, None] * ALiBi().slopes(shape)).to(torch.float32)
        return {"table": table}

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """The table's number for the range of each distance, `[heads, ...]` float32."""
        return learned["table"][self.bucket(distance)].movedim(-1, 0)
