"""Causal attention of the last tokens of a window on a GPU, without a mask.

If there are fewer queries than keys, stock transformers gives sdpa a mask. With a mask sdpa can use neither
the flash kernel nor grouped heads. So half the work is spent on masked pairs, and keys are copied for each
group of heads. The flash kernel needs no mask if the queries are the last of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_extend.attention.functions import attention_modules, implementation_of
from rope_extend.attention.log_sum_exp import kernel_dtype
from rope_extend.attention.registry import SUFFIX, register


@contextmanager
def causal_suffix_attention(decoder: nn.Module) -> Iterator[None]:
    """Inside the block, layers with sdpa and full attention compute without a mask."""
    modules = [decoder, *attention_modules(decoder)] if calls_by_name(decoder) else []
    with implementation_of(modules, lambda name: _NAME if name == "sdpa" else name):
        yield


def calls_by_name(decoder: Any) -> bool:
    """Whether a decoder calls the attention function that is registered under its implementation's name.

    A few families, such as Falcon, do not, and know transformers' own names only.
    """
    return bool(decoder._can_set_attn_implementation())


def causal_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """None for plain causal attention, otherwise the mask of sdpa."""
    rule = kwargs.get("mask_function", causal_mask_function)
    plain = rule is causal_mask_function and kwargs.get("attention_mask") is None
    if kwargs.get("local_size") is not None or not kwargs.get("allow_is_causal_skip", True):
        plain = False  # such as DeepSeek's indexers, which use the mask themselves
    return None if plain else sdpa_mask(*args, **kwargs)


def flash_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the flash kernel can compute attention of these tensors without a mask."""
    grouped, dtype = query.shape[1] != key.shape[1], kernel_dtype(query)

    def cast(part: Tensor) -> Tensor:
        """As autocast does later; torch looks at shape, strides and dtype only."""
        return part if part.dtype == dtype else part.new_empty(part.shape[-1], dtype=dtype).expand(part.shape)

    parameters = SDPAParams(cast(query), cast(key), cast(value), None, 0.0, False, grouped)
    return can_use_flash_attention(parameters)


def suffix_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens of a window, by one call of flash attention without a mask.

    torch's public function for it, with `causal_lower_right`, makes a tensor subclass, which fails while
    operations are counted. It calls the same operator.

    Args:
        query: `[batch, heads, Q, head_dim]`, in a dtype and of a width that the flash kernel supports.
        key: `[batch, kv_heads, K, head_dim]` with K > Q; the queries are the last of the keys.
        value: `[batch, kv_heads, K, value_dim]`.
        scale: the factor on the products of queries and keys.

    Returns:
        `[batch, heads, Q, value_dim]`.
    """
    width, dtype = query.shape[-1], kernel_dtype(query)
    states = [part.to(dtype) for part in (query, key, value)]
    if width % 8:
        states = [F.pad(part, (0, -width % 8)) for part in states]
    run = torch.ops.aten._scaled_dot_product_flash_attention  # causal means that the last tokens are aligned
    output: Tensor = run(*states, 0.0, True, False, scale=scale)[0]
    return output.narrow(-1, 0, width)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`; without a mask, the queries are the last of the keys."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and 1 < queries < keys and getattr(module, "is_causal", True):
        if "position_bias" not in kwargs and flash_serves(query, key, value):
            scale = kwargs.get("scaling")
            output = suffix_attention(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
            return output.transpose(1, 2).contiguous(), None
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        attention_mask = allowed[None, None]
    result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


_NAME = register(SUFFIX, _attention, causal_mask)
"""The attention implementation that replaces sdpa."""
