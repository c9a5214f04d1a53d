"""The position encoding of a checkpoint. No weights are read."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from rope_extend.checkpoint.record import check_agreement, read_record
from rope_extend.checkpoint.restoring import apply_record
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import RECORD_NAME, is_adapter, is_model, is_recorded
from rope_extend.models.config_facts import (
    CONFIG_RECORD,
    config_record,
    current_window,
    layer_config,
    rotary_part,
)
from rope_extend.models.current_table import suggested_start, unapplied_record
from rope_extend.models.decoders import unwrap
from rope_extend.models.families import family_for
from rope_extend.models.loading import empty_model, pretrained
from rope_extend.models.rotary_tables import active_table, shape_of

logger = logging.getLogger(__name__)


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
        unapplied: the encoding that the checkpoint was saved with, if the model does not use it, for example
            because stock transformers loaded it; otherwise None.
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
    shape = shape_of(model, trained_length)
    rotary = next(iter(family_for(base.config.model_type).rotary_modules(base.base_model).values()))
    record = config_record(base.config)
    unapplied = unapplied_record(base)
    if unapplied is not None:
        logger.warning("this model does not use what it was saved with: %s", unapplied[1])
    known = (
        record.encoding
        if record and unapplied is None
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
        unapplied=None if unapplied is None else str(unapplied[0]),
    )


def _empty_model(name: str) -> nn.Module:
    """The model of a checkpoint, without weights. For an adapter: its base model, with its encoding."""
    directory = Path(name)
    adapter = is_adapter(directory) and not is_model(directory)
    record = read_record(name) if is_recorded(directory) else None
    if not adapter:
        model = empty_model(name)
    elif record is None or record.base_model is None:
        what = f"without {RECORD_NAME}" if record is None else "whose record names no base model"
        raise RopeExtendError(f"{name} holds an adapter {what}; give the base model instead")
    else:
        config = pretrained(AutoConfig, record.base_model, revision=record.base_revision)
        model = empty_model(record.base_model, config)
    if record is not None:
        if adapter or is_model(directory):
            check_agreement(directory, record)
        if adapter or unapplied_record(model) is not None:
            apply_record(model, record)
    return model
