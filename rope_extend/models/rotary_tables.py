"""The rotary shape of a model, and the tables that its rotary modules use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.encodings.core.shapes import ZERO_FREQUENCY
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.models.config_facts import config_record, layer_config, rotary_part, trained_length_of
from rope_extend.models.decoders import unwrap
from rope_extend.models.families import family_for, find_family
from rope_extend.models.rotary import ExtendedRotaryEmbedding


def shape_of(model: nn.Module, trained_length: int | None = None) -> RopeShape:
    """The rotary shape of a model as it was pretrained: rotated channels, base, trained window."""
    base = unwrap(model)
    family = family_for(base.config.model_type)
    modules = list(family.rotary_modules(base.base_model).values())
    bases = {base for base in family.bases(base.config) if base}
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
        family = find_family(config.model_type)
        layer_type = family.layer_type(config) if family else None
        rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if rope_type != "default":
            return stock_table(part, rope_type, layer_type, seq_len)
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        compute = partial(module.compute_default_rope_parameters, layer_config(config), **arguments)
        return _computed_by_stock(compute, rope_type)


def stock_table(config: Any, rope_type: str, layer_type: str | None, seq_len: int) -> tuple[Tensor, float]:
    """The table that transformers computes from the config of a rotary module.

    For every `rope_type` except `default`.
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
    modules = family_for(base.config.model_type).rotary_modules(base.base_model)
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


def length_groups(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    """Groups of sequence lengths for which the model uses equal rotary tables, each group ascending.

    One forward over the longest of a group gives the losses at all its lengths. Static encodings have one
    group. Stock dynamic NTK has one for all lengths within the trained window and one for each beyond.
    """
    base = unwrap(model)
    modules = family_for(base.config.model_type).rotary_modules(base.base_model)
    if all(isinstance(m, ExtendedRotaryEmbedding) for m in modules.values()):
        return [sorted(set(lengths))]
    groups: dict[str, list[int]] = {}
    for length in sorted(set(lengths)):
        tables = [(table.tolist(), factor) for table, factor in rotary_tables(model, length)]
        groups.setdefault(repr(tables), []).append(length)
    return list(groups.values())
