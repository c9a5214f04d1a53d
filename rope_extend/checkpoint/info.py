"""The position encoding of a checkpoint, and what each method would do to it. No weights are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rope_extend.checkpoint.manifest import ADAPTER_CONFIG, RECORD_NAME
from rope_extend.checkpoint.peft_models import tuner_layers
from rope_extend.checkpoint.record import ADAPTER_MARK, check_agreement, read_record
from rope_extend.checkpoint.restoring import apply_record
from rope_extend.encodings import (
    Encoding,
    RemapEncoding,
    RopeEncoding,
    RopeShape,
    methods_from_length,
    rotary_method,
)
from rope_extend.encodings.core.shapes import check_length
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.models.current_table import suggested_start, unapplied_record
from rope_extend.models.families import adapter_for
from rope_extend.models.loading import empty_model
from rope_extend.models.view import (
    CONFIG_RECORD,
    active_table,
    config_record,
    current_window,
    has_tables_of,
    layer_config,
    rotary_part,
    shape_of,
    unwrap,
)
from rope_extend.patching import current_patch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MethodEffect:
    """What one method does to a model's rotary tables at a target length.

    Attributes:
        encoding: the method's encoding for the target length.
        attention_factor: the factor on cos and sin; attention logits are multiplied by its square.
        resolution: the fastest channel's frequency divided by plain RoPE's. 1 keeps neighbours as far apart
            as in training; 1/s squeezes s positions into one.
        kept: share of channel pairs with an unchanged frequency.
        unseen: the largest angle of the slow channels at the target length, divided by their largest angle in
            training. Slow channels never completed a turn in training. Above 1, the model meets angles that
            it has never seen, which makes perplexity explode.
        native: the `rope_type` with which stock transformers loads it; None if there is none.
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
        shape: rotated channels per head, base, and the window of pretraining.
        head_dim: channels per head, rotated or not.
        window: `max_position_embeddings`, the window in the config, in tokens.
        rope_parameters: the rotary parameters that stock loaders read.
        encoding: the current encoding; None if rope_extend does not know the `rope_type`.
        record: what rope_extend wrote into the config; None for a checkpoint it has not changed.
        current_length: the window in tokens that the model was made for under its present table.
        start: which `start` of an extension suits it, `pretrained` or `current`.
        start_reason: why.
        slow_channels: channel pairs that never completed a turn within the trained window.
        unapplied: the encoding that the active adapter or the checkpoint was saved with, if the model does
            not use it, for example because stock peft or transformers loaded it; otherwise None.
    """

    model_type: str
    shape: RopeShape
    head_dim: int
    window: int
    rope_parameters: dict[str, Any]
    encoding: str | None
    record: dict[str, Any] | None
    slow_channels: int
    current_length: int
    start: str
    start_reason: str
    unapplied: str | None = None

    def __repr__(self) -> str:
        trained = f"trained on {self.shape.trained_length} tokens, window {self.window}"
        return f"ModelInfo({self.model_type}, {self.encoding or 'unknown encoding'}, {trained})"

    def effect(self, encoding: RopeEncoding, target_length: int) -> MethodEffect:
        """What `encoding` does to this model's tables at `target_length` tokens."""
        shape, plain = self.shape, self.shape.inv_freq()
        table = encoding.inv_freq(shape, target_length)
        slow = shape.trained_length * plain < 2 * math.pi
        angles = target_length * table
        factor = encoding.attention_factor(shape, target_length)
        if isinstance(encoding, RemapEncoding):
            angles = encoding.largest_angles(shape, target_length)
            last = encoding.factor_of_queries(shape, torch.tensor([target_length - 1]))
            factor = factor if last is None else math.sqrt(last)
        angle_ratios = angles / (shape.trained_length * plain)
        try:
            native = str(encoding.rope_parameters(shape)["rope_type"])
        except RopeExtendError:
            native = None
        return MethodEffect(
            encoding=str(encoding),
            attention_factor=factor,
            resolution=float(table[0] / plain[0]),
            kept=float(((table - plain).abs() <= 1e-6 * plain).double().mean()),
            unseen=float(angle_ratios[slow].max()) if bool(slow.any()) else 0.0,
            native=native,
        )

    def effects(self, target_length: int) -> list[MethodEffect]:
        """The effect of each rotary method that needs only a target length, at `target_length` tokens.

        Raises:
            RopeExtendError: the target length is not above the trained window.
        """
        if target_length <= self.shape.trained_length:
            raise RopeExtendError(
                f"target_length must exceed the trained window of {self.shape.trained_length} tokens, "
                f"got {target_length}"
            )
        return [
            self.effect(rotary_method(name).for_target(self.shape, target_length), target_length)
            for name in methods_from_length()
        ]


