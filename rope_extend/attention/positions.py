"""The positions of the queries and keys of a forward, for everything that acts inside attention.

A cache holds keys without rotation and without positions. So their positions travel with the cache object:

- the rotary module gives a handler the positions of the new tokens;
- the cache that a forward uses has the positions of the earlier tokens;
- at the end of the forward, the cache gets the positions of all tokens.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from rope_extend.attention.functions import (
    HANDLER,
    AttentionCall,
    add_handler,
    extended_modules,
    handled_implementation,
)
from rope_extend.attention.registry import never_compiled
from rope_extend.encodings import Encoding
from rope_extend.errors import PatchError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.parameters import LearnedParameters
from rope_extend.models.rotary import InitialRotation
from rope_extend.models.undo import UndoLog


class _Tracked:
    """Mixed into a cache's class: the positions of its keys `[1 or batch, seen]`, reordered with its rows."""

    rope_extend_positions: Tensor
    rope_extend_encoding: Encoding

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.rope_extend_positions.shape[0] > 1:
            self.rope_extend_positions = self.rope_extend_positions.repeat_interleave(repeats, dim=0)

    def _select_rows(self, rows: Tensor) -> None:
        if self.rope_extend_positions.shape[0] > 1:
            self.rope_extend_positions = self.rope_extend_positions[
                rows.to(self.rope_extend_positions.device)
            ]


@cache
def _tracked(cls: Any) -> type:
    return type(cls.__name__, (_Tracked, cls), {"__module__": cls.__module__})


def cached_tokens(past: Cache | None) -> int:
    """The number of tokens in a cache; 0 without one."""
    return 0 if past is None else int(past.get_seq_length())


@dataclass
class Forward:
    """The positions of the queries and keys of one forward, and tables that all its layers share."""

    queries: Tensor
    """Positions `[1 or batch, T]`."""
    keys: Tensor
    """Positions `[1 or batch, past + T]`."""
    tables: dict[tuple[Any, ...], Any] = field(default_factory=dict, kw_only=True)
    """Tensors computed in one layer and used again in the next ones."""


@dataclass
class _State:
    """What a handler knows of one forward."""

    past: Cache | None = None
    """The cache; None after the forward."""
    position_ids: Tensor | None = None
    """The positions as the rotary module got them; None before it is called."""
    forward: Forward | None = None


class _Running(threading.local):
    """The state of the forward that runs in a thread; None between forwards."""

    state: _State | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Running, ()  # no forward runs in a copy


