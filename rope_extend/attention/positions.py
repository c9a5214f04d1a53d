"""The positions of the queries and keys of an attention call, read off the call and its cache.

The positions of the queries come with the call. A cache does not keep positions. Those of cached keys follow
from the first new token of each row that is no padding:

- if its position is its column, counted from the first one of the cache, so is that of each key before it;
- otherwise, each key that it sees is one position before the next such key.

The first holds if positions count padding too, the second if they count tokens only, wherever the padding is.
So caches may be cropped, reordered or partly empty. If cached positions have gaps, the call is refused: then
the position of the token is not the number of keys that it sees. Where a window hides some of these, the call
is refused if the position is beyond the column.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Cache

from rope_extend.attention.forward import Forward
from rope_extend.attention.functions import (
    AttentionCall,
    add_handler,
    attention_window,
    extended_modules,
    handing_over,
    handled_implementation,
)
from rope_extend.attention.masks import shown_to, visible
from rope_extend.attention.registry import Inputs
from rope_extend.encodings import Encoding, ModelShape, RopeShape
from rope_extend.errors import PatchError, UnsupportedModelError
from rope_extend.models.families import Family
from rope_extend.models.parameters import LearnedParameters
from rope_extend.models.rotary import check_one_position, marked_positions
from rope_extend.models.undo import UndoLog


class AttentionHandler:
    """Knows the positions of the queries and keys of each call, for one patch of one model.

    It has no state but one: what the layers of the latest forward share. So several forwards may run at once,
    one inside another, in threads, or again for the backward pass.

    Args:
        encoding: the encoding of the patch.
        family: the model's family.
        shape: the sizes of the model that the encoding follows from.
        learned: the parameters that the encoding learns; None if it learns none.

    Attributes:
        rotary: the rotary module of the patch; one of them, if there are several.
    """

    encoding: Encoding
    shape: RopeShape | ModelShape
    rotary: Any = None

    def __init__(
        self,
        encoding: Encoding,
        family: Family,
        shape: RopeShape | ModelShape,
        *,
        learned: LearnedParameters | None = None,
    ) -> None:
        self.encoding, self.family, self.shape, self.learned = encoding, family, shape, learned
        self._latest: tuple[Any, Forward] | None = None
        self._last_layer = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_latest": None}

    def new_forward(self, queries: Tensor) -> Forward:
        """A forward with queries at positions `[1 or batch, T]`."""
        return Forward(queries)

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
        modules = extended_modules(self.encoding, decoder, self.family)
        self._last_layer = max((int(module.layer_idx) for module in modules), default=-1)
        for config in add_handler(self, modules, undo):
            self.check_implementation(config._attn_implementation)
        for module in modules:
            undo.hook(module, hand_over)

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

        Computed once for all layers with the same mask and window, and as many keys.

        Raises:
            PatchError: the positions of cached keys have gaps.
        """
        columns, window = call.key.shape[2], attention_window(call.module)
        total = forward.cached("total", compute=partial(_tokens_so_far, call))
        compute = partial(self._key_positions, forward.queries, call, columns, total, window)
        return forward.cached("keys", columns, window, of=call.mask, compute=compute)

    def _key_positions(
        self, queries: Tensor, call: AttentionCall, columns: int, total: int, window: int | None
    ) -> Tensor:
        """As `keys_of_call`, for a layer that sees `window` tokens; the text has `total`, new ones included.

        Columns are those of the mask. The last tokens are in them, and after these, there are empty slots.
        """
        new, end = queries.shape[1], min(columns, total)
        past, dropped = end - new, total - end
        if past <= 0:
            return queries
        # A cache keeps no positions: they follow from the first new token of a row that is no padding. Only
        # such a token sees its own key, which is on the diagonal of the mask.
        at, mask = torch.zeros(1, dtype=torch.int64), call.readable_mask
        if mask is not None and new > 1:
            own_keys = mask[:, 0].diagonal(past, dim1=-2, dim2=-1)
            at = visible(own_keys).int().argmax(dim=-1).cpu()
        shown = shown_to(call, at, end)
        is_text = shown.gather(1, (past + at).expand(len(shown))[:, None])
        rows = max(len(queries), len(shown))
        # Visible keys from each one on, up to that token: the difference of positions, if these count tokens.
        after = shown[:, :past].to(torch.int64).flip(-1).cumsum(-1).flip(-1)
        seen, column = after[:, :1], dropped + past + at[:, None]
        position = queries.expand(rows, -1).gather(1, at.expand(rows)[:, None])
        position = torch.where(is_text, position, seen)  # of padding, it may be any number
        by_column = position == column  # padding was counted too
        # A token that sees all keys sees as many as its position says, or there are gaps. With a window, or
        # in a cache that dropped keys, it sees fewer: then it is only known that they are not more.
        sees_all = column < (0 if dropped else total if window is None else window)
        counted = torch.where(sees_all, position == seen, (seen <= position) & (position < column))
        unknown = ~by_column & ~counted
        if bool(unknown.any()):
            row = int(unknown.flatten().nonzero()[0])
            here, cached = int(position[row]), int(seen.expand(rows, -1)[row])
            raise PatchError(
                f"{self.encoding} counts the positions of cached tokens back from the next one, but the "
                f"token at position {here} sees {cached} cached tokens: their positions have gaps, overlap, "
                f"or do not begin at 0; use use_cache=False, or positions that count the tokens of each row"
            )
        keys = torch.where(by_column, dropped + torch.arange(past), position - after).clamp(min=0)
        return torch.cat([keys, queries.expand(rows, -1)], dim=1)


