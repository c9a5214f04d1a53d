"""Attention under changed positions, for every `RemapEncoding`: exact in any batch and under any cache.

The model rotates queries and keys as it always does, and caches hold such keys. For distant pairs they are
turned on to the positions that the method gives them. Attention is computed in one of four ways:

- a text without changed pairs: as in the model without a patch;
- one token after a cache: each key is turned by its distance, and the model's own function does the rest;
- rows of plain text, with or without padding: in parts without a mask, see `remap_parts.py`;
- everything else: by the model's own function, a few queries at a time. Keys of all regions lie side by side,
  each in channels of its own, and a mask shows each pair in its region only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.attention.bias_parts import in_blocks, rows_of_part
from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import AttentionCall, attention_window, extended_modules
from rope_extend.attention.masks import (
    TextRows,
    hidden_except,
    rows_of_mask,
    sees_later_keys,
    text_rows,
    without_keys,
)
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import beyond_plain, takes_suffix, without_cudnn
from rope_extend.attention.remap_parts import Text, attend, can_be_cut
from rope_extend.attention.rotation import turned
from rope_extend.attention.sink_cache import SinkLayer, held_layer
from rope_extend.encodings import RemapEncoding, RopeShape
from rope_extend.encodings.core.remap import DROPPED, NEAR, Chunks, Region
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.planned_device import device_of
from rope_extend.models.rotary import float64_device
from rope_extend.models.undo import UndoLog

Rotation = tuple[Tensor, Tensor]
"""cos and sin `[1 or batch, 1, n, dim/2]`."""


class _Forward(Forward):
    """The positions of one forward, and the tables that turn its queries and keys.

    Attributes:
        lengths: the length that sets the regions of each query, int64 `[1 or batch, T]`.
        scale: the factor on the logits of each query, `[1 or batch, T]`; None if all are 1.
    """

    def __init__(self, queries: Tensor, handler: RemapHandler) -> None:
        super().__init__(queries)
        self.encoding, self.shape, self.rotary = handler.encoding, handler.shape, handler.rotary
        self.lengths = self.encoding.table_length(self.shape, queries + 1)
        self.scale = self.encoding.logit_scale(self.shape, queries)
        factor = self.encoding.factor_of_queries(self.shape, queries)
        if factor is not None and not handler.normalised:
            self.scale = factor if self.scale is None else self.scale * factor
        if self.scale is not None and bool((self.scale == 1).all()):
            self.scale = None

    def is_plain(self, keys: Tensor) -> bool:
        """Whether all pairs with keys at some positions keep their own distance."""

        def plain() -> bool:
            lowest, highest = (int(keys.min()), int(max(keys.max(), self.queries.max())))
            return self.encoding.is_plain(self.shape, lowest, highest)

        return self.once("plain", of=keys, compute=plain)

    def table(self, region: Region, length: int) -> Tensor:
        """The frequencies of a region, `[dim/2]` float64."""
        return (
            self.shape.inv_freq() if region.schedule is None else region.schedule.inv_freq(self.shape, length)
        )

    def turn(
        self, of: str, region: int, lengths: tuple[int, ...], positions: Tensor, like: Tensor
    ) -> Rotation | None:
        """cos and sin that turn queries or keys at positions `[1 or batch, n]`, for pairs of a region.

        They are for the regions of one length, or of one for each row. None if nothing turns.
        """
        regions = [self.encoding.regions(self.shape, length)[region] for length in lengths]
        if all(each is NEAR for each in regions):
            return None
        name = ("turn", of, region, lengths, like.dtype, like.device)
        compute = partial(self._turn, of, regions, lengths, positions, like)
        return self.once(*name, of=positions, compute=compute)

    def _turn(
        self, of: str, regions: list[Region], lengths: tuple[int, ...], positions: Tensor, like: Tensor
    ) -> Rotation:
        """As `turn`."""
        rows = max(len(positions), len(lengths))
        at = positions.expand(rows, -1).double()
        if len(lengths) < rows:
            lengths, regions = lengths * rows, regions * rows
        given = torch.stack([getattr(each, of)(at[row]) for row, each in enumerate(regions)])
        tables = torch.stack([self.table(*each) for each in zip(regions, lengths, strict=True)])
        device = float64_device(like.device)
        at, given, tables = (to_device(each, device) for each in (at, given, tables))
        angles = given[..., None] * tables[:, None] - self.rotary.plain_angles(at)
        dtype = torch.promote_types(like.dtype, torch.float32)
        cos, sin = (each[:, None].to(like.device, dtype) for each in (angles.cos(), angles.sin()))
        return cos, sin


class RemapHandler(AttentionHandler):
    """Changes the positions of distant pairs inside attention, for one patch of one model."""

    encoding: RemapEncoding
    shape: RopeShape

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Act inside the attention of a decoder.

        Raises:
            UnsupportedModelError: this is not possible in the family, or not with the attention
                implementation, or no layer sees tokens beyond the trained window.
        """
        modules = extended_modules(self.encoding, decoder, self.adapter)
        windows = [attention_window(module) for module in modules]
        if windows and all(self._is_short(window) for window in windows):
            raise UnsupportedModelError(
                f"{self.encoding} changes the positions of distant tokens, but each layer of this "
                f"{decoder.config.model_type} model that rotates only sees the last "
                f"{max(window or 0 for window in windows)} tokens; it needs no extension there"
            )
        super().install(decoder, undo)

    def new_forward(self, queries: Tensor) -> _Forward:
        """A forward with the regions of its pairs."""
        return _Forward(queries, self)

    def _is_short(self, window: int | None) -> bool:
        """Whether a layer with a sliding window sees no pair that training did not have."""
        return window is not None and 0 < window <= self.shape.trained_length

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with queries and keys rotated here, by the region of each pair.

        Raises:
            PatchError: the positions in this call are not known, or the encoding cannot compute its mask.
        """
        forward = self.forward_of_call(call)
        assert isinstance(forward, _Forward)
        window = attention_window(call.module)
        held = held_layer(call.key)
        if self._is_short(window) and held is None:
            return call.own(call.query, call.key, call.value, call.mask)
        if held is None:
            keys = self.keys_of_call(call, forward)
        else:
            call, keys = self._of_held(call, forward, held)
        found = self._attend(call.of_first_keys(keys.shape[1]), forward, keys)
        if held is not None:
            held.trim(keys)
        return found

    def _of_held(
        self, call: AttentionCall, forward: _Forward, layer: SinkLayer
    ) -> tuple[AttentionCall, Tensor]:
        """The call with a mask of the tokens that a layer of a `SinkCache` holds, and their positions.

        Raises:
            PatchError: the cache was made for another patch, or a new token may see dropped ones.
        """
        if layer.encoding != self.encoding:
            raise PatchError(
                f"this SinkCache works in a model that is patched with {layer.encoding}, not with "
                f"{self.encoding}; make one with rope_extend.sink_cache(model), or use a DynamicCache"
            )
        if not layer.dropped:
            return call, self.keys_of_call(call, forward)
        if bool((forward.queries.diff() < 0).any()):
            raise PatchError(
                f"this SinkCache dropped {layer.dropped} tokens, and the positions of the new tokens do not "
                f"follow each other; start another text with another cache"
            )
        whole = call

        def held() -> tuple[Tensor | None, Tensor]:
            total = whole.key.shape[2] + layer.dropped
            keys = self._key_positions(forward.queries, whole, total, whole=True)
            return None if whole.mask is None else layer.of_columns(whole.mask), layer.of_columns(keys)

        mask, keys = forward.once("held", layer.dropped, call.key.shape[2], of=call.mask, compute=held)
        return replace(call, mask=mask), keys

    def _attend(self, call: AttentionCall, forward: _Forward, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        if forward.scale is not None:
            scale = forward.on(call.query.device, forward.scale)[:, None, :, None].to(call.query.dtype)
            call = replace(call, query=call.query * scale)
        if forward.is_plain(keys):
            return call.own(call.query, call.key, call.value, call.mask)
        if call.query.shape[2] == 1:
            return self._one_token(call, forward, keys)
        rows = self._rows(call, forward, keys)
        if rows is not None:
            return self._in_parts(call, forward, keys, rows), None
        return self._by_regions(call, forward, keys)

    def _turned(self, states: Tensor, rotation: Rotation | None) -> Tensor:
        return states if rotation is None else turned(states, rotation, self.adapter)

    # One token after a cache.

    def _one_token(
        self, call: AttentionCall, forward: _Forward, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one query to keys that are turned by their distance to it."""
        compute = partial(self._by_distance, forward, keys, call.query)
        rotation, shown = forward.once(
            "one token", call.query.dtype, call.query.device, of=keys, compute=compute
        )
        call = replace(call, key=self._turned(call.key, rotation))
        if shown is not None:
            call = without_keys(call, shown)
        return call.own(call.query, call.key, call.value, call.mask)

    @staticmethod
    def _by_distance(forward: _Forward, keys: Tensor, like: Tensor) -> tuple[Rotation, Tensor | None]:
        """What turns each key by its distance, and which keys are seen, `[rows, K]`; None for all."""
        encoding, shape, rows = forward.encoding, forward.shape, len(keys)
        query = forward.queries.expand(rows, -1)
        region = encoding.borders.region(query, keys)
        distance = encoding.distance(shape, query, keys).nan_to_num(0)
        lengths = forward.lengths.expand(rows, -1)[:, 0].tolist()
        regions = [encoding.regions(shape, length) for length in lengths]
        tables = torch.stack([
            torch.stack([forward.table(each, length) for each in row])
            for row, length in zip(regions, lengths, strict=True)
        ])  # fmt: skip
        moved = torch.tensor([[each is not NEAR for each in row] for row in regions])
        of_pair = torch.arange(rows)[:, None], region.clamp(min=0)
        # The query and the key are at their own angles, and their difference shall be that of the distance.
        turns = forward.rotary.plain_angles(query) - forward.rotary.plain_angles(keys)
        turns = (turns - distance[..., None] * tables[of_pair]) * moved[of_pair][..., None]
        dtype = torch.promote_types(like.dtype, torch.float32)
        cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
        hidden = region == DROPPED
        shown = to_device(~hidden, like.device) if bool(hidden.any()) else None
        return (to_device(cos[:, None], like.device), to_device(sin[:, None], like.device)), shown

    # Rows of plain text.

    def _rows(self, call: AttentionCall, forward: _Forward, keys: Tensor) -> list[TextRows] | None:
        """The texts of a call, if all of them can be computed without a mask."""
        if not (call.implementation == "sdpa" or takes_suffix(call.implementation)):
            return None
        if call.kwargs.get("dropout") or beyond_plain(call.kwargs):
            return None
        if attention_window(call.module) is not None:
            return None
        rows = text_rows(call, forward, keys)
        past = keys.shape[1] - call.query.shape[2]
        if rows is None or not all(
            can_be_cut(self.encoding.borders, each.lowest, max(0, past - each.start)) for each in rows
        ):
            return None
        return rows

    def _in_parts(self, call: AttentionCall, forward: _Forward, keys: Tensor, rows: list[TextRows]) -> Tensor:
        output = None
        for each in rows:
            found, begin, end = self._of_rows(call, forward, keys, each)
            if each.rows is None and end - begin == call.query.shape[2]:
                return found.transpose(1, 2).contiguous()
            if output is None:
                output = found.new_zeros(len(call.query), call.query.shape[2], *found.shape[1:4:2])
            which = slice(None) if each.rows is None else list(each.rows)
            output[which, begin:end] = found.transpose(1, 2)
        assert output is not None
        return output

    def _of_rows(
        self, call: AttentionCall, forward: _Forward, positions: Tensor, each: TextRows
    ) -> tuple[Tensor, int, int]:
        """The output of rows `[rows, heads, n, value_dim]`, and the queries from begin to end that it has."""
        new = call.query.shape[2]
        past = positions.shape[1] - new
        begin, end = max(0, each.start - past), each.stop - past
        which = slice(None) if each.rows is None else list(each.rows)
        row = 0 if each.rows is None else each.rows[0]
        own = positions[row if len(positions) > 1 else 0, each.start : each.stop]
        columns = forward.once("columns", row, each.start, each.stop, of=positions, compute=lambda: own[None])

        def turn(states: Tensor, start: int, region: int, length: int, *, of: str, offset: int) -> Tensor:
            rotation = forward.turn(of, region, (length,), columns, call.query)
            if rotation is None:
                return states
            part = slice(start + offset, start + offset + states.shape[2])
            return self._turned(states, (rotation[0][:, :, part], rotation[1][:, :, part]))

        query = call.query[which, :, begin:end]
        keys, values = (part[which, :, each.start : each.stop] for part in (call.key, call.value))
        if end <= begin:  # padding only
            return values.new_empty(len(query), query.shape[1], 0, values.shape[-1]), begin, begin
        lengths = forward.lengths[row if len(forward.lengths) > 1 else 0, begin:end]
        cuts = [0, *((lengths.diff() != 0).nonzero().flatten() + 1).tolist(), end - begin]
        ahead = keys.shape[2] - query.shape[2]
        text = Text(
            query,
            keys,
            values,
            partial(turn, of="query", offset=ahead),
            partial(turn, of="key", offset=0),
            [(ahead + start, ahead + stop, int(lengths[start])) for start, stop in itertools.pairwise(cuts)],
            each.lowest,
            call.kwargs["scaling"],
        )
        return attend(text, self.encoding.borders).to(call.value.dtype), begin, end

    # Everything else.

    def _by_regions(
        self, call: AttentionCall, forward: _Forward, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the model's own function, with the keys of all regions side by side."""
        if isinstance(self.encoding.borders, Chunks) and sees_later_keys(call, forward, keys.shape[1]):
            raise PatchError(
                f"{self.encoding} counts chunks back from a token, but this input lets tokens attend to "
                f"later ones (an image, a prefix or is_causal=False); use causal attention, or self_extend"
            )

        def blocks() -> Iterator[tuple[int, int, list[tuple[Rotation | None, Rotation | None]]]]:
            for start, stop, (lengths,) in forward.cut(forward.lengths):
                regions = self.encoding.regions(self.shape, lengths[0])
                rotations = [
                    (forward.turn("query", index, lengths, forward.queries, call.query),
                     forward.turn("key", index, lengths, keys, call.query))
                    for index in range(len(regions))
                ]  # fmt: skip
                size = rows_of_part(
                    len(call.query) * call.query.shape[1], len(regions) * call.key.shape[2],
                    device_of(call.query), from_table=False,
                )  # fmt: skip
                for first in range(start, stop, size):
                    yield first, min(first + size, stop), rotations

        def block(
            start: int, stop: int, rotations: Any, query: Tensor, key: Tensor, value: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            region = self.encoding.borders.region(forward.queries[:, start:stop, None], keys[:, None])
            mask = rows_of_mask(call, start, stop)
            return self._block(call, mask, region, start, rotations, query, key, value)

        return in_blocks(
            block, blocks(), (call.query, call.key, call.value), dropout=bool(call.kwargs.get("dropout"))
        )

    def _block(
        self, call: AttentionCall, mask: Tensor, region: Tensor, start: int, rotations: Any,
        query: Tensor, key: Tensor, value: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of the queries from `start` on, with the region of each pair `[rows, queries, K]`."""
        seen = [
            (region == index).flatten(0, 1).any(dim=0).nonzero().flatten() for index in range(len(rotations))
        ]
        spans = [(index, int(at[0]), int(at[-1]) + 1) for index, at in enumerate(seen) if len(at)]
        region, stop = region.to(query.device), start + region.shape[1]
        count, width = len(spans), query.shape[-1]
        queries, keys, values, masks = [], [], [], []
        for place, (index, first, end) in enumerate(spans):
            of_query, of_key = rotations[index]
            queries.append(self._turned_part(query, of_query, start, stop))
            rotated = self._turned_part(key, of_key, first, end)
            keys.append(functional.pad(rotated, (place * width, (count - 1 - place) * width)))
            values.append(value[:, :, first:end])
            masks.append(hidden_except(region[:, None, :, first:end] == index, mask[..., first:end]))
        with without_cudnn():  # each part has another number of keys
            output, weights = call.own(
                torch.cat(queries, dim=-1), torch.cat(keys, dim=2), torch.cat(values, dim=2),
                torch.cat([mask.expand(*masks[0].shape[:3], -1) for mask in masks], dim=-1),
            )  # fmt: skip
        if weights is None:
            return output, None
        whole, past = weights.new_zeros(*weights.shape[:3], key.shape[2]), 0
        for _, first, end in spans:
            part = weights[..., past : past + end - first]
            whole, past = whole + functional.pad(part, (first, key.shape[2] - end)), past + end - first
        return output, whole

    def _turned_part(self, states: Tensor, rotation: Rotation | None, start: int, stop: int) -> Tensor:
        """The states from `start` to `stop`, turned."""
        states = states[:, :, start:stop]
        if rotation is None:
            return states
        return self._turned(states, (rotation[0][:, :, start:stop], rotation[1][:, :, start:stop]))
