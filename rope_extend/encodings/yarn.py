"""YaRN: interpolate slow channels, keep fast ones, and sharpen attention a little."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.critical import check_critical, critical_pair
from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.ntk_by_parts import by_parts
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class YaRN(ScaledRope):
    """YaRN: slow channels are interpolated, fast ones kept, with a ramp between, and attention is sharpened.

    Two ramps are called YaRN. In its code and in transformers the ramp is linear in the channel index. In
    the paper's text (equation 13) it is linear in the number of turns.

    Attributes:
        factor: `s = target_length / trained_length`.
        beta_fast: frequencies with more turns than this within the trained window are kept.
        beta_slow: frequencies with fewer turns than this are divided by s.
        attention_scale: replaces the factor `0.1 ln s + 1` on cos and sin; `attention_factor` in config.json.
        truncate: whether the ends of the ramp are rounded outwards to whole channels; for `ramp="index"`.
        mscale: with `mscale_all_dim`, DeepSeek's form of the factor: the weight of `ln s` in its numerator.
        mscale_all_dim: the weight of `ln s` in its denominator.
        ramp: the ramp is linear in the channel `index` or in the number of `turns`.
        critical: the first channel pair that is divided by s in full, in place of `beta_slow`: LongRoPE2's
            critical pair (2502.20082), for `ramp="index"`. `theoretical`, which is the default too, is the
            first pair with at most one turn within the trained window. LongRoPE2 finds lower ones better.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_scale: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    ramp: str = "index"
    critical: int | str | None = None

    name: ClassVar[str] = "yarn"
    paper: ClassVar[str] = "2309.00071"
    rope_type: ClassVar[str | None] = "yarn"
    stock_names: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_scale": "attention_factor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("beta_fast", "beta_slow"):
            self._check(field, minimum=0, maximum=1e6, above=True)
        if self.beta_fast <= self.beta_slow:
            raise RopeExtendError(
                f"yarn: beta_fast must exceed beta_slow, got {self.beta_fast:g} and {self.beta_slow:g}"
            )
        for field in ("attention_scale", "mscale", "mscale_all_dim"):
            if getattr(self, field) is not None:
                self._check(field, minimum=0, maximum=100, above=True)
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise RopeExtendError("yarn: mscale and mscale_all_dim only act together; give both or neither")
        if not isinstance(self.truncate, bool):
            raise RopeExtendError(f"yarn: truncate must be true or false, got {self.truncate!r}")
        if self.ramp not in ("index", "turns"):
            raise RopeExtendError(f"yarn: ramp must be 'index' or 'turns', got {self.ramp!r}")
        if self.ramp == "turns" and not self.truncate:
            raise RopeExtendError(
                "yarn: truncate=False has no effect with ramp='turns', whose ends are never rounded; omit it"
            )
        object.__setattr__(self, "critical", check_critical("yarn", self.critical))
        if self.critical is not None and (self.ramp == "turns" or self.beta_slow != 1):
            raise RopeExtendError(
                "yarn: critical sets the slow end of the ramp in channel pairs; leave out ramp='turns' and "
                "beta_slow"
            )

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`ramp * theta_i / s + (1 - ramp) * theta_i`, `[dim/2]` float64, radians per token."""
        if self.ramp == "turns":
            return by_parts(shape, self.factor, self.beta_slow, self.beta_fast)
        low, high = (shape.index_with_turns(turns) for turns in (self.beta_fast, self._slow_turns(shape)))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, shape.dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, as in transformers
        ramp = ((torch.arange(shape.dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        plain = shape.inv_freq()
        return ramp * plain / self.factor + (1 - ramp) * plain

    def _slow_turns(self, shape: RopeShape) -> float:
        """The turns within the trained window at the slow end of the ramp.

        Raises:
            RopeExtendError: the critical pair is not in the model, or is at or below the start of the ramp.
        """
        if self.critical is None:
            return self.beta_slow
        pair = critical_pair("yarn", self.critical, shape)
        start = shape.index_with_turns(self.beta_fast)
        start = max(0, math.floor(start) if self.truncate else start)
        if pair <= start:
            raise RopeExtendError(
                f"yarn: critical must be above the pair where the ramp starts, {start:g} with "
                f"beta_fast={self.beta_fast:g}; got {pair}"
            )
        # Half a pair before if the end is rounded up, so that no rounding of the turns misses the pair.
        index = pair - 0.5 if self.truncate else pair
        return shape.turns_at(index)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """`0.1 ln s + 1`, or DeepSeek's quotient of two such terms, or `attention_scale`."""
        if self.attention_scale is not None:
            return self.attention_scale
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `yarn` with the trained length, which its ramp needs; stock `longrope` for `ramp="turns"`.

        A critical pair becomes the `beta_slow` with the same table.
        """
        if self.ramp == "turns":
            return self.longrope_parameters(shape)
        values = super().rope_parameters(shape)
        del values["ramp"]
        values.pop("critical", None)
        values["beta_slow"] = self._slow_turns(shape)
        return {**values, "original_max_position_embeddings": shape.trained_length}
