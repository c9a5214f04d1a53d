"""Where the tensors go: one frozen record per family shape, found by `config.model_type`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from torch import Tensor, nn

from rope_extend.errors import UnsupportedModelError
from rope_extend.rotary import Widening


@dataclass(frozen=True)
class FamilyAdapter:
    """Where the families of one shape keep their rotary modules.

    Attributes:
        model_types: the `config.model_type`s that share the shape.
        rotary_paths: paths of the rotary modules below the decoder (transformers' `model.base_model`); `*`
            stands for any one name, as in `layers.*.self_attn.rotary_emb`.
        note: what sets the shape apart, in a few words, for `rope-extend families`.
        stock_rope_types: the `rope_type`s the family's config accepts; None for all of them.
        widened: how the rotary module lays out the value of each pair for the channels: the table twice
            (`halves`), or each value twice (`neighbours`).
        in_float32: those of the model types whose cos and sin are float32 in a model of any dtype.
        pairs: which channels turn together where queries and keys reach the attention function: one of each
            half of the rotated channels (`halves`), or two neighbours (`neighbours`).
        rotated: where in a head the rotated channels lie, if they are not all of it: `first` or `last`.
        rotates: whether an attention module rotates by the tables that are replaced, for families with layers
            that do not; None if all do.
        backwards: whether pairs turn the other way round.
        normalises: whether an attention module normalises queries and keys after they are rotated, so that a
            factor on cos and sin has no effect; None if none does.
        unreachable: why encodings that act inside attention cannot be patched in; empty if they can.
        completes: makes of stock's rotary parameters those that the family asks for, or None of those that
            it cannot read; None where the family reads stock's.
        config_path: the part of the model's config that describes the rotary modules, such as `text_config`;
            empty if it is the config itself.
        layer_types: for families with a table for each kind of layer: the kind whose table is replaced,
            under each name it goes by. The tables of other kinds are left alone.
        sections: whether positions may have three parts (time, height, width), each turning pairs of its
            own.
    """

    model_types: tuple[str, ...]
    rotary_paths: tuple[str, ...]
    note: str
    stock_rope_types: tuple[str, ...] | None = None
    widened: Widening = "halves"
    in_float32: tuple[str, ...] = ()
    pairs: Literal["halves", "neighbours"] = "halves"
    rotated: Literal["first", "last"] = "first"
    rotates: Callable[[nn.Module], bool] | None = None
    backwards: bool = False
    normalises: Callable[[nn.Module], bool] | None = None
    unreachable: str = ""
    completes: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    config_path: str = ""
    layer_types: tuple[str, ...] = ()
    sections: bool = False

    def accepts(self, rope_type: str) -> bool:
        """Whether the family's own config class loads this `rope_type`."""
        return self.stock_rope_types is None or rope_type in self.stock_rope_types

    def rotary_config(self, config: Any) -> Any:
        """The part of a model's config that describes its rotary modules."""
        for name in filter(None, self.config_path.split(".")):
            config = getattr(config, name)
        return config

    def layer_type(self, config: Any) -> str | None:
        """The kind of layer whose table is replaced; None for families with one table for all layers.

        Raises:
            UnsupportedModelError: the model rotates no layer of that kind.
        """
        if not self.layer_types:
            return None
        part = self.rotary_config(config)
        for kind in self.layer_types:
            if isinstance((part.rope_parameters or {}).get(kind), dict):
                return kind
        raise UnsupportedModelError(
            f"this {config.model_type} model rotates no layer of kind {' or '.join(self.layer_types)}, only "
            f"{', '.join(k for k, v in (part.rope_parameters or {}).items() if v)}; nothing can be extended"
        )

    def rotary_modules(self, decoder: nn.Module) -> dict[str, Any]:
        """The rotary modules of `decoder`, by path.

        Raises:
            UnsupportedModelError: a module is missing or does not look like one, as after a change upstream.
        """
        found = {}
        for path, module in self._at_paths(decoder):
            tables = ("inv_freq", *(f"{kind}_inv_freq" for kind in self.layer_types))
            if not any(isinstance(getattr(module, table, None), Tensor) for table in tables):
                kinds = f" for layers of kind {' or '.join(self.layer_types)}" if self.layer_types else ""
                raise UnsupportedModelError(
                    f"{type(decoder).__name__}.{path} is a {type(module).__name__} without a table of "
                    f"inverse frequencies{kinds}; rope_extend cannot tell how many channels it rotates"
                )
            found[path] = module
        return found

    def _at_paths(self, decoder: nn.Module) -> list[tuple[str, nn.Module]]:
        found: list[tuple[str, nn.Module]] = []
        for path in self.rotary_paths:
            pattern = re.escape(path).replace(re.escape("*"), "[^.]+")
            if "*" in path:
                here = [pair for pair in decoder.named_modules() if re.fullmatch(pattern, pair[0])]
            else:
                try:
                    here = [(path, decoder.get_submodule(path))]
                except AttributeError:
                    here = []
            if not here:
                raise UnsupportedModelError(
                    f"{type(decoder).__name__} has no rotary module at {path!r}, where this version of "
                    f"rope_extend expects it; the installed transformers may be newer than it supports"
                )
            found += here
        return found


REFUSED: dict[str, str] = {
    "beam": "its full-attention layers rotate nothing, and the others never see beyond a window of their own",
    "deepseek_v4": "it rotates values along with keys, so a factor on cos and sin would scale its output",
    "recurrent_gemma": "its attention never sees beyond a window of its own, whatever the length of the text",
}
"""Causal families with a rotary module that are not supported, each with the reason."""

_LOADED_AS = {"mllama_text_model": "mllama"}
"""Families whose decoder, as `AutoModelForCausalLM` takes it out of a larger model, goes by another name."""


@cache
def _adapters() -> dict[str, FamilyAdapter]:
    """Every adapter of `rope_extend.patches`, by model type."""
    adapters: dict[str, FamilyAdapter] = {}
    package = "rope_extend.patches"
    for module in iter_modules(import_module(package).__path__):
        shapes = import_module(f"{package}.{module.name}")
        records: tuple[FamilyAdapter, ...] = getattr(shapes, "ADAPTERS", None) or (shapes.ADAPTER,)
        for adapter in records:
            for model_type in adapter.model_types:
                if model_type in adapters:
                    raise TypeError(f"two adapters in patches/ claim model_type {model_type!r}")
                adapters[model_type] = adapter
    return adapters


def supported_families() -> list[str]:
    """The `model_type`s that can be patched, sorted."""
    return sorted(_adapters())


def find_adapter(model_type: str) -> FamilyAdapter | None:
    """The adapter of a family, or None."""
    return _adapters().get(_LOADED_AS.get(model_type, model_type))


def adapter_for(model_type: str) -> FamilyAdapter:
    """The adapter of a family.

    Raises:
        UnsupportedModelError: none exists; the message gives the reason, or lists those that do and says how
            to add one.
    """
    adapter = find_adapter(model_type)
    if adapter is None:
        if model_type in REFUSED:
            raise UnsupportedModelError(f"{model_type!r} cannot be extended: {REFUSED[model_type]}")
        raise UnsupportedModelError(
            f"no adapter for model_type {model_type!r}; supported: {', '.join(supported_families())}. "
            f"To add one, create patches/{model_type}.py (see CONTRIBUTING.md) and a row in tests/cases.py"
        )
    return adapter
