"""What a checkpoint's position encoding is, and what each method would do to it; needs no weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.record import ADAPTER_MARK, read_record
from rope_extend.checkpoint.tables import beyond_a_table, has_tables_of
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, dialled_methods, rotary_method
from rope_extend.encodings.base import check_length
from rope_extend.errors import RopeExtendError
from rope_extend.families import adapter_for
from rope_extend.inspection import active_table, config_record, layer_config, rotary_part, shape_of, unwrap
from rope_extend.patching import current_patch, patch_model
from rope_extend.pretrained import empty_model

logger = logging.getLogger(__name__)


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
        unapplied: the encoding that the active adapter was trained with, if the model does not read with it,
            as when stock peft has loaded it; else None.
    """

    model_type: str
    shape: RopeShape
    head_dim: int
    window: int
    rope_parameters: dict[str, Any]
    encoding: str | None
    record: dict[str, Any] | None
    slow_channels: int
    unapplied: str | None = None

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


def info(model: str | PathLike[str] | nn.Module, *, trained_length: int | None = None) -> ModelInfo:
    """Say what position encoding a model has, from the live model or from a checkpoint's config alone.

    Args:
        model: a transformers model, or a local directory or hub id, of which only the config is read. Of an
            adapter's directory that rope_extend wrote, the base model's config as the adapter reads it.
        trained_length: the window it was pretrained on, in tokens, where the config does not say it.

    Raises:
        UnsupportedModelError: no adapter for the family.
        RopeExtendError: no such checkpoint, or its config does not say which window it was trained on.
    """
    if isinstance(model, str | PathLike):
        model = _empty_model(str(model))
    base = unwrap(model)
    config, parameters = rotary_part(base.config)
    layer = layer_config(base.config)
    marks = _marks(model)
    try:
        shape = shape_of(model, trained_length)
    except RopeExtendError:
        if not marks:
            raise
        shape = marks[0].shape  # what the config does not say, the adapter knows
    rotary = next(iter(adapter_for(base.config.model_type).rotary_modules(base.base_model).values()))
    record = config_record(base.config)
    known = (
        Encoding.from_dict(record["encoding"])
        if record
        else RopeEncoding.from_rope_parameters(parameters, config.max_position_embeddings)
    )
    # The stock table must be computable: a config that is broken in other ways shows it here, not later.
    active_table(rotary, base.config, shape.trained_length)
    return ModelInfo(
        model_type=base.config.model_type,
        shape=shape,
        head_dim=getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        window=config.max_position_embeddings,
        rope_parameters=dict(parameters),
        encoding=str(known) if known else None,
        record=record,
        slow_channels=int((shape.trained_length * shape.inv_freq() < 2 * math.pi).sum()),
        unapplied=_unapplied(model, marks),
    )


def _empty_model(name: str) -> nn.Module:
    """The model of a checkpoint, without weights; an adapter's is its base model, with its encoding."""
    directory = Path(name)
    if not (directory / "adapter_config.json").exists() or (directory / "config.json").exists():
        return empty_model(name)
    if not (directory / RECORD_NAME).exists():
        raise RopeExtendError(
            f"{name} holds an adapter without {RECORD_NAME}, and so says nothing of its encoding; give info "
            "its base model"
        )
    record = read_record(name)
    if record.base_model is None:
        raise RopeExtendError(f"the record in {name} names no base model; give info the base model instead")
    model = empty_model(record.base_model)
    patch_model(
        model, record.encoding, trained_length=record.shape.trained_length, target_length=record.target_length
    )
    return model


@dataclass(frozen=True)
class _Mark:
    """What an active adapter was trained with, by the mark that `rope_extend.save` leaves in its config."""

    adapter: str
    encoding: Encoding
    shape: RopeShape
    target_length: int


def _marks(model: nn.Module) -> list[_Mark]:
    """Of the active adapters, those that rope_extend saved; peft carries the mark along."""
    base = unwrap(model)
    configs = getattr(base, "peft_config", None) or {}
    layers = (module for module in base.modules() if isinstance(module, BaseTunerLayer))
    found = []
    for name in next((layer.active_adapters for layer in layers), []):
        mapping = getattr(configs.get(name), "auto_mapping", None)
        mark = mapping.get(ADAPTER_MARK) if isinstance(mapping, dict) else None
        if mark is None:
            continue
        try:
            length = check_length("adapter", "target_length", mark["target_length"])
            encoding, shape = Encoding.from_dict(mark["encoding"]), RopeShape(**mark["shape"])
        except Exception as error:
            raise RopeExtendError(
                f"what the config of the adapter {name!r} says of its encoding is damaged ({error}): "
                f"{mark!r}; load it with rope_extend.load, which compares it with what was saved"
            ) from error
        found.append(_Mark(name, encoding, shape, length))
    return found


def _unapplied(model: nn.Module, marks: Sequence[_Mark]) -> str | None:
    """The encoding that an active adapter was trained with and that the model does not read with."""
    patch = current_patch(model)
    for mark in marks:
        if not _reads(model, mark):
            logger.warning(
                "the adapter %r was trained with %s, and this model reads with %s: its output is not to be "
                "trusted. Load the adapter with rope_extend.load or rope_extend.load_adapter, not peft alone",
                mark.adapter, mark.encoding, patch.encoding if patch else "the base model's own encoding",
            )  # fmt: skip
            return str(mark.encoding)
    return None


def _reads(model: nn.Module, mark: _Mark) -> bool:
    """Whether a model reads with an encoding, by its patch or because its config says the same."""
    patch = current_patch(model)
    if patch is not None and (patch.encoding, patch.shape) == (mark.encoding, mark.shape):
        return True
    if patch is not None and beyond_a_table(patch.encoding, patch.shape):
        return False
    encoding, shape = mark.encoding, mark.shape
    if not isinstance(encoding, RopeEncoding) or (beyond_a_table(encoding, shape) and not encoding.per_row):
        return False
    return has_tables_of(model, encoding, shape, (shape.trained_length, mark.target_length))
