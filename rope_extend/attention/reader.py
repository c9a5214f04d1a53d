"""Where the queries and keys of a forward stand, known to whatever acts by it.

Caches hold keys as they were before any rotation, and say nothing of positions. So a record of them travels
with the cache object: the positions of a forward's tokens are learned from the rotary module, those of the
tokens before from the cache that it reads, and at its end all are left with the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from rope_extend.attention.functions import (
    READER,
    AttentionCall,
    attention_configs,
    attention_modules,
    never_compiled,
    out_of_reach,
    wrapped_implementation,
)
from rope_extend.encodings import Encoding
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.families import FamilyAdapter
from rope_extend.undo import UndoLog


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


@cache
def _tracked(cls: Any) -> type:
    return type(cls.__name__, (_Tracked, cls), {"__module__": cls.__module__})


def seen_by(past: Cache | None) -> int:
    """How many tokens a cache holds."""
    return 0 if past is None else int(past.get_seq_length())


@dataclass
class Forward:
    """Where the queries and keys of one forward stand, and what was made of it for all layers."""

    queries: Tensor
    """Positions `[1 or batch, T]`."""
    keys: Tensor
    """Positions `[1 or batch, past + T]`."""
    tables: dict[tuple[Any, ...], Any] = field(default_factory=dict, kw_only=True)


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

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention: the model's own, where nothing is to be done about it."""
        return call.own(call.query, call.key, call.value, call.mask)

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Put this reader into a decoder, in place of any other.

        Raises:
            UnsupportedModelError: the family or its attention implementation cannot be acted on exactly.
        """
        readers = attention_modules(decoder)
        if reason := out_of_reach(self.adapter, readers):
            raise UnsupportedModelError(
                f"{self.encoding} acts inside attention, which cannot be patched in "
                f"{decoder.config.model_type}: {reason}. A static schedule works, such as yarn or linear"
            )
        self._configs = []
        for config in attention_configs(decoder, readers):
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

    def placed(self, call: AttentionCall) -> Forward:
        """The forward in which the queries and keys of a call have their places.

        Raises:
            PatchError: they have none there.
        """
        if call.kwargs.get("cache") is not None:
            raise PatchError(
                f"{self.encoding} cannot read a paged cache (continuous batching); use generate()"
            )
        forward = self.forward_of(call.kwargs.get("position_ids"))
        queries, keys = call.query.shape[2], call.key.shape[2]
        if forward.queries.shape[1] != queries or keys < queries:
            raise PatchError(
                f"{type(call.module).__name__} reads {queries} queries and {keys} keys, and the rotary "
                f"module was told of {forward.queries.shape[1]} positions: {self.encoding} cannot place them"
            )
        return forward

    def acts_on(self, module: nn.Module) -> bool:
        """Whether an attention module rotates by the tables that were replaced."""
        return self.adapter.rotates is None or self.adapter.rotates(module)


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
