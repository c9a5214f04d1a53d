"""Where the tensors go: one frozen record per family shape, found by `config.model_type`."""

from __future__ import annotations

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
        rotary_paths: paths of the rotary modules below the decoder (transformers' `model.base_model`).
        note: what sets the shape apart, in a few words, for `rope-extend families`.
        stock_rope_types: the `rope_type`s the family's config accepts; None for all of them.
        widened: how the rotary module lays out the value of each pair for the channels: the table twice
            (`halves`), or each value twice (`neighbours`).
        pairs: which channels turn together where queries and keys reach the attention function: one of each
            half of the rotated channels (`halves`), or two neighbours (`neighbours`).
        rotated: where in a head the rotated channels lie, if they are not all of it: `first` or `last`.
        rotates: whether an attention module rotates by the tables that are replaced, for families with layers
            that do not; None if all do.
        unreachable: why encodings that act inside attention cannot be patched in; empty if they can.
    """

    model_types: tuple[str, ...]
    rotary_paths: tuple[str, ...]
    note: str
    stock_rope_types: tuple[str, ...] | None = None
    widened: Widening = "halves"
    pairs: Literal["halves", "neighbours"] = "halves"
    rotated: Literal["first", "last"] = "first"
    rotates: Callable[[nn.Module], bool] | None = None
    unreachable: str = ""

    def accepts(self, rope_type: str) -> bool:
        """Whether the family's own config class loads this `rope_type`."""
        return self.stock_rope_types is None or rope_type in self.stock_rope_types

    def rotary_modules(self, decoder: nn.Module) -> dict[str, Any]:
        """The rotary modules of `decoder`, by path.

        Raises:
            UnsupportedModelError: a module is missing or does not look like one, as after a change upstream.
        """
        found = {}
        for path in self.rotary_paths:
            try:
                module = decoder.get_submodule(path)
            except AttributeError as error:
                raise UnsupportedModelError(
                    f"{type(decoder).__name__} has no rotary module at {path!r}, where this version of "
                    f"rope_extend expects it; the installed transformers may be newer than it supports"
                ) from error
            if not isinstance(getattr(module, "inv_freq", None), Tensor):
                raise UnsupportedModelError(
                    f"{type(decoder).__name__}.{path} is a {type(module).__name__} without a table of "
                    f"inverse frequencies; rope_extend cannot tell how many channels it rotates"
                )
            found[path] = module
        return found


@cache
def _adapters() -> dict[str, FamilyAdapter]:
    """Every adapter of `rope_extend.patches`, by model type."""
    adapters: dict[str, FamilyAdapter] = {}
    package = "rope_extend.patches"
    for module in iter_modules(import_module(package).__path__):
        adapter: FamilyAdapter = import_module(f"{package}.{module.name}").ADAPTER
        for model_type in adapter.model_types:
            if model_type in adapters:
                raise TypeError(f"two adapters in patches/ claim model_type {model_type!r}")
            adapters[model_type] = adapter
    return adapters


def supported_families() -> list[str]:
    """The `model_type`s that can be patched, sorted."""
    return sorted(_adapters())


def adapter_for(model_type: str) -> FamilyAdapter:
    """The adapter of a family.

    Raises:
        UnsupportedModelError: none exists; the message lists those that do and how to add one.
    """
    adapter = _adapters().get(model_type)
    if adapter is None:
        raise UnsupportedModelError(
            f"no adapter for model_type {model_type!r}; supported: {', '.join(supported_families())}. "
            f"To add one, create patches/{model_type}.py (see CONTRIBUTING.md) and a row in tests/cases.py"
        )
    return adapter
