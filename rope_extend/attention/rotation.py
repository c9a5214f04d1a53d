"""Rotation inside attention, for every `RopeEncoding` whose tables depend on the length.

A length-dependent schedule rotates a key by the table of the query that attends to it. The model rotates
queries and keys as it always does, and caches hold such keys. Where a query has another table, it and its
keys are turned on by the difference of the two tables, just before the model's own attention function:
rotations add. Within the trained window nothing is done at all.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from rope_extend.attention.causal_suffix import without_mask
from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.masks import MASK_ROWS, rows_of_mask, sees_later_keys
from rope_extend.attention.positions import AttentionHandler
from rope_extend.attention.registry import takes_suffix, without_cudnn
from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.encodings.core.transfers import to_device
from rope_extend.errors import PatchError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.rotary import angles_of, float64_device

DECAY_LIMIT = 4.0
"""Decay (xPos) is counted from a centre that moves before any factor exceeds `exp` of this."""


@dataclass(frozen=True)
class _Segment:
    """Consecutive queries `start` to `stop` of a forward; in each row, all of them use the same table.

    Attributes:
        lengths: for each row, the length that sets its table; one number if all rows agree.
        centres: for each row, the position from which decay is counted; one number if all rows agree.
        turns: whether a row has another table than the model's own.
    """

    start: int
    stop: int
    lengths: tuple[int, ...]
    centres: tuple[int, ...]
    turns: bool


class _Forward(Forward):
    """The positions of the queries of one forward, and the tables by which they and their keys are turned.

    Args:
        queries: positions `[1 or batch, T]`.
        handler: the handler of the patch.
    """

    def __init__(self, queries: Tensor, handler: RotationHandler) -> None:
        super().__init__(queries)
        self.encoding, self.shape, self.normalised = handler.encoding, handler.shape, handler.normalised
        self.rotary = handler.rotary
        self.scale = self.encoding.logit_scale(self.shape, queries)

    @cached_property
    def segments(self) -> list[_Segment]:
        """The queries in parts; a model that rotates by one table needs none."""
        return self._cut() if self.encoding.rotates_in_attention else []

    def _cut(self) -> list[_Segment]:
        lengths = self.encoding.table_length(self.shape, self.queries + 1)
        decay = self.encoding.decay(self.shape)
        centres = torch.zeros_like(self.queries)
        if decay is not None:
            block = _decay_block(decay)
            centres = self.queries // block * block
        found = []
        for start, stop, (tables, of_rows) in self.cut(lengths, centres):
            turns = decay is not None or any(map(self._turns, tables))
            found.append(_Segment(start, stop, tables, of_rows, turns))
        return found

    def _turns(self, length: int) -> bool:
        table, factor = self.table(length)
        return factor != 1 or not torch.equal(table, self.shape.inv_freq())

    def table(self, length: int) -> tuple[Tensor, float]:
        """The frequencies `[dim/2]` for a length, and the factor on cos and sin."""
        factor = 1.0 if self.normalised else self.encoding.attention_factor(self.shape, length)
        return self.encoding.inv_freq(self.shape, length), factor

    def turn(self, of: str, segment: _Segment, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """`(cos, sin)` that turn states from the model's own table to that of a segment.

        Args:
            of: `query` or `key`, which decay treats differently.
            segment: the queries.
            positions: where the states are, `[1 or batch, n]`.
            like: a tensor of the device of the states.

        Returns:
            `[1 or batch, 1, n, dim/2]` each, float32, or float64 for states in float64.
        """
        name = ("turn", of, segment.start, like.dtype, like.device)
        return self.once(*name, of=positions, compute=partial(self._turn, of, segment, positions, like))

    def _turn(self, of: str, segment: _Segment, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """As `turn`."""
        device = float64_device(like.device)
        at = to_device(positions, device)
        tables = [self.table(length) for length in segment.lengths]
        table = torch.stack([inv_freq for inv_freq, _ in tables])[:, None]  # [1 or batch, 1, dim/2]
        factor = to_device(torch.tensor([each for _, each in tables], dtype=torch.float64), device)
        angles = angles_of(self.encoding, self.shape, at, table) - self.rotary.plain_angles(at)
        turns = torch.tensor([self._turns(length) for length in segment.lengths], dtype=torch.float64)
        angles = (
            angles * to_device(turns, device)[:, None, None]
        )  # a row within the trained window stays as it is
        size = factor[:, None, None].expand(-1, 1, angles.shape[-1])
        if (decay := self.encoding.decay(self.shape)) is not None:
            centre = to_device(torch.tensor(segment.centres), device)[:, None]
            # No query attends to keys after the block, but their factor must stay finite.
            distance = (at - centre).clamp(max=_decay_block(decay))[..., None]
            distance = distance * to_device(decay, device, torch.float64)
            size = size * (distance if of == "query" else -distance).exp()
        cos, sin = (
            (each * size)[:, None].to(like.device, _wide(like)) for each in (angles.cos(), angles.sin())
        )
        return cos, sin


def _wide(states: Tensor) -> torch.dtype:
    return torch.promote_types(states.dtype, torch.float32)


def _decay_block(decay: Tensor) -> int:
    """The number of positions with the same centre of decay."""
    return max(1, int(DECAY_LIMIT / max(float(-decay.min()), 1e-9)))


class RotationHandler(AttentionHandler):
    """Turns queries and keys inside attention, for one patch of one model."""

    encoding: RopeEncoding
    shape: RopeShape

    def new_forward(self, queries: Tensor) -> _Forward:
        """A forward, cut into segments where its tables change."""
        return _Forward(queries, self)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention by the model's own function, with queries and keys turned here.

        A query turns the keys after it, if it sees them, by its own table too.

        Raises:
            PatchError: the positions in this call are not known, or the encoding does not support its mask.
        """
        forward = self.forward_of_call(call)
        assert isinstance(forward, _Forward)
        if forward.scale is not None:
            scale = forward.on(call.query.device, forward.scale)[:, None, :, None].to(call.query.dtype)
            call = replace(call, query=call.query * scale)
        segments = forward.segments
        if not any(segment.turns for segment in segments):
            return call.own(call.query, call.key, call.value, call.mask)
        keys = self.keys_of_call(call, forward)
        call = call.of_first_keys(keys.shape[1])
        later = self._check_later(call, forward)
        with without_cudnn() if len(segments) > 1 else nullcontext():  # each has another number of keys
            return self._by_segments(call, forward, keys, later=later)

    def _by_segments(
        self, call: AttentionCall, forward: _Forward, positions: Tensor, *, later: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of one segment after the other; of queries to keys after them if `later`."""
        query, key, value, mask = call.query, call.key, call.value, call.mask
        total, new = key.shape[2], query.shape[2]
        if mask is None and new > 1 and (new < total or len(forward.segments) > 1):
            call = without_mask(call)
        maskless = takes_suffix(call.implementation)
        decays = self.encoding.decay(self.shape) is not None
        square = mask is None and not maskless and new == total and not decays
        outputs: list[Tensor] = []
        weights: list[Tensor | None] = []
        for segment in forward.segments:
            end, count = total if later else total - new + segment.stop, segment.stop - segment.start
            makes_mask = not maskless and mask is None and end > count > 1
            whole = makes_mask and square and 2 * segment.start <= segment.stop
            start = 0 if whole else segment.start
            keys, queries = key[:, :, :end], query[:, :, start : segment.stop]
            if segment.turns:
                cos, sin = forward.turn("key", segment, positions, key)
                keys = turned(keys, (cos[:, :, :end], sin[:, :, :end]), self.adapter)
                if decays:
                    cos, sin = forward.turn("query", segment, positions, query)
                own = slice(total - new + start, total - new + segment.stop)
                queries = turned(queries, (cos[:, :, own], sin[:, :, own]), self.adapter)
            if whole:
                # Plain causal attention of all queries so far, on the fast path without a mask. The results
                # of earlier queries are computed in vain.
                output, weight = call.own(queries, keys, value[:, :, :end], None)
                outputs.append(output[:, segment.start :])
                weights.append(None if weight is None else weight[:, :, segment.start :])
                continue
            for first in range(0, count, MASK_ROWS if makes_mask else count):
                start, stop = segment.start + first, min(segment.start + first + MASK_ROWS, segment.stop)
                stop = stop if makes_mask else segment.stop
                reach = total if later else total - new + stop
                masked = makes_mask or mask is not None
                part = rows_of_mask(call, start, stop)[..., :reach] if masked else None
                own_queries = queries[:, :, first : stop - segment.start]
                output, weight = call.own(own_queries, keys[:, :, :reach], value[:, :, :reach], part)
                outputs.append(output)
                weights.append(weight)
        if len(outputs) == 1 and (weights[0] is None or weights[0].shape[-1] == total):
            return outputs[0], weights[0]
        wide = [nn.functional.pad(w, (0, total - w.shape[-1])) for w in weights if w is not None]
        return torch.cat(outputs, dim=1), torch.cat(wide, dim=2) if wide else None

    def _check_later(self, call: AttentionCall, forward: _Forward) -> bool:
        """Whether keys after the last query of a segment are needed.

        Raises:
            PatchError: they are, and the encoding does not support it.
        """
        decays = self.encoding.decay(self.shape) is not None
        if not (decays or len(forward.segments) > 1) or not sees_later_keys(call, forward, call.key.shape[2]):
            return False
        if decays:
            raise PatchError(
                f"{self.encoding}: this input lets tokens attend to later ones (an image, a prefix or "
                f"is_causal=False), but its factor shrinks with the distance to earlier ones only; use "
                f"causal attention, or an encoding without xpos"
            )
        return True


def turned(states: Tensor, cos_sin: tuple[Tensor, Tensor], adapter: FamilyAdapter) -> Tensor:
    """States `[batch, heads, n, head_dim]`, turned by `[1 or batch, 1, n, dim/2]` and rounded once."""
    cos, sin = cos_sin
    sin = -sin if adapter.backwards else sin
    wide = states.to(cos.dtype)
    half = cos.shape[-1]
    if torch.is_grad_enabled() or adapter.pairs != "halves" or states.shape[-1] != 2 * half:
        return rotate(wide, cos, sin, pairs=adapter.pairs, rotated=adapter.rotated).to(states.dtype)
    result = torch.empty_like(wide)  # each token turns all keys: half the time of `rotate`
    first, last = wide[..., :half], wide[..., half:]
    torch.mul(first, cos, out=result[..., :half]).addcmul_(last, sin, value=-1)
    torch.mul(last, cos, out=result[..., half:]).addcmul_(first, sin)
    return result.to(states.dtype)


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
        # The same operations as in `turned`, so that both round alike.
        result = torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1)
    else:
        a, b = rotated_part[..., 0::2], rotated_part[..., 1::2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    if rest is None:
        return result
    return torch.cat((result, rest) if rotated == "first" else (rest, result), dim=-1)
