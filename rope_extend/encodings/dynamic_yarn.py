"""Dynamic YaRN: YaRN with the factor that the current length needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import GrowingRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.dynamic_linear import needed_factor
from rope_extend.encodings.yarn import YaRN


@dataclass(frozen=True)
class DynamicYaRN(GrowingRope):
    """Dynamic YaRN: plain RoPE within the trained window, beyond it YaRN with factor l / L.

    Attributes:
        beta_fast: as in `yarn`.
        beta_slow: as in `yarn`.
        truncate: as in `yarn`.
        ramp: as in `yarn`.
        per: which length sets the table, `query` or `row`.
        step: with `per="query"`, the relative growth of the text from one table to the next.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    ramp: str = "index"

    name: ClassVar[str] = "dynamic_yarn"
    paper: ClassVar[str] = "2309.00071"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked = self._yarn(1.0)
        object.__setattr__(self, "beta_fast", checked.beta_fast)
        object.__setattr__(self, "beta_slow", checked.beta_slow)

    def _yarn(self, factor: float) -> YaRN:
        return YaRN(
            factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            ramp=self.ramp,
        )

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """YaRN's table at `max(1, l/L)`, `[dim/2]` float64, radians per token."""
        return self._yarn(needed_factor(shape, seq_len)).inv_freq(shape)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """`0.1 ln max(1, l/L) + 1`."""
        return self._yarn(needed_factor(shape, seq_len)).attention_factor(shape)

    def target_length(self, shape: RopeShape) -> int | None:
        """None: it adapts to any length."""
        return None
