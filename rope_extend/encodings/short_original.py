"""Short prompts as the model was pretrained, longer ones as extended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.base import ComposedRope, RopeShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class ShortOriginal(ComposedRope):
    """Plain RoPE while a text fits the trained window, the inner schedule once it does not.

    A static schedule costs quality within the trained window, where nothing had to be changed. Here each
    query that ends a text of at most the trained length reads as the model was pretrained, exactly; each
    later one reads all of its text by the inner schedule.

    Attributes:
        inner: the static schedule for longer texts.
    """

    name: ClassVar[str] = "short_original"
    paper: ClassVar[str] = "the switch of 2402.13753, with plain RoPE as its short side"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.depends_on_length:
            raise RopeExtendError(
                f"short_original goes around a static schedule, such as yarn; {self.inner} follows the "
                f"length by itself"
            )

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        """Always: that is what it is for."""
        return True

    @property
    def rotates_in_attention(self) -> bool:
        """Always: the table of a key follows from the query that reads it."""
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
        """None of its own; the inner schedule's applies beyond the trained window only."""
        scale = self.inner.logit_scale(shape, position_ids)
        if scale is None:
            return None
        return torch.where(position_ids < shape.trained_length, torch.ones_like(scale), scale)
