"""How a handler gets between an attention module and its attention function.

An attention module looks up its function by `config._attn_implementation`. A module with a handler gets a
`HandlerConfig` in place of the model's config. It has the same values, but names a registered function that
calls the handler. The model's config is not changed, so `set_attn_implementation` and `output_attentions`
work as in a model without a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rope_extend.attention.registry import (
    AttentionFunction,
    Inputs,
    never_compiled,
    own_function,
    register,
    takes_boolean_mask,
)
from rope_extend.encodings import Encoding
from rope_extend.errors import UnsupportedModelError
from rope_extend.models.config_facts import window_of
from rope_extend.models.families import Family
from rope_extend.models.undo import UndoLog

HANDLER = "_rope_extend_handler"
"""The attribute of a module that holds the handler of the active patch."""

GIVEN = "rope_extend_given"
"""The argument with what a hook found among the arguments of an attention module, by name."""

HEADS = "heads"
"""Given to a handler if several processes share the heads: the first head here, and the number of all."""

_handled: dict[str, str] = {}
"""Names of attention implementations, and the names under which the same functions are called by handlers."""

_in_own_function = ContextVar("_in_own_function", default=False)
"""Whether a handler is calling a model's own attention function; each thread has its own value."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function by a module, and the model's own function for it.

    Attributes:
        inner: the model's own attention function.
        implementation: its name: `sdpa`, `eager`, ...
        module: the attention module.
        query: `[batch, heads, T, head_dim]`.
        key: `[batch, kv_heads, K, head_dim]`, as cached.
        value: `[batch, kv_heads, K, value_dim]`.
        mask: `[1 or batch, 1 or heads, T, K]`, bool or added; None for plain causal attention.
        kwargs: `scaling`, `dropout`, `position_ids`, and further arguments of the family.
        given: what a hook found among the arguments of the module, see `handing_over`.
    """

    inner: AttentionFunction
    implementation: str
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]
    given: dict[str, Any]

    @property
    def readable_mask(self) -> Tensor | None:
        """The mask if its values can be read; None without one, and in a dry run, where masks are causal."""
        return None if self.mask is None or self.mask.is_meta else self.mask

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a later key if there is no mask; not so with `is_causal=False`."""
        chosen = self.kwargs.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if chosen is None else chosen)

    def with_full_mask(self) -> AttentionCall:
        """The call with a mask of all queries and keys, unless attention is causal."""
        mask, pairs = self.mask, (self.query.shape[2], self.key.shape[2])
        if pairs[0] == 1:
            return self
        if mask is not None and mask.shape[2] == 1:
            return replace(self, mask=mask.expand(-1, -1, pairs[0], -1))  # one row for all queries
        if mask is not None or self.is_causal:
            return self
        shown = (True, torch.bool) if takes_boolean_mask(self.implementation) else (0.0, self.query.dtype)
        mask = torch.tensor(shown[0], dtype=shown[1], device=self.query.device)
        return replace(self, mask=mask.expand(1, 1, *pairs))

    def of_first_keys(self, count: int) -> AttentionCall:
        """The call without the empty slots of a static cache, which are after the last key."""
        mask = self.mask
        if count == self.key.shape[2] and (mask is None or mask.shape[-1] == count):
            return self
        mask = None if mask is None else mask[..., :count]
        return replace(self, key=self.key[:, :, :count], value=self.value[:, :, :count], mask=mask)

    def own(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        """Call the model's own function on other tensors; gives `[batch, T, heads, head_dim]` and weights."""
        token = _in_own_function.set(True)
        try:
            return self.inner(self.module, query, key, value, mask, **self.kwargs)
        finally:
            _in_own_function.reset(token)


class HandlerConfig:
    """A model's config as an attention module with a handler sees it.

    Only `_attn_implementation` differs: it names the function that calls the handler, except for the model's
    own function while that runs. It is computed on each access, so it follows every change of the
    implementation.

    Attributes:
        model_config: the model's own config, to which all reads and writes go.
    """

    model_config: Any

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "model_config", config)

    @property
    def _attn_implementation(self) -> str:
        implementation: str = self.model_config._attn_implementation
        name = _handled.get(implementation) or handled_implementation(implementation)
        # The model's own function is never compiled, and the compiler cannot read a context variable.
        own = not torch.compiler.is_compiling() and _in_own_function.get()
        return implementation if own else name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model_config, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return HandlerConfig, (self.model_config,)


