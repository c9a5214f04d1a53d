"""What a config says of its model: the rotary part, layer types, windows and what rope_extend recorded."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from rope_extend.checks import number
from rope_extend.encodings import Encoding, RopeShape
from rope_extend.encodings.core.shapes import MAX_LENGTH, check_length
from rope_extend.errors import RopeExtendError
from rope_extend.models.families import find_family

logger = logging.getLogger(__name__)

CONFIG_RECORD = "rope_extend"
"""The attribute of `config` with the record of the patch; stock loaders keep it and ignore it."""
ORIGINAL_WINDOW = "original_max_position_embeddings"
STOCK_WINDOW = "stock_window"
"""The key of that record with the `max_position_embeddings` that stock loaders need."""


def rotary_part(config: Any) -> tuple[Any, dict[str, Any]]:
    """The part of a model's config that describes its rotary modules, and its `rope_parameters`.

    For most families that part is the config itself. If `rope_parameters` are nested by layer type, those of
    the extended layers are returned.
    """
    family = find_family(config.model_type)
    if family is None:
        return config, getattr(config, "rope_parameters", None) or {}
    part, layer_type = family.rotary_config(config), family.layer_type(config)
    parameters = part.rope_parameters or {}
    return part, parameters if layer_type is None else parameters[layer_type]


def layer_config(config: Any) -> Any:
    """The config of the extended layers; heterogeneous models have one for each layer type."""
    family = find_family(config.model_type)
    part, _ = rotary_part(config)
    layer_type = family.layer_type(config) if family else None
    if layer_type and getattr(part, "is_heterogeneous", False):
        return part.per_layer_config[layer_type]
    return part


def layer_types_except_full_attention(config: Any) -> set[str]:
    """The layer types of a text config except full attention over all tokens."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types and getattr(config, "sliding_window", None):  # in all layers
        layer_types = {"sliding_attention"}
    return layer_types - {"full_attention"}


def window_of(config: Any, layer_type: str) -> int | None:
    """How many tokens the layers of a type attend to; None if all, 0 if the text config does not say."""
    for word, key in (("chunked", "attention_chunk_size"), ("sliding", "sliding_window")):
        if word in layer_type:
            return int(getattr(config, key, None) or 0)
    return None


def is_soft_capped(config: Any) -> bool:
    """Whether attention caps its scores, as in Gemma 2. sdpa has no cap; transformers 5.17 leaves it out."""
    return bool(getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None))


def trained_length_of(config: Any) -> int:
    """The window, in tokens, that a checkpoint was pretrained on, before any scaling in its config.

    Raises:
        RopeExtendError: the config does not say, or says something that is no window. With `linear` scaling,
            `max_position_embeddings` is the trained length in some checkpoints and the scaled one in others.
    """
    if (record := config_record(config)) is not None:
        return record.shape.trained_length
    part, parameters = rotary_part(config)
    rope_type = parameters.get("rope_type", "default")
    plain = rope_type == "proportional" and parameters.get("factor", 1.0) == 1.0
    if plain or rope_type in ("default", "dynamic"):
        return _stated_window(part)
    original = parameters.get(ORIGINAL_WINDOW)
    original = getattr(part, ORIGINAL_WINDOW, None) if original is None else original
    if original is None:
        raise RopeExtendError(
            f"this checkpoint already has {rope_type!r} scaling (factor {parameters.get('factor')}), but its "
            f"config does not say which window it was pretrained on; max_position_embeddings is "
            f"{part.max_position_embeddings}. Give trained_length= (--trained-length)"
        )
    return _window(ORIGINAL_WINDOW, original)


def current_window(config: Any) -> int:
    """The window, in tokens, that a checkpoint was made for under its present table, by its config.

    A config with YaRN may have the window before or after the extension in `max_position_embeddings`, so the
    larger of that and of its factor's window counts. With every other `rope_type`, the factor does not give
    the window: Llama 3.2 has `llama3` scaling with factor 32 over 8,192 tokens, and is for 131,072.
    """
    if (record := config_record(config)) is not None:
        return record.target_length
    part, parameters = rotary_part(config)
    window = _stated_window(part)
    original, factor = parameters.get(ORIGINAL_WINDOW), parameters.get("factor")
    if parameters.get("rope_type", "default") != "yarn" or original is None or factor is None:
        return window
    factor = number(0, above=True)("config", "factor", factor)
    return max(window, round(_window(ORIGINAL_WINDOW, original) * factor))


def _stated_window(part: Any) -> int:
    """`max_position_embeddings`, without what Qwen3's 40,960 reserves for the answer: it learned 32,768."""
    window = _window("max_position_embeddings", part.max_position_embeddings)
    parameters = part.rope_parameters or {}
    reserves = (
        part.model_type in ("qwen3", "qwen3_moe") and parameters.get("rope_type", "default") == "default"
    )
    return 32_768 if reserves and window == 40_960 and parameters.get("rope_theta") == 1e6 else window


def _window(name: str, value: object) -> int:
    """A window of the config in tokens."""
    return int(number(1, MAX_LENGTH)("config", name, value))


class ConfigRecord(NamedTuple):
    """What rope_extend wrote into a config: the encoding, the model's shape, and the window."""

    encoding: Encoding
    shape: RopeShape
    target_length: int


def config_record(config: Any) -> ConfigRecord | None:
    """The record that rope_extend wrote into a config, or None.

    `{"encoding": ..., "shape": ..., "target_length": ..., "rope_parameters": ...}`. If the record's
    `rope_parameters` are no longer those of the config, somebody has edited the config. The record is then
    ignored with a warning.
    """
    values = getattr(config, CONFIG_RECORD, None)
    if values is None:
        return None
    try:
        record = ConfigRecord(
            Encoding.from_dict(values["encoding"]),
            RopeShape(**values["shape"]),
            check_length(f"config.{CONFIG_RECORD}", "target_length", values["target_length"]),
        )
        recorded = dict(values["rope_parameters"])
    except (KeyError, TypeError, ValueError) as error:
        raise RopeExtendError(
            f"config.{CONFIG_RECORD} is damaged ({error}): {values!r}; remove it, and the "
            f"checkpoint loads by its rope_parameters"
        ) from error
    _, current = rotary_part(config)
    if all(current.get(key) == value for key, value in recorded.items()):
        return record
    logger.warning(
        "config.%s is ignored: it was written for other rope_parameters than the present %s",
        CONFIG_RECORD, current,
    )  # fmt: skip
    return None
