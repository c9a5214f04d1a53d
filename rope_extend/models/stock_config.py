"""Stock configs: the `config.rope_parameters` with which stock transformers computes an encoding."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, YaRN
from rope_extend.encodings.composed import ComposedRope
from rope_extend.encodings.core.shapes import ZERO_FREQUENCY, ZERO_FREQUENCY_DIVISOR
from rope_extend.errors import RopeExtendError
from rope_extend.models.config_facts import (
    CONFIG_RECORD,
    ORIGINAL_WINDOW,
    STOCK_WINDOW,
    config_record,
    rotary_part,
)
from rope_extend.models.families import Family
from rope_extend.models.rotary_tables import stock_table

_CARRIED = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Rotary parameters that describe the model's shape, not its scaling, and are kept when that changes."""
DUAL_CHUNK_KEY = "dual_chunk_attention_config"
"""The key from which SGLang and some versions of vLLM compute dual chunk attention, in addition to
`rope_parameters`. transformers keeps it in a config, and ignores it."""


def stock_forms(
    encoding: RopeEncoding, shape: RopeShape, pairs: int, *, latent: bool
) -> Iterator[dict[str, Any]]:
    """The `rope_parameters` that may express an encoding, the native form first.

    With more than `dim/2` pairs, the form also has to express the pairs that do not rotate. `proportional`
    has a share of rotating pairs, and `longrope` gets `ZERO_FREQUENCY_DIVISOR` for the others.
    `latent`: whether the family computes its softmax scale from the form too, see `latent_attention`.
    """
    for make in (encoding.rope_parameters, encoding.longrope_parameters):
        with contextlib.suppress(RopeExtendError):
            form = make(shape)
            unrotated = pairs - shape.dim // 2
            if unrotated:
                share = shape.dim / (2 * pairs)
                form["rope_theta"] = float(f"{form['rope_theta'] ** (1 / share):.12g}")
                if form["rope_type"] in ("default", "linear"):
                    form |= {"rope_type": "proportional", "partial_rotary_factor": share}
                elif form["rope_type"] == "longrope":
                    for name in ("short_factor", "long_factor"):
                        form[name] = [*form[name], *[ZERO_FREQUENCY_DIVISOR] * unrotated]
                    form["partial_rotary_factor"] = 1.0
                else:
                    continue
            if latent and form["rope_type"] != "default":
                form.setdefault("factor", 1.0)  # transformers 5.17 requires one, without effect
                if encoding.mscale_all_dim is not None:
                    form["mscale_all_dim"] = encoding.mscale_all_dim
            yield form


@contextlib.contextmanager
def window_for_stock(config: Any) -> Iterator[Any]:
    """The part of a config with `max_position_embeddings`, within the context that which stock loaders need.

    In a patched model it is the extended window, for whoever asks how much the model can read. Stock
    transformers computes the tables of `dynamic` from it, and cannot extend the window by a method that it
    does not have: both need the trained window in the file.
    """
    record = getattr(config, CONFIG_RECORD, None)
    # A config may come from anywhere, and saving it must not fail by what is no record of ours.
    record = record if isinstance(record, dict) and type(record.get(STOCK_WINDOW)) is int else {}
    part = rotary_part(config)[0] if record else config
    extended = record and record.get("target_length") == part.max_position_embeddings
    if extended:
        part.max_position_embeddings = record[STOCK_WINDOW]
    try:
        yield part
    finally:
        if extended:
            part.max_position_embeddings = record["target_length"]


_write_config = PreTrainedConfig.to_json_file


@functools.wraps(_write_config)
def _to_json_file(config: Any, *args: Any, **options: Any) -> None:
    with contextlib.ExitStack() as stack:
        for part in _with_parts(config):  # a decoder may be extended inside a model that is not
            stack.enter_context(window_for_stock(part))
        _write_config(config, *args, **options)


