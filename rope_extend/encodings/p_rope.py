"""p-RoPE: the slowest channels stand still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import ComposedRope, RopeShape


@dataclass(frozen=True)
class PRoPE(ComposedRope):
    """p-RoPE: only the fastest fraction p of the channels turns; the slow rest carries meaning, not position.

    The pairs that are kept turn as before: the denominator of their exponents stays d. Around `linear` it is
    what transformers calls `proportional` with a factor. A pretrained model has to be fine-tuned to it.

    Attributes:
        inner: the schedule whose fastest channels are kept.
        fraction: p, above 0 and at most 1; `floor(p d/2)` channel pairs keep turning.
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
