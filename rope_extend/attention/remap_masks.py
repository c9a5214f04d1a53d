"""Masks of a few queries at a time, cut by regions of pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.masks import of_block_mask
from rope_extend.attention.registry import is_dense, takes_boolean_mask


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