def _with_parts(config: Any) -> Iterator[Any]:
    """A config and all configs inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _with_parts(value)


PreTrainedConfig.to_json_file = _to_json_file  # by which `save_pretrained` of configs and models writes


def has_stock_config(config: Any, target_length: int) -> bool:
    """Whether stock transformers computes the encoding of a patched model from its config.

    If not, its own tables would be those of the pretrained model, or those of the longest row of a batch.
    """
    record = config_record(config)
    if record and record.encoding.why_not_one_table(record.shape):
        return False
    kind = rotary_part(config)[1].get("rope_type", "default")
    with window_for_stock(config) as part:
        return bool(part.max_position_embeddings == target_length or kind not in ("default", "proportional"))


def latent_attention(base: Any) -> list[tuple[Any, Callable[[dict[str, Any], float], float]]]:
    """The attention modules of DeepSeek's kind, with transformers' function for their softmax scale.

    They compute it from `rope_parameters` when they are made: `mscale_all_dim` multiplies the logits of all
    channels, also of those that do not rotate. Empty for the other families.
    """
    modules = [module for module in base.base_model.modules() if hasattr(module, "qk_head_dim")]
    named = [(each, vars(sys.modules[type(each).__module__]).get("yarn_apply_mscale")) for each in modules]
    return [(module, scale) for module, scale in named if scale is not None]


def sharpened_as_trained(
    encoding: Encoding, base: Any, shape: RopeShape, parameters: Mapping[str, Any]
) -> Encoding:
    """YaRN as the model's own config applies it: a model of DeepSeek's kind keeps its two `mscale`.

    `parameters` are the `rope_parameters` that the model has without a patch. Every other encoding, and YaRN
    with a factor on cos and sin of its own, is returned as it is.
    """
    if isinstance(encoding, ComposedRope) and not encoding.why_not_one_table(shape):
        inner: Any = sharpened_as_trained(encoding.inner, base, shape, parameters)
        return replace(encoding, inner=inner)
    if not isinstance(encoding, YaRN) or encoding.mscale is not None or encoding.attention_scale is not None:
        return encoding
    own = {key: parameters[key] for key in ("mscale", "mscale_all_dim") if parameters.get(key)}
    return replace(encoding, **own) if len(own) == 2 and latent_attention(base) else encoding


def stock_parameters(
    encoding: RopeEncoding,
    shape: RopeShape,
    family: Family,
    config: Any,
    forms: Iterable[dict[str, Any]],
    pairs: int,
    target_length: int,
) -> dict[str, Any] | None:
    """The first of several `rope_parameters` with which the family's stock code computes the same tables.

    None if there are none. A native form can fail: with several layer types, transformers ignores YaRN's
    `truncate`.
    """
    for form in forms:
        if not family.accepts(form["rope_type"]):
            continue
        if form["rope_type"] == "longrope" and not _takes_lists(family.rotary_config(config)):
            continue
        completed = form if family.completes is None else family.completes(form)
        if completed is None:
            continue
        form = completed
        if encoding.depends_on_length or form["rope_type"] == "default":
            return form
        changed = copy.deepcopy(config)
        part, old = rotary_part(changed)
        form = with_carried(form, old, shape.trained_length)
        part.rope_parameters = nested(family, changed, form)
        part.max_position_embeddings = encoding.max_position_embeddings(shape, target_length)
        try:
            table, factor = stock_table(part, form["rope_type"], family.layer_type(changed), target_length)
        except RopeExtendError:  # such as lists for more pairs than a carried share of channels leaves
            continue
        ours, scale = encoding.inv_freq(shape), encoding.attention_factor(shape)
        rotated, rest = table[: len(ours)], table[len(ours) :]
        if (
            abs(factor - scale) < 1e-4
            and len(table) == pairs
            and bool((rest < ZERO_FREQUENCY).all())
            and torch.allclose(rotated, ours, rtol=1e-4, atol=ZERO_FREQUENCY)
        ):
            return form
    return None


def dual_chunk_configs(config: Any) -> list[Any]:
    """The parts of a model's config that have `DUAL_CHUNK_KEY`: the config itself, a nested one, or both."""
    nested_parts = (config.get_text_config(decoder=True), rotary_part(config)[0])
    parts = {id(part): part for part in (config, *nested_parts)}
    return [part for part in parts.values() if DUAL_CHUNK_KEY in vars(part)]


def with_carried(
    parameters: Mapping[str, Any], old: Mapping[str, Any], trained_length: int | None = None
) -> dict[str, Any]:
    """`rope_parameters` with the old values that describe the model's shape, and that they do not state."""
    kept = {key: old[key] for key in _CARRIED if key in old and key not in parameters}
    merged = {**parameters, **kept}
    if "llama_4_scaling_beta" in merged and trained_length is not None:
        # Queries are scaled by their distance from the trained window.
        merged.setdefault(ORIGINAL_WINDOW, trained_length)
    return merged


def _takes_lists(config: Any) -> bool:
    """Whether transformers can check the length of `longrope` lists.

    It needs one head width for all layers, and raises if layers differ.
    """
    try:
        return bool(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    except RuntimeError:
        return False


def nested(family: Family, config: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for a model's config, with new ones for the extended layer type."""
    layer_type = family.layer_type(config)
    if layer_type is None:
        return parameters
    return {**family.rotary_config(config).rope_parameters, layer_type: parameters}
