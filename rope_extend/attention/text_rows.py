"""Which columns of a batch hold the text of each row, if all else is padding."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.masks import MASK_ROWS
from rope_extend.encodings import Encoding
from rope_extend.errors import PatchError


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


_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Inputs by which flash attention separates the documents of several rows."""


def refuse_unknown_documents(call: AttentionCall, forward: Forward, keys: Tensor, encoding: Encoding) -> None:
    """Refuse several packed rows that flash attention would not separate into documents.

    transformers separates documents by their lengths if all of `_LENGTHS` are there. Otherwise it does so by
    the positions, in a batch of one row only.

    Raises:
        PatchError: positions restart in a batch of several rows, or only some of its lengths are given.
    """
    if call.mask is not None or len(call.query) == 1 or "flash" not in call.implementation:
        return
    missing = [name for name in _LENGTHS if call.kwargs.get(name) is None]
    if not missing:
        return
    restarts = forward.once("restarts", of=keys, compute=lambda: bool((keys.diff() < 0).any()))
    if restarts or "cu_seq_lens_q" not in missing:
        raise PatchError(
            f"{encoding}: {call.implementation} cannot separate the documents of {len(call.query)} packed "
            f"rows without {', '.join(missing)}; give all four lengths, one packed row at a time, or use "
            f"attn_implementation='sdpa'"
        )


def text_rows(call: AttentionCall, forward: Forward, keys: Tensor) -> list[TextRows] | None:
    """The rows of a call, if attention is causal within one text in each of them; otherwise None.

    The call has a key for each of the positions `keys`. Computed once for all layers that share a mask.
    """
    if call.mask is None:
        if not call.is_causal:
            return None
        if "flash" in call.implementation and (
            call.kwargs.get("cu_seq_lens_q") is not None or bool((keys.diff() != 1).any())
        ):
            return _of_packed_rows(call, keys)
        return _of_columns(keys, None)
    mask, new = call.mask, forward.queries.shape[1]
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
    visible = (columns >= start[:, None]) & (columns < stop[:, None])
    same = (visible == shown).all() & (stop > start).all()
    if not flat:
        for first in range(0, new, MASK_ROWS):
            part = mask[:, 0, first : first + MASK_ROWS]
            own = torch.arange(keys - new + first, keys - new + first + part.shape[1], device=mask.device)
            expected = visible[:, None] & (columns <= own[:, None])
            # Padding sees nothing, everything, or as much as a token there.
            text = (own >= start[:, None]) & (own < stop[:, None])
            nothing_or_all = ~part.any(dim=-1) | part.all(dim=-1)
            same = same & ((part == expected).all(dim=-1) | ~text & nothing_or_all).all()
    if not bool(same):
        return None
    return _of_columns(positions, list(zip(start.tolist(), stop.tolist(), strict=True)))


def _of_packed_rows(call: AttentionCall, positions: Tensor) -> list[TextRows] | None:
    """The documents in each row: flash attention starts a new one wherever the positions do."""
    cuts = call.kwargs.get("cu_seq_lens_q")
    rows, length = len(call.query), call.query.shape[2]
    if positions.shape[1] != length or len(positions) not in (1, rows):
        return None  # a cache
    found, edges = [], []
    for row, own in enumerate(positions):
        starts = (own.diff() != 1).nonzero().flatten() + 1
        if bool((own[starts] != 0).any()):
            return None  # a gap within a document
        columns = [0, *starts.tolist(), length]
        edges.append(columns[:-1])
        which = (row,) if len(positions) > 1 else None
        found += [
            TextRows(which, start, stop, int(own[start])) for start, stop in itertools.pairwise(columns)
        ]
    if cuts is not None:  # of all rows, one after the other
        edges = edges if len(edges) == rows else edges * rows
        flat = [row * length + start for row, own in enumerate(edges) for start in own]
        if [*flat, rows * length] != cuts.tolist():
            return None  # the caller's documents are others
    return found


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
