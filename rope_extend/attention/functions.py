"""The attention functions that transformers calls: found in a model, wrapped under a name, and taken back.

A model's own function (sdpa, eager, flash, flex) is registered a second time, as `rope_extend_sdpa`, with the
same mask function. Under that name, a module's reader is asked first, if it has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rope_extend.errors import UnsupportedModelError
from rope_extend.undo import UndoLog

if TYPE_CHECKING:
    from rope_extend.attention.reader import PositionReader
    from rope_extend.families import FamilyAdapter

_Function = TypeVar("_Function", bound=Callable[..., Any])

PREFIX = "rope_extend_"
"""What the name of a wrapped attention implementation begins with: `rope_extend_sdpa`."""
READER = "_rope_extend_reader"
"""The attribute by which a module finds the `PositionReader` of the patch that is active in it."""


def never_compiled(function: _Function) -> _Function:
    """Run as written under `torch.compile`: what it does follows from the values of position ids."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def own_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The family's own function for an attention implementation."""
    home = sys.modules[type(module).__module__]
    interface = getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return interface.get_interface(implementation, getattr(home, "eager_attention_forward", None))


@dataclass(frozen=True)
class AttentionCall:
    """What transformers asks of an attention function, and the model's own that would answer.

    Attributes:
        inner: the family's own function.
        implementation: its name: `sdpa`, `eager`, ...
        module: the attention module that asks.
        query: `[batch, heads, T, head_dim]`.
        key: `[batch, kv_heads, K, head_dim]`, as cached.
        value: likewise.
        mask: in the form that the implementation takes; None where causality is all there is.
        kwargs: `scaling`, `dropout`, `position_ids`, and what else a family hands over.
    """

    inner: Callable[..., tuple[Tensor, Tensor | None]]
    implementation: str
    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    kwargs: dict[str, Any]

    def own(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        """What the model's own function answers on other tensors: `[batch, T, heads, head_dim]`, weights."""
        return self.inner(self.module, query, key, value, mask, **self.kwargs)


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
    """What transformers calls under the name `rope_extend_<implementation>`."""
    inner = own_function(module, implementation)
    reader: PositionReader | None = getattr(module, READER, None)
    if reader is None or reader.share == 0 or not reader.acts_on(module):
        return inner(module, query, key, value, attention_mask, **kwargs)
    return _ask(reader, inner, implementation, module, query, key, value, attention_mask, kwargs)


@never_compiled
def _ask(reader: PositionReader, *call: Any) -> tuple[Tensor, Tensor | None]:
    return reader.attend(AttentionCall(*call))


def attention_modules(decoder: nn.Module) -> list[Any]:
    """The attention modules of a decoder: those that know their layer and how to scale their logits."""
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling") and hasattr(module, "config")
    ]


def attention_configs(decoder: Any, modules: list[Any]) -> list[Any]:
    """The configs that say by which function a decoder and its attention modules attend, each once."""
    return list({id(part.config): part.config for part in (decoder, *modules)}.values())


def out_of_reach(adapter: FamilyAdapter, modules: list[Any]) -> str | None:
    """Why the attention modules of a decoder cannot be acted in; None if they can."""
    if adapter.unreachable or modules:
        return adapter.unreachable
    return "its attention does not go through transformers' interface"


def remove_readers(decoder: nn.Module, undo: UndoLog) -> None:
    """Let a decoder's own attention functions act again, and whatever a reader acted on."""
    for module in decoder.modules():
        if getattr(module, READER, None) is not None:
            undo.set(module, READER, None)
            name = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
            if name.startswith(PREFIX):
                undo.set(module.config, "_attn_implementation_internal", name.removeprefix(PREFIX))


def wrapped_implementation(implementation: str) -> str:
    """The name under which an attention implementation rotates its queries and keys; registers it.

    Raises:
        UnsupportedModelError: transformers has no mask for the implementation, so it would run without.
    """
    implementation = implementation.removeprefix(PREFIX)
    name = PREFIX + implementation
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} has no mask function in transformers; encodings "
            f"that act inside attention work with {', '.join(sorted(ALL_MASK_ATTENTION_FUNCTIONS))}"
        )
    AttentionInterface.register(name, partial(_attention, implementation=implementation))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def is_dense(implementation: str) -> bool:
    """Whether an implementation takes a mask over queries and keys, where flash takes a causal flag."""
    return "flash" not in implementation and "flex" not in implementation


def causal_mask(queries: int, keys: int, like: Tensor, implementation: str) -> Tensor:
    """`[1, 1, queries, keys]`: the queries are the last of the keys' positions."""
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
    if implementation == "sdpa":
        return allowed[None, None]
    return torch.zeros(1, 1, queries, keys, dtype=like.dtype, device=like.device).masked_fill_(
        ~allowed, torch.finfo(like.dtype).min
    )
