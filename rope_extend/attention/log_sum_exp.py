"""Attention in parts without a mask, and their exact merge.

Attention of a query to several sets of keys is the mean of the attention to each set, weighted by the sum of
the exponentials of its logits. So a part is an output and the logarithm of that sum. Kernels of torch compute
both without the matrix of all logits, but public functions return the output only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.models.planned_device import device_of

Partial = tuple[Tensor, Tensor]
"""Attention to one set of keys `[..., value_dim]`, and the log-sum-exp of its logits `[...]`."""

_WIDEST = 256
"""The most channels of a head that the flash kernel of a GPU computes."""
_SPARE = 8
"""Channels that the backward pass adds: kernels take multiples of 8."""


def partial_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Partial:
    """Attention to one set of keys, and the log-sum-exp of its logits, without a mask.

    Memory is linear in the number of tokens on a CPU, and on a GPU for float16 and bfloat16 with up to 248
    channels, or without gradients. Everything else computes all logits at once.

    Args:
        query: `[batch, heads, Q, head_dim]`.
        key: `[batch, kv_heads, K, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, kv_heads, K, value_dim]`.
        causal: whether query i sees the keys up to the i-th only; Q and K are then equal.
        scale: the factor on the products of queries and keys.

    Returns:
        The output `[batch, heads, Q, value_dim]` in the dtype of the inputs, and the log-sum-exp
        `[batch, heads, Q]` in float32, or float64 for inputs in float64. Without keys these are 0 and
        -infinity. Gradients flow through both.

    Raises:
        ValueError: causal attention with another number of keys than queries.
    """
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"causal attention of {query.shape[2]} queries to {key.shape[2]} keys is not square")
    query, key, value = (part.to(kernel_dtype(query)) for part in (query, key, value))
    if 0 in (query.shape[0], query.shape[2], key.shape[2]):  # kernels divide by the number of tokens
        nothing = 0 * (query.sum() + key.sum() + value.sum())  # gradients stay defined
        output = nothing + query.new_zeros(*query.shape[:3], value.shape[-1])
        return output, query.new_full(query.shape[:3], -math.inf, dtype=_wide(query.dtype))
    gradients = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    if not _has_kernel(query, max(query.shape[-1], value.shape[-1]), gradients):
        return _plain(query, key, value, causal=causal, scale=scale)
    if not gradients:
        output, sums, _ = _kernel(query, key, value, causal, scale)
        return output, sums
    output, sums = _Partial.apply(query, key, value, causal, scale)  # type: ignore[no-untyped-call]
    return output, sums


def merge_partials(one: Partial, other: Partial) -> Partial:
    """Attention to two sets of keys without a common one, from the attention to each.

    The log-sum-exp of a set without keys is -infinity. Results are float32, or float64 if a part is: weights
    are never rounded to less.
    """
    (output, sums), (other_output, other_sums) = one, other
    highest = torch.maximum(sums, other_sums).detach()
    highest = torch.where(highest == -math.inf, 0.0, highest)
    weight, other_weight = (sums - highest).exp(), (other_sums - highest).exp()
    total = weight + other_weight
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    share = (other_weight / total)[..., None]
    merged = torch.lerp(output.to(total.dtype), other_output.to(total.dtype), share)
    return merged, torch.where(empty, -math.inf, highest + total.log())


def kernel_dtype(states: Tensor) -> torch.dtype:
    """The dtype in which torch's attention computes: that of autocast, if it is on."""
    device = states.device.type
    if device != "meta" and states.is_floating_point() and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return states.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _has_kernel(query: Tensor, width: int, gradients: bool) -> bool:
    """Whether a kernel gives the log-sum-exp on a device, and gradients if they are needed."""
    if query.device.type in ("cpu", "meta"):
        return True
    if query.device.type != "cuda":
        return False
    return not gradients or _flash_serves(query, width + _SPARE)


def _flash_serves(query: Tensor, width: int) -> bool:
    return query.dtype in (torch.float16, torch.bfloat16) and width <= _WIDEST


