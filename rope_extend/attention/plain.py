"""Plain causal attention over all tokens by sdpa: the only kind that a run may compute by another function.

The functions that replace it support `is_causal` only, not what some families do in addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rope_extend.attention.functions import acts_inside, attention_configs, attention_modules, out_of_reach
from rope_extend.models.families import adapter_for
from rope_extend.models.undo import UndoLog
from rope_extend.models.view import is_soft_capped, layer_types_except_full_attention

_BEYOND = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments of attention functions that plain causal attention does not support."""


def beyond_plain(kwargs: dict[str, Any]) -> list[str]:
    """The names of arguments that plain causal attention does not support."""
    later = ["is_causal=False"] if kwargs.get("is_causal") is False else []
    return [name for name in _BEYOND if kwargs.get(name) is not None] + later


def beyond_plain_sdpa(lm: Any) -> str | None:
    """Why a model's attention is not plain causal attention over all tokens by sdpa; None if it is.

    Args:
        lm: a causal language model of transformers, with or without weights.
    """
    config = lm.config.get_text_config()
    implementation = config._attn_implementation
    modules = attention_modules(lm.base_model)
    if reason := out_of_reach(adapter_for(lm.config.model_type), modules):
        return reason
    if kinds := layer_types_except_full_attention(config):
        return f"it has layers of type {', '.join(sorted(kinds))}, not only full attention"
    if is_soft_capped(config) or any(hasattr(m, "sinks") for m in modules):
        return "its attention is more than a softmax over the tokens (a soft cap, or sinks)"
    if not getattr(config, "is_causal", True) or not all(getattr(m, "is_causal", True) for m in modules):
        return "its attention is not causal"
    if acts_inside(lm.base_model):
        return "its position encoding acts inside attention; a static rotary method works, such as yarn"
    if implementation != "sdpa":
        return f"attn_implementation is {implementation!r}; load the model with 'sdpa'"
    return None


@contextmanager
def instead_of_sdpa(lm: Any, name: str, attribute: str, value: Any) -> Iterator[None]:
    """Inside the block, a causal language model uses another attention implementation than sdpa.

    Args:
        lm: the model.
        name: the attention implementation.
        attribute: an attribute that its function reads from each attention module.
        value: the value of the attribute.
    """
    undo = UndoLog()
    modules = attention_modules(lm.base_model)
    try:
        for config in attention_configs([lm.base_model, *modules]):
            undo.set(config, "_attn_implementation_internal", name)
        for module in modules:
            undo.set(module, attribute, value)
        yield
    finally:
        undo.unwind()
