"""Causal attention of the last tokens of a window on a GPU, without a mask.

If there are fewer queries than keys, stock transformers gives sdpa a mask. With a mask sdpa can use neither
the flash kernel nor grouped heads. So half the work is spent on masked pairs, and keys are copied for each
group of heads. The flash kernel needs no mask if the queries are the last of the keys.

cuDNN's kernel, which is faster on new GPUs, supports causal attention only of as many queries as keys. So the
queries attend to their own tokens and to the earlier ones separately, and both are merged by log-sum-exp.
cuDNN builds a plan for each new shape, so the earlier keys are cut into parts of a few sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from rope_extend.attention.functions import AttentionCall, attention_configs, attention_modules
from rope_extend.attention.fused_kernels import kernel_dtype, takes_cudnn
from rope_extend.attention.log_sum_exp import merge, partial_attention
from rope_extend.attention.plain import beyond_plain
from rope_extend.attention.registry import SUFFIX, own_function, register, without_cudnn
from rope_extend.models.undo import UndoLog

SMALLEST_PART = 4096
"""The smallest number of earlier keys that is a power of two and computed as a part by cuDNN."""
WHOLE_QUERIES = 1024
"""cuDNN computes chunks of a multiple of this many tokens, as all have but the last one of a document."""


@contextmanager
def causal_suffix_attention(decoder: nn.Module) -> Iterator[None]:
    """Inside the block, layers with sdpa and full attention compute without a mask."""
    undo = UndoLog()
    if calls_by_name(decoder):
        for config in attention_configs([decoder, *attention_modules(decoder)]):
            if config._attn_implementation == "sdpa":
                undo.set(config, "_attn_implementation_internal", _NAME)
    try:
        yield
    finally:
        undo.unwind()


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


def without_mask(call: AttentionCall) -> AttentionCall:
    """A call of sdpa, by a function that needs no mask if its queries are the last of its keys.

    Only if the flash kernel can compute it; otherwise the call is one of sdpa itself. Calls of other
    implementations are unchanged.
    """
    if call.implementation not in ("sdpa", _NAME):
        return call
    dropout = call.kwargs.get("dropout")
    if not (dropout or beyond_plain(call.kwargs)) and flash_serves(call.query, call.key, call.value):
        return replace(call, implementation=_NAME, inner=_attention)
    return replace(call, implementation="sdpa", inner=own_function(call.module, "sdpa"))


def flash_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the flash kernel can compute attention of these tensors without a mask."""
    grouped, dtype = query.shape[1] != key.shape[1], kernel_dtype(query)

    def cast(part: Tensor) -> Tensor:
        """As autocast does later; torch looks at shape, strides and dtype only."""
        return part if part.dtype == dtype else part.new_empty(part.shape[-1], dtype=dtype).expand(part.shape)

    parameters = SDPAParams(cast(query), cast(key), cast(value), None, 0.0, False, grouped)
    return can_use_flash_attention(parameters)


def suffix_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens of a window, without a mask.

    Args:
        query: `[batch, heads, Q, head_dim]`, in a dtype and of a width that the flash kernel supports.
        key: `[batch, kv_heads, K, head_dim]` with K > Q; the queries are the last of the keys.
        value: `[batch, kv_heads, K, value_dim]`.
        scale: the factor on the products of queries and keys.

    Returns:
        `[batch, heads, Q, value_dim]`.
    """
    query, key, value = (part.to(kernel_dtype(query)) for part in (query, key, value))
    queries, keys = query.shape[2], key.shape[2]
    own = slice(keys - queries, keys)
    gradients = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    usual = queries % WHOLE_QUERIES == 0 and not gradients
    if usual and takes_cudnn(query, key[:, :, own], value[:, :, own], causal=True):
        return in_parts(query, key, value, scale)
    return flash_suffix(query, key, value, scale)


def flash_suffix(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """As `suffix_attention`, in one call of flash attention.

    torch's public function for it, with `causal_lower_right`, makes a tensor subclass, which fails while
    operations are counted. It calls the same operator.
    """
    width = query.shape[-1]
    states = [F.pad(part, (0, -width % 8)) if width % 8 else part for part in (query, key, value)]
    run = torch.ops.aten._scaled_dot_product_flash_attention  # causal means that the last tokens are aligned
    output: Tensor = run(*states, 0.0, True, False, scale=scale)[0]
    return output[..., :width]


def in_parts(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """As `suffix_attention`: of the queries to their own tokens, and to parts of the earlier ones, merged."""
    earlier = key.shape[2] - query.shape[2]
    own, start = slice(earlier, None), 0
    output, sums = partial_attention(query, key[:, :, own], value[:, :, own], causal=True, scale=scale)
    for size in sizes_of_parts(earlier):
        part = slice(start, start + size)
        with nullcontext() if size >= SMALLEST_PART else without_cudnn():
            other = partial_attention(query, key[:, :, part], value[:, :, part], causal=False, scale=scale)
        output, sums = merge(output, sums, *other)
        start += size
    return output.to(query.dtype)


def sizes_of_parts(keys: int) -> list[int]:
    """The sizes of the parts of some keys: different powers of two, and what is left of less than the least.

    So few shapes occur, and few parts: at most 9 up to a million keys.
    """
    sizes = [1 << bit for bit in reversed(range(keys.bit_length())) if keys >> bit & 1]
    whole = [size for size in sizes if size >= SMALLEST_PART]
    rest = keys - sum(whole)
    return whole + ([rest] if rest else [])


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
