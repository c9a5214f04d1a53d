"""Attention functions for encodings that act inside attention.

A length-dependent schedule rotates a key by the table of the query that reads it, so the key cannot be
rotated when it is cached. Here the rotary module turns nothing, caches of any class hold unrotated keys, and
one attention function around the model's own (sdpa, eager, flash, flex) rotates queries and keys where they
meet. It needs to know where each cached key stands: a record of positions travels with the cache object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.families import FamilyAdapter, adapter_for
from rope_extend.inspection import kinds_beside_full_attention
from rope_extend.rotary import angles_of
from rope_extend.undo import UndoLog

PREFIX = "rope_extend_"
"""What the name of a wrapped attention implementation begins with: `rope_extend_sdpa`."""
READER = "_rope_extend_reader"
"""The attribute by which a module finds the `PositionReader` of the patch that is active in it."""

BEYOND_PLAIN = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What families hand to their attention function that plain causal attention does not do."""

DECAY_LIMIT = 4.0
"""Decay (xPos) is counted from a centre that moves on before any factor exceeds `exp` of this."""
MASK_ROWS = 512
"""Where causality needs a mask of its own, it is built for at most this many queries at a time."""
TABLE_BYTES = 2**28
"""How much of one forward's cos and sin is kept for the next layer, rather than computed again."""


# ---------------------------------------------------------------------------------------------------------
# The record of positions that travels with a cache


class _Tracked:
    """Mixed into a cache's class: the positions of its keys `[1 or batch, seen]`, in step with its rows."""

    rope_extend_positions: Tensor
    rope_extend_encoding: Encoding

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.rope_extend_positions.shape[0] > 1:
            self.rope_extend_positions = self.rope_extend_positions.repeat_interleave(repeats, dim=0)

    def _take(self, rows: Tensor) -> None:
        if self.rope_extend_positions.shape[0] > 1:
            self.rope_extend_positions = self.rope_extend_positions[
                rows.to(self.rope_extend_positions.device)
            ]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Run as written under `torch.compile`: what it does follows from the values of position ids."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


@cache
def _tracked(cls: Any) -> type:
    return type(cls.__name__, (_Tracked, cls), {"__module__": cls.__module__})


def seen_by(past: Cache | None) -> int:
    """How many tokens a cache holds."""
    return 0 if past is None else int(past.get_seq_length())


# ---------------------------------------------------------------------------------------------------------
# One forward


@dataclass(frozen=True)
class _Segment:
    """Consecutive queries `start` to `stop` of a forward, over which no row changes its table.

    Attributes:
        lengths: the length whose table each row is read by, one number where all rows agree.
        centres: the position from which decay is counted, likewise.
    """

    start: int
    stop: int
    lengths: tuple[int, ...]
    centres: tuple[int, ...]


@dataclass
class Forward:
    """Where the queries and keys of one forward stand, and what was made of it for all layers."""

    queries: Tensor
    """Positions `[1 or batch, T]`."""
    keys: Tensor
    """Positions `[1 or batch, past + T]`."""
    tables: dict[tuple[Any, ...], Any] = field(default_factory=dict, kw_only=True)


