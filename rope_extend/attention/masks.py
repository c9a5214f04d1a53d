"""What the mask of an attention call lets queries see: which keys, later ones, or one text in each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.registry import takes_boolean_mask

MASK_ROWS = 512
"""The largest number of queries for which a mask is computed at a time."""
_HIDDEN = -9e3
"""An added mask hides a key by less than this. In use are -1e4, -1e9, the least number and -inf."""


def visible(mask: Tensor) -> Tensor:
    """Which keys each query sees, bool, from a mask that is bool or is added to the logits."""
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


def shown_to(call: AttentionCall, query: int | Tensor, columns: int) -> Tensor:
    """Which of the first `columns` keys a query of each row sees, bool `[1 or batch, columns]` on the CPU.

    All of them if there is no mask. `query` is one, or `[batch]`.
    """
    mask = call.readable_mask
    if mask is None:
        return torch.ones(1, columns, dtype=torch.bool)
    return visible(mask[torch.arange(len(mask)), 0, query, :columns]).cpu()


def sees_later_keys(call: AttentionCall, forward: Forward, keys: int) -> bool:
    """Whether a query of a call sees keys after its own, as images, prefixes and encoders do.

    Computed once for all layers of a forward that share a mask.
    `keys` is the number of keys without the empty slots of a static cache.
    """
    mask, new = call.readable_mask, call.query.shape[2]
    if new == 1:
        return False
    if mask is None:
        return call.mask is None and not call.is_causal
    shown = mask[..., :keys]
    return forward.cached("sees later", of=mask, compute=lambda: _shows_later(shown, new, keys - new))


def _shows_later(mask: Tensor, queries: int, first: int) -> bool:
    """Whether a query sees a key after its own; key `first` is that of query 0."""
    found: bool | Tensor = False
    for start in range(0, queries, MASK_ROWS):
        shown = visible(mask[..., start : start + MASK_ROWS, first + start + 1 :])
        found = found | shown.triu().any()
    return bool(found)


def rows_of_mask(call: AttentionCall, start: int, stop: int) -> Tensor:
    """The mask of queries `start` to `stop` of a call, `[1 or batch, 1 or heads, stop - start, K]`."""
    if call.mask is not None:
        rows: Tensor = call.mask[:, :, start:stop]
        return rows
    keys = call.key.shape[2]
    shown = torch.ones(stop - start, keys, dtype=torch.bool, device=call.query.device)
    return _in_form(shown.tril(keys - call.query.shape[2] + start)[None, None], call)


def hidden_except(here: Tensor, mask: Tensor) -> Tensor:
    """A mask, bool or added to the logits, with all pairs hidden but those `here`."""
    if mask.dtype == torch.bool:
        return mask & here
    return torch.where(here, mask, torch.finfo(mask.dtype).min)


def without_keys(call: AttentionCall, shown: Tensor) -> AttentionCall:
    """A call of one query, with all keys hidden but those shown, `[1 or batch, K]`."""
    shown = shown[:, None, None]
    mask = _in_form(shown, call) if call.mask is None else hidden_except(shown, call.mask)
    return replace(call, mask=mask)


def _in_form(shown: Tensor, call: AttentionCall) -> Tensor:
    """Which keys are seen, as a mask that the function of a call takes."""
    if takes_boolean_mask(call.implementation):
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
    mask, new = call.readable_mask, forward.queries.shape[1]
    if mask is None:
        return _of_columns(keys, None) if call.mask is not None or call.is_causal else None
    return forward.cached("text rows", of=mask, compute=lambda: _of_mask(mask, keys, new))


def _of_mask(mask: Tensor, positions: Tensor, new: int) -> list[TextRows] | None:
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    shown = mask[:, 0, -1]
    keys = shown.shape[1]
    columns = torch.arange(keys, device=mask.device)
    start = torch.where(shown, columns, keys).amin(dim=1)
    stop = torch.where(shown, columns, -1).amax(dim=1) + 1
    inside = (columns >= start[:, None]) & (columns < stop[:, None])
    same = (inside == shown).all() & (stop > start).all()
    for first in range(0, new, MASK_ROWS):
        part = mask[:, 0, first : first + MASK_ROWS]
        own = torch.arange(keys - new + first, keys - new + first + part.shape[1], device=mask.device)
        expected = inside[:, None] & (columns <= own[:, None])
        # Padding sees nothing, everything, or as much as a token there.
        text = (own >= start[:, None]) & (own < stop[:, None])
        nothing_or_all = ~part.any(dim=-1) | part.all(dim=-1)
        same = same & ((part == expected).all(dim=-1) | ~text & nothing_or_all).all()
    found = torch.stack([start, stop, same.long().expand_as(start)], dim=1).tolist()  # one look at a GPU
    if not all(plain for *_, plain in found):
        return None
    return _of_columns(positions, [(first, last) for first, last, _ in found])


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
