"""Facts about a model: what is inside wrappers, its rotary shape, its rotary tables and its layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.checks import number
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
from rope_extend.encodings.core.shapes import MAX_LENGTH, ZERO_FREQUENCY, check_length
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.models.families import adapter_for, find_adapter
from rope_extend.models.rotary import ExtendedRotaryEmbedding

logger = logging.getLogger(__name__)

CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"
"""The argument of models and of `generate` that takes a cache. Its old name is deprecated."""
CONFIG_RECORD = "rope_extend"
"""The attribute of `config` with the record of the patch; stock loaders keep it and ignore it."""
ORIGINAL_WINDOW = "original_max_position_embeddings"
STOCK_WINDOW = "stock_window"
"""The key of that record with the `max_position_embeddings` that stock loaders need."""


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside PEFT, DistributedDataParallel and `torch.compile` wrappers.

    Raises:
        UnsupportedModelError: there is none.
    """
    inner: Any = model
    if isinstance(model, str | PathLike):
        raise UnsupportedModelError(
            f"this takes a loaded model, got the name {str(model)!r}. Load it first, with "
            f"AutoModelForCausalLM.from_pretrained, or with rope_extend.load if rope_extend saved it"
        )
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # peft
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):  # data parallel wrappers
            inner = inner.module
        else:
            raise UnsupportedModelError(
                f"this needs a transformers model, got {type(model).__name__}; load one, for example with "
                f"AutoModelForCausalLM.from_pretrained"
            )
    return inner


def rotary_part(config: Any) -> tuple[Any, dict[str, Any]]:
    """The part of a model's config that describes its rotary modules, and its `rope_parameters`.

    For most families that part is the config itself. If `rope_parameters` are nested by layer type, those of
    the extended layers are returned.

    Raises:
        UnsupportedModelError: the model rotates no layer of the type that is extended.
    """
    adapter = find_adapter(config.model_type)
    if adapter is None:
        return config, getattr(config, "rope_parameters", None) or {}
    part, layer_type = adapter.rotary_config(config), adapter.layer_type(config)
    parameters = part.rope_parameters or {}
    return part, parameters if layer_type is None else parameters[layer_type]


def layer_config(config: Any) -> Any:
    """The config of the extended layers; heterogeneous models have one for each layer type."""
    adapter = find_adapter(config.model_type)
    part, _ = rotary_part(config)
    layer_type = adapter.layer_type(config) if adapter else None
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

    Raises:
        RopeExtendError: a window or a factor in the config is not a finite number above 0, or what
            rope_extend recorded in the config is damaged.
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

    Raises:
        RopeExtendError: the record is damaged.
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


def shape_of(model: nn.Module, trained_length: int | None = None) -> RopeShape:
    """The rotary shape of a model as it was pretrained: rotated channels, base, trained window.

    Raises:
        UnsupportedModelError: the family has no adapter.
        RopeExtendError: the config does not say which window it was trained on, or `trained_length` is
            invalid.
    """
    base = unwrap(model)
    adapter = adapter_for(base.config.model_type)
    modules = list(adapter.rotary_modules(base.base_model).values())
    bases = {base for base in adapter.bases(base.config) if base}
    if len(bases) > 1:
        raise UnsupportedModelError(f"the layers of this model differ in base: {sorted(bases)}")
    if isinstance(modules[0], ExtendedRotaryEmbedding):
        dim, theta = modules[0].shape.dim, modules[0].shape.theta
    elif (record := config_record(base.config)) is not None:
        dim, theta = record.shape.dim, record.shape.theta
    else:
        dim, theta = _stock_shape(base.config, modules)
    return RopeShape(dim, theta, trained_length_of(base.config) if trained_length is None else trained_length)


def _stock_shape(config: Any, modules: Sequence[Any]) -> tuple[int, float]:
    """The rotated channels per head and the base, by the stock rotary modules of a model."""
    _, parameters = rotary_part(config)
    if (theta := parameters.get("rope_theta")) is None:
        raise RopeExtendError(
            f"config.rope_parameters of this {config.model_type} model has no rope_theta, only "
            f"{parameters}; set it to the base that the model was pretrained with"
        )
    tables = [active_table(module, config, 1)[0] for module in modules]
    widths = sorted({2 * int((table > ZERO_FREQUENCY).sum()) for table in tables})
    channels = sorted({2 * len(table) for table in tables})
    if channels[0] == 0:
        raise UnsupportedModelError(
            f"this {config.model_type} model rotates no channels, by its config: {parameters}; correct it"
        )
    if len(widths) > 1:
        raise UnsupportedModelError(f"the rotary modules of this model differ in width: {widths}")
    if len(channels) == 1:
        # "Proportional" rotary: the exponents count all channels, but only the fastest pairs rotate.
        theta **= widths[0] / channels[0]
    return widths[0], theta


