"""The table that a model has now, as the start of another extension (`start="current"`).

A model that was trained under a scaled table knows that table. Another extension on top of it multiplies the
divisors of both, as the second stage of LongRoPE does (2402.13753), and the factors on cos and sin too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.encodings import Encoding, LongRoPE, Method, RopeEncoding, RopeShape
from rope_extend.encodings.core.shapes import (
    ZERO_FREQUENCY,
    ZERO_FREQUENCY_DIVISOR,
    ExtendedShape,
    check_length,
)
from rope_extend.errors import RopeExtendError
from rope_extend.method_names import CURRENT, PRETRAINED
from rope_extend.models.config_facts import config_record, current_window, rotary_part
from rope_extend.models.decoders import unwrap
from rope_extend.models.rotary_tables import has_tables_of, rotary_tables, shape_of
from rope_extend.models.stock_config import latent_attention

_ADVICE = "leave start='current' out to extend plain RoPE from the pretrained window"


@dataclass(frozen=True)
class CurrentTable:
    """The schedule that a model has now, and the windows that it was trained on.

    Attributes:
        pretrained: the rotary shape of the model as it was pretrained.
        shape: the same with the present table, and with the window that the model was trained to read under
            it.
        attention_factor: the present factor on cos and sin.
        short: the divisors within the pretrained window, if they are others (`longrope` with two lists).
        mscale: the square root of the present factor on all attention logits, in families of DeepSeek's kind;
            None in others.
    """

    pretrained: RopeShape
    shape: ExtendedShape
    attention_factor: float
    short: tuple[float, ...] | None = None
    mscale: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the present table is plain RoPE in the pretrained window."""
        return (
            self.attention_factor == 1
            and self.short is None
            and self.shape.trained_length == self.pretrained.trained_length
            and torch.allclose(self.shape.inv_freq(), self.pretrained.inv_freq(), rtol=1e-5, atol=0)
        )

    def extended_by(self, top: RopeEncoding, target_length: int) -> LongRoPE:
        """The present schedule with another one on top, as one table: the products of divisors and factors.

        A short list is kept, but `longrope` has one factor on cos and sin for both lists. If the present
        scaling multiplies all logits, as in DeepSeek's models, so does the new factor.

        `top` has one table, computed for `shape`. The new window is in tokens.
        """
        if reason := top.why_not_one_table(self.shape):
            raise RopeExtendError(
                f"start='current' multiplies two tables, and {top} is not one table: {reason}; use a method "
                "with one static table, such as yarn"
            )
        factor, mscale = top.attention_factor(self.shape, target_length), self.mscale
        if mscale is not None and top.mscale_all_dim is not None:
            mscale *= 1 + 0.1 * top.mscale_all_dim * math.log(target_length / self.shape.trained_length)
        elif mscale is not None and mscale != 1:
            mscale, factor = mscale * factor, 1.0
        factor *= self.attention_factor
        table = top.inv_freq(self.shape, target_length)
        return replace(self, mscale=mscale).with_table(table, factor, target_length)

    def with_table(self, table: Tensor, attention_factor: float, target_length: int) -> LongRoPE:
        """A table and a factor on cos and sin as an encoding of the pretrained model; it keeps `short`.

        The table is `[dim/2]` float64, radians per token; the new window is in tokens.
        """
        divisors = divisors_of(table, self.pretrained)
        factor = max(1.0, target_length / self.pretrained.trained_length)
        weight = None if self.mscale in (None, 1.0) else 10 * (self.mscale - 1) / math.log(factor)
        return LongRoPE(
            factor,
            long_factor=divisors,
            short_factor=self.short or divisors,
            attention_scale=attention_factor,
            mscale_all_dim=weight,
        )


def divisors_of(table: Tensor, shape: RopeShape) -> tuple[float, ...]:
    """What plain RoPE's frequencies are divided by in a table `[dim/2]` float64."""
    divisors = torch.where(table > ZERO_FREQUENCY, shape.inv_freq() / table, ZERO_FREQUENCY_DIVISOR)
    return tuple(divisors.tolist())


