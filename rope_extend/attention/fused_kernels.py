"""The fused kernel of attention that torch takes on a GPU, and cuDNN's with the log-sum-exp of its logits."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

logger = logging.getLogger(__name__)

_refused: set[tuple[torch.device, torch.dtype, int, int]] = set()
"""Devices, dtypes and widths of heads for which cuDNN failed in this process."""


def kernel_dtype(states: Tensor) -> torch.dtype:
    """The dtype in which torch's attention computes: that of autocast, if it is on."""
    device = states.device.type
    if device != "meta" and states.is_floating_point() and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return states.dtype


def chosen_kernel(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> SDPBackend:
    """The kernel that torch would take for attention without a mask.

    It depends on the device, on the versions of torch and cuDNN, and on the kernels that are turned on.

    Args:
        query: `[batch, heads, Q, head_dim]`.
        key: `[batch, kv_heads, K, head_dim]`.
        value: `[batch, kv_heads, K, value_dim]`.
        causal: whether query i sees the keys up to the i-th only.
    """
    grouped = query.shape[1] != key.shape[1]
    return SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, causal, enable_gqa=grouped))


def takes_cudnn(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Whether torch would take cuDNN's kernel for attention without a mask, and it has not failed before."""
    if query.device.type != "cuda" or _kind(query, value) in _refused:
        return False
    return chosen_kernel(query, key, value, causal=causal) == SDPBackend.CUDNN_ATTENTION


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Attention by cuDNN, and the log-sum-exp of its logits; without gradients.

    Args:
        query: `[batch, heads, Q, head_dim]`, float16 or bfloat16.
        key: `[batch, kv_heads, K, head_dim]`.
        value: `[batch, kv_heads, K, value_dim]`.
        causal: whether query i sees the keys up to the i-th only.
        scale: the factor on the products of queries and keys.

    Returns:
        The output `[batch, heads, Q, value_dim]` and the log-sum-exp `[batch, heads, Q]` in float32. None if
        cuDNN fails, with a line in the log. It is then not called again for heads of this size.

    Raises:
        torch.OutOfMemoryError: memory ran out.
    """
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    try:
        output, sums, *_ = run(query, key, value, None, True, 0.0, causal, False, scale=scale)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _refused.add(_kind(query, value))
        logger.warning(
            "cuDNN's attention with a log-sum-exp failed for %d channels (%s); using flash attention",
            query.shape[-1], str(error).splitlines()[0],
        )  # fmt: skip
        return None
    return output, sums.squeeze(-1)  # unlike other kernels, it keeps the last axis


def _kind(query: Tensor, value: Tensor) -> tuple[torch.device, torch.dtype, int, int]:
    return query.device, query.dtype, query.shape[-1], value.shape[-1]
