"""The handler that an encoding needs inside a model, built whole."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils.modeling import has_offloaded_params

from rope_extend.attention.biases import BiasHandler
from rope_extend.attention.functions import extended_modules
from rope_extend.attention.kernel import KernelHandler
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.rotation import RotationHandler
from rope_extend.attention.vectors import VectorHandler
from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    Encoding,
    LinearAttention,
    ModelShape,
    RopeEncoding,
    RopeShape,
)
from rope_extend.models.config_facts import layer_config
from rope_extend.models.families import Family
from rope_extend.models.parameters import LearnedParameters


def handler_for(encoding: Encoding, shape: RopeShape, model: Any, family: Family) -> AttentionHandler | None:
    """The handler for what an encoding does beyond its rotary tables, not installed yet; None for nothing."""
    if isinstance(encoding, BiasEncoding):
        modules = extended_modules(encoding, model.base_model, family)
        sized = _model_shape(model, shape, modules[0] if modules else None)
        layers = sorted({int(module.layer_idx) for module in modules})
        return BiasHandler(encoding, family, sized, learned=_learned(encoding, sized, model, layers))
    if isinstance(encoding, AbsoluteEncoding):
        sized = _model_shape(model, shape)
        return VectorHandler(encoding, family, sized, learned=_learned(encoding, sized, model, []))
    if isinstance(encoding, LinearAttention):
        return KernelHandler(encoding, family, shape)
    if isinstance(encoding, RopeEncoding) and (
        encoding.rotates_in_attention or encoding.scales_logits(shape)
    ):
        return RotationHandler(encoding, family, shape)
    return None


def _model_shape(model: Any, shape: RopeShape, attention: Any = None) -> ModelShape:
    """The sizes of a model; of its heads, those of an attention module, which its config may not give."""
    config = layer_config(model.config)
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    width = getattr(attention, "qk_head_dim", None) or getattr(attention, "head_dim", None) or head_dim
    return ModelShape(heads, hidden, shape.trained_length, width)


def _learned(
    encoding: Encoding, shape: ModelShape, model: Any, layers: list[int]
) -> LearnedParameters | None:
    """The parameters that an encoding learns, on the model's device; None if it learns none."""
    if not encoding.initial(shape):
        return None
    offloaded = any(map(has_offloaded_params, model.base_model.modules()))  # then its weights are on none
    device = torch.device("cpu") if offloaded else next(model.base_model.parameters()).device
    return LearnedParameters(encoding, shape, layers, device)
