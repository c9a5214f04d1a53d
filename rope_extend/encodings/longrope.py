"""LongRoPE: a separate divisor for every channel, found by search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from rope_extend.checks import integer, number
from rope_extend.encodings.core.rope import RopeEncoding, ScaledRope
from rope_extend.encodings.core.shapes import (
    MAX_FACTOR,
    MAX_LENGTH,
    ZERO_FREQUENCY_DIVISOR,
    RopeShape,
    check_length,
)
from rope_extend.errors import RopeExtendError


def _divisors(owner: str, field: str, values: Any) -> tuple[float, ...]:
    """A list of divisors."""
    if not isinstance(values, list | tuple) or not values:
        raise RopeExtendError(
            f"{owner}: {field} must be a list of numbers, one for each channel pair, got {values!r}"
        )
    return tuple(
        ZERO_FREQUENCY_DIVISOR
        if value == ZERO_FREQUENCY_DIVISOR
        else number(0, MAX_FACTOR, above=True)(owner, f"{field}[{i}]", value)
        for i, value in enumerate(values)
    )


@dataclass(frozen=True)
class LongRoPE(ScaledRope):
    """LongRoPE: every frequency has its own searched divisor, with a second set of divisors for short texts.

    A text of exactly the trained length is a short one. The attention factor is the same for both sets, as
    in transformers and in Phi-3. LongRoPE's search keeps the divisors non-decreasing from the fastest channel
    to the slowest. This class does not require it, because checkpoints store other schedules in this form.

    Attributes:
        factor: `s = target_length / trained_length`, which sets the attention factor.
        long_factor: the divisor of each channel pair's frequency beyond the trained length, fastest first.
        short_factor: the same up to and including the trained length; all 1 by default.
        start_tokens: n-hat: positions below this keep plain RoPE's angles.
        attention_scale: replaces the factor `sqrt(1 + ln s / ln L)` on cos and sin; `attention_factor` in
            config.json.
        mscale_all_dim: the weight of `ln s` in the softmax scale of families of DeepSeek's kind.
    """

    long_factor: Annotated[tuple[float, ...], _divisors]
    short_factor: Annotated[tuple[float, ...] | None, _divisors] = None
    start_tokens: Annotated[int, integer(0, MAX_LENGTH)] = 0
    attention_scale: Annotated[float | None, number(0, 100, above=True)] = None
    mscale_all_dim: Annotated[float | None, number(0, 100, above=True)] = None

    name: ClassVar[str] = "longrope"
    paper: ClassVar[str] = "2402.13753"
    rope_type: ClassVar[str | None] = "longrope"
    stock_names: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_scale": "attention_factor"})
    stock_omits = ("start_tokens",)
    states_trained_length = True
    depends_on_length = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.short_factor is not None:
            if len(self.short_factor) != len(self.long_factor):
                raise RopeExtendError(
                    f"longrope: short_factor and long_factor must have equal lengths, a value for each "
                    f"channel pair, got {len(self.short_factor)} and {len(self.long_factor)}"
                )
            if set(self.short_factor) == {1.0}:
                object.__setattr__(self, "short_factor", None)  # so that equal encodings compare equal
        if self.long_factor == (self.short_factor or (1.0,) * len(self.long_factor)):
            object.__setattr__(self, "depends_on_length", False)  # how checkpoints store static schedules

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`theta_i / lambda_i`, with the long divisors beyond the trained length, else the short ones.

        `[dim/2]` float64, radians per token.

        Raises:
            RopeExtendError: the lists do not have one value for each rotated channel pair of the model.
        """
        if len(self.long_factor) != shape.dim // 2:
            raise RopeExtendError(
                f"longrope: long_factor has {len(self.long_factor)} values, but this model rotates "
                f"{shape.dim // 2} channel pairs; give one value for each"
            )
        is_long = seq_len is not None and seq_len > shape.trained_length
        divisors = self.long_factor if is_long else self.short_factor
        plain = shape.inv_freq()
        if divisors is None:
            return plain
        divisor = torch.tensor(divisors, dtype=torch.float64)
        return torch.where(divisor < ZERO_FREQUENCY_DIVISOR, plain / divisor, 0.0)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """`sqrt(1 + ln s / ln L)`, 1 for s = 1, or `attention_scale`; the same at every length.

        Raises:
            RopeExtendError: the trained window is one token, for which the formula has no value.
        """
        if self.attention_scale is not None:
            return self.attention_scale
        if self.factor == 1:
            return 1.0
        if shape.trained_length == 1:
            raise RopeExtendError(
                "longrope: the formula of the attention factor has no value for a trained window of 1 token; "
                "give attention_scale="
            )
        return math.sqrt(1 + math.log(self.factor) / math.log(shape.trained_length))

    def max_position_embeddings(self, shape: RopeShape, target_length: int) -> int:
        """The target: stock `longrope` stores the trained length in a separate field."""
        return target_length

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `longrope`."""
        if self.start_tokens:
            raise RopeExtendError(
                f"longrope with start_tokens={self.start_tokens} has no form that stock transformers can "
                "load; leave start_tokens out"
            )
        self.inv_freq(shape)
        return {"short_factor": [1.0] * len(self.long_factor), **super().rope_parameters(shape)}

    @classmethod
    def _from_stock(
        cls, rope_parameters: Mapping[str, Any], max_position_embeddings: int | None
    ) -> RopeEncoding | None:
        if rope_parameters.get("factor") is not None:
            return super()._from_stock(rope_parameters, max_position_embeddings)
        original = rope_parameters.get("original_max_position_embeddings")
        if original is not None and max_position_embeddings is not None:
            original = check_length("longrope", "original_max_position_embeddings", original)
            factor = max(1.0, max_position_embeddings / original)
            return super()._from_stock({**rope_parameters, "factor": factor}, max_position_embeddings)
        if rope_parameters.get("attention_factor") is None:
            return None
        # Next to an attention factor, `factor` only states the window: take that of the slowest channel.
        encoding = super()._from_stock({**rope_parameters, "factor": 1.0}, max_position_embeddings)
        assert isinstance(encoding, LongRoPE)
        divisors = [divisor for divisor in encoding.long_factor if divisor < ZERO_FREQUENCY_DIVISOR]
        return replace(encoding, factor=max([1.0, *divisors]))
