"""What the mask of an attention call lets queries see, and masks of a few queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.registry import is_dense, takes_boolean_mask

MASK_ROWS = 512
"""The largest number of queries for which a mask is computed at a time."""
_HIDDEN = -9e3
"""An added mask hides a key by less than this. In use are -1e4, -1e9, the least number and -inf."""


def visible(mask: Tensor) -> Tensor:
    """Which keys each query sees, bool, from a mask that is bool or is added to the logits."""
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def visible_to(call: AttentionCall, query: int, columns: int) -> Tensor | None:
    """Which of the first `columns` keys a query of a call sees, bool `[1 or batch, columns]` on the CPU.

    None if there is no mask, or in a dry run, where masks are causal.
    """
    mask = call.mask
    if hasattr(mask, "mask_mod"):  # a BlockMask
        shown = of_block_mask(mask, query, query + 1, columns, call.query.device)[:, 0, 0]
    elif not isinstance(mask, Tensor) or mask.is_meta:
        return None
    elif mask.dim() == 2:  # of flash attention
        shown = mask[:, :columns].bool()
    else:
        shown = visible(mask[:, 0, min(query, mask.shape[2] - 1), :columns])
    return shown.cpu()


def sees_later_keys(call: AttentionCall, forward: Forward, keys: int) -> bool:
    """Whether a query of a call sees keys after its own, as images, prefixes and encoders do.

    Computed once for all layers of a forward that share a mask. In a dry run, masks are causal.
    `keys` is the number of keys without the empty slots of a static cache.
    """
    mask, new = call.mask, call.query.shape[2]
    if new == 1:
        return False
    of_flex = hasattr(mask, "mask_mod")  # a BlockMask
    if not of_flex and (not isinstance(mask, Tensor) or mask.dim() != 4):
        return not call.is_causal
    if isinstance(mask, Tensor) and mask.is_meta:
        return False

    def shown(start: int, stop: int) -> Tensor:
        """Which keys the queries from `start` to `stop` see, bool `[batch, heads, queries, keys]`."""
        if of_flex:
            return of_block_mask(mask, start, stop, keys, call.query.device)
        return visible(mask[:, :, start:stop, :keys])

    return forward.once("sees later", of=mask, compute=lambda: _shows_later(shown, new, keys - new))


def of_block_mask(mask: Any, start: int, stop: int, keys: int, device: torch.device) -> Tensor:
    """Which keys the queries from `start` to `stop` see, from the BlockMask of flex attention, bool."""
    rows, heads = mask.shape[:2]
    return create_mask(
        lambda b, h, q, k: mask.mask_mod(b, h, q + start, k), rows, heads, stop - start, keys, str(device)
    )


def _shows_later(shown: Callable[[int, int], Tensor], queries: int, first: int) -> bool:
    """Whether a query sees a key after its own; key `first` is that of query 0."""
    found: bool | Tensor = False
    for start in range(0, queries, MASK_ROWS):
        later = shown(start, min(start + MASK_ROWS, queries))[..., first + start + 1 :]
        found = found | later.triu().any()
    return bool(found)


@dataclass(frozen=True)
class RowsOfMask:
    """The mask of a call, for some of its queries at a time.

    Masks of flash and flex attention become those that eager attention takes.
    """

    call: AttentionCall

    def __call__(self, start: int, stop: int) -> Tensor:
        """The mask of queries `start` to `stop`, `[1 or batch, 1 or heads, stop - start, K]`."""
        call = self.call
        mask, keys = call.mask, call.key.shape[2]
        if is_dense(call.implementation):
            if mask is not None:
                return mask[:, :, start:stop]
            return _in_form(self._causal(start, stop), call)
        if hasattr(mask, "mask_mod"):  # a BlockMask
            return _in_form(of_block_mask(mask, start, stop, keys, call.query.device), call)
        shown = self._causal(start, stop)
        if mask is not None:
            shown = shown & mask.bool()[:, None, None, :keys]
        return _in_form(shown, call)

    def _causal(self, start: int, stop: int) -> Tensor:
        """Which keys are seen without a mask, `[1, 1, stop - start, K]`."""
        call = self.call
        keys = call.key.shape[2]
        shown = torch.ones(stop - start, keys, dtype=torch.bool, device=call.query.device)
        first = keys - call.query.shape[2] + start
        if call.is_causal:
            shown = shown.tril(first)
        window = call.kwargs.get("sliding_window")
        if window is not None and not is_dense(call.implementation):
            shown = shown.triu(first - window + 1)
        return shown[None, None]


def hidden_except(here: Tensor, mask: Tensor) -> Tensor:
    """A mask, bool or added to the logits, with all pairs hidden but those `here`."""
    if mask.dtype == torch.bool:
        return mask & here
    return torch.where(here, mask, torch.finfo(mask.dtype).min)


def without_keys(call: AttentionCall, shown: Tensor) -> AttentionCall:
    """A call of one query, with all keys hidden but those shown, `[1 or batch, K]`."""
    if not is_dense(call.implementation):
        shown = shown.expand(len(call.key), -1)
        return replace(call, mask=shown if call.mask is None else call.mask.bool() & shown)
    shown = shown[:, None, None]
    if call.mask is None:
        return replace(call, mask=_in_form(shown, call))
    return replace(call, mask=hidden_except(shown, call.mask))


def _in_form(shown: Tensor, call: AttentionCall) -> Tensor:
    """Which keys are seen, as a mask that the function of a call takes."""
    if is_dense(call.implementation) and takes_boolean_mask(call.implementation):
        return shown
    like = torch.zeros((), dtype=call.query.dtype, device=call.query.device)
    return like.masked_fill(~shown, torch.finfo(like.dtype).min)
