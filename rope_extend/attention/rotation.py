"""Rotation inside attention, for every `RopeEncoding` that one table for all pairs does not say.

The model rotates queries and keys as it always does, and caches hold such keys. Where a method gives a pair
another rotation, by the distance of the two or by the length of the text up to the query, both are turned on
by the difference, just before attention: rotations add. A region of pairs is turned alike. Length-dependent
schedules have one region, and position maps have up to three. Attention is computed in one of four ways:

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
    shown_to,
    text_rows,
    without_keys,
)
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import beyond_plain, takes_suffix, without_cudnn
from rope_extend.attention.remap_parts import Text, attend, can_be_cut
from rope_extend.attention.sink_cache import SinkLayer, held_layer
from rope_extend.encodings import RemapEncoding, RopeEncoding, RopeShape
from rope_extend.encodings.core.regions import DROPPED, NEAR, Chunks, Region
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.families import Family
from rope_extend.models.planned_device import device_of
from rope_extend.models.rotary import angles_of, float64_device
from rope_extend.models.undo import UndoLog

Rotation = tuple[Tensor, Tensor]
"""cos and sin `[1 or batch, 1, n, dim/2]`."""
Table = tuple[int, int]
"""What the rotation of a query follows from: a length, and the position from which decay is counted."""
PART = 2**18
"""Elements of keys that are turned at once on a CPU: 1 MiB in float32."""
DECAY_LIMIT = 4.0
"""Decay (xPos) is counted from a centre that moves before any factor exceeds `exp` of this."""


class _Forward(Forward):
    """The positions of one forward, and the tables that turn its queries and keys.

    Attributes:
        lengths: the length that sets the regions of each query, int64 `[1 or batch, T]`.
        centres: the position from which the decay of each query is counted, likewise.
        scale: the factor on the logits of each query, `[1 or batch, T]`; None if all are 1.
    """

    def __init__(self, queries: Tensor, handler: RotationHandler) -> None:
        super().__init__(queries)
        self.encoding, self.shape, self.rotary = handler.encoding, handler.shape, handler.rotary
        self.lengths = self.encoding.table_length(self.shape, queries + 1)
        self.decay = self.encoding.decay(self.shape)
        self.block = (
            0 if self.decay is None else max(1, int(DECAY_LIMIT / max(float(-self.decay.min()), 1e-9)))
        )
        self.centres = queries // self.block * self.block if self.block else torch.zeros_like(queries)
        self.scale = self.encoding.logit_scale(self.shape, queries)
        self.normalised = handler.normalised
        factor = None
        if isinstance(self.encoding, RemapEncoding):
            factor = self.encoding.factor_of_queries(self.shape, queries)
        if factor is not None and not self.normalised:
            self.scale = factor if self.scale is None else self.scale * factor
        if self.scale is not None and bool((self.scale == 1).all()):
            self.scale = None
        # Whatever the keys: no layer of a text within the window looks at more than this.
        self.plain = self.encoding.is_plain(self.shape, 0, int(queries.max()))

    def is_plain(self, positions: Tensor) -> bool:
        """Whether no pair with keys at some positions is turned."""

        def plain() -> bool:
            lowest, highest = (int(positions.min()), int(max(positions.max(), self.queries.max())))
            return self.encoding.is_plain(self.shape, lowest, highest)

        return self.cached("plain", of=positions, compute=plain)

    def regions(self, length: int) -> tuple[Region, ...]:
        """The regions of queries whose table has a length."""
        return self.cached("regions", length, compute=lambda: self.encoding.regions(self.shape, length))

    def cut(self, rows: slice, begin: int, end: int) -> Iterator[tuple[int, int, tuple[Table, ...]]]:
        """Consecutive queries of some rows with the same tables in each row.

        Yields:
            Start, stop, and the tables of the rows; one if all rows agree.
        """
        values = torch.stack([self.lengths, self.centres], dim=-1)[rows, begin:end]
        changes = (values.diff(dim=1) != 0).any(dim=-1).any(dim=0).nonzero().flatten() + 1
        for start, stop in itertools.pairwise([0, *changes.tolist(), end - begin]):
            tables = tuple((length, centre) for length, centre in values[:, start].tolist())
            yield begin + start, begin + stop, tables if len(set(tables)) > 1 else tables[:1]

    def table(self, region: Region, length: int) -> Tensor:
        """The frequencies of a region, `[dim/2]` float64."""
        return (
            self.shape.inv_freq() if region.schedule is None else region.schedule.inv_freq(self.shape, length)
        )

    def size(self, region: Region, length: int) -> float:
        """The factor on cos and sin. Position maps have one on all logits of a query instead."""
        if region is NEAR or self.encoding.remaps or self.normalised:
            return 1.0
        return self.encoding.attention_factor(self.shape, length)

    def angles(self, region: Region, at: Tensor, table: Tensor) -> Tensor:
        """The angles of a region at the positions that it gives, `[..., n, dim/2]` float64."""
        return angles_of(region.schedule or self.encoding, self.shape, at, table)

    def turn(
        self, of: str, region: int, tables: tuple[Table, ...], positions: Tensor, like: Tensor
    ) -> Rotation | None:
        """cos and sin that turn queries or keys at positions `[1 or batch, n]`, for pairs of a region.

        They are for one table, or one for each row. None if nothing turns.
        """
        regions = [self.regions(length)[region] for length, _ in tables]
        if all(each is NEAR for each in regions):
            return None
        if self.decay is None and all(each.query is each.key for each in regions):
            of = "key"  # queries and keys turn alike
        name = ("turn", of, region, tables, like.dtype, like.device)
        compute = partial(self._turn, of, regions, tables, positions, like)
        return self.cached(*name, of=positions, compute=compute)

    def _turn(
        self, of: str, regions: list[Region], tables: tuple[Table, ...], positions: Tensor, like: Tensor
    ) -> Rotation:
        """As `turn`."""
        rows = max(len(positions), len(tables))
        at = positions.expand(rows, -1).double()
        if len(tables) < rows:
            tables, regions = tables * rows, regions * rows
        given = torch.stack([getattr(each, of)(at[row]) for row, each in enumerate(regions)])
        of_rows = [self.table(each, length) for each, (length, _) in zip(regions, tables, strict=True)]
        turned_rows = torch.tensor([each is not NEAR for each in regions], dtype=torch.float64)
        sizes = [self.size(each, length) for each, (length, _) in zip(regions, tables, strict=True)]
        device = float64_device(like.device)
        at, given, turned_rows = (to_device(each, device) for each in (at, given, turned_rows))
        changed = next(each for each in regions if each is not NEAR)
        angles = self.angles(changed, given, torch.stack(of_rows)[:, None]) - self.rotary.plain_angles(at)
        angles = angles * turned_rows[:, None, None]  # a row within the trained window stays as it is
        size = to_device(torch.tensor(sizes, dtype=torch.float64), device)[:, None, None]
        cos, sin = angles.cos() * size, angles.sin() * size
        if self.decay is not None:
            # Queries shrink as keys grow, so that products decay. From afar, both leave the range of a dtype.
            centres = to_device(torch.tensor([centre for _, centre in tables]), device)
            # No query attends to keys after the block, but their factor must stay finite.
            distance = (at - centres[:, None]).clamp(max=self.block)[..., None]
            distance = distance * to_device(self.decay, device, torch.float64)
            size = (distance if of == "query" else -distance).exp()
            cos, sin = cos * size, sin * size
        dtype = torch.promote_types(like.dtype, torch.float32)
        return cos[:, None].to(like.device, dtype), sin[:, None].to(like.device, dtype)


class RotationHandler(AttentionHandler):
    """Turns queries and keys inside attention, for one patch of one model.

    Attributes:
        normalised: whether the model normalises them afterwards, which cancels a factor on cos and sin.
    """

    encoding: RopeEncoding
    shape: RopeShape
    normalised = False

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Act inside the attention of a decoder."""
        modules = extended_modules(self.encoding, decoder, self.family)
        windows = [attention_window(module) for module in modules]
        if self.encoding.remaps and windows and all(self._is_short(window) for window in windows):
            raise UnsupportedModelError(
                f"{self.encoding} changes the positions of distant tokens, but each layer of this "
                f"{decoder.config.model_type} model that rotates only sees the last "
                f"{max(window or 0 for window in windows)} tokens; it needs no extension there"
            )
        normalises = self.family.normalises
        self.normalised = normalises is not None and any(map(normalises, modules))
        super().install(decoder, undo)

    def new_forward(self, queries: Tensor) -> _Forward:
        """A forward with the regions of its pairs."""
        return _Forward(queries, self)

    def _is_short(self, window: int | None) -> bool:
        """Whether a layer with a sliding window sees no pair that training did not have."""
        return window is not None and 0 < window <= self.shape.trained_length

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with queries and keys rotated here, by the region of each pair."""
        forward = self.forward_of_call(call)
        assert isinstance(forward, _Forward)
        held = held_layer(call.key)
        if self.encoding.remaps and held is None and self._is_short(attention_window(call.module)):
            return call.own(call.query, call.key, call.value, call.mask)
        if forward.scale is not None:
            scale = forward.on(call.query.device, forward.scale)[:, None, :, None].to(call.query.dtype)
            call = replace(call, query=call.query * scale)
        if held is None and forward.plain:
            return call.own(call.query, call.key, call.value, call.mask)
        if held is None:
            keys = self.keys_of_call(call, forward)
        else:
            call, keys = self._of_held(call, forward, held)
        found = self._attend(call.of_first_keys(keys.shape[1]), forward, keys)
        if held is not None:
            count = keys.shape[1]
            compute = partial(shown_to, call, call.query.shape[2] - 1, count)
            held.trim(keys, forward.cached("shown", count, of=call.mask, compute=compute))
        return found

    def _of_held(
        self, call: AttentionCall, forward: _Forward, layer: SinkLayer
    ) -> tuple[AttentionCall, Tensor]:
        """The call with a mask of the tokens that a layer of a `SinkCache` holds, and their positions."""
        if layer.encoding != self.encoding:
            raise PatchError(
                f"this SinkCache works in a model that is patched with {layer.encoding}, not with "
                f"{self.encoding}; make one with rope_extend.sink_cache(model), or use a DynamicCache"
            )
        if not layer.dropped:
            return call, self.keys_of_call(call, forward)
        whole, new = call, call.query.shape[2]

        def held() -> tuple[Tensor | None, Tensor]:
            total = whole.key.shape[2] + layer.dropped
            keys = self._key_positions(forward.queries, whole, total, total, None)
            text = torch.where(shown_to(whole, new - 1, total), keys, -1)[:, -new:]
            if bool(((text >= 0) & (text < text.cummax(dim=1).values)).any()):
                raise PatchError(
                    f"this SinkCache dropped {layer.dropped} tokens, and the positions of the new tokens do "
                    f"not follow each other; start another text with another cache"
                )
            return None if whole.mask is None else layer.of_columns(whole.mask), layer.of_columns(keys)

        mask, keys = forward.cached("held", layer.dropped, call.key.shape[2], of=call.mask, compute=held)
        return replace(call, mask=mask), keys

    def _attend(self, call: AttentionCall, forward: _Forward, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        if forward.is_plain(keys):
            return call.own(call.query, call.key, call.value, call.mask)
        if call.query.shape[2] == 1:
            return self._one_token(call, forward, keys)
        rows = self._rows(call, forward, keys)
        if rows is not None:
            return self._in_parts(call, forward, keys, rows), None
        return self._by_regions(call, forward, keys)

    # One token after a cache.

    def _one_token(
        self, call: AttentionCall, forward: _Forward, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one query to keys that are turned by their distance to it."""
        compute = partial(self._by_distance, forward, keys, call.query)
        rotation, shown = forward.cached(
            "one token", call.query.dtype, call.query.device, of=keys, compute=compute
        )
        call = replace(call, key=rotated_by(call.key, rotation, self.family))
        if shown is not None:
            call = without_keys(call, shown)
        return call.own(call.query, call.key, call.value, call.mask)

    @staticmethod
    def _by_distance(forward: _Forward, keys: Tensor, like: Tensor) -> tuple[Rotation, Tensor | None]:
        """What turns each key by its distance, and which keys are seen, `[rows, K]`; None for all."""
        rows, rotary = len(keys), forward.rotary
        query = forward.queries.expand(rows, -1)
        region = forward.encoding.borders.region(query, keys)
        # Keys alone are rotated, because the query has another angle in each region. Both are at the angles
        # of plain RoPE, so a key gets what their difference lacks to that of its region.
        turns = rotary.plain_angles(query) - rotary.plain_angles(keys)
        sizes = torch.ones(rows, 1, 1, dtype=torch.float64)
        for row, length in enumerate(forward.lengths.expand(rows, -1)[:, 0].tolist()):
            for index, each in enumerate(forward.regions(length)):
                here = region[row] == index
                if each is NEAR:
                    turns[row, here] = 0
                    continue
                table = forward.table(each, length)
                sizes[row] = forward.size(each, length) ** 2  # of the query and of the key
                given = forward.angles(each, each.query(query[row].double()), table)
                turns[row, here] -= given - forward.angles(each, each.key(keys[row, here].double()), table)
        cos, sin = turns.cos() * sizes, turns.sin() * sizes
        if forward.decay is not None:
            size = ((query - keys)[..., None] * forward.decay).exp()
            cos, sin = cos * size, sin * size
        dtype = torch.promote_types(like.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
        hidden = region == DROPPED
        shown = to_device(~hidden, like.device) if bool(hidden.any()) else None
        return (to_device(cos[:, None], like.device), to_device(sin[:, None], like.device)), shown

    # Rows of plain text.

    def _rows(self, call: AttentionCall, forward: _Forward, keys: Tensor) -> list[TextRows] | None:
        """The texts of a call, if all of them can be computed without a mask."""
        if not call.implementation.endswith("sdpa") and not takes_suffix(call.implementation):  # or a dry run
            return None
        beyond = [name for name in beyond_plain(call.kwargs) if name != "sliding_window"]
        window = attention_window(call.module)
        hides_keys = window is not None and window < keys.shape[1]
        if call.kwargs.get("dropout") or beyond or hides_keys:
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
        columns = forward.cached(
            "columns", row, each.start, each.stop, of=positions, compute=lambda: own[None]
        )

        def turn(of: str, states: Tensor, start: int, region: int, table: Table) -> Tensor:
            rotation = forward.turn(of, region, (table,), columns, call.query)
            return rotated_by(states, rotation, self.family, start)

        query = call.query[which, :, begin:end]
        keys, values = (part[which, :, each.start : each.stop] for part in (call.key, call.value))
        if end <= begin:  # padding only
            return values.new_empty(len(query), query.shape[1], 0, values.shape[-1]), begin, begin
        of_row = row if len(forward.queries) > 1 else 0
        segments = forward.cut(slice(of_row, of_row + 1), begin, end)
        ahead = keys.shape[2] - query.shape[2]
        text = Text(
            query,
            keys,
            values,
            turn,
            [(ahead + start - begin, ahead + stop - begin, tables[0]) for start, stop, tables in segments],
            each.lowest,
            call.kwargs["scaling"],
        )
        return attend(text, self.encoding.borders).to(call.value.dtype), begin, end

    # Everything else.

    def _by_regions(
        self, call: AttentionCall, forward: _Forward, keys: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the model's own function, with the keys of all regions side by side."""
        later = sees_later_keys(call, forward, keys.shape[1])
        chunks = isinstance(self.encoding.borders, Chunks)
        if later and (chunks or forward.decay is not None):
            raise PatchError(
                f"{self.encoding} counts back from a token, but this input lets tokens attend to later ones "
                f"(an image, a prefix or is_causal=False); use causal attention, or "
                f"{'self_extend' if chunks else 'an encoding without xpos'}"
            )
        ahead = keys.shape[1] - call.query.shape[2]

        def blocks() -> Iterator[tuple[int, int, list[tuple[Rotation | None, Rotation | None]]]]:
            for start, stop, tables in forward.cut(slice(None), 0, call.query.shape[2]):
                count = len(forward.regions(tables[0][0]))
                rotations = [
                    (forward.turn("query", index, tables, forward.queries, call.query),
                     forward.turn("key", index, tables, keys, call.query))
                    for index in range(count)
                ]  # fmt: skip
                size = rows_of_part(
                    len(call.query) * call.query.shape[1], count * call.key.shape[2],
                    device_of(call.query), from_table=False,
                )  # fmt: skip
                for first in range(start, stop, size):
                    yield first, min(first + size, stop), rotations

        def block(
            start: int, stop: int, rotations: Any, query: Tensor, key: Tensor, value: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            reach = keys.shape[1] if later else ahead + stop
            region = self.encoding.borders.region(forward.queries[:, start:stop, None], keys[:, None, :reach])
            mask = rows_of_mask(call, start, stop)[..., :reach]
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
        region, stop = to_device(region, query.device), start + region.shape[1]
        count, width = len(spans), query.shape[-1]
        queries, keys, values, masks = [], [], [], []
        for place, (index, first, end) in enumerate(spans):
            of_query, of_key = rotations[index]
            queries.append(rotated_by(query[:, :, start:stop], of_query, self.family, start))
            rotated = rotated_by(key[:, :, first:end], of_key, self.family, first)
            keys.append(functional.pad(rotated, (place * width, (count - 1 - place) * width)))
            values.append(value[:, :, first:end])
            masks.append(hidden_except(region[:, None, :, first:end] == index, mask[..., first:end]))
        # One softmax over all regions: keys are 0 in the channels of other regions, so products ignore these.
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


def rotated_by(states: Tensor, rotation: Rotation | None, family: Family, first: int = 0) -> Tensor:
    """States `[batch, heads, n, head_dim]`, rotated by entries `first` on of a rotation, and rounded once."""
    if rotation is None:
        return states
    n = states.shape[2]
    cos, sin = (part[:, :, first : first + n] for part in rotation)
    half = cos.shape[-1]
    if torch.is_grad_enabled() or family.pairs != "halves" or states.shape[-1] != 2 * half:
        return rotate(states.to(cos.dtype), cos, sin, family).to(states.dtype)
    sin = -sin if family.backwards else sin
    # Each token turns all keys: in parts that stay in the cache of a CPU, a third of the time of `rotate`.
    result = torch.empty_like(states, dtype=cos.dtype)
    size = PART // (states.shape[1] * 2 * half) if states.device.type == "cpu" else n
    for at in range(0, n, max(1, size)):
        part = slice(at, at + size)
        given, turn, shift, out = (each[:, :, part] for each in (states, cos, sin, result))
        given = given.to(cos.dtype)
        torch.mul(given, torch.cat((turn, turn), dim=-1), out=out)
        out[..., :half].addcmul_(given[..., half:], shift, value=-1)
        out[..., half:].addcmul_(given[..., :half], shift)
    return result.to(states.dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor, family: Family) -> Tensor:
    """Rotate `states` `[batch, heads, n, head_dim]` by `cos`, `sin` `[1 or batch, 1, n, dim/2]`."""
    sin, at_first = -sin if family.backwards else sin, family.rotated == "first"
    dim, head_dim = 2 * cos.shape[-1], states.shape[-1]
    rotated_part, rest = states, None
    if dim < head_dim:
        left, right = states.tensor_split([dim if at_first else head_dim - dim], dim=-1)
        rotated_part, rest = (left, right) if at_first else (right, left)
    if family.pairs == "halves":
        a, b = rotated_part.chunk(2, dim=-1)
        # The same operations as in `rotated_by`, so that both round alike.
        result = torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1)
    else:
        a, b = rotated_part[..., 0::2], rotated_part[..., 1::2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    if rest is None:
        return result
    return torch.cat((result, rest) if at_first else (rest, result), dim=-1)