def _plain(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    grouped = query.reshape(query.shape[0], -1, groups, *query.shape[2:])
    logits = grouped @ key[:, :, None].mT  # [batch, kv_heads, groups, Q, K]
    logits = logits.to(_wide(query.dtype)) * scale
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(later, -math.inf)
    weights = logits.softmax(dim=-1).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2), logits.logsumexp(dim=-1).flatten(1, 2)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Any]:
    """Output, log-sum-exp, and what the backward kernel of a GPU needs in addition."""
    width, shown = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    groups = query.shape[1] // key.shape[1]
    if query.device.type != "cuda":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        if device_of(query).type == "cpu":  # up to torch 2.8, the kernel misreads grouped keys
            key, value = (_of_each_head(part, groups) for part in (key, value))
        query, key, value = (_widened(part, width) for part in (query, key, value))
        output, sums = run(query, key, value, 0.0, causal, scale=scale)
        return output[..., :shown], sums.to(_wide(query.dtype)), ()
    width += -width % _SPARE
    query, key, value = (_widened(part, width) for part in (query, key, value))
    if _flash_serves(query, width):
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return results[0][..., :shown], results[1], results[2:8]
    key, value = (_of_each_head(part, groups) for part in (key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    output, sums, *_ = efficient(query, key, value, None, True, 0.0, causal, scale=scale)
    return output[..., :shown], sums[..., : query.shape[2]], ()  # the kernel pads the sums


def _of_each_head(states: Tensor, groups: int) -> Tensor:
    """Keys or values `[batch, heads, K, width]`, a copy for each head of a group."""
    return states.repeat_interleave(groups, dim=1) if groups > 1 else states


def _widened(states: Tensor, width: int) -> Tensor:
    return functional.pad(states, (0, width - states.shape[-1])) if states.shape[-1] < width else states


class _Partial(torch.autograd.Function):
    """The kernel with gradients through both of its results.

    Kernels compute the gradient of a logit as `p (d_out . v - delta)` with `delta = d_out . out`, and know no
    gradient of the log-sum-exp. That gradient adds `p d_sums`, so it belongs into delta: one more channel of
    `d_out` is 1, the same channel of `out` is `-d_sums`, and that of the values is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        output, sums, rest = _kernel(query, key, value, causal, scale)
        tensors = [part for part in rest if isinstance(part, Tensor)]
        ctx.rest = [None if isinstance(part, Tensor) else part for part in rest]
        ctx.save_for_backward(query, key, value, output, sums, *tensors)
        ctx.causal, ctx.scale = causal, scale
        return output, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_output, d_sums = gradients
        query, key, value, output, sums, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        rest = [next(remaining) if part is None else part for part in ctx.rest]
        groups, head_dim, shown = query.shape[1] // key.shape[1], query.shape[-1], value.shape[-1]
        width = max(head_dim, shown)
        width += _SPARE + -width % _SPARE
        dtype, fewer = query.dtype, width - shown
        # float16 and bfloat16 hold the gradient as a sum of three numbers.
        pieces, left = [], -d_sums
        for _ in range(3):
            pieces.append(left.to(dtype))
            left = left - pieces[-1].to(left.dtype)
        zeros = output.new_zeros(*output.shape[:3], fewer - 3)
        output = torch.cat([output, torch.stack(pieces, dim=-1), zeros], dim=-1)
        d_output = torch.cat([d_output.to(dtype), torch.ones_like(output[..., :3]), zeros], dim=-1)
        wide = [_widened(part, width) for part in (query, key, value)]
        wide[1:] = [_of_each_head(part, groups) for part in wide[1:]]
        aten = torch.ops.aten
        if query.device.type == "cuda":
            results = aten._scaled_dot_product_flash_attention_backward(
                d_output, *wide, output, sums, *rest[:4], 0.0, ctx.causal, *rest[4:], scale=ctx.scale
            )
        else:
            results = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_output, *wide, output, sums, 0.0, ctx.causal, scale=ctx.scale
            )
        d_query, d_key, d_value = results
        d_key, d_value = (
            part.reshape(len(part), -1, groups, *part.shape[2:]).sum(dim=2) if groups > 1 else part
            for part in (d_key, d_value)
        )
        return d_query[..., :head_dim], d_key[..., :head_dim], d_value[..., :shown], None, None
