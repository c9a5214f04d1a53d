"""Resonance RoPE: whole wavelengths, so that channels repeat the angles they were trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class Resonance(ComposedRope):
    """Resonance: wavelengths rounded to whole tokens, so that fast channels repeat trained angles.

    A channel whose wavelength is a whole number of tokens has the same angles in every turn. Only channels
    that complete a turn within the trained window are changed.

    Attributes:
        inner: the schedule whose wavelengths are rounded.
    """

    name: ClassVar[str] = "resonance"
    paper: ClassVar[str] = "2403.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`2 pi / round(wavelength)` for wavelengths below L, `[dim/2]` float64, radians per token."""
        table = self.inner.inv_freq(shape, seq_len)
        wavelength = 2 * math.pi / table  # infinite for frequency zero
        whole = 2 * math.pi / wavelength.round().clamp(min=1)
        return torch.where(wavelength < shape.trained_length, whole, table)
