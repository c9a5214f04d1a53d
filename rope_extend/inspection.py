"""Reading a model: what is inside wrappers, its rotary shape, and the tables that it reads positions by."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.encodings import Encoding, RopeShape
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.families import adapter_for, find_adapter
from rope_extend.rotary import ExtendedRotaryEmbedding

logger = logging.getLogger(__name__)

CONFIG_RECORD = "rope_extend"
"""The attribute of `config` that says what was done; stock loaders carry it along and ignore it."""

RESTING = 1e-20
"""Radians per token below which a pair does not turn at all."""


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside PEFT, DistributedDataParallel and `torch.compile` wrappers.

    Raises:
        RopeExtendError: there is none.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # peft
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # torch.compile
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):  # data parallel wrappers
            inner = inner.module
        else:
            raise UnsupportedModelError(
                f"expected a transformers model, such as AutoModelForCausalLM.from_pretrained returns, "
                f"got {type(model).__name__}"
            )
    return inner


def rotary_part(config: Any) -> tuple[Any, dict[str, Any]]:
    """The part of a model's config that describes its rotary modules, and the `rope_parameters` in it of the
    layers that are extended.

    For most families that is the config itself; `rope_parameters` may be nested, by kinds of layer.

    Raises:
        UnsupportedModelError: the model rotates no layer of the kind that is extended.
    """
    adapter = find_adapter(config.model_type)
    if adapter is None:
        return config, config.rope_parameters or {}
    part, kind = adapter.rotary_config(config), adapter.layer_type(config)
    parameters = part.rope_parameters or {}
    return part, parameters if kind is None else parameters[kind]


def layer_config(config: Any) -> Any:
    """The config of the layers that are extended, which say for themselves what differs between layers."""
    adapter = find_adapter(config.model_type)
    part, _ = rotary_part(config)
    kind = adapter.layer_type(config) if adapter else None
    return part.per_layer_config[kind] if kind and getattr(part, "is_heterogeneous", False) else part


def kinds_beside_full_attention(config: Any) -> set[str]:
    """Which kinds of layers a text config names other than full attention over all tokens."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None):  # of all layers
        kinds = {"sliding_attention"}
    return kinds - {"full_attention"}


def trained_length_of(config: Any) -> int:
    """The window, in tokens, that a checkpoint was pretrained on, before any scaling it carries.

    Raises:
        RopeExtendError: the config does not say, as with `linear` scaling, where `max_position_embeddings`
            is the trained length in some checkpoints and the scaled one in others.
    """
    record = config_record(config)
    if record is not None:
        return RopeShape(**record["shape"]).trained_length
    config, parameters = rotary_part(config)
    rope_type = parameters.get("rope_type", "default")
    original = parameters.get("original_max_position_embeddings")
    plain = rope_type == "proportional" and parameters.get("factor", 1.0) == 1.0
    if plain or rope_type == "default" or rope_type == "dynamic":
        return int(config.max_position_embeddings)
    if original is None:
        original = getattr(config, "original_max_position_embeddings", None)
    if original is None:
        raise RopeExtendError(
            f"this checkpoint already carries {rope_type!r} scaling (factor {parameters.get('factor')}) and "
            f"does not say which window it was pretrained on; max_position_embeddings is "
            f"{config.max_position_embeddings}. Give trained_length= (--trained-length on the command line)"
        )
    return int(original)


