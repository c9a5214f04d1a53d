"""The positions of the queries and keys of an attention call, read off the call alone.

The positions of the queries come with the call. Those of the keys follow from them:

- without a cache, keys are at the positions of the queries;
- with one, a cached key is as many positions before the first query as there are visible keys after it. Or
  its position is its column, where positions count padding too.

That holds for padding on the left and on the right, for beams, and for caches that were cropped, reordered or
have empty slots. It does not hold if cached positions have gaps: then it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import (
    AttentionCall,
    add_handler,
    attention_window,
    extended_modules,
    handing_over,
    handled_implementation,
)
from rope_extend.attention.masks import visible, visible_to
from rope_extend.encodings import Encoding, ModelShape, RopeShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.families import FamilyAdapter
from rope_extend.models.parameters import LearnedParameters
from rope_extend.models.rotary import marked_positions
from rope_extend.models.undo import UndoLog


class AttentionHandler:
    """Knows the positions of the queries and keys of each call, for one patch of one model.

    It has no state but one: what the layers of the latest forward share. So several forwards may run at once,
    one inside another, in threads, or again for the backward pass.

    Args:
        encoding: the encoding of the patch.
        adapter: the model's family.
        shape: the sizes of the model that the encoding follows from.
        learned: the parameters that the encoding learns; None if it learns none.
        normalised: whether the model normalises queries and keys after rotating them, so that a factor on cos
            and sin has no effect.

    Attributes:
        rotary: the rotary module of the patch; one of them, if there are several.
    """

    encoding: Encoding
    shape: RopeShape | ModelShape
    rotary: Any = None

    def __init__(
        self,
        encoding: Encoding,
        adapter: FamilyAdapter,
        shape: RopeShape | ModelShape,
        *,
        learned: LearnedParameters | None = None,
        normalised: bool = False,
    ) -> None:
        self.encoding, self.adapter, self.shape = encoding, adapter, shape
        self.learned, self.normalised = learned, normalised
        self._latest: tuple[Any, Forward] | None = None
        self._last_layer = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_latest": None}

    def new_forward(self, queries: Tensor) -> Forward:
        """A forward with queries at positions `[1 or batch, T]`."""
        return Forward(queries)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention for one call; in this class, by the model's own function."""
        return call.own(call.query, call.key, call.value, call.mask)

    def attended(self, module: Any) -> None:
        """After the last layer, drop what they share: the same positions may come with other weights."""
        if module.layer_idx == self._last_layer:
            self._latest = None

    def check_implementation(self, implementation: str) -> None:
        """Refuse attention implementations without a mask over queries and keys.

        Raises:
            UnsupportedModelError: the encoding does not work with the implementation.
        """
        if "flash" in implementation or "flex" in implementation:
            raise UnsupportedModelError(
                f"{self.encoding} acts inside attention and needs its mask, which {implementation} does not "
                f"have; use attn_implementation='sdpa' or 'eager'"
            )
        handled_implementation(implementation)

    def install(self, decoder: Any, undo: UndoLog) -> None:
        """Act inside the attention of a decoder.

        Raises:
            UnsupportedModelError: this is not possible in the family, or not with the attention
                implementation.
        """
        modules = extended_modules(self.encoding, decoder, self.adapter)
        self._last_layer = max((int(module.layer_idx) for module in modules), default=-1)
        for config in add_handler(self, modules, undo):
            self.check_implementation(config._attn_implementation)
        if decoder.config.model_type in self.adapter.hides_positions:
            for module in modules:
                undo.hook(module, give_positions)

    def forward_of_call(self, call: AttentionCall) -> Forward:
        """The forward that a call belongs to, with the positions of its queries.

        Raises:
            PatchError: the positions are not known.
        """
        if call.kwargs.get("write_index") is not None:
            raise PatchError(
                f"{self.encoding} cannot use a paged cache (continuous batching); use generate()"
            )
        given = call.kwargs.get("position_ids")
        position_ids = call.given.get("positions") if given is None else given
        name, count = type(call.module).__name__, call.query.shape[2]
        if position_ids is None:
            raise PatchError(
                f"{self.encoding} does not know the positions in {name}: it gets neither position_ids nor "
                f"the cos and sin of the rotary module itself, but perhaps copies, or is compiled; turn "
                f"gradient checkpointing and torch.compile off, or put the model on one device"
            )
        forward = self.forward_at(position_ids, call.module, call.key.shape[2] - count)
        if forward.queries.shape[1] != count:
            raise PatchError(
                f"{self.encoding} does not know the positions in {name}: it has {count} queries, and "
                f"{forward.queries.shape[1]} positions"
            )
        return forward

    def forward_at(self, position_ids: Tensor, module: Any, cached: int = 0) -> Forward:
        """The forward in which a module reads tokens at `[T]`, `[batch, T]` or `[parts, batch, T]` positions.

        All modules that get the same tensor share it. One that reads for the second time is in another
        forward: the tensor may have been changed in place, and so may a mask. `cached` is the number of
        earlier tokens, which matters in a dry run only.
        """
        latest = self._latest
        if latest is not None and latest[0]() is position_ids and id(module) not in latest[1].readers:
            latest[1].readers.add(id(module))
            return latest[1]
        if position_ids.is_meta:  # the ones that follow those in the cache
            count = position_ids.shape[-1]
            read = torch.arange(cached, cached + count, device="cpu")[None]
        else:
            read = position_ids.cpu()
        forward = self.new_forward(_rows(read, self.encoding))
        forward.readers.add(id(module))
        # What layers share goes when the positions do.
        self._latest = weakref.ref(position_ids, self._forget), forward
        return forward

    def _forget(self, reference: Any) -> None:
        if self._latest is not None and self._latest[0] is reference:
            self._latest = None

    def keys_of_call(self, call: AttentionCall, forward: Forward) -> Tensor:
        """The positions `[1 or batch, K]` of the keys of a call, without the empty slots of a static cache.

        Computed once for all layers with the same mask and as many keys.

        Raises:
            PatchError: the positions of cached keys have gaps.
        """
        columns = call.key.shape[2]

        def keys() -> Tensor:
            whole = attention_window(call.module) is None
            return self._key_positions(forward.queries, call, columns, whole=whole)

        return forward.once("keys", columns, of=call.mask, compute=keys)

    def _key_positions(self, queries: Tensor, call: AttentionCall, columns: int, *, whole: bool) -> Tensor:
        """As `keys_of_call`; `whole` if the layer sees all tokens since the first."""
        new = queries.shape[1]
        if columns == new or _is_first_of_fixed_size(queries, call):
            return queries
        first = visible_to(call, 0, columns)  # the keys that the first query sees, [1 or batch, columns]
        layouts = [columns - new]  # how many keys are before it
        if first is None:
            first = torch.ones(1, columns, dtype=torch.bool)
        else:
            # A cache of fixed size has empty slots after the new keys, which no query sees.
            last = visible_to(call, new - 1, columns) if new > 1 else first
            assert last is not None
            ends = [int(each.any(0).nonzero()[-1]) if bool(each.any()) else -1 for each in (last, first)]
            layouts += [past for past in (ends[0] - (new - 1), ends[1]) if 0 <= past <= columns - new]
        rows = max(len(queries), len(first))
        own_keys = [past for past in layouts if bool(first[:, past].any())]  # the first query sees its own
        for past in own_keys or layouts[1:2] or layouts:
            # In each row, keys are counted back from the first query that is no padding: it sees its own key.
            at, seen, own = torch.zeros(1, dtype=torch.int64), first, first[:, past]
            if call.mask is not None and new > 1 and not bool(own.all()):
                sees_own = visible(call.mask[:, 0].diagonal(past, dim1=-2, dim2=-1)).cpu()
                at, own = sees_own.int().argmax(dim=-1), sees_own.any(dim=-1)
                seen = visible(call.mask[torch.arange(len(at)), 0, at, :columns]).cpu()
            start = queries.expand(rows, -1).gather(1, at.expand(rows)[:, None])
            # The number of visible keys from each one on, up to that query.
            after = seen[:, :past].to(torch.int64).flip(-1).cumsum(-1).flip(-1)
            before = start - after
            if whole and past:
                by_column = start == past + at[:, None]  # padding has positions too
                known = (before[:, :1] == 0) | by_column
                if not bool(known[own.expand(rows)].all()):
                    continue
                before = torch.where(before[:, :1] == 0, before, torch.arange(past))
            return torch.cat([before.clamp(min=0), queries.expand(rows, -1)], dim=1)
        raise PatchError(
            f"{self.encoding} counts the positions of cached tokens back from the next one, but the token at "
            f"position {int(queries[0, 0])} sees {int(first[0, :past].sum())} cached tokens: their positions "
            f"have gaps, or do not begin at 0; use use_cache=False, or positions without gaps"
        )


