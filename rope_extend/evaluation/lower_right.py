"""Causal attention of a window's later tokens on a GPU, without a mask.

Stock transformers gives sdpa a mask wherever there are fewer queries than keys, and with a mask neither flash
kernel nor grouped heads are to be had: half the work is spent on pairs that are masked out, and keys are
copied for each group of heads. The flash kernel takes queries as the last ones of the keys by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from rope_extend.attention.functions import attention_modules
from rope_extend.undo import UndoLog

NAME = "rope_extend_lower_right"
"""The attention implementation that stands in for sdpa."""


@contextmanager
def lower_right(decoder: nn.Module) -> Iterator[None]:
    """Let those layers of a decoder that use sdpa and see all keys attend without a mask."""
    undo = UndoLog()
    for module in (decoder, *attention_modules(decoder)) if calls_by_name(decoder) else ():
        if module.config._attn_implementation == "sdpa":
            undo.set(module.config, "_attn_implementation_internal", NAME)
    try:
        yield
    finally:
        undo.unwind()


def calls_by_name(decoder: Any) -> bool:
    """Whether a decoder attends by the function that is registered under its implementation's name.

    A few families, Falcon among them, only compare the name, and know none but transformers' own.
    """
    return bool(decoder._can_set_attn_implementation())


def causal_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None for plain causal attention, else what sdpa gets."""
    rule = kwargs.get("mask_function", causal_mask_function)
    plain = rule is causal_mask_function and kwargs.get("attention_mask") is None
    if kwargs.get("local_size") is not None or not kwargs.get("allow_is_causal_skip", True):
        plain = False  # DeepSeek's indexers, for one, read the mask themselves
    return None if plain else sdpa_mask(*args, **kwargs)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`, where no mask means that the queries are the last of the keys."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and 1 < queries < keys and getattr(module, "is_causal", True):
        grouped = query.shape[1] != key.shape[1]
        if "position_bias" not in kwargs and can_use_flash_attention(
            SDPAParams(query, key, value, None, 0.0, False, grouped)
        ):
            output = F.scaled_dot_product_attention(
                query, key, value, causal_lower_right(queries, keys), scale=kwargs.get("scaling"),
                enable_gqa=grouped,
            )  # fmt: skip
            return output.transpose(1, 2).contiguous(), None
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        attention_mask = allowed[None, None]
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, causal_mask)
