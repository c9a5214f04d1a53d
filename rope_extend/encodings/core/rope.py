"""Encodings that rotate queries and keys."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.checks import number
from rope_extend.encodings.core.encoding import Encoding, encoding_classes
from rope_extend.encodings.core.regions import NEAR, Borders, Everywhere, Region
from rope_extend.encodings.core.shapes import MAX_FACTOR, ZERO_FREQUENCY_DIVISOR, RopeShape
from rope_extend.errors import RopeExtendError

FINEST_STEP = 1 / 1024
"""The smallest `step` of a growing schedule, except 0."""


class RopeEncoding(Encoding):
    """A rotary schedule: the frequency of each channel pair, and the factor on cos and sin."""

    rope_type: ClassVar[str | None] = None
    """The `rope_type` of transformers with the same formula and parameters, if there is one."""
    stock_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Parameters with another name in `config.rope_parameters`: our name to the stock name."""
    stock_omits: ClassVar[tuple[str, ...]] = ()
    """Parameters that `config.rope_parameters` does not have."""
    states_trained_length: ClassVar[bool] = False
    """Whether stock transformers takes the trained window from `config.rope_parameters`."""
    start_tokens: int = 0
    """Positions below this keep plain RoPE's angles (LongRoPE's n-hat)."""
    mscale_all_dim: float | None = None
    """In families of DeepSeek's kind, all logits are multiplied by `(0.1 mscale_all_dim ln s + 1)²`."""

    @property
    def rotates_in_attention(self) -> bool:
        """Whether the model rotates by plain RoPE, and attention turns on to the table of a query."""
        return self.depends_on_length

    def why_not_one_table(self, shape: RopeShape) -> str:
        """Why one table of frequencies and one attention factor are not the whole schedule; empty if so."""
        if self.remaps:
            return "it rotates distant pairs of tokens in another way than near ones, inside attention"
        if self.decay(shape) is not None:
            return "the product of a query and a key shrinks with their distance"
        if self._logit_scales(shape) is not None:
            return "it scales attention logits in addition to the rotation"
        if self.start_tokens:
            return f"its first {self.start_tokens} positions keep plain RoPE's angles"
        if self.depends_on_length or self.rotates_in_attention:
            return "its table depends on the length of the text"
        return ""

    def scales_logits(self, shape: RopeShape) -> bool:
        """Whether the attention logits of a query have a factor, in addition to the attention factor."""
        return self._logit_scales(shape) is not None

    def scales_by_position(self, shape: RopeShape) -> bool:
        """Whether that factor changes with the query's position."""
        scales = self._logit_scales(shape)
        return scales is not None and bool(scales[0] != scales[1])

    def _logit_scales(self, shape: RopeShape) -> Tensor | None:
        """The factor of a query at the end of the trained window, and of one far beyond."""
        ends = torch.tensor([shape.trained_length - 1, 8 * shape.trained_length], device="cpu")
        return self.logit_scale(shape, ends)

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The length that sets the table of a query, int64 `[...]`.

        `lengths` `[...]` is the number of tokens up to and including each query. Each result depends on its
        own element alone: lengths of later queries are asked for in advance. Queries with equal results share
        one table, and keys are rotated once for each table. Here: two tables if it depends on the length, one
        up to and including the trained length, and one beyond.
        """
        beyond = (lengths > shape.trained_length) if self.depends_on_length else torch.zeros_like(lengths)
        return shape.trained_length + beyond.to(torch.int64)

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The factor on a query's logits, in addition to the attention factor; None for 1.

        Float64, of the shape of `position_ids` `[...]`.
        """
        return None

    def decay(self, shape: RopeShape) -> Tensor | None:
        """`ln` of the factor on the product of a query and a key, per token of distance; None for no decay.

        `[dim/2]` float64, at most 0.
        """
        return None

    @property
    def borders(self) -> Borders:
        """Which pairs of a query and a key belong to which region; here, all to one."""
        return Everywhere()

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """How attention rotates the pairs of each region, in the order in which `borders` counts them.

        `length` is the result of `table_length` for the query. `NEAR` are pairs that the model has rotated
        already.
        """
        table, factor = self.inv_freq(shape, length), self.attention_factor(shape, length)
        plain = factor == 1 and torch.equal(table, shape.inv_freq()) and self.decay(shape) is None
        kept = plain or not self.rotates_in_attention
        return (NEAR if kept else Region(NEAR.query, NEAR.key, self),)

    def is_plain(self, shape: RopeShape, lowest: int, highest: int) -> bool:
        """Whether attention to a text with positions from `lowest` to `highest` turns no pair."""
        length = self.table_length(shape, torch.tensor([highest + 1], device="cpu"))
        return all(region is NEAR for region in self.regions(shape, int(length)))

    @abstractmethod
    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`[dim/2]` float64, radians per token, for a sequence of `seq_len` tokens.

        Static schedules ignore `seq_len`. Without it, a length-dependent schedule returns its table for the
        trained window.
        """

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """The factor on cos and sin; attention logits grow by its square."""
        return 1.0

    def target_length(self, shape: RopeShape) -> int | None:
        """The window this encoding is meant for, in tokens; None if its parameters do not say."""
        return shape.trained_length

    def max_position_embeddings(self, shape: RopeShape, target_length: int) -> int:
        """The value of `config.max_position_embeddings` with which stock loaders compute the same tables.

        Stock transformers takes the trained length of length-dependent schedules from this field.
        """
        return shape.trained_length if self.depends_on_length else target_length

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """The value of `config.rope_parameters` with which stock transformers computes the same tables.

        Raises:
            RopeExtendError: stock transformers cannot express this encoding.
        """
        if self.rope_type is not None:
            values = {
                self.stock_names.get(key, key): value
                for key, value in self.to_dict().items()
                if key not in ("name", *self.stock_omits)
            }
            if self.states_trained_length:
                values["original_max_position_embeddings"] = shape.trained_length
            return {"rope_type": self.rope_type, "rope_theta": shape.theta, **values}
        return self.longrope_parameters(shape)

    def longrope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """The schedule as stock `longrope` with equal short and long lists.

        This form expresses any static table, to float32 rounding. A pair with frequency zero gets the
        divisor `ZERO_FREQUENCY_DIVISOR`. Next to an `attention_factor`, `factor` changes nothing in the
        tables; it states the window.

        Raises:
            RopeExtendError: one static table does not say all that the encoding does.
        """
        table = self.inv_freq(shape)
        if self.why_not_one_table(shape):
            raise RopeExtendError(f"{self.name} has no form that stock transformers can load")
        factors = torch.where(table > 0, shape.inv_freq() / table, ZERO_FREQUENCY_DIVISOR).tolist()
        target = self.target_length(shape)
        return {
            "rope_type": "longrope",
            "rope_theta": shape.theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": self.attention_factor(shape),
            "original_max_position_embeddings": shape.trained_length,
            **({} if target is None else {"factor": max(1.0, target / shape.trained_length)}),
        }

    @staticmethod
    def from_rope_parameters(
        rope_parameters: Mapping[str, Any], max_position_embeddings: int | None = None
    ) -> RopeEncoding | None:
        """The encoding that a stock `config.rope_parameters` describes.

        None for a `rope_type` without an encoding here. Phi-3's form of `longrope` computes its factor from
        the config's `max_position_embeddings`; without that argument the result is None as well.

        Raises:
            RopeExtendError: the parameters are invalid.
        """
        rope_type = rope_parameters.get("rope_type", "default")
        for cls in encoding_classes().values():
            if issubclass(cls, RopeEncoding) and cls.rope_type == rope_type:
                return cls._from_stock(rope_parameters, max_position_embeddings)
        return None

    @classmethod
    def _from_stock(
        cls, rope_parameters: Mapping[str, Any], max_position_embeddings: int | None
    ) -> RopeEncoding | None:
        values = {key: rope_parameters.get(cls.stock_names.get(key, key)) for key in cls.parameters()}
        return cls.make({key: value for key, value in values.items() if value is not None})


@dataclass(frozen=True)
class ScaledRope(RopeEncoding):
    """A rotary schedule computed from one number: how many times longer the window becomes.

    Attributes:
        factor: `s = target_length / trained_length`, at least 1.
    """

    factor: Annotated[float, number(1, MAX_FACTOR)]

    def target_length(self, shape: RopeShape) -> int:
        """`factor * trained_length`, to the nearest token."""
        return round(self.factor * shape.trained_length)

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The one place where `factor = target_length / trained_length` is computed."""
        if "factor" in parameters:
            raise RopeExtendError(
                f"{cls.name}: factor follows from target_length ({target_length} / {shape.trained_length} = "
                f"{target_length / shape.trained_length:g}); give only one of the two. "
                f"For any other factor: patch_model(model, encoding({cls.name!r}, factor=...))"
            )
        return cls.make({"factor": target_length / shape.trained_length, **parameters})


