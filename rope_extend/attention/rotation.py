"""Rotation inside attention, for every `RopeEncoding` whose tables depend on the length.

A length-dependent schedule rotates a key by the table of the query that attends to it. So a key cannot be
rotated before it is cached. The rotary module does not rotate, and caches of any class hold unrotated keys.
Queries and keys are rotated here, just before the model's own attention function.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.attention.causal_suffix import without_mask
from rope_extend.attention.forwards import Forward, mark
from rope_extend.attention.functions import AttentionCall, extended_modules
from rope_extend.attention.growing import spare, with_room
from rope_extend.attention.masks import MASK_ROWS, sees_later_keys
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import (
    causal_mask,
    is_dense,
    takes_suffix,
    without_cudnn,
)
from rope_extend.attention.rotated_keys import CHOICE, keep, kept_keys, layer_with
from rope_extend.attention.tracked_cache import RUNNING, is_plain
from rope_extend.attention.two_rows import TwoRows
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.planned_device import device_of
from rope_extend.models.rotary import angles_of
from rope_extend.models.undo import UndoLog

DECAY_LIMIT = 4.0
"""Decay (xPos) is counted from a centre that moves before any factor exceeds `exp` of this."""
POSITIONS = 64
"""Consecutive positions whose cos and sin are computed together, for decoding."""
TABLE_BYTES, GPU_TABLE_BYTES = 2**28, 2**31
"""The largest size of the cos and sin of one forward that is kept for the next layer.

On a GPU, tables come from the host, and a copy from there waits.
"""


@dataclass(frozen=True)
class _Segment:
    """Consecutive queries `start` to `stop` of a forward; in each row, all of them use the same table.

    Attributes:
        lengths: for each row, the length that sets its table; one number if all rows agree.
        centres: for each row, the position from which decay is counted; one number if all rows agree.
    """

    start: int
    stop: int
    lengths: tuple[int, ...]
    centres: tuple[int, ...]


@dataclass
class _Forward(Forward):
    """The positions of the queries and keys of one forward, and the tables that rotate them."""

    encoding: RopeEncoding
    shape: RopeShape
    normalised: bool
    """Whether the model normalises queries and keys after rotating them, so that a factor has no effect."""
    length: int | None = None
    """The length that sets the table, if it is known: of one query without decay."""
    position: int = -1
    """The position of that query."""
    scale: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.encoding.logit_scale(self.shape, self.queries)

    @cached_property
    def segments(self) -> list[_Segment]:
        """The queries in parts; a token that the model itself rotates needs none."""
        return self._cut() if self.encoding.rotates_in_attention else []

    def _cut(self) -> list[_Segment]:
        if self.length is not None:
            return [_Segment(0, 1, (self.length,), (0,))]
        lengths = self.encoding.table_length(self.shape, self.queries + 1)
        decay = self.encoding.decay(self.shape)
        centres = torch.zeros_like(self.queries)
        if decay is not None:
            block = _decay_block(decay)
            centres = self.queries // block * block
        starts = [0]
        if self.queries.shape[1] > 1:
            changes = ((lengths.diff() != 0) | (centres.diff() != 0)).any(dim=0)
            starts += (changes.nonzero().flatten() + 1).tolist()
        stops = [*starts[1:], self.queries.shape[1]]

        def agreed(values: Tensor) -> list[tuple[int, ...]]:
            columns = values[:, starts].T.tolist()
            return [tuple(row if len(set(row)) > 1 else row[:1]) for row in columns]

        parts = zip(starts, stops, agreed(lengths), agreed(centres), strict=True)
        return [_Segment(*part) for part in parts]

    def rotation(
        self, segment: _Segment, like: Tensor, later: bool = False, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(cos, sin)` of the segment's queries, and of the keys from `first` up to its last one.

        If `later`, of the keys up to the very last.

        Each is `[1 or batch, 1, n, dim/2]` in the dtype and on the device of `like`.
        """
        name = (segment.start, later, first, like.dtype, like.device)
        if name in self.tables:
            return self.tables[name]
        past = self.keys.shape[1] - self.queries.shape[1]
        keys = self.on(like.device, self.keys)
        keys = keys[:, first:] if later else keys[:, first : past + segment.stop]
        tables = [
            (
                self.encoding.inv_freq(self.shape, length),
                1.0 if self.normalised else self.encoding.attention_factor(self.shape, length),
            )
            for length in segment.lengths
        ]
        table = torch.stack([inv_freq for inv_freq, _ in tables])[:, None]  # [1 or batch, 1, dim/2]
        factor = to_device(torch.tensor([factor for _, factor in tables]), like.device)[:, None, None]
        angles = angles_of(self.encoding, self.shape, keys, table)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        new = slice(past + segment.start - first, past + segment.stop - first)
        pair_q, pair_k = (cos[:, new], sin[:, new]), (cos, sin)
        decay = self.encoding.decay(self.shape)
        if decay is not None:
            centre = to_device(torch.tensor(segment.centres), like.device)[:, None]
            # No query attends to keys after the block, but their factor must stay finite.
            distance = (keys - centre).clamp(max=_decay_block(decay))[..., None] * to_device(
                decay, like.device, cos.dtype
            )
            pair_q = tuple(part * distance[:, new].exp() for part in pair_q)  # type: ignore[assignment]
            pair_k = tuple(part * (-distance).exp() for part in pair_k)  # type: ignore[assignment]
        rotation = tuple(part[:, None].to(like.dtype) for part in (*pair_q, *pair_k))
        size = sum(part.numel() for part in rotation) * like.element_size()
        limit = TABLE_BYTES if device_of(like).type == "cpu" else GPU_TABLE_BYTES
        if size * len(self.segments) <= limit:
            self.tables[name] = rotation
        return rotation  # type: ignore[return-value]