@dataclass
class _Forward(Forward):
    """Where the queries and keys of one forward stand, and the tables they are rotated by."""

    encoding: RopeEncoding
    shape: RopeShape
    normalised: bool
    """Whether what is rotated is then normalised in the stock model, where a factor has no effect."""
    segments: list[_Segment] = field(init=False)
    scale: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.encoding.logit_scale(self.shape, self.queries)
        self.segments = self._cut() if self.encoding.rotates_in_attention else []

    def _cut(self) -> list[_Segment]:
        lengths = self.encoding.table_length(self.shape, self.queries + 1)
        centres = torch.zeros_like(self.queries)
        decay = self.encoding.decay(self.shape)
        if decay is not None:
            block = _decay_block(decay)
            centres = self.queries // block * block
        changes = ((lengths.diff() != 0) | (centres.diff() != 0)).any(dim=0)
        starts = [0, *(changes.nonzero().flatten() + 1).tolist()]
        stops = [*starts[1:], self.queries.shape[1]]

        def agreed(values: Tensor) -> list[tuple[int, ...]]:
            columns = values[:, starts].T.tolist()
            return [tuple(row if len(set(row)) > 1 else row[:1]) for row in columns]

        parts = zip(starts, stops, agreed(lengths), agreed(centres), strict=True)
        return [_Segment(*part) for part in parts]

    def rotation(self, segment: _Segment, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(cos, sin)` of the segment's queries and `(cos, sin)` of all keys up to its last one.

        Each `[1 or batch, 1, n, dim/2]` in the dtype and on the device of `like`.
        """
        wanted = (segment.start, like.dtype, like.device)
        if wanted in self.tables:
            return self.tables[wanted]
        past = self.keys.shape[1] - self.queries.shape[1]
        keys = self.keys[:, : past + segment.stop].to(like.device)
        tables = [
            (
                self.encoding.inv_freq(self.shape, length),
                1.0 if self.normalised else self.encoding.attention_factor(self.shape, length),
            )
            for length in segment.lengths
        ]
        table = torch.stack([inv_freq for inv_freq, _ in tables])[:, None]  # [1 or batch, 1, dim/2]
        factor = torch.tensor([factor for _, factor in tables], device=like.device)[:, None, None]
        angles = angles_of(self.encoding, self.shape, keys, table)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        first = past + segment.start
        pair_q, pair_k = (cos[:, first:], sin[:, first:]), (cos, sin)
        decay = self.encoding.decay(self.shape)
        if decay is not None:
            centre = torch.tensor(segment.centres, device=like.device)[:, None]
            # Keys after the block are never attended to, but what multiplies them must stay finite.
            away = (keys - centre).clamp(max=_decay_block(decay))[..., None] * decay.to(
                like.device, cos.dtype
            )
            pair_q = tuple(part * away[:, first:].exp() for part in pair_q)  # type: ignore[assignment]
            pair_k = tuple(part * (-away).exp() for part in pair_k)  # type: ignore[assignment]
        made = tuple(part[:, None].to(like.dtype) for part in (*pair_q, *pair_k))
        size = sum(part.numel() for part in made) * like.element_size()
        if size * len(self.segments) <= TABLE_BYTES:
            self.tables[wanted] = made
        return made  # type: ignore[return-value]


def _decay_block(decay: Tensor) -> int:
    """How many positions share a centre of decay."""
    return max(1, int(DECAY_LIMIT / max(float(-decay.min()), 1e-9)))


class PositionReader:
    """Knows where the queries and keys of each forward stand, for one patch of one model.

    Its two hooks on the decoder learn which cache a forward reads and leave the positions with it; the
    rotary module calls `begin` with the positions of the new tokens. What acts inside attention derives
    from it and is asked by the attention function, in `attend`.
    """

    encoding: Encoding
    _forward: Forward | None

    def __init__(self, encoding: Encoding, adapter: FamilyAdapter) -> None:
        self.encoding = encoding
        self.adapter = adapter
        self.share = 1.0  # of what is read by the encoding while a model is annealed to it, see `Patch.mix`
        self._configs: list[tuple[Any, str]] = []
        self._past: Cache | None = None
        self._given: Tensor | None = None
        self._forward = None

    def new_forward(self, queries: Tensor, keys: Tensor) -> Forward:
        """A forward with queries at positions `[1 or batch, T]`, and keys at `[1 or batch, past + T]`."""
        return Forward(queries, keys)

    def attend(
        self,
        inner: Callable[..., tuple[Tensor, Tensor | None]],
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, by the model's own function `inner` or instead of it.

        `query` `[batch, heads, T, head_dim]`; `key`, `value` `[batch, kv_heads, K, head_dim]` as cached.
        """
        return inner(module, query, key, value, attention_mask, **kwargs)

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Put this reader into a decoder, in place of any other.

        Raises:
            UnsupportedModelError: the family or its attention implementation cannot be acted on exactly.
        """
        readers = attention_modules(decoder)
        if self.adapter.unreachable or not readers:
            reason = self.adapter.unreachable or "its attention does not go through transformers' interface"
            raise UnsupportedModelError(
                f"{self.encoding} acts inside attention, which cannot be patched in "
                f"{decoder.config.model_type}: {reason}. A static schedule works, such as yarn or linear"
            )
        self._configs = []
        for config in {id(module.config): module.config for module in (decoder, *readers)}.values():
            name = wrapped_implementation(config._attn_implementation)
            undo.set(config, "_attn_implementation_internal", name)
            self._configs.append((config, name))
        self.watch(decoder, undo)
        for module in readers:
            undo.set(module, READER, self)

    def watch(self, decoder: nn.Module, undo: UndoLog) -> None:
        """Learn which cache each forward of a decoder reads."""
        undo.set(decoder, READER, self)
        decoder.register_forward_pre_hook(self.before, with_kwargs=True)
        decoder.register_forward_hook(self.after, with_kwargs=True)

    def leave(self, decoder: nn.Module) -> None:
        """Take the hooks off a decoder."""
        for hooks, flags in (
            (decoder._forward_pre_hooks, decoder._forward_pre_hooks_with_kwargs),
            (decoder._forward_hooks, decoder._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
                flags.pop(key, None)

    # -- what the decoder tells

    @never_compiled
    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder: find the cache."""
        if getattr(decoder, READER, None) is self:
            self._forward = None
            self._past = next((v for v in (*args, *kwargs.values()) if isinstance(v, Cache)), None)

    @never_compiled
    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder: leave the positions of all keys with the cache."""
        if getattr(decoder, READER, None) is not self or self._forward is None:
            return
        values = output if isinstance(output, tuple) else output.values()
        past = self._past or next((value for value in values if isinstance(value, Cache)), None)
        if past is not None:
            if not isinstance(past, _Tracked):
                cls: Any = type(past)
                past.__class__ = _tracked(cls)
            assert isinstance(past, _Tracked)
            past.rope_extend_positions = self._forward.keys
            past.rope_extend_encoding = self.encoding
            self.keep(past)
        self._past = None
        self._forward.tables.clear()

    def keep(self, past: Cache) -> None:
        """Leave with a cache what else the next forward needs, at the end of the present one."""

    @never_compiled
    def begin(self, position_ids: Tensor) -> None:
        """Called by the rotary module with the positions `[batch, T]` of a forward's tokens.

        Raises:
            PatchError: the attention implementation was changed since, or the cache was filled otherwise.
        """
        if position_ids is self._given and self._forward is not None:
            return  # several rotary modules are told of one forward
        for config, name in self._configs:
            if config._attn_implementation != name:
                raise PatchError(
                    f"the attention implementation became {config._attn_implementation!r} after "
                    f"{self.encoding} was patched in, which needs {name!r}: remove the patch, choose the "
                    f"implementation, and patch again"
                )
        queries = _rows(self._with_values(position_ids))
        past = self._positions_of_past(queries)
        rows = max(past.shape[0], queries.shape[0])
        keys = torch.cat([past.expand(rows, -1), queries.expand(rows, -1)], dim=1)
        self._given, self._forward = position_ids, self.new_forward(queries, keys)

    def _with_values(self, position_ids: Tensor) -> Tensor:
        """On the meta device, where what a text takes is rehearsed: that it goes on where it was."""
        if not position_ids.is_meta:
            return position_ids
        seen = seen_by(self._past)
        with torch.device("cpu"):
            return torch.arange(seen, seen + position_ids.shape[-1])[None]

    def _positions_of_past(self, queries: Tensor) -> Tensor:
        seen = seen_by(self._past)
        if seen == 0:
            return queries[:, :0]
        if not isinstance(self._past, _Tracked) or self._past.rope_extend_positions.shape[1] < seen:
            raise PatchError(
                f"{self.encoding} cannot read this {type(self._past).__name__}: its {seen} tokens were "
                f"cached without it, so their keys are already rotated; start from an empty cache"
            )
        if self._past.rope_extend_encoding != self.encoding:
            raise PatchError(
                f"{self.encoding} cannot read this {type(self._past).__name__}: it was filled under "
                f"{self._past.rope_extend_encoding}; start from an empty cache"
            )
        positions = self._past.rope_extend_positions[:, :seen].to(queries.device)  # shorter after a crop
        if 1 < positions.shape[0] != queries.shape[0] > 1:
            raise PatchError(
                f"{self.encoding}: the cache holds {positions.shape[0]} rows and the input "
                f"{queries.shape[0]}; give as many rows as were cached"
            )
        return positions

    def refuse_changed_rows(self, position_ids: Tensor) -> None:
        """Learn the positions, and refuse to go on from a cache that they do not fit."""
        self.begin(position_ids)

    def forward_of(self, position_ids: Tensor | None) -> Forward:
        """The present forward, or for gradient checkpointing, which runs layers again, the one it was."""
        assert self._forward is not None
        if position_ids is None or position_ids is self._given:
            return self._forward
        queries = _rows(position_ids)
        if not torch.equal(queries, self._forward.queries):
            self._given, self._forward = position_ids, self.new_forward(queries, queries)
        return self._forward

    def acts_on(self, module: nn.Module) -> bool:
        """Whether an attention module rotates by the tables that were replaced."""
        return self.adapter.rotates is None or self.adapter.rotates(module)


class AttentionReader(PositionReader):
    """Rotates queries and keys inside attention, for one patch of one model."""

    encoding: RopeEncoding
    _forward: _Forward | None

    def __init__(self, encoding: RopeEncoding, shape: RopeShape, adapter: FamilyAdapter) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self._normalised = False

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Put this reader into a decoder, in place of any other.

        Raises:
            UnsupportedModelError: the family or its attention implementation cannot be acted on exactly.
        """
        super().install(decoder, undo)
        if self.adapter.normalises is not None:
            self._normalised = any(map(self.adapter.normalises, attention_modules(decoder)))

    def new_forward(self, queries: Tensor, keys: Tensor) -> _Forward:
        """A forward, cut where its tables change."""
        forward = _Forward(queries, keys, self.encoding, self.shape, self._normalised)
        if forward.scale is not None and self.share != 1:
            forward.scale = 1 + self.share * (forward.scale - 1)
        return forward

    def refuse_changed_rows(self, position_ids: Tensor) -> None:
        """For schedules per row: refuse to go on from a cache that was filled under other tables.

        Raises:
            PatchError: a row's table now differs from the one its cached keys and values were computed by.
        """
        self.begin(position_ids)
        assert self._forward is not None
        past = self._forward.keys.shape[1] - self._forward.queries.shape[1]
        if past == 0:
            return
        before = self._forward.keys[:, :past].amax(dim=1) + 1
        now = self._forward.queries.amax(dim=1) + 1
        for old, new in zip(before.tolist(), now.expand_as(before).tolist(), strict=True):
            same = torch.equal(
                self.encoding.inv_freq(self.shape, old), self.encoding.inv_freq(self.shape, new)
            ) and self.encoding.attention_factor(self.shape, old) == self.encoding.attention_factor(
                self.shape, new
            )
            if not same:
                raise PatchError(
                    f"{self.encoding} rotates a whole row by the table of its length, so the {old} cached "
                    f"tokens would have to be computed again at {new}; use_cache=False does that, and "
                    f"per='query' needs no such thing"
                )

    @never_compiled
    def attend(
        self,
        inner: Callable[..., tuple[Tensor, Tensor | None]],
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the model's own function `inner`, with queries and keys rotated here.

        `query` `[batch, heads, T, head_dim]`; `key`, `value` `[batch, kv_heads, K, head_dim]` as cached.
        """
        if kwargs.get("cache") is not None:
            raise PatchError(
                f"{self.encoding} cannot read a paged cache (continuous batching); use generate()"
            )
        forward = self.forward_of(kwargs.get("position_ids"))
        assert isinstance(forward, _Forward)
        if forward.scale is not None:
            query = query * forward.scale[:, None, :, None].to(query.device, query.dtype)
        if not forward.segments:
            return inner(module, query, key, value, attention_mask, **kwargs)
        total, new = forward.keys.shape[1], query.shape[2]
        if forward.queries.shape[1] != new or key.shape[2] < new:
            raise PatchError(
                f"{type(module).__name__} reads {new} queries and {key.shape[2]} keys, and the rotary module "
                f"was told of {forward.queries.shape[1]} positions: {self.encoding} cannot place them"
            )
        if len(forward.segments) > 1:
            kwargs = self._for_parts(implementation, attention_mask, forward, kwargs)
        low = max(0, total - key.shape[2])  # a layer with a sliding window hands over its last keys only
        turn = partial(rotate, pairs=self.adapter.pairs, rotated=self.adapter.rotated)
        same = self.encoding.decay(self.shape) is None  # a query and a key at one place turn alike
        outputs: list[Tensor] = []
        weights: list[Tensor | None] = []
        for segment in forward.segments:
            # A cache of fixed size hands over empty slots behind the last key; they are cut off as well.
            end = total - new + segment.stop
            cos_q, sin_q, cos_k, sin_k = forward.rotation(segment, query)
            if self.adapter.backwards:
                sin_q, sin_k = -sin_q, -sin_k
            keys, values = key[:, :, : end - low], value[:, :, : end - low]
            keys = turn(keys, cos_k[:, :, low:], sin_k[:, :, low:])
            needs_mask = attention_mask is None and end - low > segment.stop - segment.start > 1
            if needs_mask and total == new == key.shape[2] and 2 * segment.start <= segment.stop and same:
                # Plain causal attention of all queries so far, on the fast path and without a mask, for the
                # price of the earlier ones, whose results are dropped.
                queries = turn(query[:, :, : segment.stop], cos_k, sin_k)
                output, weight = inner(module, queries, keys, values, None, **kwargs)
                outputs.append(output[:, segment.start :])
                weights.append(None if weight is None else weight[:, :, segment.start :])
                continue
            queries = turn(query[:, :, segment.start : segment.stop], cos_q, sin_q)
            rows = MASK_ROWS if needs_mask and is_dense(implementation) else segment.stop - segment.start
            for start in range(segment.start, segment.stop, rows):
                stop = min(start + rows, segment.stop)
                reach = total - new + stop - low
                if needs_mask and is_dense(implementation):
                    mask = causal_mask(stop - start, reach, query, implementation)
                else:
                    mask = _part_of_mask(attention_mask, start, stop, reach)
                output, weight = inner(
                    module,
                    queries[:, :, start - segment.start : stop - segment.start],
                    keys[:, :, :reach],
                    values[:, :, :reach],
                    mask,
                    **kwargs,
                )
                outputs.append(output)
                weights.append(weight)
        if len(outputs) == 1 and (weights[0] is None or weights[0].shape[-1] == key.shape[2]):
            return outputs[0], weights[0]
        wide = [nn.functional.pad(w, (0, key.shape[2] - w.shape[-1])) for w in weights if w is not None]
        return torch.cat(outputs, dim=1), torch.cat(wide, dim=2) if wide else None

    def _for_parts(
        self, implementation: str, mask: Any, forward: _Forward, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """What the inner function is given where it is called with a part of the queries at a time.

        Raises:
            PatchError: it cannot work on a part.
        """
        switch = "the tables change within this input"
        if "flex" in implementation:
            raise PatchError(
                f"{self.encoding}: {switch}, and the block mask of flex_attention cannot be cut there; "
                f"use attn_implementation='sdpa'"
            )
        if "flash" in implementation:
            if kwargs.get("cu_seq_lens_q") is not None or bool((forward.queries.diff() < 0).any()):
                raise PatchError(
                    f"{self.encoding}: {switch}, and {implementation} cannot cut packed rows there; "
                    f"use attn_implementation='sdpa', or one row per document"
                )
            return {name: value for name, value in kwargs.items() if name != "position_ids"}
        return kwargs


def _rows(position_ids: Tensor) -> Tensor:
    """Positions as `[1 or batch, T]` int64: one row where all agree, one axis where sections agree."""
    if position_ids.dim() == 3:
        if not bool((position_ids == position_ids[:1]).all()):
            raise PatchError(
                "positions that differ between sections (images, video) have no one length to choose tables "
                "by; length-dependent encodings read text only"
            )
        position_ids = position_ids[0]
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    rows = position_ids.to(torch.int64)
    return rows[:1] if rows.shape[0] > 1 and bool((rows == rows[:1]).all()) else rows


def is_dense(implementation: str) -> bool:
    """Whether an implementation takes a mask over queries and keys, where flash takes a causal flag."""
    return "flash" not in implementation and "flex" not in implementation


def causal_mask(queries: int, keys: int, like: Tensor, implementation: str) -> Tensor:
    """`[1, 1, queries, keys]`: the queries are the last of the keys' positions."""
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
    if implementation == "sdpa":
        return allowed[None, None]
    return torch.zeros(1, 1, queries, keys, dtype=like.dtype, device=like.device).masked_fill_(
        ~allowed, torch.finfo(like.dtype).min
    )


def _part_of_mask(mask: Any, start: int, stop: int, keys: int) -> Any:
    """The mask's rows of some queries and columns of the first `keys` keys, in whatever form it has."""
    if isinstance(mask, Tensor):
        if mask.dim() == 4:
            return mask[:, :, start:stop, :keys]
        if mask.dim() == 2:
            return mask[:, :keys]
    return mask


def rotate(states: Tensor, cos: Tensor, sin: Tensor, *, pairs: str, rotated: str) -> Tensor:
    """Rotate `states` `[batch, heads, n, head_dim]` by `cos`, `sin` `[1 or batch, 1, n, dim/2]`."""
    dim, head_dim = 2 * cos.shape[-1], states.shape[-1]
    turning, rest = states, None
    if dim < head_dim:
        first, last = (dim, head_dim - dim) if rotated == "first" else (head_dim - dim, dim)
        one, other = torch.split(states, [first, last], dim=-1)
        turning, rest = (one, other) if rotated == "first" else (other, one)
    if pairs == "halves":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    if rest is None:
        return turned
    return torch.cat((turned, rest) if rotated == "first" else (rest, turned), dim=-1)


# ---------------------------------------------------------------------------------------------------------
# The attention functions


def own_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The family's own function for an attention implementation."""
    home = sys.modules[type(module).__module__]
    interface = getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    return interface.get_interface(implementation, getattr(home, "eager_attention_forward", None))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    implementation: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls under the name `rope_extend_<implementation>`."""
    inner = own_function(module, implementation)
    reader: PositionReader | None = getattr(module, READER, None)
    if reader is None or reader.share == 0 or not reader.acts_on(module):
        return inner(module, query, key, value, attention_mask, **kwargs)
    return reader.attend(inner, implementation, module, query, key, value, attention_mask, **kwargs)


def attention_modules(decoder: nn.Module) -> list[Any]:
    """The attention modules of a decoder: those that know their layer and how to scale their logits."""
    return [
        module
        for module in decoder.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling") and hasattr(module, "config")
    ]


def beyond_plain_sdpa(lm: Any) -> str | None:
    """Why a model's attention is not plain causal attention over all tokens by sdpa; None if it is.

    What takes the place of such attention with `is_causal` alone would lose all that a family does beyond.

    Args:
        lm: a causal language model of transformers; one without weights will do.
    """
    config = lm.config.get_text_config()
    implementation = config._attn_implementation
    modules = attention_modules(lm.base_model)
    unreachable = adapter_for(lm.config.model_type).unreachable
    if unreachable or not modules:
        return unreachable or "its attention does not go through transformers' interface"
    if kinds := kinds_beside_full_attention(config):
        return f"it has layers of kind {', '.join(sorted(kinds))}, and not full attention alone"
    if getattr(config, "attn_logit_softcapping", None) or any(hasattr(m, "sinks") for m in modules):
        return "its attention does more than a softmax over the tokens (a soft cap, or sinks)"
    if implementation != "sdpa":
        return f"attn_implementation is {implementation!r}; load the model with 'sdpa'"
    return None


def remove_readers(decoder: nn.Module, undo: UndoLog) -> None:
    """Let a decoder's own attention functions act again, and whatever a reader acted on."""
    for module in decoder.modules():
        if getattr(module, READER, None) is not None:
            undo.set(module, READER, None)
            name = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
            if name.startswith(PREFIX):
                undo.set(module.config, "_attn_implementation_internal", name.removeprefix(PREFIX))


def wrapped_implementation(implementation: str) -> str:
    """The name under which an attention implementation rotates its queries and keys; registers it.

    Raises:
        UnsupportedModelError: transformers has no mask for the implementation, so it would run without.
    """
    implementation = implementation.removeprefix(PREFIX)
    name = PREFIX + implementation
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} has no mask function in transformers; encodings "
            f"that act inside attention work with {', '.join(sorted(ALL_MASK_ATTENTION_FUNCTIONS))}"
        )
    AttentionInterface.register(name, partial(_attention, implementation=implementation))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name
