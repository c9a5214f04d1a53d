"""Static schedules: one table of frequencies for texts of any length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.checks import FLAG, choice, integer, number, or_word
from rope_extend.encodings.core.rope import RopeEncoding, ScaledRope
from rope_extend.encodings.core.shapes import MAX_DIM, RopeShape, critical_range
from rope_extend.errors import RopeExtendError

TURNS = number(0, 1e6, above=True)
"""Turns of a channel pair within the trained window, where a ramp between two schedules starts or ends."""
CRITICAL = or_word(integer(1, MAX_DIM), "theoretical")
"""The index of a channel pair, or the theoretical critical pair, see `critical_range`."""


def critical_pair(name: str, critical: int | str, shape: RopeShape) -> int:
    """The index of the critical pair in a model.

    Raises:
        RopeExtendError: the model has no such pair.
    """
    theoretical, last = critical_range(shape)[1], shape.dim // 2 - 1
    if isinstance(critical, int) and critical > last:
        raise RopeExtendError(
            f"{name}: critical is {critical}, but this model rotates {last + 1} channel pairs, 0 to {last}; "
            f"the theoretical critical pair is {theoretical}"
        )
    return critical if isinstance(critical, int) else theoretical


def check_order(method: Any, larger: str, smaller: str) -> None:
    """Refuse a ramp that does not go from one field of a method up to another."""
    high, low = getattr(method, larger), getattr(method, smaller)
    if high <= low:
        raise RopeExtendError(f"{method.name}: {larger} must exceed {smaller}, got {high:g} and {low:g}")


@dataclass(frozen=True)
class PlainRope(RopeEncoding):
    """Plain RoPE, `theta_i = theta^(-2i/d)`: the baseline for every extension."""

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = "2104.09864"
    rope_type: ClassVar[str | None] = "default"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta^(-2i/d)`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq()


@dataclass(frozen=True)
class Linear(ScaledRope):
    """Position interpolation: every frequency divided by s, so that s times as many positions fit."""

    name: ClassVar[str] = "linear"
    paper: ClassVar[str] = "2306.15595"
    rope_type: ClassVar[str | None] = "linear"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i / s`, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() / self.factor


def ntk_theta(shape: RopeShape, stretch: float) -> float:
    """The base with which the slowest pair rotates `stretch` times slower and the fastest is unchanged.

    `theta' = theta * stretch^(d/(d-2))`.

    Raises:
        RopeExtendError: fewer than four rotated channels: the only pair is the fastest, which stays.
    """
    if shape.dim < 4:
        raise RopeExtendError(
            f"NTK scaling needs 4 or more rotated channels per head, this model has {shape.dim}; use linear"
        )
    return float(shape.theta * stretch ** (shape.dim / (shape.dim - 2)))


@dataclass(frozen=True)
class NTK(ScaledRope):
    """NTK-aware scaling: a larger base, which slows the slowest channels by s and keeps the fastest.

    Attributes:
        critical: the first channel pair that is divided by s in full: LongRoPE2's critical pair (2502.20082).
            The pairs before it are divided by `s^(i/critical)`. `theoretical` is the first pair with at most
            one turn within the trained window; LongRoPE2 finds lower ones better. By default the last pair,
            which is NTK-aware scaling as published.
    """

    critical: Annotated[int | str | None, CRITICAL] = None

    name: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "bloc97 2023 (NTK-aware scaled RoPE); described in 2309.00071"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's table at `theta * s^(d/(d-2))`, `[dim/2]` float64, radians per token.

        With `critical=c`: `theta_i / s^min(1, i/c)`.
        """
        if self.critical is None:
            return shape.inv_freq(ntk_theta(shape, self.factor))
        pair = critical_pair("ntk", self.critical, shape)
        share = (torch.arange(shape.dim // 2, dtype=torch.float64) / pair).clamp(max=1)
        return shape.inv_freq() / self.factor**share

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `default` with the larger theta, which every loader supports; `longrope` for `critical`."""
        if self.critical is not None:
            return self.longrope_parameters(shape)
        return {"rope_type": "default", "rope_theta": ntk_theta(shape, self.factor)}


def by_parts(shape: RopeShape, factor: float, slow: float, fast: float) -> Tensor:
    """Blend of interpolated and plain frequencies, `[dim/2]` float64, radians per token.

    Channel i makes `r_i` turns within the trained window. Its frequency is divided by `factor` if
    `r_i <= slow` and kept if `r_i >= fast`. Between the two is a ramp that is linear in `r_i`.
    """
    plain = shape.inv_freq()
    turns = shape.trained_length * plain / (2 * math.pi)
    keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain


@dataclass(frozen=True)
class NTKByParts(ScaledRope):
    """NTK-by-parts: YaRN's blend with the ramp of its paper, linear in turns, and no attention factor.

    Attributes:
        alpha: frequencies with fewer turns than this within the trained window are divided by s.
        beta: frequencies with more turns than this are kept.
    """

    alpha: Annotated[float, TURNS] = 1.0
    beta: Annotated[float, TURNS] = 32.0

    name: ClassVar[str] = "ntk_by_parts"
    paper: ClassVar[str] = "2309.00071"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "beta", "alpha")

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`(1 - keep) * theta_i / s + keep * theta_i`, `[dim/2]` float64, radians per token."""
        return by_parts(shape, self.factor, self.alpha, self.beta)


@dataclass(frozen=True)
class NTKMixed(ScaledRope):
    """NTK-mixed: channel i is slowed by `exp(a (i+1)^c)`, which grows up to s at the last channel.

    Attributes:
        exponent: c; the larger it is, the less the early channels are slowed.
    """

    exponent: Annotated[float, number(0, 10, above=True)] = 0.75

    name: ClassVar[str] = "ntk_mixed"
    paper: ClassVar[str] = "Su 2023 (NTK-RoPE mixed)"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i * exp(-a (i+1)^c)` with `a = ln s / (d/2)^c`, `[dim/2]` float64, radians per token."""
        share = (torch.arange(1, shape.dim // 2 + 1, dtype=torch.float64) / (shape.dim // 2)) ** self.exponent
        return shape.inv_freq() * torch.exp(-math.log(self.factor) * share)


@dataclass(frozen=True)
class YaRN(ScaledRope):
    """YaRN: slow channels are interpolated, fast ones kept, with a ramp between, and attention is sharpened.

    Two ramps are called YaRN. In its code and in transformers the ramp is linear in the channel index. In
    the paper's text (equation 13) it is linear in the number of turns.

    Attributes:
        beta_fast: frequencies with more turns than this within the trained window are kept.
        beta_slow: frequencies with fewer turns than this are divided by s.
        attention_scale: replaces the factor `0.1 ln s + 1` on cos and sin; `attention_factor` in config.json.
        truncate: whether the ends of the ramp are rounded outwards to whole channels; for `ramp="index"`.
        mscale: with `mscale_all_dim`, DeepSeek's form of the factor: the weight of `ln s` in its numerator.
        mscale_all_dim: the weight of `ln s` in its denominator, and in the softmax scale of families of
            DeepSeek's kind.
        ramp: the ramp is linear in the channel `index` or in the number of `turns`.
        critical: the first channel pair that is divided by s in full, in place of `beta_slow`: LongRoPE2's
            critical pair (2502.20082), for `ramp="index"`. `theoretical`, which is the default too, is the
            first pair with at most one turn within the trained window. LongRoPE2 finds lower ones better.
    """

    beta_fast: Annotated[float, TURNS] = 32.0
    beta_slow: Annotated[float, TURNS] = 1.0
    attention_scale: Annotated[float | None, number(0, 100, above=True)] = None
    truncate: Annotated[bool, FLAG] = True
    mscale: Annotated[float | None, number(0, 100, above=True)] = None
    mscale_all_dim: Annotated[float | None, number(0, 100, above=True)] = None
    ramp: Annotated[str, choice("index", "turns")] = "index"
    critical: Annotated[int | str | None, CRITICAL] = None

    name: ClassVar[str] = "yarn"
    paper: ClassVar[str] = "2309.00071"
    rope_type: ClassVar[str | None] = "yarn"
    stock_omits = ("ramp",)
    states_trained_length = True
    stock_names: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_scale": "attention_factor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "beta_fast", "beta_slow")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise RopeExtendError("yarn: mscale and mscale_all_dim only act together; give both or neither")
        if self.ramp == "turns" and not self.truncate:
            raise RopeExtendError(
                "yarn: truncate=False has no effect with ramp='turns', whose ends are never rounded; omit it"
            )
        if self.critical is not None and (self.ramp == "turns" or self.beta_slow != 1):
            raise RopeExtendError(
                "yarn: critical sets the slow end of the ramp in channel pairs; leave out ramp='turns' and "
                "beta_slow"
            )

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`ramp * theta_i / s + (1 - ramp) * theta_i`, `[dim/2]` float64, radians per token."""
        if self.ramp == "turns":
            return by_parts(shape, self.factor, self.beta_slow, self.beta_fast)
        low, high = self._ends(shape)
        if low == high:
            high += 0.001  # a step instead of a ramp, as in transformers
        ramp = ((torch.arange(shape.dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        plain = shape.inv_freq()
        return ramp * plain / self.factor + (1 - ramp) * plain

    def _ends(self, shape: RopeShape) -> tuple[float, float]:
        """The (fractional) channel pairs where the ramp starts and ends, for `ramp="index"`."""
        low, high = (shape.index_with_turns(turns) for turns in (self.beta_fast, self.beta_slow))
        low = max(math.floor(low) if self.truncate else low, 0)
        if self.critical is None:
            return low, min(math.ceil(high) if self.truncate else high, shape.dim - 1)
        pair = critical_pair("yarn", self.critical, shape)
        if pair <= low:
            raise RopeExtendError(
                f"yarn: critical must be above the pair where the ramp starts, {low:g} with "
                f"beta_fast={self.beta_fast:g}; got {pair}"
            )
        return low, pair

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
        if values.pop("critical", None) is not None:
            # Half a pair before if the end is rounded up, so that no rounding of the turns misses the pair.
            index = self._ends(shape)[1] - self.truncate / 2
            turns = shape.trained_length * shape.theta ** (-2 * index / shape.dim) / (2 * math.pi)
            values["beta_slow"] = float(turns)
        return values


@dataclass(frozen=True)
class Llama3(ScaledRope):
    """Llama 3.1's scaling: YaRN's blend with a ramp in the number of turns, and no attention factor.

    Attributes:
        low_freq_factor: frequencies with fewer turns than this within the trained window are divided by s.
        high_freq_factor: frequencies with more turns than this are kept.
    """

    low_freq_factor: Annotated[float, TURNS] = 1.0
    high_freq_factor: Annotated[float, TURNS] = 4.0

    name: ClassVar[str] = "llama3"
    paper: ClassVar[str] = "2407.21783"
    rope_type: ClassVar[str | None] = "llama3"
    states_trained_length = True  # on which its ramp depends

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "high_freq_factor", "low_freq_factor")

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`(1 - keep) * theta_i / s + keep * theta_i`, `[dim/2]` float64, radians per token."""
        return by_parts(shape, self.factor, self.low_freq_factor, self.high_freq_factor)


@dataclass(frozen=True)
class ABF(RopeEncoding):
    """Adjusted base frequency: a larger base, given directly, as in Code Llama and Llama 2 Long.

    Attributes:
        theta: the new base.
    """

    theta: Annotated[float, number(1, 1e15, above=True)]

    name: ClassVar[str] = "abf"
    paper: ClassVar[str] = "2309.16039"

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's table at the new base, `[dim/2]` float64, radians per token."""
        return shape.inv_freq(self.theta)

    def target_length(self, shape: RopeShape) -> int | None:
        """None: a base alone does not say which window it is meant for."""
        return None

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Without `theta`, uses the critical base for the target: `theta^(ln(L'/2pi) / ln(L/2pi))`.

        The channels that complete a turn within the trained window then complete one within the target
        (Theorem 1 of 2310.05209)."""
        cls.check_names(parameters)
        if "theta" not in parameters:
            if shape.trained_length <= 2 * math.pi:
                raise RopeExtendError(
                    f"abf: the rule for theta needs a trained window of 7 tokens or more, this one has "
                    f"{shape.trained_length}; give theta="
                )
            growth = math.log(target_length / (2 * math.pi)) / math.log(shape.trained_length / (2 * math.pi))
            parameters["theta"] = shape.theta**growth
        return cls(**parameters)

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `default` with the new theta, which every loader supports."""
        return {"rope_type": "default", "rope_theta": self.theta}


@dataclass(frozen=True)
class NoPE(RopeEncoding):
    """NoPE: no rotation; only the causal mask tells the model the order of tokens."""

    name: ClassVar[str] = "nope"
    paper: ClassVar[str] = "2305.19466"
    replaces_rotation = True

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Zeros, `[dim/2]` float64, radians per token."""
        return shape.inv_freq() * 0

    def target_length(self, shape: RopeShape) -> int | None:
        """None: without positions there is no intended length."""
        return None


@dataclass(frozen=True)
class DroPE(ScaledRope):
    """DroPE: rotation removed from a trained model, followed by a short recalibration.

    Recalibrate at the trained length. Longer texts then use attention sharpened by `1 + c ln s` for a text
    s times that long. The paper does not say which length counts, see `per`.

    Attributes:
        factor: `target_length / trained_length`, the largest s.
        coefficient: c. The paper fits 0.103 for a model pretrained with RoPE and recalibrated (SmolLM), and
            0.412 for a model trained from scratch this way.
        per: `query` computes s from the text up to each query: nothing is scaled within the trained window,
            and no token depends on later ones. `target` uses s = factor for every query.
    """

    coefficient: Annotated[float, number(0, 10)] = 0.103
    per: Annotated[str, choice("query", "target")] = "query"

    name: ClassVar[str] = "drope"
    paper: ClassVar[str] = "2512.12167"
    replaces_rotation = True

    inv_freq = NoPE.inv_freq

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`1 + c ln s` at each position, float64, like `position_ids`; None for 1 at all of them."""
        if self.coefficient * math.log(self.factor) == 0:
            return None
        stretch = torch.full_like(position_ids, self.factor, dtype=torch.float64)
        if self.per == "query":
            stretch = ((position_ids + 1) / shape.trained_length).double().clamp(min=1, max=self.factor)
        return 1 + self.coefficient * stretch.log()
