"""Shifted sparse attention, LongLoRA's S² (2309.12307, section 3.2), to train with and never to read with.

It is an approximation. Tokens attend within groups of a fixed number of them; in half of the heads the groups
are shifted by half a group, so that what one layer cannot pass across a border the next ones can. No token
sees more than a group directly, and so a model trained this way has not been shown attention over its window,
only positions in it: the paper reports perplexities close to those of full attention, not equal ones. In
return attention costs `T · group` rather than `T²`.

The paper rolls the shifted heads around the text's end, where the last half group meets the first. Under a
causal mask in rolled order the first tokens would then read the last ones, which is the future; here, as in
the authors' flash attention code, the two half groups at the ends each attend to themselves alone.
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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from rope_extend.attention.functions import PREFIX, attention_modules, own_function
from rope_extend.encodings import Encoding
from rope_extend.errors import RopeExtendError, UnsupportedModelError
from rope_extend.loss import causal_lm, hidden_states
from rope_extend.training.plain_attention import beyond_plain, beyond_plain_sdpa, in_place_of_sdpa

_NAME = "shifted_sparse_sdpa"
"""The attention implementation while the option is on."""
_OPTION = "_rope_extend_shifted_sparse"
"""The attribute by which an attention module finds its `_Option`."""


@dataclass
class _Option:
    """The option as the attention modules of one model see it."""

    group: int
    tried: bool = False
    """Whether all layers were seen to come by here."""
    reached: set[int] = field(default_factory=set)
    """Attention modules that have come by here."""


def shifted_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, group: int, *, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Causal attention within groups of tokens, which half of the heads have shifted by half a group.

    Head h of the first half lets token i see token j, not after it, where `i // group = j // group`; of the
    second half, where `(i + group / 2) // group = (j + group / 2) // group`. With an odd number of heads the
    first half is the larger one.

    Args:
        query: `[B, H, T, D]`, rotated.
        key: `[B, KV, T, D]`, rotated; KV divides H, and head h reads key head `h // (H / KV)`.
        value: `[B, KV, T, V]`.
        group: tokens per group, even; T is a multiple of it.
        scale: of the logits; `D ** -0.5` if not given.
        dropout: of the weights.

    Returns:
        `[B, H, T, V]` in the dtype of `value`.

    Raises:
        RopeExtendError: T is no multiple of the group, or the group is odd.
    """
    heads, kv_heads, tokens = query.shape[1], key.shape[1], query.shape[2]
    if group < 2 or group % 2 or tokens % group:
        raise RopeExtendError(
            f"shifted sparse attention takes groups of an even number of tokens that divides the text's; got "
            f"groups of {group} and {tokens} tokens"
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
    found = scaled_dot_product_attention(
        cut(query), cut(key), cut(value), dropout_p=dropout, is_causal=True, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return found.reshape(len(query), -1, *found.shape[1:]).transpose(1, 2).flatten(2, 3)


# ---------------------------------------------------------------------------------------------------------
# In a model


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls under the name `shifted_sparse_sdpa`."""
    option: _Option | None = getattr(module, _OPTION, None)
    if option is None or (option.tried and not module.training):
        return own_function(module, "sdpa")(module, query, key, value, attention_mask, **kwargs)
    option.reached.add(id(module))
    beyond = beyond_plain(kwargs)
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        beyond.append("a mask or a cache, as for padding")
    if beyond:
        raise UnsupportedModelError(
            f"shifted sparse attention is plain causal attention over rows without padding, and "
            f"{type(module).__name__} was given {', '.join(beyond)}; leave shifted_sparse out to train with "
            "full attention"
        )
    output = shifted_sparse_attention(
        query, key, value, option.group, scale=kwargs.get("scaling"), dropout=kwargs.get("dropout") or 0.0
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def check_shifted_sparse(model: nn.Module, encoding: Encoding) -> None:
    """Refuse a model or an encoding whose attention is not plain causal attention over all tokens.

    Args:
        model: a causal language model, patched with the encoding; one without weights will do.
        encoding: what it reads with.

    Raises:
        UnsupportedModelError: naming what stands in the way, and what works.
    """
    lm = causal_lm(model)
    if lm.config.get_text_config()._attn_implementation.startswith(PREFIX):
        reason: str | None = f"{encoding} acts inside attention; a static rotary method works, such as yarn"
    else:
        reason = beyond_plain_sdpa(lm)
    if reason is not None:
        raise UnsupportedModelError(
            f"shifted sparse attention does not work with {lm.config.model_type}: {reason}. Leave "
            "shifted_sparse out to train with full attention"
        )


@contextmanager
def shifted_sparse(
    model: nn.Module, group: int, run: Callable[[Callable[[nn.Module], None]], None] | None = None
) -> Iterator[None]:
    """Train with shifted sparse attention inside the block.

    Outside it, and inside it in evaluation mode, attention is the model's own.

    Args:
        model: a causal language model of transformers, with or without PEFT and patch.
        group: tokens per group, even; every text trained on has a multiple of it.
        run: hands the model to a function that reads with it, where its weights are not always there (FSDP).

    Raises:
        UnsupportedModelError: what `check_shifted_sparse` refuses, or some layer's attention is out of reach.
    """
    lm = causal_lm(model)
    modules = attention_modules(lm.base_model)
    option = _Option(group)
    with in_place_of_sdpa(lm, _NAME, _OPTION, option):
        trial = partial(_try, option=option, modules=modules)
        trial(model) if run is None else run(trial)
        yield


@torch.no_grad()
def _try(model: nn.Module, option: _Option, modules: list[Any]) -> None:
    """Read one group, and see that every layer's attention comes by; else it would be full unnoticed."""
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
            f"{missing[0].layer_idx}; leave shifted_sparse out to train with full attention"
        )
