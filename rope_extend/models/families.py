"""What differs between model families: one frozen record per shape, found by `config.model_type`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from torch import Tensor, nn

from rope_extend.errors import UnsupportedModelError

Layout = Literal["halves", "neighbours", "once", "complex"]
"""How a rotary module lays out the value of each channel pair, see `expand_cos_sin`."""


@dataclass(frozen=True)
class Family:
    """What the families of one shape have in common: paths, layouts and limits.

    Attributes:
        model_types: the `config.model_type`s that share the shape.
        note: a description of the shape in a few words, for `rope-extend families`.
        rotary_path: path of the rotary modules below the decoder (transformers' `model.base_model`); `*`
            stands for any one name, as in `layers.*.self_attn.rotary_emb`.
        stock_rope_types: the `rope_type`s that the family's config accepts; None for all of them.
        layout: the order of the values that the rotary module returns: the whole table twice (`halves`), each
            value twice (`neighbours`), once (`once`), or as complex numbers (`complex`).
        in_float32: the model types whose cos and sin are float32 in a model of any dtype.
        pairs: the two channels of a pair, as queries and keys reach the attention function: one of each half
            of the rotated channels (`halves`), or two neighbours (`neighbours`).
        rotated: the position of the rotated channels in a head, if not all are rotated: `first` or `last`.
        rotates: tells whether an attention module rotates by the tables that are replaced; None if those of
            `layer_types` do, or all.
        backwards: whether pairs rotate in the opposite direction.
        normalises: tells whether an attention module normalises queries and keys after the rotation, which
            cancels a factor on cos and sin; None if none does.
        unreachable: why encodings that act inside attention cannot be patched in; empty if they can.
        counts: what counts tokens instead of using given positions; empty if nothing does.
        completes: converts stock rotary parameters to those that the family needs, or to None if the family
            cannot use them; None if the family uses the stock parameters.
        config_path: the part of the model's config that describes the rotary modules, such as `text_config`;
            empty if it is the config itself.
        layer_types: for families with a table for each layer type: the type whose table is replaced, under
            all its names. The tables of other types stay unchanged.
        sections: whether positions may have three parts (time, height, width), each for some of the pairs.
        several_streams: the model types whose layers take several streams of hidden states, not one.
        layer_bases: the attribute of the config that lists the rotary base of each layer, 0 for a layer that
            does not rotate; empty if all layers share one base.
    """

    model_types: tuple[str, ...]
    note: str
    rotary_path: str = "rotary_emb"
    stock_rope_types: tuple[str, ...] | None = None
    layout: Layout = "halves"
    in_float32: tuple[str, ...] = ()
    pairs: Literal["halves", "neighbours"] = "halves"
    rotated: Literal["first", "last"] = "first"
    rotates: Callable[[nn.Module], bool] | None = None
    backwards: bool = False
    normalises: Callable[[nn.Module], bool] | None = None
    unreachable: str = ""
    counts: str = ""
    completes: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    config_path: str = ""
    layer_types: tuple[str, ...] = ()
    sections: bool = False
    several_streams: tuple[str, ...] = ()
    layer_bases: str = ""

    def extends(self, module: nn.Module) -> bool:
        """Whether an attention module rotates by the tables that a patch replaces."""
        if self.rotates is not None:
            return self.rotates(module)
        attention: Any = module
        return not self.layer_types or attention.config.layer_types[attention.layer_idx] in self.layer_types

    def accepts(self, rope_type: str) -> bool:
        """Whether the family's own config class loads this `rope_type`."""
        return self.stock_rope_types is None or rope_type in self.stock_rope_types

    def rotary_config(self, config: Any) -> Any:
        """The part of a model's config that describes its rotary modules."""
        for name in filter(None, self.config_path.split(".")):
            config = getattr(config, name)
        return config

    def layer_type(self, config: Any) -> str | None:
        """The layer type whose table is replaced; None for families with one table for all layers."""
        if not self.layer_types:
            return None
        part = self.rotary_config(config)
        for layer_type in self.layer_types:
            if isinstance((part.rope_parameters or {}).get(layer_type), dict):
                return layer_type
        raise UnsupportedModelError(
            f"this {config.model_type} model cannot be extended: it rotates no layer of type "
            f"{' or '.join(self.layer_types)}, only "
            f"{', '.join(name for name, value in (part.rope_parameters or {}).items() if value)}"
        )

    def bases(self, config: Any) -> list[float]:
        """The rotary base of each layer, 0 for a layer that does not rotate; empty if all share one."""
        if not self.layer_bases:
            return []
        return list(getattr(self.rotary_config(config), self.layer_bases, None) or ())

    def rotary_modules(self, decoder: nn.Module) -> dict[str, Any]:
        """The rotary modules of `decoder`, by path."""
        pattern = re.compile(re.escape(self.rotary_path).replace(re.escape("*"), "[^.]+"))
        modules = {path: module for path, module in decoder.named_modules() if pattern.fullmatch(path)}
        newer = "the installed transformers may be newer than rope_extend supports"
        if not modules:
            raise UnsupportedModelError(
                f"{type(decoder).__name__} has no rotary module at {self.rotary_path!r}; {newer}"
            )
        names = ("inv_freq", *(f"{layer_type}_inv_freq" for layer_type in self.layer_types))
        for path, module in modules.items():
            if not any(isinstance(getattr(module, name, None), Tensor) for name in names):
                types = f" for layers of type {' or '.join(self.layer_types)}" if self.layer_types else ""
                raise UnsupportedModelError(
                    f"{type(decoder).__name__}.{path} is a {type(module).__name__} without a table of "
                    f"inverse frequencies{types}, so rope_extend cannot tell how many channels it rotates; "
                    f"{newer}"
                )
        return modules


def slides(attention: Any) -> bool:
    """Cohere 2, AFMoE and Flint rotate in layers with a sliding window; Cohere 2 MoE in dense ones too."""
    return attention.sliding_window is not None or bool(getattr(attention, "force_rope", False))


def has_rotary(attention: Any) -> bool:
    """Llama 4 and SmolLM 3 say it for each layer."""
    return bool(attention.use_rope)


def types(names: str) -> tuple[str, ...]:
    """Model types, from their names with spaces between them."""
    return tuple(names.split())


_UNCHECKED = "and it has not been checked yet"
_NORMED = "it scales the channels of queries and keys by weights after the rotation, which distorts pairs"
_SINES = "its rotary module has a table of sines of each position, not of frequencies"

REFUSED: dict[str, str] = {
    "beam": "its full-attention layers do not rotate, and its other layers see a fixed local window only",
    "codegen": _SINES,
    "cohere_compass_text": f"each of its tables takes positions with three parts, {_UNCHECKED}",
    "dbrx": f"its layers have attention two modules deep, {_UNCHECKED}",
    "deepseek_v4": "it rotates values as well as keys, so a factor on cos and sin would scale its output",
    "dory": "its middle layers run several times for each token, and not all checks pass for it yet",
    "emu3": f"its text decoder is one part of a larger model, {_UNCHECKED}",
    "gptj": _SINES,
    "granitemoehybrid": f"it rotates only if its config says so, {_UNCHECKED}",
    "hunyuan_v1_dense": _NORMED,
    "hunyuan_v1_moe": _NORMED,
    "lara_mini": "its layers with full attention do not rotate, and not all checks pass for it yet",
    "lfm2_moe": f"its rotary module has another name than those of other families, {_UNCHECKED}",
    "qwen4_exp_text": f"its attention also rotates keys of whole blocks, to choose some, {_UNCHECKED}",
    "recurrent_gemma": "its attention sees a fixed local window only, in texts of any length",
    "zamba2": f"its layers share one attention, which rotates only if the config says so, {_UNCHECKED}",
}
"""Causal families with a rotary module that are not supported, with the reason."""

_LOADED_AS = {"mllama_text_model": "mllama"}
"""Model types of decoders that `AutoModelForCausalLM` takes out of a larger model: name to family."""


@cache
def _families() -> dict[str, Family]:
    """Every record of `rope_extend.patches`, by model type."""
    families: dict[str, Family] = {}
    package = "rope_extend.patches"
    for module in iter_modules(import_module(package).__path__):
        shapes = import_module(f"{package}.{module.name}")
        for family in getattr(shapes, "FAMILIES", ()):
            for model_type in family.model_types:
                if model_type in families:
                    raise TypeError(f"two records in patches/ claim model_type {model_type!r}")
                families[model_type] = family
    return families


def supported_families() -> list[str]:
    """The `model_type`s that can be patched, sorted."""
    return sorted(_families())


def find_family(model_type: str) -> Family | None:
    """The record of a family, or None."""
    return _families().get(_LOADED_AS.get(model_type, model_type))


def family_for(model_type: str) -> Family:
    """The record of a family; any other is refused, with the reason or the nearest name."""
    family = find_family(model_type)
    if family is None:
        if model_type in REFUSED:
            raise UnsupportedModelError(f"{model_type!r} cannot be extended: {REFUSED[model_type]}")
        near = difflib.get_close_matches(model_type, supported_families(), n=1)
        raise UnsupportedModelError(
            f"no support for model_type {model_type!r}.{f' Did you mean {near[0]!r}?' if near else ''} "
            f"`rope-extend families` lists the {len(supported_families())} supported ones. If the family "
            f"uses RoPE, add patches/{model_type}.py; CONTRIBUTING.md explains how"
        )
    return family
