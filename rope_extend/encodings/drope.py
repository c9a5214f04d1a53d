"""DroPE: rotation removed after pretraining."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class DroPE(ScaledRope):
    """DroPE: rotation removed from a trained model, followed by a short recalibration.

    Recalibrate at the trained length. Longer texts then use attention sharpened by `1 + c ln s` for a text
    s times that long. The paper does not say which length counts, see `per`.

    Attributes:
        factor: `target_length / trained_length`, the largest s.
        coefficient: c. The paper fits 0.103 for a model pretrained with RoPE and recalibrated (SmolLM), and
            0.412 for a model trained from scratch this way.
        per: `query` computes s from the text up to each query: nothing is scaled within the trained window,
            and no token depends on later ones. `target` uses s = factor for every query.
    """

    coefficient: float = 0.103
    per: str = "query"

    name: ClassVar[str] = "drope"
    paper: ClassVar[str] = "2512.12167"
    replaces_rotation = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("coefficient", minimum=0, maximum=10)
        if self.per not in ("query", "target"):
            raise RopeExtendError(f"{self.name}: per must be 'query' or 'target', got {self.per!r}")

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Zeros, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() * 0

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`1 + c ln s` at each position, float64, like `position_ids`; None for 1 at all of them."""
        if self.coefficient * math.log(self.factor) == 0:
            return None
        stretch = torch.full_like(position_ids, self.factor, dtype=torch.float64)
        if self.per == "query":
            stretch = ((position_ids + 1) / shape.trained_length).double().clamp(min=1, max=self.factor)
        return 1 + self.coefficient * stretch.log()
