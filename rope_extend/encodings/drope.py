"""DroPE: positions dropped after pretraining."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import RopeShape, ScaledRope


@dataclass(frozen=True)
class DroPE(ScaledRope):
    """DroPE: rotation dropped from a trained model, which a short recalibration gets used to.

    Recalibrate at the trained length (factor 1, which scales nothing), then read further with attention
    sharpened by `1 + c ln s`.

    Attributes:
        factor: `s = target_length / trained_length`.
        coefficient: c; fitted in the paper to 0.103 for a model pretrained with RoPE and recalibrated
            (SmolLM), and to 0.412 for one trained from scratch for the purpose.
    """

    coefficient: float = 0.103

    name: ClassVar[str] = "drope"
    paper: ClassVar[str] = "2512.12167"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("coefficient", minimum=0, maximum=10)

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Zeros, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() * 0

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`1 + c ln s` at every position, float64, like `position_ids`; None for 1."""
        scale = 1 + self.coefficient * math.log(self.factor)
        return None if scale == 1 else torch.full_like(position_ids, scale, dtype=torch.float64)