def config_record(config: Any) -> dict[str, Any] | None:
    """What rope_extend wrote into a config, or None.

    `{"encoding": ..., "shape": ..., "target_length": ..., "rope_parameters": ...}`. A record whose
    `rope_parameters` are no longer the config's was overtaken by somebody's edit, and is ignored with a
    warning.

    Raises:
        RopeExtendError: the record is damaged.
    """
    record = getattr(config, CONFIG_RECORD, None)
    if record is None:
        return None
    try:
        RopeShape(**record["shape"])
        Encoding.from_dict(record["encoding"])
        written = dict(record["rope_parameters"])
    except (KeyError, TypeError, ValueError) as error:
        raise RopeExtendError(
            f"config.{CONFIG_RECORD} is damaged ({error}): {record!r}; without it the checkpoint can be read"
        ) from error
    _, current = rotary_part(config)
    if all(current.get(key) == value for key, value in written.items()):
        return dict(record)
    logger.warning(
        "config.%s was written beside other rope_parameters than the present %s; it is ignored",
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
    config = base.config
    modules = adapter_for(config.model_type).rotary_modules(base.base_model)
    _, parameters = rotary_part(config)
    record = config_record(config)
    theta = record["shape"]["theta"] if record else parameters.get("rope_theta")
    if theta is None:
        raise RopeExtendError(
            f"config.rope_parameters of this {config.model_type} model has no rope_theta, only "
            f"{parameters}; set it to the base the model was pretrained with"
        )
    channels, widths = set(), set()
    for module in modules.values():
        table, _ = active_table(module, config, 1)
        channels.add(2 * len(table))
        widths.add(
            module.shape.dim
            if isinstance(module, ExtendedRotaryEmbedding)
            else record["shape"]["dim"]
            if record
            else 2 * int((table > RESTING).sum())
        )
    if not record and len(widths) == len(channels) == 1:
        # "Proportional" rotary: the exponents count all channels, and only the fastest pairs turn.
        theta **= min(widths) / min(channels)
    if len(widths) != 1:
        raise UnsupportedModelError(f"the rotary modules of this model differ in width: {sorted(widths)}")
    bases = {each for each in getattr(rotary_part(config)[0], "layer_rope_theta", None) or () if each}
    if len(bases) > 1:
        raise UnsupportedModelError(f"the layers of this model differ in base: {sorted(bases)}")
    if trained_length is None:
        trained_length = trained_length_of(config)
    return RopeShape(widths.pop(), theta, trained_length)


def active_table(module: Any, config: Any, seq_len: int) -> tuple[Tensor, float]:
    """`(inv_freq [dim/2] float64, attention factor)` that a rotary module uses for `seq_len` tokens.

    `config` is the model's. Of several tables, the one of the layers that are extended.
    """
    with torch.device("cpu"):  # tables are made there, also where the caller made another the default
        if isinstance(module, ExtendedRotaryEmbedding):
            return (
                module.with_resting(module.encoding.inv_freq(module.shape, seq_len)),
                module.encoding.attention_factor(module.shape, seq_len),
            )
        # From the stock formula, not from the module's buffer, which a cast of the model may have rounded.
        part, _ = rotary_part(config)
        adapter = find_adapter(config.model_type)
        kind = adapter.layer_type(config) if adapter else None
        rope_type = module.rope_type if kind is None else module.rope_type[kind]
        if rope_type != "default":
            return stock_table(part, rope_type, kind, seq_len)
        of_kind = {} if kind is None else {"layer_type": kind}
        table, factor = module.compute_default_rope_parameters(layer_config(config), **of_kind)
        return table.to("cpu", torch.float64), float(factor)


def stock_table(config: Any, rope_type: str, layer_type: str | None, seq_len: int) -> tuple[Tensor, float]:
    """What transformers computes from the config of a rotary module, for a `rope_type` but `default`."""
    of_kind = {} if layer_type is None else {"layer_type": layer_type}
    table, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len, **of_kind)
    return table.to("cpu", torch.float64), float(factor)


def length_groups(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    """Group sequence lengths for which the model uses equal rotary tables, each group ascending.

    One forward over the longest of a group gives the losses at all its lengths. Static encodings give one
    group; dynamic NTK gives one for all lengths within the trained window and one for each beyond.

    Raises:
        UnsupportedModelError: the family has no adapter.
    """
    base = unwrap(model)
    modules = adapter_for(base.config.model_type).rotary_modules(base.base_model)
    if all(isinstance(m, ExtendedRotaryEmbedding) and not m.encoding.per_row for m in modules.values()):
        return [sorted(set(lengths))]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for length in sorted(set(lengths)):
        tables = [active_table(module, base.config, length) for module in modules.values()]
        key = tuple((tuple(table.tolist()), factor) for table, factor in tables)
        groups.setdefault(key, []).append(length)
    return list(groups.values())