def current_table(
    model: nn.Module, trained_length: int | None = None, current_length: int | None = None
) -> CurrentTable:
    """The table and the attention factor that a model has now.

    `trained_length` is the window of pretraining, needed if the config is wrong, and `current_length` the one
    that the model was trained to read under its present table, by default `current_window`; both in tokens.
    """
    shape = shape_of(model, trained_length)
    if current_length is None:
        current_length = current_window(unwrap(model).config)
    window = check_length("start='current'", "current_length", current_length)
    latent = latent_attention(unwrap(model))
    scales = [math.sqrt(module.scaling / module.qk_head_dim**-0.5) for module, _ in latent]
    mscale = scales[0] if scales else None
    if window < (least := shape.trained_length + (mscale not in (None, 1.0))):
        raise RopeExtendError(
            f"start='current': current_length is {window}, less than the {least} tokens that it was "
            "trained on at least; give the window that the model was trained to read last"
        )
    if (recorded := unapplied_record(model)) is not None:
        raise RopeExtendError(f"start='current' needs the table that the model has now, and {recorded[1]}")
    encoding, short, first = current_encoding(model), None, 1
    if isinstance(encoding, LongRoPE) and encoding.depends_on_length and not encoding.start_tokens:
        short, first = encoding.short_factor or (1.0,) * len(encoding.long_factor), shape.trained_length + 1
        if trained_length is not None and shape_of(model) != shape:
            raise RopeExtendError(
                "start='current': this model has a list of divisors for texts within its trained window, and "
                f"trained_length={trained_length} would use it for others; leave trained_length out, or "
                "correct original_max_position_embeddings in the config"
            )
    elif encoding is not None and (reason := encoding.why_not_one_table(shape)):
        raise RopeExtendError(
            f"start='current' needs a model with one static table, and this one has {encoding}: {reason}; "
            f"{_ADVICE}"
        )
    # A table of a stock rope_type that is not known here may depend on the length: look at several lengths.
    lengths = (first, window + 1, 4 * window)
    tables = [each for length in lengths for each in rotary_tables(model, length)]
    table, factor = tables[0]
    if any(not torch.equal(other, table) or scale != factor for other, scale in tables[1:]):
        name = encoding or rotary_part(unwrap(model).config)[1].get("rope_type")
        raise RopeExtendError(
            f"start='current' needs one table for all lengths, and that of {name} depends on the length of "
            f"the text; {_ADVICE}"
        )
    pairs = table[: shape.dim // 2]
    if isinstance(encoding, RopeEncoding) and has_tables_of(model, encoding, shape, lengths):
        # Without the rounding of transformers' float32.
        pairs, factor = encoding.inv_freq(shape, window + 1), encoding.attention_factor(shape, window + 1)
    return CurrentTable(
        shape, ExtendedShape(shape.dim, shape.theta, window, tuple(pairs.tolist())), factor, short, mscale
    )


def current_encoding(model: nn.Module) -> Encoding | None:
    """The encoding that a model has now, from its patch or its config; None for an unknown `rope_type`."""
    config = unwrap(model).config
    if (record := config_record(config)) is not None:
        return record.encoding
    part, parameters = rotary_part(config)
    return RopeEncoding.from_rope_parameters(parameters, part.max_position_embeddings)


def unapplied_record(model: nn.Module) -> tuple[RopeEncoding, str] | None:
    """The encoding that a config records, and what to do, if the model has other tables; otherwise None.

    Stock transformers loads a checkpoint so if it cannot represent the encoding, and makes a model from the
    config of a patched one so. Only tables are looked at, within the pretrained window and at the target.
    """
    encoding, shape, window = config_record(unwrap(model).config) or (None, None, 0)
    if not isinstance(encoding, RopeEncoding) or shape is None:
        return None
    if has_tables_of(model, encoding, shape, (shape.trained_length, window)):
        return None
    return encoding, (
        f"its config names {encoding}, but its rotary tables are others, as after stock from_pretrained "
        "or from_config, which cannot represent that encoding; load it with rope_extend.load, or if it was "
        "not written by rope_extend.save, apply that encoding with patch_model"
    )


def extended_again(
    current: CurrentTable, method: Method[Any], target_length: int, parameters: dict[str, Any]
) -> RopeEncoding:
    """The encoding of a method on top of the present table.

    A model with plain RoPE gets the method itself.
    """
    window = current.shape.trained_length
    if target_length <= window:
        raise RopeExtendError(
            f"start='current': target_length must exceed the {window} tokens that the model reads now, got "
            f"{target_length}; give current_length= if it was trained on fewer"
        )
    if method.saved is not None:
        raise RopeExtendError(
            "start='current' takes a method by name; a saved encoding already is the whole table, so use it "
            "with start='pretrained'"
        )
    shape = current.pretrained if current.is_plain else current.shape
    encoding = method.for_target(shape, target_length, **parameters)
    # `nope` is a schedule whose frequencies are all zero.
    if not isinstance(encoding, RopeEncoding) or not encoding.inv_freq(current.shape, target_length).any():
        raise RopeExtendError(
            f"start='current' keeps the rotation that the model has, and {encoding.name} replaces it; "
            "leave start='current' out"
        )
    return encoding if current.is_plain else current.extended_by(encoding, target_length)


def suggested_start(model: nn.Module, trained_length: int | None = None) -> tuple[str, str]:
    """Which `start` suits a checkpoint, and why, from its config alone.

    Few configs say whether their scaling was trained, by `finetuned`, as YaRN's authors do. In others, if
    `max_position_embeddings` is less than the window of the scaling, the scaling was added by hand, as the
    makers of Qwen advise, and was not trained.
    """
    config = unwrap(model).config
    part, parameters = rotary_part(config)
    window, trained = part.max_position_embeddings, parameters.get("finetuned")
    if (recorded := unapplied_record(model)) is not None:
        return PRETRAINED, recorded[1]
    try:
        current = current_table(model, trained_length)
    except RopeExtendError:
        return PRETRAINED, "its present table is not one for all texts, so it cannot be extended again"
    if current.is_plain:
        return PRETRAINED, "the model has plain RoPE, so both starts are the same"
    if trained is not None:
        start = CURRENT if trained else PRETRAINED
        return start, f"its config has finetuned: {str(bool(trained)).lower()} for its scaling"
    if config_record(config) is None and window < current.shape.trained_length:
        return PRETRAINED, (
            f"max_position_embeddings is {window}, so the scaling was added to the "
            "config and not trained; current suits if it was"
        )
    return CURRENT, (
        "its weights know the present table if they were trained under it; pretrained suits if they were not"
    )
