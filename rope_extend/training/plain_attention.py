"""Attention that a run may compute in another way: plain causal attention over all tokens, by sdpa.

What takes its place has `is_causal` alone, and would lose whatever a family does beyond.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rope_extend.attention.functions import attention_configs, attention_modules, out_of_reach
from rope_extend.families import adapter_for
from rope_extend.inspection import kinds_beside_full_attention
from rope_extend.undo import UndoLog

_BEYOND = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What families hand to their attention function that plain causal attention does not do."""


def beyond_plain(kwargs: dict[str, Any]) -> list[str]:
    """What an attention function was given that plain causal attention does not do."""
    return [name for name in _BEYOND if kwargs.get(name) is not None]


def beyond_plain_sdpa(lm: Any) -> str | None:
    """Why a model's attention is not plain causal attention over all tokens by sdpa; None if it is.

    Args:
        lm: a causal language model of transformers; one without weights will do.
    """
    config = lm.config.get_text_config()
    implementation = config._attn_implementation
    modules = attention_modules(lm.base_model)
    if reason := out_of_reach(adapter_for(lm.config.model_type), modules):
        return reason
    if kinds := kinds_beside_full_attention(config):
        return f"it has layers of kind {', '.join(sorted(kinds))}, and not full attention alone"
    if getattr(config, "attn_logit_softcapping", None) or any(hasattr(m, "sinks") for m in modules):
        return "its attention does more than a softmax over the tokens (a soft cap, or sinks)"
    if implementation != "sdpa":
        return f"attn_implementation is {implementation!r}; load the model with 'sdpa'"
    return None


@contextmanager
def in_place_of_sdpa(lm: Any, name: str, attribute: str, value: Any) -> Iterator[None]:
    """Let a causal language model attend by the function that is registered as `name`.

    Args:
        lm: the model.
        name: an attention implementation.
        attribute: by which its function finds what it needs in each attention module.
        value: what that is.
    """
    undo = UndoLog()
    modules = attention_modules(lm.base_model)
    try:
        for config in attention_configs(lm.base_model, modules):
            undo.set(config, "_attn_implementation_internal", name)
        for module in modules:
            undo.set(module, attribute, value)
        yield
    finally:
        undo.unwind()