def handled_implementation(implementation: str) -> str:
    """The name under which an attention implementation calls the handler of its module.

    Raises:
        UnsupportedModelError: transformers has no mask function for the implementation.
    """
    name = _handled.get(implementation)
    if name is not None:
        return name
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} has no mask function in transformers; encodings "
            f"that act inside attention work with {', '.join(sorted(ALL_MASK_ATTENTION_FUNCTIONS))}"
        )
    name = register(
        f"handler_{implementation}",
        partial(_attention, implementation=implementation),
        ALL_MASK_ATTENTION_FUNCTIONS[implementation],
    )
    _handled[implementation] = name
    return name


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    implementation: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls under the name of `handled_implementation`."""
    inner = own_function(module, implementation)
    given = kwargs.pop(GIVEN, {})
    return _call_handler(inner, implementation, module, query, key, value, attention_mask, kwargs, given)


@never_compiled
def _call_handler(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    call = AttentionCall(*arguments)
    handler: Any = getattr(call.module, HANDLER, None)
    if handler is None:
        return call.own(call.query, call.key, call.value, call.mask)
    handler.check_implementation(call.implementation)
    output, weights = handler.attend(call.with_full_mask())
    if weights is not None and weights.shape[-1] < call.key.shape[2]:  # empty slots of a static cache
        weights = functional.pad(weights, (0, call.key.shape[2] - weights.shape[-1]))
    handler.attended(call.module)
    return output, weights


def handing_over(module: nn.Module, inputs: Inputs, **given: Any) -> Inputs | None:
    """What a forward pre-hook of an attention module returns to give its handler values that are not None."""
    given = {name: value for name, value in given.items() if value is not None}
    if not given or getattr(module, HANDLER, None) is None:
        return None
    args, kwargs = inputs
    return args, {**kwargs, GIVEN: {**kwargs.get(GIVEN, {}), **given}}


def attention_modules(decoder: nn.Module) -> list[Any]:
    """The attention modules of a decoder: those with a layer index and a scale of their logits."""
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling") and hasattr(module, "config")
    ]


def model_config(module: Any) -> Any:
    """The model's config that a module uses, also if the module has a handler."""
    config = module.config
    return config.model_config if isinstance(config, HandlerConfig) else config


def attention_window(module: Any) -> int | None:
    """How many tokens an attention module sees: its sliding window or chunk; None if all, 0 if not known."""
    config = model_config(module)
    own, kinds = getattr(module, "sliding_window", None), getattr(config, "layer_types", None)
    if not kinds:
        size = own or window_of(config, "sliding")
        return int(size) if size else None
    kind = kinds[module.layer_idx]
    return int(own) if own and "sliding" in kind else window_of(config, kind)


def attention_configs(modules: Iterable[Any]) -> list[Any]:
    """The model's configs that name the attention functions of modules, each once."""
    return list({id(config): config for config in map(model_config, modules)}.values())


@contextmanager
def implementation_of(modules: Iterable[Any], choose: Callable[[str], str]) -> Iterator[None]:
    """Inside the block, modules use other attention implementations, chosen by the names of their own."""
    undo = UndoLog()
    try:
        for config in attention_configs(modules):
            undo.set(config, "_attn_implementation_internal", choose(config._attn_implementation))
        yield
    finally:
        undo.unwind()


def acts_inside(decoder: nn.Module) -> bool:
    """Whether a handler acts inside the attention of a decoder."""
    return any(isinstance(getattr(module, "config", None), HandlerConfig) for module in decoder.modules())


def out_of_reach(family: Family, modules: list[Any]) -> str | None:
    """Why no handler can act inside the attention modules of a decoder; None if one can."""
    if family.unreachable or modules:
        return family.unreachable
    return "its attention does not go through transformers' interface"


def extended_modules(encoding: Encoding, decoder: Any, family: Family) -> list[Any]:
    """The attention modules of a decoder in which the handler of an encoding acts.

    Raises:
        UnsupportedModelError: no handler can act in this family.
    """
    modules = attention_modules(decoder)
    if reason := out_of_reach(family, modules):
        raise UnsupportedModelError(
            f"{encoding} acts inside attention, which cannot be patched in {decoder.config.model_type}: "
            f"{reason}. A static schedule works, such as yarn or linear"
        )
    return [module for module in modules if family.extends(module)]


def add_handler(handler: Any, modules: Iterable[Any], undo: UndoLog) -> list[Any]:
    """Put a handler between attention modules and their functions; returns the model's configs they use."""
    modules = list(modules)
    configs = attention_configs(modules)
    views = {id(config): HandlerConfig(config) for config in configs}
    for module in modules:
        undo.set(module, HANDLER, handler)
        undo.set(module, "config", views[id(model_config(module))])
    return configs


def remove_handlers(decoder: nn.Module, undo: UndoLog) -> None:
    """Take every handler out of a decoder, so that its own attention functions are called again."""
    for module in decoder.modules():
        if getattr(module, HANDLER, None) is not None:
            undo.set(module, HANDLER, None)
            if isinstance(getattr(module, "config", None), HandlerConfig):
                undo.set(module, "config", model_config(module))
