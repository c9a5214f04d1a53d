"""Resonance RoPE: whole wavelengths, so that channels meet again the angles they were trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import ComposedRope, RopeShape


@dataclass(frozen=True)
class Resonance(ComposedRope):
    """Resonance: wavelengths rounded to whole tokens, so that fast channels repeat the angles they know.

    A channel whose wavelength is a whole number of tokens takes the same angles in every turn. Only those
    that turned within the trained window have angles to repeat; the others are left as they are.

    Attributes:
        inner: the schedule whose wavelengths are rounded.
    """

    name: ClassVar[str] = "resonance"
    paper: ClassVar[str] = "2403.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`2 pi / round(wavelength)` for wavelengths below L, `[dim/2]` float64, radians per token."""
        table = self.inner.inv_freq(shape, seq_len)
        wavelength = 2 * math.pi / table  # infinite where a channel stands still
        whole = 2 * math.pi / wavelength.round().clamp(min=1)
        return torch.where(wavelength < shape.trained_length, whole, table)
