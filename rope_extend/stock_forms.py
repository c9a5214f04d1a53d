"""The form in which stock transformers carries an encoding: what `config.rope_parameters` gets."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.encodings.base import STILL
from rope_extend.errors import RopeExtendError
from rope_extend.families import FamilyAdapter
from rope_extend.inspection import RESTING, rotary_part, stock_table

CARRIED = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")
"""Rotary parameters that describe the model's shape, not its scaling, and survive a change of scaling."""


def stock_forms(
    encoding: RopeEncoding, shape: RopeShape, pairs: int, softmax_scale: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """The `rope_parameters` that may carry an encoding, the native form first.

    With more than `dim/2` pairs, those that do not turn are part of the form: `proportional` has a share of
    pairs that turn, and in `longrope` the others are slowed to a halt. `softmax_scale` is that of
    `softmax_scale_of`: a patch leaves it as it was, so the form has to give the same.
    """
    for make in (encoding.rope_parameters, encoding.longrope_parameters):
        with contextlib.suppress(RopeExtendError):
            form = make(shape)
            resting = pairs - shape.dim // 2
            if resting:
                share = shape.dim / (2 * pairs)
                form["rope_theta"] = float(f"{form['rope_theta'] ** (1 / share):.12g}")
                if form["rope_type"] in ("default", "linear"):
                    form |= {"rope_type": "proportional", "partial_rotary_factor": share}
                elif form["rope_type"] == "longrope":
                    for name in ("short_factor", "long_factor"):
                        form[name] = [*form[name], *[STILL] * resting]
                    form["partial_rotary_factor"] = 1.0
                else:
                    continue
            if softmax_scale is not None and "mscale_all_dim" in form:
                form = {key: value for key, value in form.items() if key not in ("mscale", "mscale_all_dim")}
                form["attention_factor"] = encoding.attention_factor(shape)
            if softmax_scale is not None and form["rope_type"] != "default":
                form.setdefault("factor", 1.0)  # transformers 5.17 asks for one, to no effect
            if softmax_scale:
                if form["rope_type"] != "longrope":
                    continue
                form |= softmax_scale
            yield form


def softmax_scale_of(base: Any) -> dict[str, Any] | None:
    """The `rope_parameters` from which a model's attention scales its logits, as DeepSeek's families do;
    None for the others.
    """
    if not hasattr(sys.modules[type(base).__module__], "yarn_get_mscale"):
        return None
    _, parameters = rotary_part(base.config)
    if not parameters.get("mscale_all_dim"):
        return {}
    return {key: parameters[key] for key in ("factor", "mscale_all_dim")}


def stock_parameters(
    encoding: RopeEncoding,
    shape: RopeShape,
    adapter: FamilyAdapter,
    config: Any,
    forms: Iterable[dict[str, Any]],
    pairs: int,
    target_length: int,
) -> dict[str, Any] | None:
    """Of the `rope_parameters` that may carry an encoding, the first that the family accepts and that stock
    transformers computes the same tables from; None if there are none.

    Not every native form does: with layers of several kinds, YaRN's `truncate` is not read where it stands.
    """
    for form in forms:
        if not adapter.accepts(form["rope_type"]):
            continue
        if form["rope_type"] == "longrope" and not _takes_lists(adapter.rotary_config(config)):
            continue
        completed = form if adapter.completes is None else adapter.completes(form)
        if completed is None:
            continue
        form = completed
        if encoding.depends_on_length or form["rope_type"] == "default":
            return form
        changed = copy.deepcopy(config)
        part, old = rotary_part(changed)
        form |= {key: old[key] for key in CARRIED if key in old and key not in form}
        part.rope_parameters = nested(adapter, changed, form)
        part.max_position_embeddings = encoding.max_position_embeddings(shape, target_length)
        table, factor = stock_table(part, form["rope_type"], adapter.layer_type(changed), target_length)
        ours, scale = encoding.inv_freq(shape), encoding.attention_factor(shape)
        same = (
            abs(factor - scale) < 1e-4 and len(table) == pairs and bool((table[len(ours) :] < RESTING).all())
        )
        if same and torch.allclose(table[: len(ours)], ours, rtol=1e-4, atol=RESTING):
            return form
    return None


def _takes_lists(config: Any) -> bool:
    """Whether transformers can check the length of `longrope` lists: it looks for one width of all heads, and
    raises where layers differ in it.
    """
    try:
        return bool(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    except RuntimeError:
        return False


def nested(adapter: FamilyAdapter, config: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for a model's config: those of the kind of layer that is extended are exchanged."""
    kind = adapter.layer_type(config)
    return parameters if kind is None else {**adapter.rotary_config(config).rope_parameters, kind: parameters}
