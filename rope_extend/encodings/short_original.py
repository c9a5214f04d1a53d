"""Plain RoPE for short texts, an extension for longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.rope import ComposedRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class ShortOriginal(ComposedRope):
    """Plain RoPE while a text fits the trained window, the inner schedule once it does not.

    A static schedule costs quality within the trained window, where no change is needed. Here every query
    within the trained window uses the pretrained model's table, exactly. Every later query uses the inner
    schedule for its whole text.

    Attributes:
        inner: the static schedule for longer texts, without decay (xpos).
    """

    name: ClassVar[str] = "short_original"
    paper: ClassVar[str] = "the switch of 2402.13753, with plain RoPE as its short side"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.depends_on_length:
            raise RopeExtendError(
                f"short_original: inner must be a static schedule, but {self.inner} already depends on the "
                f"length; give one such as yarn"
            )
        if self.inner.rotates_in_attention:
            raise RopeExtendError(
                f"short_original: {self.inner} makes distant tokens lose weight in texts of any length, so "
                f"short ones would not be processed as pretrained; give a schedule without xpos"
            )

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        """Always: the length decides between the two tables."""
        return True

    @property
    def rotates_in_attention(self) -> bool:
        """Always: the table of a key depends on the query."""
        return True

    @staticmethod
    def _is_short(shape: RopeShape, seq_len: int | None) -> bool:
        return seq_len is None or seq_len <= shape.trained_length

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's up to and including the trained length, then the inner one's, `[dim/2]` float64."""
        return shape.inv_freq() if self._is_short(shape, seq_len) else self.inner.inv_freq(shape, seq_len)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """1 up to and including the trained length, then the inner schedule's."""
        return 1.0 if self._is_short(shape, seq_len) else self.inner.attention_factor(shape, seq_len)

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """Two tables: one up to and including the trained length, and one beyond."""
        return shape.trained_length + (lengths > shape.trained_length).to(torch.int64)

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The inner schedule's, beyond the trained window only."""
        scale = self.inner.logit_scale(shape, position_ids)
        if scale is None:
            return None
        return torch.where(position_ids < shape.trained_length, torch.ones_like(scale), scale)
