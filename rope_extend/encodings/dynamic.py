"""Schedules whose table grows with the length of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from rope_extend.checks import FLAG, choice
from rope_extend.encodings.core.rope import GrowingRope, ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.static import TURNS, YaRN, ntk_theta


def needed_factor(shape: RopeShape, seq_len: int | None) -> float:
    """`max(1, l / L)`: the length of a sequence in trained windows, at least 1."""
    return max(1.0, (seq_len or 1) / shape.trained_length)


@dataclass(frozen=True)
class DynamicLinear(GrowingRope):
    """Dynamic interpolation: plain RoPE within the trained window, beyond it linear with factor l / L."""

    name: ClassVar[str] = "dynamic_linear"
    paper: ClassVar[str] = "2309.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i / max(1, l/L)`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() / needed_factor(shape, seq_len)


@dataclass(frozen=True)
class DynamicNTK(ScaledRope, GrowingRope):
    """Dynamic NTK: plain RoPE within the trained window, and a base that grows with the length beyond it.

    Attributes:
        factor: s, how fast the base grows: at l tokens it is that for `s*l/L - (s-1)` times the window.
    """

    name: ClassVar[str] = "dynamic_ntk"
    paper: ClassVar[str] = "emozilla 2023 (dynamically scaled RoPE); described in 2309.00071"
    rope_type: ClassVar[str | None] = "dynamic"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's table at `theta * (s*l/L - (s-1))^(d/(d-2))` for l > L, `[dim/2]` float64."""
        if seq_len is None or seq_len <= shape.trained_length:
            return shape.inv_freq()
        stretch = self.factor * seq_len / shape.trained_length - (self.factor - 1)
        return shape.inv_freq(ntk_theta(shape, stretch))


@dataclass(frozen=True)
class DynamicYaRN(GrowingRope):
    """Dynamic YaRN: plain RoPE within the trained window, beyond it YaRN with factor l / L.

    Attributes:
        beta_fast: as in `yarn`.
        beta_slow: as in `yarn`.
        truncate: as in `yarn`.
        ramp: as in `yarn`.
    """

    beta_fast: Annotated[float, TURNS] = 32.0
    beta_slow: Annotated[float, TURNS] = 1.0
    truncate: Annotated[bool, FLAG] = True
    ramp: Annotated[str, choice("index", "turns")] = "index"

    name: ClassVar[str] = "dynamic_yarn"
    paper: ClassVar[str] = "2309.00071"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._yarn(1.0)  # checks that the parameters fit together

    def _yarn(self, factor: float) -> YaRN:
        names = ("beta_fast", "beta_slow", "truncate", "ramp")
        return YaRN(factor, **{name: getattr(self, name) for name in names})

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """YaRN's table at `max(1, l/L)`, `[dim/2]` float64, radians per token."""
        return self._yarn(needed_factor(shape, seq_len)).inv_freq(shape)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """`0.1 ln max(1, l/L) + 1`."""
        return self._yarn(needed_factor(shape, seq_len)).attention_factor(shape)