def info(model: str | PathLike[str] | nn.Module, *, trained_length: int | None = None) -> ModelInfo:
    """The position encoding of a model, from the live model or from a checkpoint's config alone.

    Args:
        model: a transformers model, or a local directory or hub id, of which only the config is read. For an
            adapter's directory that rope_extend wrote: the base model's config, with the adapter's encoding.
        trained_length: the window of pretraining, in tokens; needed if the config does not state it.

    Raises:
        UnsupportedModelError: the model's family is not supported.
        RopeExtendError: no such checkpoint, or its config does not state the window of pretraining.
    """
    if isinstance(model, str | PathLike):
        model = _empty_model(expand_home(model))
    base = unwrap(model)
    config, parameters = rotary_part(base.config)
    layer = layer_config(base.config)
    marks = _marks(base)
    try:
        shape = shape_of(model, trained_length)
    except RopeExtendError:
        if not marks:
            raise
        shape = next(iter(marks.values()))[1]  # the adapter's config states it
    rotary = next(iter(adapter_for(base.config.model_type).rotary_modules(base.base_model).values()))
    record = config_record(base.config)
    unapplied = _unapplied(model, marks)
    recorded = unapplied_record(base)
    if recorded is not None:
        logger.warning("this model does not use what it was saved with: %s", recorded[1])
        unapplied = unapplied or str(recorded[0])
    known = (
        record.encoding
        if record and recorded is None
        else RopeEncoding.from_rope_parameters(parameters, config.max_position_embeddings)
    )
    # The stock table must be computable. A config that is broken in other ways fails here, not later.
    active_table(rotary, base.config, shape.trained_length)
    start, start_reason = suggested_start(base, shape.trained_length)
    return ModelInfo(
        model_type=base.config.model_type,
        shape=shape,
        head_dim=getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        window=config.max_position_embeddings,
        rope_parameters=dict(parameters),
        encoding=str(known) if known else None,
        record=None if record is None else dict(getattr(base.config, CONFIG_RECORD)),
        slow_channels=int((shape.trained_length * shape.inv_freq() < 2 * math.pi).sum()),
        current_length=current_window(base.config),
        start=start,
        start_reason=start_reason,
        unapplied=unapplied,
    )


def _empty_model(name: str) -> nn.Module:
    """The model of a checkpoint, without weights. For an adapter: its base model, with its encoding."""
    directory = Path(name)
    adapter = (directory / ADAPTER_CONFIG).exists() and not (directory / "config.json").exists()
    record = read_record(name) if (directory / RECORD_NAME).exists() else None
    if not adapter:
        model = empty_model(name)
    elif record is None or record.base_model is None:
        what = f"without {RECORD_NAME}" if record is None else "whose record names no base model"
        raise RopeExtendError(f"{name} holds an adapter {what}; give the base model instead")
    else:
        model = empty_model(record.base_model)
    if record is not None:
        if adapter or (directory / "config.json").exists():
            check_agreement(directory, record)
        if adapter or unapplied_record(model) is not None:
            apply_record(model, record)
    return model


def _marks(base: Any) -> dict[str, tuple[Encoding, RopeShape, int]]:
    """Encoding, shape and window that the active adapters were trained with, if rope_extend saved them."""
    configs = getattr(base, "peft_config", None) or {}
    marks = {}
    for name in next((layer.active_adapters for _, layer in tuner_layers(base)), ()):
        mapping = getattr(configs.get(name), "auto_mapping", None)
        mark = mapping.get(ADAPTER_MARK) if isinstance(mapping, dict) else None
        if mark is None:
            continue
        try:
            length = check_length("adapter", "target_length", mark["target_length"])
            marks[name] = Encoding.from_dict(mark["encoding"]), RopeShape(**mark["shape"]), length
        except Exception as error:
            raise RopeExtendError(
                f"the encoding in the config of the adapter {name!r} is damaged ({error}): {mark!r}; load it "
                "with rope_extend.load, which compares it with what was saved"
            ) from error
    return marks


def _unapplied(model: nn.Module, marks: Mapping[str, tuple[Encoding, RopeShape, int]]) -> str | None:
    """The encoding that an active adapter was trained with, if the model does not use it."""
    patch = current_patch(model)
    for name, (encoding, shape, target_length) in marks.items():
        if patch is not None and (patch.encoding, patch.shape) == (encoding, shape):
            continue
        if (
            isinstance(encoding, RopeEncoding)
            and not (patch is not None and patch.encoding.beyond_one_table(patch.shape))
            and not encoding.beyond_one_table(shape)
            and has_tables_of(model, encoding, shape, (shape.trained_length, target_length))
        ):
            continue
        logger.warning(
            "the adapter %r was trained with %s, but this model uses %s, so its output cannot be trusted. "
            "Load the adapter with rope_extend.load or rope_extend.load_adapter, not with peft alone",
            name, encoding, patch.encoding if patch else "the base model's own encoding",
        )  # fmt: skip
        return str(encoding)
    return None
