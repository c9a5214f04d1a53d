"""What the mask of an attention call lets queries see: which keys, later ones, or one text in each row."""

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


def rows_of_mask(call: AttentionCall, start: int, stop: int) -> Tensor:
    """The mask of queries `start` to `stop` of a call, `[1 or batch, 1 or heads, stop - start, K]`.

    Masks of flash and flex attention become those that eager attention takes.
    """
    mask, keys = call.mask, call.key.shape[2]
    if hasattr(mask, "mask_mod"):  # a BlockMask
        return _in_form(of_block_mask(mask, start, stop, keys, call.query.device), call)
    if mask is not None and mask.dim() == 4:
        rows: Tensor = mask[:, :, start:stop]
        return rows
    shown = torch.ones(stop - start, keys, dtype=torch.bool, device=call.query.device)
    first = keys - call.query.shape[2] + start
    if call.is_causal:
        shown = shown.tril(first)
    window = call.kwargs.get("sliding_window")
    if window is not None and not is_dense(call.implementation):
        shown = shown.triu(first - window + 1)
    if mask is not None:  # of flash attention
        return _in_form(shown & mask.bool()[:, None, None, :keys], call)
    return _in_form(shown[None, None], call)


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


@dataclass(frozen=True)
class TextRows:
    """Rows of a batch whose text is in the same columns, at the same positions, without gaps.

    Attributes:
        rows: their indices; None for all rows.
        start: the first column of the text, of all keys.
        stop: the column after the last.
        lowest: the position of the first column.
    """

    rows: tuple[int, ...] | None
    start: int
    stop: int
    lowest: int


def text_rows(call: AttentionCall, forward: Forward, keys: Tensor) -> list[TextRows] | None:
    """The rows of a call, if attention is causal within one text in each of them; otherwise None.

    The call has a key for each of the positions `keys`. Computed once for all layers that share a mask.
    """
    mask, new = call.mask, forward.queries.shape[1]
    if mask is None:
        packed = call.kwargs.get("cu_seq_lens_q") is not None
        return _of_columns(keys, None) if call.is_causal and not packed else None
    if not isinstance(mask, Tensor):
        return None
    return forward.once("text rows", of=mask, compute=lambda: _of_mask(mask, keys, new))


def _of_mask(mask: Tensor, positions: Tensor, new: int) -> list[TextRows] | None:
    if mask.is_meta:  # in a dry run, the mask is causal
        return _of_columns(positions, None)
    flat = mask.dim() == 2  # of flash attention, which is causal in addition
    if not flat and (mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1):
        return None
    shown = mask.bool() if flat else mask[:, 0, -1]
    keys = shown.shape[1]
    columns = torch.arange(keys, device=mask.device)
    start = torch.where(shown, columns, keys).amin(dim=1)
    stop = torch.where(shown, columns, -1).amax(dim=1) + 1
    inside = (columns >= start[:, None]) & (columns < stop[:, None])
    same = (inside == shown).all() & (stop > start).all()
    if not flat:
        for first in range(0, new, MASK_ROWS):
            part = mask[:, 0, first : first + MASK_ROWS]
            own = torch.arange(keys - new + first, keys - new + first + part.shape[1], device=mask.device)
            expected = inside[:, None] & (columns <= own[:, None])
            # Padding sees nothing, everything, or as much as a token there.
            text = (own >= start[:, None]) & (own < stop[:, None])
            nothing_or_all = ~part.any(dim=-1) | part.all(dim=-1)
            same = same & ((part == expected).all(dim=-1) | ~text & nothing_or_all).all()
    if not bool(same):
        return None
    return _of_columns(positions, list(zip(start.tolist(), stop.tolist(), strict=True)))


def _of_columns(positions: Tensor, columns: list[tuple[int, int]] | None) -> list[TextRows] | None:
    """The rows, grouped by their columns and first positions; None if positions have gaps."""
    count = max(len(positions), len(columns or ()))
    columns = columns or [(0, positions.shape[1])]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for row in range(count):
        start, stop = columns[row % len(columns)]
        own = positions[row % len(positions), start:stop]
        if not bool((own.diff() == 1).all()):
            return None
        groups.setdefault((start, stop, int(own[0])), []).append(row)
    if len(groups) == 1:
        (only,) = groups
        return [TextRows(None, *only)]
    return [TextRows(tuple(rows), *key) for key, rows in groups.items()]