def _decay_block(decay: Tensor) -> int:
    """The number of positions with the same centre of decay."""
    return max(1, int(DECAY_LIMIT / max(float(-decay.min()), 1e-9)))


class RotationHandler(AttentionHandler):
    """Rotates queries and keys inside attention, for one patch of one model.

    Args:
        encoding: the schedule.
        adapter: the model's family.
        shape: the rotary shape of the model.
        normalised: whether the model normalises queries and keys after rotating them, so that a factor on cos
            and sin has no effect.
    """

    encoding: RopeEncoding
    shape: RopeShape

    def __init__(
        self, encoding: RopeEncoding, adapter: FamilyAdapter, shape: RopeShape, *, normalised: bool
    ) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self._normalised = normalised
        self._latest: tuple[Any, tuple[Tensor, ...]] | None = None  # see `_of_position`
        self._lengths: tuple[int, list[int]] = (0, [])  # see `_table_length`
        self._decays = encoding.decay(shape) is not None
        self._two_rows = False

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Act inside the attention of a decoder; for a schedule with one table per row, only find the caches.

        Raises:
            UnsupportedModelError: this is not possible in the family, or not with the attention
                implementation.
        """
        if self.encoding.effects(self.shape).in_attention:
            super().install(decoder, undo)
            self._two_rows = self._allows_two_rows(decoder)
        else:
            self.watch(decoder, undo)

    def new_forward(self, queries: Tensor, keys: Tensor) -> _Forward:
        """A forward, cut into segments where its tables change."""
        one = self.encoding.rotates_in_attention and not self._decays and queries.numel() == 1
        position = int(queries.item()) if one else -1
        length = self._table_length(position) if one else None
        forward = _Forward(queries, keys, self.encoding, self.shape, self._normalised, length, position)
        if forward.scale is not None and self.share != 1:
            forward.scale = 1 + self.share * (forward.scale - 1)
        return forward

    def _allows_two_rows(self, decoder: Any) -> bool:
        """Whether a decoded token may have cos and sin of two rows."""
        if (
            decoder.config.model_type not in self.adapter.two_rows
            or self._decays
            or self.encoding.start_tokens
        ):
            return False
        modules = extended_modules(self.encoding, decoder, self.adapter)
        return self.encoding.rotates_in_attention and all(map(_is_of_transformers, modules))

    def two_rows(self, forward: _Forward, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin `[1, 2, dim]` of no rotation and of the token, for a step of decoding; else None."""
        past = forward.past
        if not self._two_rows or self.share != 1 or forward.length is None or forward.scale is not None:
            return None
        if past is None or forward.gradients or like.is_meta or not is_plain(past) or "update" in vars(past):
            return None
        if RUNNING not in vars(past) or not vars(past).get(CHOICE, True):
            return None
        if like.dim() != 3 or like.shape[1] != 1 or not self._belongs_to_decoder(forward):
            return None
        if forward.step is None:
            forward.step = TwoRows(past, (forward.length,), partial(self._rotate_keys, forward))
            setattr(past, RUNNING, forward.step)
        cos, sin = self._of_position(forward.position, forward.length, like, rows=2)
        mark((cos, sin), forward)
        return cos, sin

    def _rotate_keys(self, forward: _Forward, key: Tensor) -> Tensor:
        """All keys of a layer, rotated by the table of a forward of one token."""
        *_, cos, sin = forward.rotation(forward.segments[0], key)
        sin = -sin if self.adapter.backwards else sin
        return rotate(key, cos, sin, pairs=self.adapter.pairs, rotated=self.adapter.rotated)

    def _table_length(self, position: int) -> int:
        """The length that sets the table of a query; those of the next few positions are computed with it."""
        first, lengths = self._lengths
        if not first <= position < first + len(lengths):
            first = position // POSITIONS * POSITIONS
            with torch.device("cpu"):
                block = torch.arange(first + 1, first + 1 + POSITIONS)
                lengths = self.encoding.table_length(self.shape, block).tolist()
            self._lengths = first, lengths
        return lengths[position - first]

    def begin_whole_rows(self, position_ids: Tensor) -> Forward:
        """`begin`, for schedules with one table per row: refuse a cache that was filled under other tables.

        Raises:
            PatchError: the table of a row differs from the one that its cached keys and values were computed
                with.
        """
        forward = self.begin(position_ids)
        past = forward.keys.shape[1] - forward.queries.shape[1]
        if past == 0:
            return forward
        before = forward.keys[:, :past].amax(dim=1) + 1
        now = forward.queries.amax(dim=1) + 1
        for old, new in zip(before.tolist(), now.expand_as(before).tolist(), strict=True):
            same = torch.equal(
                self.encoding.inv_freq(self.shape, old), self.encoding.inv_freq(self.shape, new)
            ) and self.encoding.attention_factor(self.shape, old) == self.encoding.attention_factor(
                self.shape, new
            )
            if not same:
                raise PatchError(
                    f"{self.encoding} rotates a whole row by the table of its length, so the {old} cached "
                    f"tokens would have to be computed again at {new}; use use_cache=False, or an encoding "
                    f"with per='query'"
                )
        return forward

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention by the model's own function, with queries and keys rotated here.

        A query rotates the keys after it, if it sees them, by its own table too.

        Raises:
            PatchError: the positions in this call are not known, or the attention implementation or the
                encoding does not support its mask.
        """
        known = self.known_forward(call.kwargs.get("position_ids"))
        if known is not None and known.step is not None and known.step.awaits(call.module.layer_idx):
            if not known.step.gave(call.key) or call.query.shape[2] != 2:
                raise PatchError(
                    f"{self.encoding}: between the cache and the attention of layer {call.module.layer_idx}, "
                    f"the queries or the rotated keys were replaced by other tensors, so it is not known "
                    f"which are rotated; set cache.rope_extend_keep_rotated_keys = False on an empty cache, "
                    f"or pass on the tensors that cache.update returned"
                )
            rotated = call.query.narrow(2, 1, 1)
            return call.own(rotated, call.key, call.value, _part_of_mask(call.mask, 0, 1, call.key.shape[2]))
        if known is not None and known.step is not None and call.query.shape[2] == 2:
            call = replace(call, query=call.query.narrow(2, 0, 1))  # rotated keys of the layer are not kept
        forward = self.forward_of_call(call)
        assert isinstance(forward, _Forward)
        if forward.scale is not None:
            scale = forward.on(call.query.device, forward.scale)[:, None, :, None].to(call.query.dtype)
            call = replace(call, query=call.query * scale)
        if not forward.segments:
            return call.own(call.query, call.key, call.value, call.mask)
        if call.query.shape[2] == 1 and not self._decays:
            layer = layer_with(
                call.query, call.key, call.value, forward.past, getattr(call.module, "layer_idx", None)
            )
            if layer is not None and call.key.shape[2] == forward.keys.shape[1]:
                return self._decode(call, forward)
        later = self._check_later(call, forward)
        if len(forward.segments) == 1:
            return self._by_segments(call, forward, later)
        with without_cudnn():  # each segment has another number of keys
            return self._by_segments(self._for_parts(call, forward), forward, later)

    def _decode(self, call: AttentionCall, forward: _Forward) -> tuple[Tensor, Tensor | None]:
        """Attention of one token. Earlier keys are rotated only if their table has changed."""
        (segment,), past, index = forward.segments, forward.past, call.module.layer_idx
        assert past is not None
        query, key = call.query, call.key
        kept = kept_keys(past, index)
        if kept is not None and kept.continues(segment.lengths, key):
            both = self._rotate_one(torch.cat([query, key[:, :, -1:]], dim=1), forward)
            query, new = both.split_with_sizes([query.shape[1], key.shape[1]], dim=1)
            keys = kept.keys.extended(new)
        else:
            cos, sin, *_ = forward.rotation(segment, query)
            sin = -sin if self.adapter.backwards else sin
            query = rotate(query, cos, sin, pairs=self.adapter.pairs, rotated=self.adapter.rotated)
            keys = with_room(self._rotate_keys(forward, key), spare(key.shape[2]))
        keep(past, index, segment.lengths, keys, key)
        mask = _part_of_mask(call.mask, 0, 1, key.shape[2])
        return call.own(query, keys.view, call.value, mask)

    def _rotate_one(self, states: Tensor, forward: _Forward) -> Tensor:
        """Rotate queries and keys `[batch, heads, 1, head_dim]` at the last position of a forward."""
        name = ("one token", states.dtype, states.device)
        found = forward.tables.get(name)
        if found is None:
            found = forward.tables[name] = self._of_one_token(forward, states)
        cos, sin = found
        if not self._has_halves(states):
            return rotate(states, cos, sin, pairs=self.adapter.pairs, rotated=self.adapter.rotated)
        return rotate_channels(states, cos, sin)

    def _has_halves(self, states: Tensor) -> bool:
        """Whether all channels rotate, and those of a pair are half a head apart."""
        return self.adapter.pairs == "halves" and states.shape[-1] == self.shape.dim

    def _of_one_token(self, forward: _Forward, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at the last position of a forward, for each pair.

        If a head has halves, for each channel; sin is then negative in the first half.
        """
        (segment,) = forward.segments
        if not self._has_halves(like):
            cos, sin, *_ = forward.rotation(segment, like, first=forward.keys.shape[1] - 1)
            return cos, -sin if self.adapter.backwards else sin
        if forward.queries.shape[0] > 1 or self.encoding.start_tokens:
            cos, sin, *_ = forward.rotation(segment, like, first=forward.keys.shape[1] - 1)
            return channels_of(cos, -sin if self.adapter.backwards else sin)
        cos, sin = self._of_position(forward.position, segment.lengths[0], like)
        return cos, sin

    def _of_position(self, position: int, length: int, like: Tensor, rows: int = 1) -> tuple[Tensor, ...]:
        """cos and sin of a position; those of the next few positions are computed with them.

        One row: by channel, `[dim]` each, see `channels_of`. Two rows: `[1, 2, dim]` each, as models take
        them, the first one of no rotation.
        """
        first, latest = position // POSITIONS * POSITIONS, self._latest
        name = (first, length, like.dtype, like.device, rows)
        if latest is None or latest[0] != name:
            with torch.device("cpu"):
                table = self.encoding.inv_freq(self.shape, length)
                factor = 1.0 if self._normalised else self.encoding.attention_factor(self.shape, length)
                factor = float(torch.tensor(factor))  # as `_Forward.rotation` rounds it
                angles = torch.arange(first, first + POSITIONS, dtype=torch.float64)[:, None] * table
                cos, sin = angles.cos() * factor, angles.sin() * factor
                sin = -sin if self.adapter.backwards else sin
                if rows == 1:
                    both = torch.stack(channels_of(cos, sin), dim=1)
                else:
                    each = torch.stack([torch.ones_like(cos), cos, torch.zeros_like(sin), sin], dim=1)
                    both = torch.cat([each, each], dim=-1).view(POSITIONS, 2, 1, 2, -1)
            self._latest = latest = name, to_device(both, like.device, like.dtype).unbind()
        return latest[1][position - first].unbind()  # new tensors, which are marked

    def _by_segments(
        self, call: AttentionCall, forward: _Forward, later: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one segment after the other; of queries to keys after them if `later`."""
        query, key, value, mask = call.query, call.key, call.value, call.mask
        total, new = forward.keys.shape[1], query.shape[2]
        low = max(0, total - key.shape[2])  # a layer with a sliding window has its last keys only
        if mask is None and new > 1 and (new < total or len(forward.segments) > 1):
            call = without_mask(call)
        maskless = takes_suffix(call.implementation)
        rotate_states = partial(rotate, pairs=self.adapter.pairs, rotated=self.adapter.rotated)
        same = not self._decays  # query and key at one position rotate equally
        outputs: list[Tensor] = []
        weights: list[Tensor | None] = []
        for segment in forward.segments:
            # A cache of fixed size has empty slots after the last key; they are cut off as well.
            end = total if later else total - new + segment.stop
            cos_q, sin_q, cos_k, sin_k = forward.rotation(segment, query, later)
            if self.adapter.backwards:
                sin_q, sin_k = -sin_q, -sin_k
            keys, values = key[:, :, : end - low], value[:, :, : end - low]
            keys = rotate_states(keys, cos_k[:, :, low:], sin_k[:, :, low:])
            needs_mask = not maskless and mask is None and end - low > segment.stop - segment.start > 1
            if needs_mask and total == new == key.shape[2] and 2 * segment.start <= segment.stop and same:
                # Plain causal attention of all queries so far, on the fast path without a mask. The results
                # of earlier queries are computed in vain.
                queries = rotate_states(query[:, :, : segment.stop], cos_k, sin_k)
                output, weight = call.own(queries, keys, values, None)
                outputs.append(output[:, segment.start :])
                weights.append(None if weight is None else weight[:, :, segment.start :])
                continue
            queries = rotate_states(query[:, :, segment.start : segment.stop], cos_q, sin_q)
            rows = MASK_ROWS if needs_mask and is_dense(call.implementation) else segment.stop - segment.start
            for start in range(segment.start, segment.stop, rows):
                stop = min(start + rows, segment.stop)
                reach = (total if later else total - new + stop) - low
                if needs_mask and is_dense(call.implementation):
                    part = causal_mask(stop - start, reach, query, call.implementation)
                else:
                    part = _part_of_mask(mask, start, stop, reach)
                output, weight = call.own(
                    queries[:, :, start - segment.start : stop - segment.start],
                    keys[:, :, :reach],
                    values[:, :, :reach],
                    part,
                )
                outputs.append(output)
                weights.append(weight)
        if len(outputs) == 1 and (weights[0] is None or weights[0].shape[-1] == key.shape[2]):
            return outputs[0], weights[0]
        wide = [nn.functional.pad(w, (0, key.shape[2] - w.shape[-1])) for w in weights if w is not None]
        return torch.cat(outputs, dim=1), torch.cat(wide, dim=2) if wide else None

    def _check_later(self, call: AttentionCall, forward: _Forward) -> bool:
        """Whether keys after the last query of a segment are needed.

        Raises:
            PatchError: they are, and the encoding or the attention implementation does not support it.
        """
        decays = self.encoding.decay(self.shape) is not None
        if not (decays or len(forward.segments) > 1) or not sees_later_keys(call, forward):
            return False
        seen = "this input lets tokens attend to later ones (an image, a prefix or is_causal=False)"
        if decays:
            raise PatchError(
                f"{self.encoding}: {seen}, but its factor shrinks with the distance to earlier ones only; "
                f"use causal attention, or an encoding without xpos"
            )
        if not is_dense(call.implementation):
            raise PatchError(
                f"{self.encoding}: the tables change within this input, and {seen}, which "
                f"{call.implementation} cannot compute in parts; use attn_implementation='sdpa'"
            )
        return True

    def _for_parts(self, call: AttentionCall, forward: _Forward) -> AttentionCall:
        """The call, prepared for a function that gets a part of the queries at a time.

        Raises:
            PatchError: the attention implementation cannot compute a part.
        """
        reason = "the tables change within this input"
        if "flex" in call.implementation:
            raise PatchError(
                f"{self.encoding}: {reason}, and the block mask of flex_attention cannot be cut there; "
                f"use attn_implementation='sdpa'"
            )
        if "flash" in call.implementation:
            if call.kwargs.get("cu_seq_lens_q") is not None or bool((forward.queries.diff() < 0).any()):
                raise PatchError(
                    f"{self.encoding}: {reason}, and {call.implementation} cannot cut packed rows there; "
                    f"use attn_implementation='sdpa', or one row per document"
                )
            kwargs = {name: value for name, value in call.kwargs.items() if name != "position_ids"}
            return replace(call, kwargs=kwargs)
        return call


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether an attention module computes as transformers does, with the rotation of its own file.

    A method or a function that a user put in its place may not take two rows.
    """
    rotation = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    places = [getattr(part, "__module__", None) for part in (module.forward, rotation)]
    return all(str(place).startswith("transformers.models.") for place in places)


def _part_of_mask(mask: Any, start: int, stop: int, keys: int) -> Any:
    """The mask of queries `start` to `stop` and of the first `keys` keys, in the form that it has."""
    if isinstance(mask, Tensor):
        if mask.dim() == 4:
            return mask[:, :, start:stop, :keys]
        if mask.dim() == 2:
            return mask[:, :keys]
    return mask


def rotate(states: Tensor, cos: Tensor, sin: Tensor, *, pairs: str, rotated: str) -> Tensor:
    """Rotate `states` `[batch, heads, n, head_dim]` by `cos`, `sin` `[1 or batch, 1, n, dim/2]`."""
    dim, head_dim = 2 * cos.shape[-1], states.shape[-1]
    rotated_part, rest = states, None
    if dim < head_dim:
        first, last = (dim, head_dim - dim) if rotated == "first" else (head_dim - dim, dim)
        left, right = torch.split(states, [first, last], dim=-1)
        rotated_part, rest = (left, right) if rotated == "first" else (right, left)
    if pairs == "halves":
        a, b = rotated_part.chunk(2, dim=-1)
        result = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = rotated_part[..., 0::2], rotated_part[..., 1::2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    if rest is None:
        return result
    return torch.cat((result, rest) if rotated == "first" else (rest, result), dim=-1)


def rotate_channels(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rotate` for heads of two halves, by the cos and sin of each channel, see `channels_of`.

    A step of decoding is as slow as its number of operations: three here, eight in `rotate`.
    """
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, dims=-1), sin)


def channels_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The cos and sin of each channel, `[..., dim]`, from those of each pair, `[..., dim/2]`."""
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
