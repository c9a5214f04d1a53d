"""What a checkpoint's position encoding is, and what each method would do to it; needs no weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, dialled_methods, rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.families import adapter_for
from rope_extend.patching import active_table, config_record, shape_of, unwrap
from rope_extend.pretrained import empty_model


@dataclass(frozen=True)
class MethodEffect:
    """What one method does to a model's rotary tables at a target length.

    Attributes:
        encoding: the encoding that the method gives for the target.
        attention_factor: on cos and sin; logits grow by its square.
        resolution: the fastest channel's frequency against plain RoPE's; 1 keeps neighbours as far apart
            as in training, 1/s squeezes s positions into one.
        kept: share of channel pairs that turn as in training.
        unseen: how far the slow channels, those that never completed a turn in training, turn at the
            target length, against the furthest they turned in training; above 1 the model meets angles
            it has never seen, which is what makes perplexity explode.
        native: the `rope_type` under which stock transformers loads it; None if there is none.
    """

    encoding: str
    attention_factor: float
    resolution: float
    kept: float
    unseen: float
    native: str | None


@dataclass(frozen=True)
class ModelInfo:
    """A checkpoint's position encoding.

    Attributes:
        model_type: the family.
        shape: rotated channels per head, base, and the window it was pretrained on.
        head_dim: channels per head, rotated or not.
        window: `max_position_embeddings`, the window it claims, in tokens.
        rope_parameters: what stock loaders read.
        encoding: what it reads with, where rope_extend knows the `rope_type`.
        record: what rope_extend wrote into the config; None for a checkpoint it has not touched.
        slow_channels: channel pairs that never completed a turn within the trained window.
    """

    model_type: str
    shape: RopeShape
    head_dim: int
    window: int
    rope_parameters: dict[str, Any]
    encoding: str | None
    record: dict[str, Any] | None
    slow_channels: int

    def effect(self, encoding: RopeEncoding, target_length: int) -> MethodEffect:
        """What `encoding` does to this model's tables at `target_length` tokens."""
        shape, plain = self.shape, self.shape.inv_freq()
        table = encoding.inv_freq(shape, target_length)
        slow = shape.trained_length * plain < 2 * math.pi
        turned = (target_length * table) / (shape.trained_length * plain)
        try:
            native = str(encoding.rope_parameters(shape)["rope_type"])
        except RopeExtendError:
            native = None
        return MethodEffect(
            encoding=str(encoding),
            attention_factor=encoding.attention_factor(shape, target_length),
            resolution=float(table[0] / plain[0]),
            kept=float(((table - plain).abs() <= 1e-6 * plain).double().mean()),
            unseen=float(turned[slow].max()) if bool(slow.any()) else 0.0,
            native=native,
        )

    def effects(self, target_length: int) -> list[MethodEffect]:
        """What each rotary method that follows from the length alone does at `target_length` tokens.

        Raises:
            RopeExtendError: the target is not beyond the trained window.
        """
        if target_length <= self.shape.trained_length:
            raise RopeExtendError(
                f"target_length must exceed the trained window of {self.shape.trained_length} tokens, "
                f"got {target_length}"
            )
        made = [rotary_method(name).for_target(self.shape, target_length) for name in dialled_methods()]
        return [self.effect(encoding, target_length) for encoding in made]

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return asdict(self)


def info(model: str | nn.Module, *, trained_length: int | None = None) -> ModelInfo:
    """Say what position encoding a model has, from the live model or from a checkpoint's config alone.

    Args:
        model: a transformers model, or a local directory or hub id, of which only the config is read.
        trained_length: the window it was pretrained on, in tokens, where the config does not say it.

    Raises:
        UnsupportedModelError: no adapter for the family.
        RopeExtendError: no such checkpoint, or its config does not say which window it was trained on.
    """
    if isinstance(model, str):
        model = empty_model(model)
    base = unwrap(model)
    config = base.config
    shape = shape_of(model, trained_length)
    rotary = next(iter(adapter_for(config.model_type).rotary_modules(base.base_model).values()))
    parameters = dict(config.rope_parameters or {})
    record = config_record(config)
    known = (
        Encoding.from_dict(record["encoding"])
        if record
        else RopeEncoding.from_rope_parameters(parameters, config.max_position_embeddings)
    )
    # The stock table must be computable: a config that is broken in other ways shows it here, not later.
    active_table(rotary, config, shape.trained_length)
    return ModelInfo(
        model_type=config.model_type,
        shape=shape,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        window=config.max_position_embeddings,
        rope_parameters=parameters,
        encoding=str(known) if known else None,
        record=record,
        slow_channels=int((shape.trained_length * shape.inv_freq() < 2 * math.pi).sum()),
    )
