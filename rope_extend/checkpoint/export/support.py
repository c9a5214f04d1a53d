"""Whether each export target computes an encoding, and in which form: what the encoding does decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rope_extend.checkpoint.export.gguf import architecture_of, schedule
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.models.families import Family, find_family

NATIVE = "native"
FACTORS = "exact by factors"
PLUGIN = "needs rope_extend"
IMPOSSIBLE = "impossible"
_UNKNOWN = "we do not know how it reads this family's rotary parameters"
_NO_LONGROPE = "the family's config does not accept longrope, which could hold its table"


@dataclass(frozen=True)
class Support:
    """Whether a target computes an encoding, and in which form.

    Attributes:
        target: one of `TARGETS`.
        verdict: `native`: the target has the method, or a simpler one with the same table; `exact by
            factors`: it takes the table itself; `needs rope_extend`: only `rope_extend.load` loads it; or
            `impossible`.
        reason: the reason, as a phrase.
        form: what the export writes: metadata and tensors for llama.cpp, otherwise keys of `config.json`.
            None if the target does not support the encoding.
    """

    target: str
    verdict: str
    reason: str
    form: Mapping[str, Any] | None = None

    @property
    def possible(self) -> bool:
        """Whether the target computes the encoding without this library."""
        return self.form is not None


def support(
    encoding: Encoding,
    shape: RopeShape,
    target: str,
    model_type: str | None = None,
    *,
    target_length: int | None = None,
    architecture: str | None = None,
) -> Support:
    """Whether, and how, a target computes an encoding without this library.

    Args:
        model_type: the family; default: one of Llama's shape.
        target_length: the extended window, in tokens; default: the encoding's own.
        architecture: for llama.cpp, the architecture of the GGUF file; default: that of the family.
    """
    if target not in TARGETS:
        raise RopeExtendError(f"export supports {', '.join(TARGETS)}, got {target!r}")
    engine = TARGETS[target]
    if obstacle := encoding.why_not_one_table(shape):
        return _refused(target, obstacle)
    assert isinstance(encoding, RopeEncoding)
    length = target_length or encoding.target_length(shape) or shape.trained_length
    family = find_family(model_type) if model_type else None
    if engine.reads == "stock":
        return _in_stock(encoding, shape, length, family)
    if family is not None and (family.layer_types or family.config_path):
        return _refused(target, _UNKNOWN)
    if engine.reads == "gguf":
        return _in_gguf(encoding, shape, length, architecture or architecture_of(model_type))
    return _in_config(encoding, shape, length, family, target)


def _refused(target: str, reason: str) -> Support:
    return Support(target, PLUGIN if TARGETS[target].reads == "stock" else IMPOSSIBLE, reason)


def _in_keys(target: str, verdict: str, reason: str, parameters: Mapping[str, Any], window: int) -> Support:
    """A form that consists of keys of `config.json`."""
    form = {"rope_parameters": parameters, "max_position_embeddings": window}
    return Support(target, verdict, reason, form)


def _native(target: str, parameters: Mapping[str, Any], window: int) -> Support:
    kind = parameters["rope_type"]
    reason = f"as base {parameters['rope_theta']:.6g}" if kind == "default" else f"type {kind}"
    return _in_keys(target, NATIVE, reason, parameters, window)


def _own_type(encoding: RopeEncoding, shape: RopeShape, family: Family | None) -> dict[str, Any] | None:
    """The rotary parameters of an encoding's own type; None if only a table describes it in this family."""
    with suppress(RopeExtendError):
        form = encoding.rope_parameters(shape)
        kind = form["rope_type"]
        if kind in ("default", encoding.rope_type) and (family is None or family.accepts(kind)):
            return form
    return None


def _in_stock(encoding: RopeEncoding, shape: RopeShape, length: int, family: Family | None) -> Support:
    """The config of stock transformers.

    `modeling_rope_utils.py`: `longrope` takes any list of divisors and an `attention_factor`.
    """
    window = encoding.max_position_embeddings(shape, length)
    if form := _own_type(encoding, shape, family):
        return _native("transformers", form, window)
    if family and not family.accepts("longrope"):
        return _refused("transformers", _NO_LONGROPE)
    form = {**encoding.longrope_parameters(shape), "factor": 1.0}
    return _in_keys("transformers", FACTORS, "as longrope with equal lists", form, window)


def _in_config(
    encoding: RopeEncoding, shape: RopeShape, length: int, family: Family | None, target: str
) -> Support:
    """The config of an engine that reads `rope_parameters` by rules of its own."""
    engine, form = TARGETS[target], _own_type(encoding, shape, family)
    kind = form["rope_type"] if form else ""
    # DeepSeek's classes rename other types before get_rope sees them; sections go with `default` and `yarn`.
    if family and kind != "default" and (family.sections or family.rotated != "first"):
        return _refused(target, _UNKNOWN)
    if form and kind in engine.types and _is_usual(form, encoding.attention_factor(shape)):
        form = {key: form[key] for key in form if kind != "yarn" or key not in _YARN_ATTENTION}
        return _native(target, form, shape.trained_length if kind in engine.multiplied else length)
    if family and not family.accepts("longrope"):
        return _refused(target, _NO_LONGROPE)
    if family and family.pairs == "neighbours":
        reason = "its longrope, which could hold the table, does not rotate neighbouring channels"
        return _refused(target, reason)
    form = {**encoding.longrope_parameters(shape), "factor": 1.0}
    form |= {"short_mscale": form["attention_factor"], "long_mscale": form["attention_factor"]}
    if engine.original:
        form["original_max_position_embeddings"] = length
    reason = "as longrope with equal lists, and the attention factor as short_mscale and long_mscale"
    return _in_keys(target, FACTORS, reason, form, length)


_YARN_ATTENTION = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys that not all engines read; without them, all compute the factor of the paper."""


def _is_usual(form: Mapping[str, Any], attention_factor: float) -> bool:
    """Whether the factor on cos and sin is the one that follows from the type."""
    usual = 0.1 * math.log(form["factor"]) + 1 if form["rope_type"] == "yarn" else attention_factor
    return math.isclose(attention_factor, usual, rel_tol=1e-9)


def _in_gguf(encoding: RopeEncoding, shape: RopeShape, length: int, architecture: str) -> Support:
    try:
        content = schedule(encoding, shape, length, architecture)
    except RopeExtendError as error:
        return _refused("llama.cpp", str(error))
    form = {"keys": content.keys, "tensors": content.tensors}
    if content.tensors:
        reason = f"as {', '.join(content.tensors)} and rope.scaling.attn_factor"
        return Support("llama.cpp", FACTORS, reason, form)
    kind = content.keys["rope.scaling.type"]
    reason = f"as rope.freq_base {content.keys['rope.freq_base']:.6g}" if kind == "none" else f"type {kind}"
    return Support("llama.cpp", NATIVE, reason, form)
