"""Attention under changed positions, for every `RemapEncoding`: exact in any batch and under any cache.

Caches hold unrotated keys. Attention is computed in one of four ways:

- a text without changed pairs: as in the model without a patch, by its own tables and function;
- one token after a cache: by keys that were rotated before, see `remap_decoding.py`; where that is not
  possible, each key is rotated by its distance, and the model's own function does the rest;
- rows of plain text, with or without padding: in a few calls without a mask, see `remap_parts.py`;
- everything else: by the model's own function, a few queries at a time. Keys of all regions lie side by side,
  each in channels of its own, and a mask shows each pair in its region only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from rope_extend.attention.bias_parts import rows_of_part
from rope_extend.attention.forwards import Forward
from rope_extend.attention.functions import AttentionCall, attention_window, extended_modules
from rope_extend.attention.masks import sees_later_keys
from rope_extend.attention.plain import beyond_plain
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import is_dense, own_function, takes_suffix, without_cudnn
from rope_extend.attention.remap_decoding import attend_one
from rope_extend.attention.remap_masks import RowsOfMask, hidden_except, without_keys
from rope_extend.attention.remap_parts import Text, attend, can_be_cut
from rope_extend.attention.rotation import GPU_TABLE_BYTES, TABLE_BYTES, rotate
from rope_extend.attention.sink_cache import SinkCache
from rope_extend.attention.text_rows import TextRows, refuse_unknown_documents, text_rows
from rope_extend.encodings import RemapEncoding, RopeShape
from rope_extend.encodings.core.remap import DROPPED, NEAR, Chunks, Region
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.planned_device import device_of
from rope_extend.models.rotary import ExtendedRotaryEmbedding, has_float64
from rope_extend.models.undo import UndoLog

Rotation = tuple[Tensor, Tensor]
"""cos and sin `[1 or batch, 1, n, dim/2]`."""

UNCHANGED = -2
"""Not a region of the encoding: all pairs as in plain RoPE."""


@dataclass
class _Forward(Forward):
    """The positions of one forward, and the tables that rotate its queries and keys."""

    encoding: RemapEncoding
    shape: RopeShape
    normalised: bool
    lengths: Tensor = field(init=False)
    """The length that sets the regions of each query, int64 `[1 or batch, T]`."""
    scale: Tensor | None = field(init=False)
    is_plain: bool = field(init=False)
    changes: Tensor = field(init=False)
    """The first query of each segment but the first."""

    def __post_init__(self) -> None:
        self.lengths = self.encoding.table_length(self.shape, self.queries + 1)
        self.scale = self.encoding.logit_scale(self.shape, self.queries)
        factor = self.encoding.factor_of_queries(self.shape, self.queries)
        if factor is not None and not self.normalised:
            self.scale = factor if self.scale is None else self.scale * factor
        if self.scale is not None and bool((self.scale == 1).all()):
            self.scale = None
        self.changes = (self.lengths.diff() != 0).any(dim=0).nonzero().flatten() + 1
        lowest, highest = int(self.keys.min()), int(self.keys.max())
        self.is_plain = self.encoding.is_plain(self.shape, lowest, highest)

    def segments(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Consecutive queries with the same regions in each row: start, stop, and the length of each row."""
        starts = [0, *self.changes.tolist()]
        stops = [*starts[1:], self.lengths.shape[1]]
        return [
            (start, stop, tuple(self.lengths[:, start].tolist()))
            for start, stop in zip(starts, stops, strict=True)
        ]

    def region(self, index: int, length: int) -> Region:
        """A region of pairs, or that of plain RoPE."""
        return NEAR if index == UNCHANGED else self.encoding.regions(self.shape, length)[index]

    def table(self, region: int, length: int) -> Tensor:
        """The frequencies of a region, `[dim/2]` float64."""
        schedule = self.region(region, length).schedule
        return self.shape.inv_freq() if schedule is None else schedule.inv_freq(self.shape, length)

    def rotation(
        self,
        of: str,
        region: int,
        lengths: tuple[int, ...],
        like: Tensor,
        part: tuple[int, int, int] | None = None,
    ) -> Rotation:
        """cos and sin of queries or keys, for pairs of a region and the length of each row.

        They are of all queries or keys, or of columns `start` to `stop` of a row, `(row, start, stop)`. They
        are kept for the next layer if those of all segments are small enough.
        """
        near = region in (0, UNCHANGED)  # the same for all lengths
        name = ("rotation", of, region, None if near else lengths, part, like.dtype, like.device)
        if name in self.tables:
            kept: Rotation = self.tables[name]
            return kept
        positions = self.queries if of == "query" else self.keys
        tables = 1 if near else 1 + len(self.changes)  # the number of such tables
        if part is not None:
            row, start, stop = part
            tables *= len(positions)
            positions = positions[row if len(positions) > 1 else 0, start:stop][None]
        found = self.rotation_at(positions, of, region, lengths, like)
        size = sum(each.numel() * each.element_size() for each in found)
        if size * tables <= (TABLE_BYTES if device_of(like).type == "cpu" else GPU_TABLE_BYTES):
            self.tables[name] = found
        return found

    def used(
        self, positions: Tensor, of: str, region: int, lengths: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """What queries or keys at positions `[1 or batch, n]` are rotated by, for pairs of a region.

        The positions that are used, `[1 or batch, n]`, and the frequencies of each row,
        `[1 or batch, dim/2]`; both float64.
        """
        rows = max(len(positions), len(lengths))
        positions = positions.expand(rows, -1).double()
        lengths = lengths if len(lengths) > 1 else lengths * rows
        found = [
            getattr(self.region(region, length), of)(positions[row]) for row, length in enumerate(lengths)
        ]
        table = {length: self.table(region, length) for length in set(lengths)}
        return torch.stack(found), torch.stack([table[length] for length in lengths])

    def rotation_at(
        self, positions: Tensor, of: str, region: int, lengths: tuple[int, ...], like: Tensor
    ) -> Rotation:
        """cos and sin of queries or keys at positions `[1 or batch, n]`, as in `rotation`; not kept."""
        return _cos_sin(*self.used(positions, of, region, lengths), like)


def _cos_sin(positions: Tensor, tables: Tensor, like: Tensor) -> Rotation:
    """cos and sin `[rows, 1, n, dim/2]` at positions `[rows, n]`, computed in float64.

    `tables` are the frequencies of each row, `[rows, dim/2]` float64.
    """
    device = like.device if has_float64(like.device) else torch.device("cpu")
    angles = to_device(positions, device)[:, None, :, None] * to_device(tables, device)[:, None, None]
    cos, sin = angles.cos(), angles.sin()
    return cos.to(like.device, like.dtype), sin.to(like.device, like.dtype)


class RemapHandler(AttentionHandler):
    """Changes the positions of distant pairs inside attention, for one patch of one model.

    Args:
        encoding: the regions and their positions.
        adapter: the model's family.
        shape: the rotary shape of the model.
        normalised: whether the model normalises queries and keys after rotating them, so that a factor on cos
            and sin would have no effect.
    """

    encoding: RemapEncoding
    shape: RopeShape

    def __init__(
        self, encoding: RemapEncoding, adapter: FamilyAdapter, shape: RopeShape, *, normalised: bool
    ) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self._normalised = normalised
        self._stock: Any = None  # the model's own rotary module, if it computes plain RoPE

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
        rotary = next(iter(self.adapter.rotary_modules(decoder).values()))
        one_table = self.adapter.layer_type(decoder.config) is None and not self.adapter.sections
        stock = not isinstance(rotary, ExtendedRotaryEmbedding) and rotary.rope_type == "default"
        # A model that was cast has rounded frequencies. Then all paths use exact ones, or they would differ.
        if one_table and stock and torch.finfo(rotary.inv_freq.dtype).bits >= 32:
            self._stock = rotary
        super().install(decoder, undo)

    def new_forward(self, queries: Tensor, keys: Tensor) -> _Forward:
        """A forward with the regions of its pairs."""
        return _Forward(queries, keys, self.encoding, self.shape, self._normalised)

    def _positions_of_past(self, queries: Tensor, past: Cache | None) -> Tensor:
        positions = super()._positions_of_past(queries, past)
        if isinstance(past, SinkCache):
            past.check(queries)
        return positions

    def keep(self, past: Cache, forward: Forward) -> None:
        """A cache of bounded size drops what no later token sees."""
        if isinstance(past, SinkCache):
            past.trim()

    def _is_short(self, window: int | None) -> bool:
        """Whether a layer with a sliding window sees no pair that training did not have."""
        return window is not None and 0 < window <= self.shape.trained_length

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention with queries and keys rotated here, by the region of each pair.

        Raises:
            PatchError: the positions in this call are not known, the encoding cannot compute its mask, or
                flash attention would not separate the documents of this batch.
        """
        forward = self.forward_of_call(call)
        assert isinstance(forward, _Forward)
        if isinstance(forward.past, SinkCache):
            call = self._of_held(call, forward, forward.past)
        slots, total = call.key.shape[2], forward.keys.shape[1]
        if slots > total:  # a cache of fixed size has empty slots after the last key
            mask = call.mask[..., :total] if isinstance(call.mask, Tensor) else call.mask
            call = replace(call, key=call.key[:, :, :total], value=call.value[:, :, :total], mask=mask)
        output, weights = self._attend(call, forward)
        if weights is not None and weights.shape[-1] < slots:
            weights = functional.pad(weights, (0, slots - weights.shape[-1]))
        return output, weights

    def _of_held(self, call: AttentionCall, forward: _Forward, past: SinkCache) -> AttentionCall:
        """The call with a mask of the tokens that a cache holds.

        Raises:
            PatchError: flex attention got a mask of the whole text.
        """
        if not past.dropped or call.mask is None:
            return call
        if not isinstance(call.mask, Tensor):
            raise PatchError(
                f"{self.encoding}: the block mask of flex_attention cannot leave out the {past.dropped} "
                f"tokens that this SinkCache dropped; use attn_implementation='sdpa'"
            )
        name = ("held", id(call.mask))
        if name not in forward.tables:  # with the mask, so that no other one gets its id
            forward.tables[name] = call.mask, past.of_mask(call.mask)
        return replace(call, mask=forward.tables[name][1])

    def _attend(self, call: AttentionCall, forward: _Forward) -> tuple[Tensor, Tensor | None]:
        refuse_unknown_documents(call, forward, self.encoding)
        window = attention_window(call.module)
        if self._is_short(window):
            return self._plainly(call, forward)
        if forward.scale is not None:
            scale = forward.on(call.query.device, forward.scale)[:, None, :, None].to(call.query.dtype)
            call = replace(call, query=call.query * scale)
        if forward.is_plain:
            return self._plainly(call, forward)
        if call.query.shape[2] == 1 and not hasattr(call.mask, "mask_mod"):
            output = attend_one(call, forward, self.adapter) if window is None else None
            return self._one_token(call, forward) if output is None else (output, None)
        rows = self._rows(call, forward)
        if rows is not None:
            return self._in_parts(call, forward, rows), None
        return self._by_regions(call, forward)

    def _rotate(self, states: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        sin = -sin if self.adapter.backwards else sin
        return rotate(states, cos, sin, pairs=self.adapter.pairs, rotated=self.adapter.rotated)

    # Texts without changed pairs.

    def _plainly(self, call: AttentionCall, forward: _Forward) -> tuple[Tensor, Tensor | None]:
        low = forward.keys.shape[1] - call.key.shape[2]  # a sliding window has its last keys only
        cos, sin = self._own_rotation(forward, call.query)
        new = call.query.shape[2]
        query = self._rotate(call.query, (cos[:, :, -new:], sin[:, :, -new:]))
        key = self._rotate(call.key, (cos[:, :, low:], sin[:, :, low:]))
        return call.own(query, key, call.value, call.mask)

    def _own_rotation(self, forward: _Forward, like: Tensor) -> Rotation:
        """cos and sin of all keys, with the very values of the model's own rotary module, if it has one."""
        if self._stock is None or like.is_meta or self._stock.inv_freq.is_meta:
            return forward.rotation("key", UNCHANGED, (int(forward.lengths[0, 0]),), like)
        name = ("own rotation", like.dtype, like.device)
        if name not in forward.tables:
            device = self._stock.inv_freq.device
            values = self._stock(like.new_empty(1, device=device), to_device(forward.keys, device))
            if self.adapter.layout == "complex":
                cos, sin = values.real, values.imag
            elif self.adapter.layout == "neighbours":
                cos, sin = (value[..., 0::2] for value in values)
            else:
                cos, sin = values
            pairs = self.shape.dim // 2
            forward.tables[name] = tuple(
                value[:, None, :, :pairs].to(like.device, like.dtype) for value in (cos, sin)
            )
        found: Rotation = forward.tables[name]
        return found

    # One token after a cache.

    def _one_token(self, call: AttentionCall, forward: _Forward) -> tuple[Tensor, Tensor | None]:
        """Attention of one query, which is not rotated, to keys that are rotated by their distance to it."""
        low = forward.keys.shape[1] - call.key.shape[2]
        name = ("one token", low, call.query.dtype, call.query.device)
        if name not in forward.tables:
            forward.tables[name] = self._by_distance(forward, low, call.query)
        rotation, shown = forward.tables[name]
        call = replace(call, key=self._rotate(call.key, rotation))
        if shown is not None:
            call = without_keys(call, shown)
        return call.own(call.query, call.key, call.value, call.mask)

    @staticmethod
    def _by_distance(forward: _Forward, low: int, like: Tensor) -> tuple[Rotation, Tensor | None]:
        """The rotation of each key by its distance, and which keys are seen, `[rows, K]`; None for all."""
        encoding, shape = forward.encoding, forward.shape
        keys = forward.keys[:, low:]
        query = forward.queries.expand(len(keys), -1)
        region = encoding.borders.region(query, keys)
        distance = encoding.distance(shape, query, keys).nan_to_num(0)
        cos, sin = (torch.empty(*keys.shape, shape.dim // 2, dtype=like.dtype) for _ in "cs")
        lengths = forward.lengths.expand(len(keys), -1)
        different = sorted(set(lengths.flatten().tolist()))
        for index, length in itertools.product(range(int(region.max()) + 1), different):
            here = (region == index) & (lengths == length)
            # Many keys share a distance.
            values, which = torch.unique(distance[here], return_inverse=True)
            angles = values[:, None] * forward.table(index, length)
            cos[here] = angles.cos().to(like.dtype)[which]
            sin[here] = -angles.sin().to(like.dtype)[which]
        hidden = region == DROPPED
        cos[hidden], sin[hidden] = 1.0, 0.0
        shown = to_device(~hidden, like.device) if bool(hidden.any()) else None
        tables = (to_device(part[:, None], like.device) for part in (cos, sin))
        return (next(tables), next(tables)), shown

    # Rows of plain text.

    def _rows(self, call: AttentionCall, forward: _Forward) -> list[TextRows] | None:
        """The texts of a call, if all of them can be computed without a mask."""
        implementation = call.implementation
        if not (implementation == "sdpa" or takes_suffix(implementation) or "flash" in implementation):
            return None
        if call.kwargs.get("dropout") or beyond_plain(call.kwargs):
            return None
        if call.key.shape[2] != forward.keys.shape[1] or attention_window(call.module) is not None:
            return None
        rows = text_rows(call, forward)
        past = forward.keys.shape[1] - call.query.shape[2]
        if rows is None or not all(
            can_be_cut(self.encoding.borders, each.lowest, max(0, past - each.start)) for each in rows
        ):
            return None
        return rows

    def _in_parts(self, call: AttentionCall, forward: _Forward, rows: list[TextRows]) -> Tensor:
        output = None
        for each in rows:
            found, begin, end = self._of_rows(call, forward, each)
            if each.rows is None and end - begin == call.query.shape[2]:
                return found.transpose(1, 2).contiguous()
            if output is None:
                output = found.new_zeros(len(call.query), call.query.shape[2], *found.shape[1:4:2])
            which = slice(None) if each.rows is None else list(each.rows)
            output[which, begin:end] = found.transpose(1, 2)
        assert output is not None
        return output

    def _of_rows(self, call: AttentionCall, forward: _Forward, each: TextRows) -> tuple[Tensor, int, int]:
        """The output of rows `[rows, heads, n, value_dim]`, and the queries from begin to end that it has."""
        new = call.query.shape[2]
        past = forward.keys.shape[1] - new
        begin, end = max(0, each.start - past), each.stop - past
        which = slice(None) if each.rows is None else list(each.rows)
        row = 0 if each.rows is None else each.rows[0]

        def turn(states: Tensor, start: int, region: int, length: int, *, of: str, offset: int) -> Tensor:
            first = start + offset
            part = row, first, first + states.shape[2]
            return self._rotate(states, forward.rotation(of, region, (length,), call.query, part))

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
            partial(turn, of="query", offset=begin),
            partial(turn, of="key", offset=each.start),
            [(ahead + start, ahead + stop, int(lengths[start])) for start, stop in itertools.pairwise(cuts)],
            each.lowest,
            call.kwargs["scaling"],
        )
        return attend(text, self.encoding.borders).to(call.value.dtype), begin, end

    # Everything else.

    def _by_regions(self, call: AttentionCall, forward: _Forward) -> tuple[Tensor, Tensor | None]:
        """Attention by the model's own function, with the keys of all regions side by side."""
        if isinstance(self.encoding.borders, Chunks) and sees_later_keys(call, forward):
            raise PatchError(
                f"{self.encoding} counts chunks back from a token, but this input lets tokens attend to "
                f"later ones (an image, a prefix or is_causal=False); use causal attention, or self_extend"
            )
        shown, call = RowsOfMask(call), self._for_masks(call, forward)
        low = forward.keys.shape[1] - call.key.shape[2]
        recompute = torch.is_grad_enabled() and any(
            states.requires_grad for states in (call.query, call.key, call.value)
        )
        outputs, weights = [], []
        for start, stop, lengths in forward.segments():
            regions = self.encoding.regions(self.shape, lengths[0])
            rotations = [
                (forward.rotation("query", index, lengths, call.query),
                 forward.rotation("key", index, lengths, call.query))
                for index in range(len(regions))
            ]  # fmt: skip
            size = rows_of_part(
                len(call.query) * call.query.shape[1], len(regions) * call.key.shape[2],
                device_of(call.query), from_table=False,
            )  # fmt: skip
            for first in range(start, stop, size):
                block = _Block(forward, rotations, low, first, min(first + size, stop))
                compute: Callable[..., tuple[Tensor, Tensor | None]] = partial(
                    self._block, call, shown, block
                )
                if recompute:
                    random = bool(call.kwargs.get("dropout"))
                    compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=random)
                output, weight = compute(call.query, call.key, call.value)
                outputs.append(output)
                if weight is not None:
                    weights.append(weight)
        return torch.cat(outputs, dim=1), torch.cat(weights, dim=2) if weights else None

    def _block(
        self, call: AttentionCall, shown: RowsOfMask, block: _Block, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the queries of a block."""
        region, mask = block.region.to(query.device), shown(block.start, block.stop)
        spans = block.spans()
        count, width = len(spans), query.shape[-1]
        queries, keys, values, masks = [], [], [], []
        for place, (index, first, end) in enumerate(spans):
            of_query, of_key = block.rotations[index]
            rows, columns = slice(block.start, block.stop), slice(block.low + first, block.low + end)
            queries.append(
                self._rotate(query[:, :, rows], (of_query[0][:, :, rows], of_query[1][:, :, rows]))
            )
            rotated = self._rotate(key[:, :, first:end], (of_key[0][:, :, columns], of_key[1][:, :, columns]))
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

    def _for_masks(self, call: AttentionCall, forward: _Forward) -> AttentionCall:
        """The call of a function that takes a mask of queries and keys.

        Raises:
            PatchError: flash attention got packed rows.
        """
        if is_dense(call.implementation):
            return call
        packed = call.kwargs.get("cu_seq_lens_q") is not None or bool((forward.queries.diff() < 0).any())
        if "flash" in call.implementation and packed:
            raise PatchError(
                f"{self.encoding} changes positions within this input, and {call.implementation} cannot cut "
                f"packed rows there; use attn_implementation='sdpa', or one row per document"
            )
        return replace(call, inner=own_function(call.module, "eager"))


@dataclass(frozen=True)
class _Block:
    """Queries `start` to `stop` of a forward, with keys from column `low` on."""

    forward: _Forward
    rotations: list[tuple[Rotation, Rotation]]
    """For each region, the rotation of all queries and of all keys."""
    low: int
    start: int
    stop: int

    @property
    def region(self) -> Tensor:
        """The region of each pair, `[1 or batch, queries, keys]`."""
        forward = self.forward
        query = forward.queries[:, self.start : self.stop, None]
        return forward.encoding.borders.region(query, forward.keys[:, None, self.low :])

    def spans(self) -> list[tuple[int, int, int]]:
        """The regions with pairs: the index, the first key with one, and the key after the last."""
        name = ("spans", self.low, self.start, self.stop)
        if name not in self.forward.tables:
            region = self.region
            found = []
            for index in range(len(self.rotations)):
                columns = (region == index).flatten(0, 1).any(dim=0).nonzero().flatten()
                if len(columns):
                    found.append((index, int(columns[0]), int(columns[-1]) + 1))
            self.forward.tables[name] = found
        spans: list[tuple[int, int, int]] = self.forward.tables[name]
        return spans
