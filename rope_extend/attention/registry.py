"""Registration of attention functions with transformers, all under one prefix."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""Called with `(module, query, key, value, mask, **kwargs)`; gives `[batch, T, heads, dim]` and weights."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module, as a forward pre-hook takes them, and returns them if it changes any."""

PREFIX = "rope_extend_"
"""The start of the name of each attention implementation that this library registers."""

SUFFIX = "causal_suffix"
"""The end of the names of implementations that need no mask if the queries are the last of the keys."""

_BEYOND = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments of attention functions that plain causal attention does not support."""

_choosing = threading.Lock()
_before: list[bool] = []
"""Whether cuDNN's kernel was in use when each open block of `without_cudnn` began, those of all threads."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def register(name: str, attention: AttentionFunction, mask: Callable[..., Any]) -> str:
    """Register an attention function with transformers; returns its name for `config._attn_implementation`.

    Without a mask function, transformers would call it without a mask.
    """
    full_name = PREFIX + name
    AttentionInterface.register(full_name, attention)
    AttentionMaskInterface.register(full_name, mask)
    return full_name


def own_function(module: nn.Module, implementation: str) -> AttentionFunction:
    """The function that the family of an attention module uses for an attention implementation."""
    family = sys.modules[type(module).__module__]
    interface = getattr(family, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    eager = getattr(family, "eager_attention_forward", None)
    function: AttentionFunction = interface.get_interface(implementation, eager)
    return function


def never_compiled(function: _Function) -> _Function:
    """Exclude a function from `torch.compile`: its control flow depends on the values of position ids."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def takes_suffix(implementation: str) -> bool:
    """Whether an implementation needs no mask if the queries are the last of the keys."""
    return implementation.endswith(SUFFIX)


def takes_boolean_mask(implementation: str) -> bool:
    """Whether the masks of an implementation are boolean; those of others are added to the logits."""
    return implementation == "sdpa" or takes_suffix(implementation)


def beyond_plain(kwargs: dict[str, Any]) -> list[str]:
    """The names of arguments that plain causal attention does not support."""
    later = ["is_causal=False"] if kwargs.get("is_causal") is False else []
    return [name for name in _BEYOND if kwargs.get(name) is not None] + later


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Inside the block, attention uses kernels that need no plan for each shape of their inputs.

    cuDNN's kernel is the fastest on new GPUs, but builds a plan for each new shape, which takes up to half a
    second. So calls that hardly ever have the same shape twice use another one. The choice is that of the
    whole process.
    """
    with _choosing:
        _before.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _choosing:
            first = _before[0]
            _before.pop()
            if not _before:
                torch.backends.cuda.enable_cudnn_sdp(first)
