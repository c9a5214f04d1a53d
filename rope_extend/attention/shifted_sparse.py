"""Shifted sparse attention, LongLoRA's S² (2309.12307, section 3.2), for training only, never for inference.

It is an approximation. Tokens attend within groups of fixed size. In half of the heads the groups are shifted
by half a group, so that information crosses group borders from layer to layer. No token attends to more than
a group directly. So a model trained this way has learned the positions of its window, not attention over it.
The paper reports perplexities close to those of full attention, not equal ones. In return, attention costs
`T · group` instead of `T²`.

In the paper, the last half group of the shifted heads is rolled to the front and joined with the first one.
Under a causal mask in rolled order, the first tokens would attend to the last ones, which are in their
future. Here, as in the authors' flash attention code, each of these two half groups attends to itself only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rope_extend.attention.functions import acts_inside, attention_modules
from rope_extend.attention.plain import beyond_plain, beyond_plain_sdpa, instead_of_sdpa
from rope_extend.attention.registry import own_function, register
from rope_extend.encodings import Encoding
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.loss import causal_lm, hidden_states

_OPTION = "_rope_extend_shifted_sparse"
"""The attribute of an attention module with its `_Option`."""


@dataclass
class _Option:
    """The option, shared by the attention modules of one model."""

    group: int
    """Tokens per group."""
    tried: bool = False
    """Whether the trial forward reached all layers."""
    reached: set[int] = field(default_factory=set)
    """The ids of the attention modules that called this implementation."""


def shifted_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, group: int, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Causal attention within groups of tokens, which half of the heads have shifted by half a group.

    Token i attends to token j, not after it:

    - in the first half of the heads, if `i // group = j // group`;
    - in the second half, if `(i + group / 2) // group = (j + group / 2) // group`.

    With an odd number of heads the first half is the larger one.

    Args:
        query: `[B, H, T, D]`, rotated.
        key: `[B, KV, T, D]`, rotated; KV divides H, and head h uses key head `h // (H / KV)`.
        value: `[B, KV, T, V]`.
        group: tokens per group, even; T is a multiple of it.
        scale: the scale of the logits; `D ** -0.5` if not given.
        dropout: the dropout of the weights.

    Returns:
        `[B, H, T, V]` in the dtype of `value`.

    Raises:
        RopeExtendError: T is not a multiple of the group, or the group is odd.
    """
    heads, kv_heads, tokens = query.shape[1], key.shape[1], query.shape[2]
    if group < 2 or group % 2 or tokens % group:
        raise RopeExtendError(
            f"shifted sparse attention got groups of {group} tokens for {tokens} tokens; choose an even "
            f"group size that divides the number of tokens"
        )
    if heads % 2 or kv_heads % 2:  # the halves would share a key head
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    first, first_kv = (heads + 1) // 2, (key.shape[1] + 1) // 2
    attend = partial(_in_groups, scale=scale, dropout=dropout)
    plain = attend(query[:, :first], key[:, :first_kv], value[:, :first_kv], group=group)
    if heads == 1:
        return plain
    half = group // 2
    shifted = [part[:, start:] for part, start in ((query, first), (key, first_kv), (value, first_kv))]
    ends = attend(*(torch.cat([x[:, :, :half], x[:, :, -half:]], dim=2) for x in shifted), group=half)
    middle = attend(*(x[:, :, half : tokens - half] for x in shifted), group=group)
    return torch.cat([plain, torch.cat([ends[:, :, :half], middle, ends[:, :, half:]], dim=2)], dim=1)


def _in_groups(
    query: Tensor, key: Tensor, value: Tensor, *, group: int, scale: float | None, dropout: float
) -> Tensor:
    """Causal attention within consecutive groups, `[B, h, T, V]`."""

    def cut(states: Tensor) -> Tensor:
        batch, heads, tokens, channels = states.shape
        groups = states.reshape(batch, heads, tokens // group, group, channels)
        return groups.transpose(1, 2).flatten(0, 1)  # [B · T / group, heads, group, channels]

    if query.shape[2] == 0:
        return query.new_empty(*query.shape[:3], value.shape[-1])
    output = scaled_dot_product_attention(
        cut(query), cut(key), cut(value), dropout_p=dropout, is_causal=True, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return output.reshape(len(query), -1, *output.shape[1:]).transpose(1, 2).flatten(2, 3)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls under the name `rope_extend_shifted_sparse`."""
    option: _Option | None = getattr(module, _OPTION, None)
    if option is None or (option.tried and not module.training):
        return own_function(module, "sdpa")(module, query, key, value, attention_mask, **kwargs)
    option.reached.add(id(module))
    beyond = beyond_plain(kwargs)
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        beyond.append("a mask or a cache, as for padding")
    if beyond:
        raise UnsupportedModelError(
            f"shifted sparse attention supports plain causal attention over rows without padding only, but "
            f"{type(module).__name__} got {', '.join(beyond)}; remove shifted_sparse to train with full "
            "attention"
        )
    output = shifted_sparse_attention(
        query, key, value, option.group, scale=kwargs.get("scaling"), dropout=kwargs.get("dropout") or 0.0
    )
    return output.transpose(1, 2).contiguous(), None


_NAME = register("shifted_sparse", _attention, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
"""The attention implementation while the option is on."""


def check_shifted_sparse(model: nn.Module, encoding: Encoding) -> None:
    """Refuse a model or an encoding whose attention is not plain causal attention over all tokens.

    Args:
        model: a causal language model, patched with the encoding, with or without weights.
        encoding: the encoding.

    Raises:
        UnsupportedModelError: with the reason, and with what works.
    """
    lm = causal_lm(model)
    if acts_inside(lm.base_model):
        reason: str | None = f"{encoding} acts inside attention; a static rotary method works, such as yarn"
    else:
        reason = beyond_plain_sdpa(lm)
    if reason is not None:
        raise UnsupportedModelError(
            f"shifted sparse attention does not work with {lm.config.model_type}: {reason}. Remove "
            "shifted_sparse to train with full attention"
        )


@contextmanager
def shifted_sparse(
    model: nn.Module, group: int, run: Callable[[Callable[[nn.Module], None]], None] | None = None
) -> Iterator[None]:
    """Inside the block, a model in training mode uses shifted sparse attention.

    In evaluation mode, attention is the model's own.

    Args:
        model: a causal language model of transformers, with or without PEFT and patch.
        group: tokens per group, even; the length of every training sequence is a multiple of it.
        run: calls a function with the model while its weights are gathered (FSDP); by default, a plain call.

    Raises:
        UnsupportedModelError: a layer's attention does not use the implementation.
    """
    lm = causal_lm(model)
    modules = attention_modules(lm.base_model)
    option = _Option(group)
    with instead_of_sdpa(lm, _NAME, _OPTION, option):
        trial = partial(_try, option=option, modules=modules)
        trial(model) if run is None else run(trial)
        yield


@torch.no_grad()
def _try(model: nn.Module, option: _Option, modules: list[Any]) -> None:
    """Check by a forward of one group that no layer silently uses full attention."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        hidden_states(model, torch.zeros(1, option.group, dtype=torch.int64, device=device))
    finally:
        model.train(training)
    option.tried = True
    if missing := [m for m in modules if id(m) not in option.reached]:
        raise UnsupportedModelError(
            f"shifted sparse attention does not reach {type(missing[0]).__name__} of layer "
            f"{missing[0].layer_idx}; remove shifted_sparse to train with full attention"
        )