def _tokens_so_far(call: AttentionCall) -> int:
    """The number of tokens of the text, new ones and padding included, by the cache of a call."""
    cache = call.given.get("cache")
    if cache is None or call.key.is_meta:
        return call.key.shape[2]
    own = cache.layers[call.module.layer_idx : call.module.layer_idx + 1]  # none, if layers share their keys
    counted = own[0] if own and hasattr(own[0], "get_seq_length") else cache
    return int(counted.get_seq_length())


def count_tokens_only(decoder: nn.Module, undo: UndoLog) -> None:
    """Number the tokens of rows with padding as if each row was alone, where the caller gives no positions.

    By default models number the columns. Plain RoPE does not notice, but whatever follows the length does.
    """
    undo.hook(decoder, partial(_give_positions, tuple(inspect.signature(decoder.forward).parameters)))


def _give_positions(
    names: tuple[str, ...], decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inputs | None:
    """Forward pre-hook of a decoder whose arguments have `names`: positions from a mask `[batch, tokens]`.

    Padding after the text keeps the number of its column, so padding on the right changes no position.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, inputs = given.get("attention_mask"), given.get("inputs_embeds")
    inputs = given.get("input_ids") if inputs is None else inputs
    if given.get("position_ids") is not None or inputs is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    cache, padding = _cache_among(given.values()), mask.to(inputs.device) == 0
    columns = torch.arange(inputs.shape[1], device=inputs.device)
    columns = columns if cache is None else columns + cache.get_seq_length()
    before = padding.cumsum(dim=-1).masked_fill(padding, 0).cummax(dim=-1).values
    return (), {**given, "position_ids": columns - before[:, columns.clamp(max=mask.shape[1] - 1)]}


def _cache_among(values: Iterable[Any]) -> Any:
    """The first cache among the arguments of a module; None if it gets none."""
    return next((value for value in values if isinstance(value, Cache)), None)


def hand_over(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
    """Forward pre-hook of an attention module: give its handler the cache, and the positions.

    Not every module hands positions to its attention function.
    """
    cache = _cache_among((*args, *kwargs.values()))
    return handing_over(module, (args, kwargs), cache=cache, positions=positions_among((args, kwargs)))


def positions_among(inputs: Inputs) -> Tensor | None:
    """The positions that a module gets, or those with which the rotary module marked cos and sin; or None."""
    positions: Tensor | None = inputs[1].get("position_ids")
    if positions is not None:
        return positions
    marked = map(marked_positions, tree_leaves(inputs))
    return next((positions for positions in marked if positions is not None), None)


def _rows(position_ids: Tensor, encoding: Encoding) -> Tensor:
    """Positions as `[1 or batch, T]` int64: one row if all rows are equal, one axis if all sections are."""
    if position_ids.numel() == 1 and position_ids.dtype == torch.int64:  # at once, for decoding
        return position_ids.view(1, 1)
    if position_ids.dim() == 3:
        check_one_position(encoding, position_ids)
        position_ids = position_ids[0]
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    rows = position_ids.to(torch.int64)
    return rows[:1] if rows.shape[0] > 1 and bool((rows == rows[:1]).all()) else rows