def _is_first_of_fixed_size(queries: Tensor, call: AttentionCall) -> bool:
    """Whether a call is the first of a cache of fixed size, whose other slots are empty.

    Then transformers gives sdpa no mask, because its causal attention counts from the first key.
    """
    alone = call.mask is None and call.implementation == "sdpa" and call.is_causal
    return alone and queries.shape[1] > 1 and bool((queries[:, 0] == 0).all())


def give_positions(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of an attention module that does not hand positions to its attention function.

    The rotary module has marked cos and sin with them.
    """
    positions = kwargs.get("position_ids")
    positions = find_positions((args, kwargs)) if positions is None else positions
    return handing_over(module, args, kwargs, "positions", positions)


def find_positions(arguments: Any) -> Tensor | None:
    """The positions with which cos and sin among the arguments of a module are marked; None if none are."""
    if isinstance(arguments, Tensor):
        return marked_positions(arguments)
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    elif not isinstance(arguments, tuple | list):
        return None
    found = (find_positions(argument) for argument in arguments)
    return next((positions for positions in found if positions is not None), None)


def _rows(position_ids: Tensor, encoding: Encoding) -> Tensor:
    """Positions as `[1 or batch, T]` int64: one row if all rows are equal, one axis if all sections are."""
    if position_ids.numel() == 1 and position_ids.dtype == torch.int64:  # at once, for decoding
        return position_ids.view(1, 1)
    if position_ids.dim() == 3:
        if not bool((position_ids == position_ids[:1]).all()):
            raise PatchError(
                f"{encoding} needs one position for each token, but this input has tokens with several "
                f"(time, height, width); use a static schedule, such as yarn"
            )
        position_ids = position_ids[0]
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    rows = position_ids.to(torch.int64)
    return rows[:1] if rows.shape[0] > 1 and bool((rows == rows[:1]).all()) else rows