def active_table(module: Any, config: Any, seq_len: int) -> tuple[Tensor, float]:
    """`(inv_freq [dim/2] float64, attention factor)` that a rotary module uses for `seq_len` tokens.

    `config` is the model's. If the module has several tables, that of the extended layers is returned.
    """
    with torch.device("cpu"):  # the caller may have another default device
        if isinstance(module, ExtendedRotaryEmbedding):
            return (
                module.pad_unrotated(module.encoding.inv_freq(module.shape, seq_len)),
                module.encoding.attention_factor(module.shape, seq_len),
            )
        # From the stock formula: the module's buffer may have been rounded by a cast of the model.
        part, _ = rotary_part(config)
        adapter = find_adapter(config.model_type)
        layer_type = adapter.layer_type(config) if adapter else None
        rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if rope_type != "default":
            return stock_table(part, rope_type, layer_type, seq_len)
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        compute = partial(module.compute_default_rope_parameters, layer_config(config), **arguments)
        return _computed_by_stock(compute, rope_type)


def stock_table(config: Any, rope_type: str, layer_type: str | None, seq_len: int) -> tuple[Tensor, float]:
    """The table that transformers computes from the config of a rotary module.

    For every `rope_type` except `default`.

    Raises:
        RopeExtendError: the config has values that transformers cannot compute with.
    """
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    compute = ROPE_INIT_FUNCTIONS[rope_type]
    return _computed_by_stock(partial(compute, config, torch.device("cpu"), seq_len, **arguments), rope_type)


def _computed_by_stock(compute: Callable[[], tuple[Tensor, float]], rope_type: str) -> tuple[Tensor, float]:
    """A table of transformers and its attention factor, in float64 on the CPU."""
    try:
        table, factor = compute()
        return table.to("cpu", torch.float64), float(factor)
    except Exception as error:  # what a config holds is checked by nobody, so the error may be any
        raise RopeExtendError(
            f"transformers cannot compute the rotary table of rope_type {rope_type!r} from this config "
            f"({type(error).__name__}: {error}); correct its rope_parameters"
        ) from error


def rotary_tables(model: nn.Module, length: int) -> list[tuple[Tensor, float]]:
    """`(inv_freq [pairs] float64, attention factor)` of each rotary module, for texts of `length` tokens."""
    base = unwrap(model)
    modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
    return [active_table(module, base.config, length) for module in modules.values()]


def has_tables_of(model: nn.Module, encoding: RopeEncoding, shape: RopeShape, lengths: Iterable[int]) -> bool:
    """Whether every rotary module of a model has an encoding's tables, up to float32 rounding.

    Pairs beyond those of the shape must have frequency zero.
    """
    for length in lengths:
        ours, scale = encoding.inv_freq(shape, length), encoding.attention_factor(shape, length)
        for table, factor in rotary_tables(model, length):
            if len(table) < len(ours) or not math.isclose(factor, scale, rel_tol=1e-6):
                return False
            expected = torch.nn.functional.pad(ours, (0, len(table) - len(ours)))
            if not torch.allclose(table, expected, rtol=1e-5, atol=ZERO_FREQUENCY):
                return False
    return True


class DecoderLayers(NamedTuple):
    """The list of a decoder's layers, and where it is."""

    parent: nn.Module
    """The module that holds the list."""
    name: str
    """The attribute of `parent` that is the list."""
    layers: nn.ModuleList
    complete: bool
    """Whether these are all layers that a token passes through, one entry for each."""


def decoder_layers(model: nn.Module) -> DecoderLayers | None:
    """The layers of a model's text decoder, from the nearest module that holds the rotary module.

    None if they are not in one list, or if the family has no adapter.
    """
    base = unwrap(model)
    decoder, adapter = base.base_model, find_adapter(base.config.model_type)
    if adapter is None:
        return None
    steps = adapter.rotary_path.split(".")
    steps = steps[: steps.index("*")] if "*" in steps else steps
    for depth in range(len(steps) - 1, -1, -1):
        parent = decoder.get_submodule(".".join(steps[:depth]))
        for name in ("layers", "h"):
            layers = getattr(parent, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers):
                count = base.config.get_text_config(decoder=True).num_hidden_layers
                embeds = any(isinstance(module, nn.Embedding) for module in parent.modules())
                complete = len(layers) == count and embeds  # BLT has more layers before and after
                return DecoderLayers(parent, name, layers, complete)
    return None


def length_groups(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    """Groups of sequence lengths for which the model uses equal rotary tables, each group ascending.

    One forward over the longest of a group gives the losses at all its lengths. Static encodings have one
    group. Stock dynamic NTK has one for all lengths within the trained window and one for each beyond.

    Raises:
        UnsupportedModelError: the family has no adapter.
    """
    base = unwrap(model)
    modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
    if all(isinstance(m, ExtendedRotaryEmbedding) for m in modules.values()):
        return [sorted(set(lengths))]
    groups: dict[str, list[int]] = {}
    for length in sorted(set(lengths)):
        tables = [(table.tolist(), factor) for table, factor in rotary_tables(model, length)]
        groups.setdefault(repr(tables), []).append(length)
    return list(groups.values())
