"""DroPE: positions dropped after pretraining."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import REPLACED, RopeShape, ScaledRope
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class DroPE(ScaledRope):
    """DroPE: rotation dropped from a trained model, which a short recalibration gets used to.

    Recalibrate at the trained length, then read further with attention sharpened by `1 + c ln s` for a text
    s times that long. Whose length it is, the paper leaves open.

    Attributes:
        factor: `target_length / trained_length`, the largest s.
        coefficient: c; fitted in the paper to 0.103 for a model pretrained with RoPE and recalibrated
            (SmolLM), and to 0.412 for one trained from scratch for the purpose.
        per: `query`, by the text that each query ends, so that nothing is scaled within the trained window,
            and what a token reads never depends on later ones; or `target`, by s = factor for every query.
    """

    coefficient: float = 0.103
    per: str = "query"

    name: ClassVar[str] = "drope"
    paper: ClassVar[str] = "2512.12167"
    adaptation = REPLACED

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
