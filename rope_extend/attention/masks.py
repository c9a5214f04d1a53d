"""What the mask of an attention call lets queries see, beyond plain causal attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from rope_extend.attention.functions import AttentionCall

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


def sees_later_keys(call: AttentionCall, tables: dict[tuple[Any, ...], Any], keys: int) -> bool:
    """Whether a query of a call sees keys after its own, as images, prefixes and encoders do.

    Computed once for all layers of a forward that share a mask, and kept in its `tables`. In a dry run, masks
    are causal. `keys` is the number of keys without the empty slots of a static cache.
    """
    mask, new = call.mask, call.query.shape[2]
    if new == 1:
        return False
    of_flex = hasattr(mask, "mask_mod")  # a BlockMask
    if not of_flex and (not isinstance(mask, Tensor) or mask.dim() != 4):
        return not call.is_causal
    if isinstance(mask, Tensor) and mask.is_meta:
        return False
    name = ("sees later", id(mask))
    if name not in tables:

        def shown(start: int, stop: int) -> Tensor:
            """Which keys the queries from `start` to `stop` see, bool `[batch, heads, queries, keys]`."""
            if of_flex:
                return of_block_mask(mask, start, stop, keys, call.query.device)
            return visible(mask[:, :, start:stop, :keys])

        # The mask is kept with the result, so that no other mask gets its id.
        tables[name] = mask, _shows_later(shown, new, keys - new)
    found: bool = tables[name][1]
    return found


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
