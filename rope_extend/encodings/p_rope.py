"""p-RoPE: the slowest channels do not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class PRoPE(ComposedRope):
    """p-RoPE: only the fastest fraction p of the channels rotates; the others carry content, not position.

    The kept pairs rotate as before: the denominator of their exponents stays d. `p_rope(linear)` is what
    transformers calls `proportional` with a factor. A pretrained model has to be fine-tuned to it.

    Attributes:
        inner: the schedule whose fastest channels are kept.
        fraction: p, above 0 and at most 1; `floor(p d/2)` channel pairs keep their frequency.
    """

    fraction: float = 0.75

    name: ClassVar[str] = "p_rope"
    paper: ClassVar[str] = "2410.06205"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("fraction", minimum=0, maximum=1, above=True)

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """The inner table with zeros from pair `floor(p d/2)` on, `[dim/2]` float64, radians per token."""
        table = self.inner.inv_freq(shape, seq_len)
        kept = torch.arange(shape.dim // 2) < int(self.fraction * shape.dim // 2)
        return torch.where(kept, table, torch.zeros_like(table))