@dataclass(frozen=True, kw_only=True)
class GrowingRope(RopeEncoding):
    """A rotary schedule whose table keeps changing with the length of the text beyond the trained window.

    The table of a query, and of its keys, is that of the text up to this query. The encoding of a token then
    never depends on later tokens, so one forward, a prefill in chunks and decoding with a cache agree. Stock
    transformers uses the longest row of a batch.

    Attributes:
        step: the relative growth of the text from one table to the next. All texts between two tables use
            that of the longest. 0 computes a table, and rotates all keys, for every token.
    """

    step: Annotated[float, number(0, 1)] = 1 / 16

    depends_on_length = True
    stock_omits = ("step",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.step < FINEST_STEP:
            raise RopeExtendError(
                f"{self.name}: step must be 0 (a table for each token) or at least {FINEST_STEP}, "
                f"got {self.step!r}"
            )

    def target_length(self, shape: RopeShape) -> int | None:
        """None: it adapts to any length."""
        return None

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The trained length within it; beyond, the longest text of the step that a length falls into."""
        if self.step == 0:
            return lengths.clamp(min=shape.trained_length)
        ends, longest = [shape.trained_length], int(lengths.max())
        while ends[-1] < longest:
            ends.append(max(ends[-1] + 1, int(ends[-1] * (1 + self.step))))
        table = torch.tensor(ends, device=lengths.device)
        return table[torch.searchsorted(table, lengths.contiguous())]


def attribute_of(field: str, attribute: str) -> Any:
    """An attribute or a method that is that of the schedule in a field."""
    return property(lambda self: getattr(getattr(self, field), attribute))


def inner_schedule(outer: Any, field: str = "inner", *, may_remap: bool = False) -> RopeEncoding:
    """The schedule in a field of an encoding that is made of others, also if it was given as `to_dict()`.

    Raises:
        RopeExtendError: it is not a rotary schedule, or it changes positions and may not.
    """
    given = getattr(outer, field)
    inner = Encoding.from_dict(given) if isinstance(given, Mapping) else given
    if not isinstance(inner, RopeEncoding):
        raise RopeExtendError(
            f"{outer.name}: {field} must be a rotary schedule, such as encoding('yarn', factor=8.0), "
            f"got {given!r}"
        )
    if inner.remaps and not may_remap:
        raise RopeExtendError(
            f"{outer.name}: {field} must be a schedule of frequencies, but {inner.name} changes positions "
            f"and goes into no other method; use {inner.name} alone"
        )
    return inner


def log_n_scale(shape: RopeShape, position_ids: Tensor) -> Tensor:
    """`max(1, ln(p+1) / ln L)` at position p, float64, like `position_ids` (Su 2021).

    Raises:
        RopeExtendError: the trained window is one token, for which the formula has no value.
    """
    if shape.trained_length == 1:
        raise RopeExtendError(
            "log-n scaling needs a model trained on 2 or more tokens, this one has a window of 1; turn it "
            "off, or use another method"
        )
    seen = position_ids.to(torch.float64).clamp(min=0)  # padding may have negative positions
    return (torch.log1p(seen) / math.log(shape.trained_length)).clamp(min=1)
