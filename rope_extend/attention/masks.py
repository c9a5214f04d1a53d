"""What the mask of an attention call lets queries see, beyond plain causal attention."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.positions import Forward

MASK_ROWS = 512
"""The largest number of queries for which a mask is computed at a time."""


def visible(mask: Tensor) -> Tensor:
    """Which keys each query sees, bool, from a mask that is bool or is added to the logits."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def sees_later_keys(call: AttentionCall, forward: Forward) -> bool:
    """Whether a query of a call sees keys after its own, as images, prefixes and encoders do.

    Computed once for all layers of a forward that share a mask. In a dry run, masks are causal.
    """
    mask, new = call.mask, call.query.shape[2]
    if new == 1:
        return False
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return not call.is_causal
    if mask.is_meta:
        return False
    name = ("sees later", id(mask))
    if name not in forward.tables:
        total = forward.keys.shape[1]
        stored = min(total, call.key.shape[2])  # a sliding window has its last keys only
        # The mask is kept with the result, so that no other mask gets its id.
        forward.tables[name] = mask, _shows_later(mask[..., :stored], stored - new)
    found: bool = forward.tables[name][1]
    return found


def _shows_later(mask: Tensor, first: int) -> bool:
    """Whether a mask `[batch, heads, T, K]` shows a key after the query; key `first` is that of query 0."""
    found = torch.zeros((), dtype=torch.bool, device=mask.device)
    for start in range(0, mask.shape[2], MASK_ROWS):
        later = visible(mask[:, :, start : start + MASK_ROWS, first + start + 1 :])
        found |= later.triu().any()
    return bool(found)
