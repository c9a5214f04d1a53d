"""The positions of the queries and keys of a forward, for everything that acts inside attention.

A cache holds keys without rotation and without positions. So their positions travel with the cache object:

- the rotary module gives a handler the positions of the new tokens;
- the cache that a forward uses has the positions of the earlier tokens;
- at the end of the forward, the cache gets the positions of all tokens.

Positions belong to one forward, and several forwards may be under way at once: one inside a hook of another,
one in each thread, or layers of an earlier one that run again for the backward pass. So cos and sin carry the
`Forward` that they were computed for, and each attention module gets its positions with them.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from rope_extend.attention.forwards import FORWARD, Forward, Frame, Running, mark, marked_forward
from rope_extend.attention.functions import (
    HANDLER,
    AttentionCall,
    add_handler,
    extended_modules,
    handled_implementation,
)
from rope_extend.attention.interrupts import still_running
from rope_extend.attention.registry import never_compiled
from rope_extend.attention.tracked_cache import (
    RUNNING,
    TrackedCache,
    cached_tokens,
    held_tokens,
    is_even,
    tracked,
)
from rope_extend.encodings import AbsoluteEncoding, BiasEncoding, Encoding, ModelShape, RopeShape
from rope_extend.errors import PatchError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.parameters import LearnedParameters
from rope_extend.models.rotary import InitialRotation, has_float64
from rope_extend.models.undo import UndoLog

_REGISTERING = Lock()
"""Held while a hook is registered: a thread that sees it finds all that belongs to it."""


class AttentionHandler:
    """Knows the positions of the queries and keys of each forward, for one patch of one model.

    Two hooks on the decoder find the cache of each forward and write the positions into it. The rotary module
    calls `begin` with the positions of the new tokens. Subclasses compute attention in `attend`. Several
    threads may run forwards of the model at once.

    Args:
        encoding: the encoding of the patch.
        adapter: the model's family.

    Attributes:
        shape: the sizes of the model that the encoding follows from; subclasses set it.
        share: the weight of the encoding while a model is annealed to it, from 0 to 1, see `Patch.mix`.
        learned: the parameters that the encoding learns; None if it learns none.
    """

    encoding: Encoding
    shape: RopeShape | ModelShape
    learned: LearnedParameters | None = None

    def __init__(self, encoding: Encoding, adapter: FamilyAdapter) -> None:
        self.encoding = encoding
        self.adapter = adapter
        self.share = 1.0
        self._configs: list[Any] = []
        self._running = Running()

    @property
    def _decoder_frame(self) -> Frame | None:
        """The innermost decoder that runs in this thread."""
        for frame in reversed(self._running.frames):
            if frame.is_decoder:
                return frame
        return None

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
        for module in modules:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
        self.watch(decoder, undo)

    def watch(self, decoder: nn.Module, undo: UndoLog) -> None:
        """Find the cache of each forward of a decoder, without acting inside its attention."""
        undo.set(decoder, HANDLER, self)
        decoder.register_forward_pre_hook(self.before, with_kwargs=True)
        decoder.register_forward_hook(self.after, with_kwargs=True, always_call=True)

    def leave(self, decoder: nn.Module) -> None:
        """Remove the hooks from a decoder and its modules, and end what an interrupt (Ctrl-C) left running.

        PyTorch calls no hook after an interrupt.
        """
        while self._running.frames:
            self._finish(self._running.frames.pop())
        for module in decoder.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)

    @never_compiled
    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder: find the cache.

        Raises:
            UnsupportedModelError: the attention implementation was changed to one that the encoding does not
                work with.
        """
        if getattr(decoder, HANDLER, None) is self:
            past = kwargs.get("past_key_values")  # the usual name; a search costs time
            if not isinstance(past, Cache):
                past = next((v for v in (*args, *kwargs.values()) if isinstance(v, Cache)), None)
            if self._running.frames:
                self._end_interrupted(decoder)
            marked = past is not None and self._filled(past)
            if marked and RUNNING in vars(past):  # of an outer decoder, or interrupted in another thread
                marked = all(frame.past is not past for frame in self._running.frames)
            gradients = torch.is_grad_enabled()
            frame = Frame(is_decoder=True, module=decoder, past=past, marked=marked, gradients=gradients)
            self._running.frames.append(frame)
            if frame.marked:
                setattr(past, RUNNING, True)
            self._check_implementations()

    def _end_interrupted(self, decoder: nn.Module) -> None:
        """End what an interrupt left running, when a decoder is called while something seems to run."""
        frames = self._running.frames
        running = still_running([frame.module for frame in frames], decoder)
        for frame, runs in zip(frames, running, strict=True):
            if not runs:
                self._finish(frame)
        frames[:] = [frame for frame, runs in zip(frames, running, strict=True) if runs]

    def _check_implementations(self) -> None:
        for config in self._configs:
            self.check_implementation(config._attn_implementation)

    @never_compiled
    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of the decoder: write the positions of all keys into the cache.

        It is also called after an exception, with None as the output.
        """
        if getattr(decoder, HANDLER, None) is not self:
            return
        frames = self._running.frames
        if not frames or frames[-1].module is not decoder:
            return  # it never began
        frame = frames[-1]
        try:
            if frame.forward is not None and output is not None:
                self._write_positions(frame.forward, output)
        finally:
            self._finish(frame)
            frames.pop()  # the last thing, as an interrupt may come at any time

    @staticmethod
    def _finish(frame: Frame) -> None:
        """End a decoder's frame: its cache is no longer in use."""
        if frame.marked:
            vars(frame.past).pop(RUNNING, None)
        for forward in (frame.forward, *frame.others):
            if forward is not None:
                forward.finish()

    def _write_positions(self, forward: Forward, output: Any) -> None:
        past = forward.past
        if past is None:
            values = output if isinstance(output, tuple) else output.values()
            past = next((value for value in values if isinstance(value, Cache)), None)
        if past is not None:
            cache: Any = past
            cls: Any = type(past)
            cache.rope_extend_positions = forward.keys
            cache.rope_extend_encoding, cache.rope_extend_shape = self.encoding, self.shape
            if not isinstance(past, TrackedCache):  # the last thing, as an interrupt may come at any time
                cache.__class__ = tracked(cls)
            self.keep(past, forward)

    def keep(self, past: Cache, forward: Forward) -> None:
        """Write into a cache what the next forward needs besides positions, at the end of the present one."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of an attention module: find the forward that its cos and sin belong to.

        Most often it is that of the decoder that runs, as in every layer of a step of decoding.
        """
        if torch.compiler.is_compiling():
            return self._enter(module, args, kwargs)
        named = kwargs.get("position_embeddings")  # the usual name; a search costs time
        forward = getattr(named[0], FORWARD, None) if type(named) is tuple and named else None
        frames = self._running.frames
        if forward is None or not frames or not frames[-1].is_decoder or frames[-1].forward is not forward:
            self._enter(module, args, kwargs)
        return None

    @never_compiled
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(module, HANDLER, None) is self:
            forward, decoder = marked_forward((args, kwargs)), self._decoder_frame
            if forward is not None and decoder is not None and any(one is forward for one in decoder.others):
                # A user had called the rotary module before the decoder did: attention uses the later one.
                decoder.others.append(decoder.forward)
                decoder.position_ids, decoder.forward = None, forward
            self._await_exit(module)
            self._running.frames.append(Frame(is_decoder=False, module=module, forward=forward))

    def _await_exit(self, module: nn.Module) -> None:
        """Register `exit`, unless it is: a hook takes time in each layer, and generation needs none.

        PyTorch looks for it after the forward, so it is called for the present one.
        """
        with _REGISTERING:
            if self.exit not in module._forward_hooks.values():
                module.register_forward_hook(self.exit, always_call=True)

    def exit(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of an attention module, called after an exception too: forget its forward.

        If an earlier pre-hook raised, `enter` was not called.
        """
        if torch.compiler.is_compiling():
            self._exit(module)
        else:
            frames = self._running.frames
            if frames and frames[-1].module is module:
                self._exit(module)

    @never_compiled
    def _exit(self, module: nn.Module) -> None:
        if getattr(module, HANDLER, None) is self:
            self._left(module)

    def _left(self, module: nn.Module) -> Frame | None:
        """Remove the frame of a module that ends; None if it is not the innermost, as it never began."""
        frames = self._running.frames
        return frames.pop() if frames and frames[-1].module is module else None

    @never_compiled
    def begin(self, position_ids: Tensor) -> Forward:
        """The forward that tokens at positions `[batch, T]` belong to; the rotary module calls this.

        Raises:
            PatchError: the cache was filled under another encoding, or with another number of rows.
        """
        frames = self._running.frames
        innermost = frames[-1] if frames else None
        running = innermost if innermost is not None and innermost.is_decoder else self._decoder_frame
        frame = running or Frame(is_decoder=True)
        forward = frame.forward
        if forward is None or position_ids is not frame.position_ids:
            queries, read = self._read(position_ids, frame.past)
            if forward is None or not torch.equal(queries, forward.queries):
                forward = self._new_forward(queries, read, frame)
                forward.running = running is not None
            if frame.forward is None:
                frame.position_ids, frame.forward = position_ids, forward
            elif frame.forward is not forward:
                frame.others.append(forward)
        if innermost is not None and not innermost.is_decoder:
            innermost.forward = forward  # of an attention module that has its own rotary
        return forward

    def _new_forward(self, queries: Tensor, read: tuple[float, ...], frame: Frame) -> Forward:
        """A forward of tokens at positions `[1 or batch, T]`, of a decoder."""
        if frame.forward is None:
            past = self._positions_of_past(queries, frame.past)
        else:  # some layers may have added their new keys to the cache
            past = frame.forward.keys[:, : -frame.forward.queries.shape[1]]
        if past.shape[0] == queries.shape[0]:
            keys = torch.cat([past, queries], dim=1)
        else:
            rows = max(past.shape[0], queries.shape[0])
            keys = torch.cat([past.expand(rows, -1), queries.expand(rows, -1)], dim=1)
        forward = self.new_forward(queries, keys)
        forward.past, forward.read, forward.gradients = frame.past, read, frame.gradients
        return forward

    def _belongs_to_decoder(self, forward: Forward) -> bool:
        """Whether a forward is that of the decoder that runs, and no module with a frame runs inside it."""
        frames = self._running.frames
        return bool(frames) and frames[-1].is_decoder and frames[-1].forward is forward

    def two_rows(self, forward: Any, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin `[1, 2, dim]` that leave a state as it is and rotate it too; None in most forwards.

        They are marked.
        """
        return None

    def rotated_query(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The rotated row of a query of two, if `key` is rotated too, see `TwoRows`; else None."""
        frames = self._running.frames
        forward = frames[-1].forward if frames else None
        if forward is None or forward.step is None or not forward.step.gave(key):
            return None
        return query.narrow(2, 1, 1)

    @never_compiled
    def mark(self, tables: tuple[Tensor, ...], forward: Forward) -> None:
        """Remember which forward cos and sin belong to."""
        mark(tables, forward)

    def on_the_device(self) -> Tensor | None:
        """Values of the encoding that a forward needs on the host, `[n]`; None if there are none."""
        return None

    def _read(self, position_ids: Tensor, past: Cache | None) -> tuple[Tensor, tuple[float, ...]]:
        """Positions `[1 or batch, T]` and the values of `on_the_device`, read from the device at once."""
        positions, values = self._with_values(position_ids, past), self.on_the_device()
        if values is None:
            return _rows(positions.cpu()), ()
        if values.is_meta:  # in a dry run, positions are beyond those that need less
            return _rows(positions), (-1.0,) * len(values)
        if not has_float64(positions.device):
            return _rows(positions.cpu()), tuple(values.tolist())
        values = values.to(positions.device, torch.float64)
        both = torch.cat([positions.flatten().to(torch.float64), values]).cpu()  # float64 holds all positions
        count = positions.numel()
        return _rows(both[:count].view(positions.shape)), tuple(both[count:].tolist())

    @staticmethod
    def _with_values(position_ids: Tensor, past: Cache | None) -> Tensor:
        """Positions; in a dry run on the meta device, the ones that follow those in the cache."""
        if not position_ids.is_meta:
            return position_ids
        seen = cached_tokens(past)
        with torch.device("cpu"):
            return torch.arange(seen, seen + position_ids.shape[-1])[None]

    def _positions_of_past(self, queries: Tensor, past: Cache | None) -> Tensor:
        """Positions `[1 or batch, past]` of the tokens in the cache."""
        seen = held_tokens(past)
        if seen == 0:
            return queries[:, :0]
        known = past.rope_extend_positions.shape[1] if isinstance(past, TrackedCache) else seen
        if known < seen:
            state = f"it has positions for {known} of its {seen} tokens"
            if not is_even(past):
                state = "its layers hold different numbers of tokens"
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: {state}, as after an error or an "
                f"interrupt in a forward, or when its layers are shared with a copy.copy that went on; use "
                f"copy.deepcopy, and start from an empty cache"
            )
        if known > seen:
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: it was filled with {known} tokens "
                f"and holds {seen}, so the positions of its keys are not known; remove tokens by its crop, "
                f"or compress keys under a method that rotates them before they are cached, such as yarn"
            )
        if not isinstance(past, TrackedCache):
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: its {seen} tokens were "
                f"cached without the encoding, so their keys are already rotated; start from an empty cache"
            )
        if not self._filled(past):
            if not _equal(past.rope_extend_encoding, self.encoding):
                raise PatchError(
                    f"{self.encoding} cannot use this {type(past).__name__}: it was filled under "
                    f"{past.rope_extend_encoding}; start from an empty cache"
                )
            raise PatchError(
                f"{self.encoding} cannot use this {type(past).__name__}: it was filled for "
                f"{past.rope_extend_shape}, but the model is patched for {self.shape}; start "
                f"from an empty cache"
            )
        positions = past.rope_extend_positions.to(queries.device)
        if 1 < positions.shape[0] != queries.shape[0] > 1:
            raise PatchError(
                f"{self.encoding}: the cache holds {positions.shape[0]} rows and the input "
                f"{queries.shape[0]}; give as many rows as were cached"
            )
        return positions

    def _filled(self, past: Cache) -> bool:
        """Whether a cache was filled under this encoding, for the same sizes and trained window."""
        if not isinstance(past, TrackedCache) or not _equal(past.rope_extend_encoding, self.encoding):
            return False
        return _equal(past.rope_extend_shape, self.shape)

    def begin_whole_rows(self, position_ids: Tensor) -> Forward:
        """`begin`, for an encoding that chooses one table per row; see `RotationHandler`."""
        return self.begin(position_ids)

    def known_forward(self, position_ids: Tensor | None) -> Forward | None:
        """The forward that the innermost module belongs to; None if it is not known.

        It is not known if a layer runs again for the backward pass with copies of cos and sin, as on several
        devices. `position_ids` are the module's, if it gets them.
        """
        if self._running.frames and self._running.frames[-1].forward is not None:
            return self._running.frames[-1].forward
        frame = self._decoder_frame
        if frame is None or frame.forward is None:
            return None
        if position_ids is None or position_ids is frame.position_ids:
            return frame.forward
        queries = frame.forward.queries
        if position_ids is not frame.compared:  # such as a copy on another device, for layers that are there
            frame.compared = position_ids
            frame.equal = torch.equal(_rows(position_ids.cpu()), queries)
        return frame.forward if frame.equal else None

    def forward_of_call(self, call: AttentionCall) -> Forward:
        """The forward that a call belongs to, with the positions of its queries and keys.

        Raises:
            PatchError: the positions are not known.
        """
        if call.kwargs.get("cache") is not None:
            raise PatchError(
                f"{self.encoding} cannot use a paged cache (continuous batching); use generate()"
            )
        position_ids = call.kwargs.get("position_ids")
        forward = self.known_forward(position_ids)
        queries, keys = call.query.shape[2], call.key.shape[2]
        name = type(call.module).__name__
        if forward is None:
            if position_ids is None or keys != queries:
                raise PatchError(
                    f"{self.encoding} does not know the positions in {name}: it gets neither position_ids "
                    f"nor the cos and sin of the rotary module itself, but perhaps copies; turn gradient "
                    f"checkpointing off, or put the model on one device"
                )
            positions, read = self._read(position_ids, None)
            forward = self.new_forward(positions, positions)
            forward.read = read
            return forward
        if forward.queries.shape[1] != queries or keys < queries:
            raise PatchError(
                f"{self.encoding} does not know the positions in {name}: it has {queries} queries and {keys} "
                f"keys, and the rotary module got {forward.queries.shape[1]} positions"
            )
        return forward


class SizedHandler(AttentionHandler):
    """A handler of an encoding that follows from the sizes of the model, and may learn parameters.

    Args:
        encoding: the encoding of the patch.
        adapter: the model's family.
        shape: the sizes of the model that the encoding follows from.
        learned: the parameters that the encoding learns; None if it learns none.
    """

    shape: ModelShape

    def __init__(
        self,
        encoding: BiasEncoding | AbsoluteEncoding,
        adapter: FamilyAdapter,
        shape: ModelShape,
        learned: LearnedParameters | None,
    ) -> None:
        super().__init__(encoding, adapter)
        self.shape = shape
        self.learned = learned


def _equal(one: Any, other: Any) -> bool:
    """Whether two encodings or shapes are equal; at once if they are the same object."""
    return one is other or bool(one == other)


def _rows(position_ids: Tensor) -> Tensor:
    """Positions as `[1 or batch, T]` int64: one row if all rows are equal, one axis if all sections are."""
    if position_ids.numel() == 1 and position_ids.dtype == torch.int64:  # at once, for decoding
        return position_ids.view(1, 1)
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