class AttentionHandler:
    """Knows the positions of the queries and keys of each forward, for one patch of one model.

    Two hooks on the decoder find the cache of each forward and write the positions into it. The rotary module
    calls `begin` with the positions of the new tokens. Subclasses compute attention in `attend`. Several
    threads may run forwards of the model at once.

    Args:
        encoding: the encoding of the patch.
        adapter: the model's family.

    Attributes:
        share: the weight of the encoding while a model is annealed to it, from 0 to 1, see `Patch.mix`.
        learned: the parameters that the encoding learns; None if it learns none.
    """

    encoding: Encoding
    learned: LearnedParameters | None = None

    def __init__(self, encoding: Encoding, adapter: FamilyAdapter) -> None:
        self.encoding = encoding
        self.adapter = adapter
        self.share = 1.0
        self._configs: list[Any] = []
        self._running = _Running()
        self._last = _State()  # for layers that run again for the backward pass, in any thread

    @property
    def _state(self) -> _State:
        return self._running.state or self._last

    @property
    def _forward(self) -> Any:
        """The present forward; after it, the last one."""
        return self._state.forward

    @property
    def _past(self) -> Cache | None:
        """The cache of the forward that runs in this thread."""
        return None if self._running.state is None else self._running.state.past

    def new_forward(self, queries: Tensor, keys: Tensor) -> Forward:
        """A forward with queries at positions `[1 or batch, T]`, and keys at `[1 or batch, past + T]`."""
        return Forward(queries, keys)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention for one call; in this class, by the model's own function."""
        return call.own(call.query, call.key, call.value, call.mask)

    def blend(self, share: float, start: InitialRotation) -> float:
        """Set the weight of the encoding, against the model's own rotation `start`.

        Returns the weight that the rotary module has to use.
        """
        self.share = share
        return share

    def check_implementation(self, implementation: str) -> None:
        """Refuse an attention implementation under which this handler is not exact.

        Raises:
            UnsupportedModelError: the encoding does not work with the implementation.
        """
        handled_implementation(implementation)

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Act inside the attention of a decoder.

        Raises:
            UnsupportedModelError: this is not possible in the family, or not with the attention
                implementation.
        """
        modules = extended_modules(self.encoding, decoder, self.adapter)
        self._configs = add_handler(self, modules, undo)
        self._check_implementations()
        self.watch(decoder, undo)

    def watch(self, decoder: nn.Module, undo: UndoLog) -> None:
        """Find the cache of each forward of a decoder, without acting inside its attention."""
        undo.set(decoder, HANDLER, self)
        decoder.register_forward_pre_hook(self.before, with_kwargs=True)
        decoder.register_forward_hook(self.after, with_kwargs=True)

    def leave(self, decoder: nn.Module) -> None:
        """Remove the hooks from a decoder."""
        for hooks, flags in (
            (decoder._forward_pre_hooks, decoder._forward_pre_hooks_with_kwargs),
            (decoder._forward_hooks, decoder._forward_hooks_with_kwargs),
        ):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
                flags.pop(key, None)

    @never_compiled
    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder: find the cache.

        Raises:
            UnsupportedModelError: the attention implementation was changed to one that the encoding does not
                work with.
        """
        if getattr(decoder, HANDLER, None) is self:
            self._check_implementations()
            past = next((v for v in (*args, *kwargs.values()) if isinstance(v, Cache)), None)
            self._running.state = _State(past)

    def _check_implementations(self) -> None:
        for config in self._configs:
            self.check_implementation(config._attn_implementation)

    @never_compiled
    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder: write the positions of all keys into the cache."""
        try:
            if getattr(decoder, HANDLER, None) is self and self._forward is not None:
                self._write_positions(output)
                self._forward.tables.clear()
        finally:
            self._running.state = None

    def _write_positions(self, output: Any) -> None:
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

    def keep(self, past: Cache) -> None:
        """Write into a cache what the next forward needs besides positions, at the end of the present one."""

    @never_compiled
    def begin(self, position_ids: Tensor) -> None:
        """Begin a forward; the rotary module calls this with the positions `[batch, T]` of its tokens.

        Raises:
            PatchError: the cache was filled under another encoding, or with another number of rows.
        """
        state = self._state
        if position_ids is state.position_ids and state.forward is not None:
            return  # a second rotary module in the same forward
        queries = _rows(self._with_values(position_ids))
        past = self._positions_of_past(queries)
        rows = max(past.shape[0], queries.shape[0])
        keys = torch.cat([past.expand(rows, -1), queries.expand(rows, -1)], dim=1)
        self._set_forward(position_ids, self.new_forward(queries, keys))

    def _set_forward(self, position_ids: Tensor, forward: Forward) -> None:
        """Set the present forward of this thread, which is also the last one."""
        if self._running.state is not None:
            self._running.state = _State(self._past, position_ids, forward)
        self._last = _State(None, position_ids, forward)

    def _with_values(self, position_ids: Tensor) -> Tensor:
        """Positions; in a dry run on the meta device, the ones that follow those in the cache."""
        if not position_ids.is_meta:
            return position_ids
        seen = cached_tokens(self._past)
        with torch.device("cpu"):
            return torch.arange(seen, seen + position_ids.shape[-1])[None]

    def _positions_of_past(self, queries: Tensor) -> Tensor:
        """Positions `[1 or batch, past]` of the tokens in the cache."""
        seen = cached_tokens(self._past)
        if seen == 0:
            return queries[:, :0]
        if not isinstance(self._past, _Tracked) or self._past.rope_extend_positions.shape[1] < seen:
            raise PatchError(
                f"{self.encoding} cannot use this {type(self._past).__name__}: its {seen} tokens were "
                f"cached without the encoding, so their keys are already rotated; start from an empty cache"
            )
        if self._past.rope_extend_encoding != self.encoding:
            raise PatchError(
                f"{self.encoding} cannot use this {type(self._past).__name__}: it was filled under "
                f"{self._past.rope_extend_encoding}; start from an empty cache"
            )
        positions = self._past.rope_extend_positions[:, :seen].to(queries.device)  # fewer after a crop
        if 1 < positions.shape[0] != queries.shape[0] > 1:
            raise PatchError(
                f"{self.encoding}: the cache holds {positions.shape[0]} rows and the input "
                f"{queries.shape[0]}; give as many rows as were cached"
            )
        return positions

    def begin_whole_rows(self, position_ids: Tensor) -> None:
        """`begin`, for an encoding that chooses one table per row; see `RotationHandler`."""
        self.begin(position_ids)

    def forward_of(self, position_ids: Tensor | None) -> Forward:
        """The present forward; when gradient checkpointing runs layers again, the forward they belong to."""
        state = self._state
        assert state.forward is not None
        if position_ids is None or position_ids is state.position_ids:
            return state.forward
        queries = _rows(position_ids)
        if torch.equal(queries, state.forward.queries):
            return state.forward
        forward = self.new_forward(queries, queries)
        self._set_forward(position_ids, forward)
        return forward

    def forward_of_call(self, call: AttentionCall) -> Forward:
        """The forward that a call belongs to, with the positions of its queries and keys.

        Raises:
            PatchError: the positions are not known.
        """
        if call.kwargs.get("cache") is not None:
            raise PatchError(
                f"{self.encoding} cannot use a paged cache (continuous batching); use generate()"
            )
        forward = self.forward_of(call.kwargs.get("position_ids"))
        queries, keys = call.query.shape[2], call.key.shape[2]
        if forward.queries.shape[1] != queries or keys < queries:
            raise PatchError(
                f"{self.encoding} does not know the positions in {type(call.module).__name__}: it has "
                f"{queries} queries and {keys} keys, and the rotary module got "
                f"{forward.queries.shape[1]} positions"
            )
        return forward


def _rows(position_ids: Tensor) -> Tensor:
    """Positions as `[1 or batch, T]` int64: one row if all rows are equal, one axis if all sections are."""
    if position_ids.dim() == 3:
        if not bool((position_ids == position_ids[:1]).all()):
            raise PatchError(
                "positions that differ between sections (images, video) do not give one length to choose "
                "tables by; length-dependent encodings work for text only"
            )
        position_ids = position_ids[0]
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    rows = position_ids.to(torch.int64)
    return rows[:1] if rows.shape[0] > 1 and bool((rows == rows[:1]).all()) else rows
