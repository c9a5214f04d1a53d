"""One token after a cache, under changed positions, at about the cost of a token in the model as it was.

The keys of a layer are kept as the present query needs them: each is rotated for the region that it is in. A
step rotates the new key, and the key that leaves the region of near pairs, which is one for each token. The
query is rotated once for each region. Regions are consecutive keys, so attention takes views of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rope_extend.attention.functions import AttentionCall
from rope_extend.attention.fused_kernels import kernel_dtype
from rope_extend.attention.growing import Growing, spare, with_room
from rope_extend.attention.log_sum_exp import merge, partial_attention
from rope_extend.attention.plain import beyond_plain
from rope_extend.attention.registry import takes_suffix, without_cudnn
from rope_extend.attention.rotated_keys import (
    RotatedKeys,
    keep,
    kept_keys,
    layer_with,
)
from rope_extend.attention.rotation import channels_of, rotate, rotate_channels
from rope_extend.attention.text_rows import text_rows
from rope_extend.encodings import RemapEncoding
from rope_extend.encodings.core.remap import Bands, Chunks, StartAndWindow
from rope_extend.models.families import FamilyAdapter

Rotation = tuple[Tensor, Tensor]
"""cos and sin `[1 or batch, heads, n, dim/2]`."""


class RemapForward(Protocol):
    """A forward of the handler in `remaps.py`."""

    queries: Tensor
    keys: Tensor
    past: Any
    tables: dict[tuple[Any, ...], Any]
    encoding: RemapEncoding
    lengths: Tensor

    def used(
        self, positions: Tensor, of: str, region: int, lengths: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Positions `[1 or batch, n]` and frequencies `[1 or batch, dim/2]`, float64, that rotate them."""

    def rotation_at(
        self, positions: Tensor, of: str, region: int, lengths: tuple[int, ...], like: Tensor
    ) -> Rotation:
        """cos and sin of queries or keys at positions `[1 or batch, n]`, `[1 or batch, 1, n, dim/2]`."""


@dataclass(frozen=True)
class _Step:
    """What all layers of a forward of one token share.

    Attributes:
        spans: the keys that are seen: first column, column after the last, and the region of the pairs.
        border: keys before this column are rotated for region 1, all others for region 0.
        lengths: the lengths that set the regions, one for each row or one for all.
        hidden: what is hidden of the columns of all spans, `[batch, 1, 1, columns]`; None if nothing is.
    """

    spans: tuple[tuple[int, int, int], ...]
    border: int
    lengths: tuple[int, ...]
    hidden: Tensor | None


def attend_one(call: AttentionCall, forward: RemapForward, adapter: FamilyAdapter) -> Tensor | None:
    """Attention of one query, `[batch, 1, heads, value_dim]`; None if it has to be computed in another way.

    Args:
        call: the call, with unrotated queries and keys, in a layer without a window of its own.
        forward: the positions of its queries and keys.
        adapter: the model's family.
    """
    implementation, past, index = call.implementation, forward.past, getattr(call.module, "layer_idx", None)
    if implementation != "sdpa" and not takes_suffix(implementation) and "flash" not in implementation:
        return None
    if call.kwargs.get("dropout") or beyond_plain(call.kwargs):
        return None
    if call.key.shape[2] != forward.keys.shape[1]:
        return None
    if layer_with(call.query, call.key, call.value, past, index) is None:
        return None
    step = _step(call, forward)
    if step is None:
        return None
    if step.hidden is not None and kernel_dtype(call.query).itemsize < 4:
        return None  # only the kernels are exact to these dtypes, and they take no mask
    queries, keys = _rotated(call, forward, step, adapter)
    keep(past, call.module.layer_idx, (step.border, *step.lengths), keys, call.key)
    return _attend(call, step, queries, keys.view)


def _step(call: AttentionCall, forward: RemapForward) -> _Step | None:
    """The regions of the keys; None if they are not the same columns in all rows."""
    name = ("step", id(call.mask))
    if name not in forward.tables:  # with the mask, so that no other one gets its id
        forward.tables[name] = call.mask, _new_step(call, forward)
    found: _Step | None = forward.tables[name][1]
    return found


def _new_step(call: AttentionCall, forward: RemapForward) -> _Step | None:
    borders, total = forward.encoding.borders, call.key.shape[2]
    lengths = tuple(forward.lengths[:, 0].tolist())
    if len(set(lengths)) == 1:
        lengths = lengths[:1]
    if isinstance(borders, StartAndWindow):
        return _start_and_window(call, forward, borders, lengths)
    rows = text_rows(call, forward)  # type: ignore[arg-type]
    if rows is None or any(each.stop != total for each in rows):
        return None
    start = rows[0].start if len(rows) == 1 else 0
    hidden = None
    if len(rows) > 1:
        hidden = _hidden(call)
        if hidden is None or isinstance(borders, Chunks):
            return None
    if isinstance(borders, Bands):
        border = max(start, total - borders.window)
        spans = [(start, border, 1), (border, total, 0)]
    else:
        own = total - 1 - int(forward.queries[0, 0]) % borders.size
        before = own - borders.size
        border = 0
        spans = [
            (start, max(start, before), 2),
            (max(start, before), max(start, own), 1),
            (max(start, own), total, 0),
        ]
    return _Step(tuple(span for span in spans if span[0] < span[1]), border, lengths, hidden)


def _start_and_window(
    call: AttentionCall, forward: RemapForward, borders: StartAndWindow, lengths: tuple[int, ...]
) -> _Step | None:
    """The first tokens, and the window; tokens between them may be missing."""
    total, keys, query = call.key.shape[2], forward.keys, forward.queries
    early = (keys < borders.start).any(dim=0).nonzero()
    head = int(early[-1]) + 1 if len(early) else 0
    near = total - borders.window
    if near < head or total == 0:
        return None
    distance = query - keys
    expected = torch.arange(borders.window - 1, -1, -1, device=distance.device)
    if not bool((distance[:, near:] == expected).all() & (distance[:, head:near] >= borders.window).all()):
        return None
    hidden = None
    later = keys[:, :head] >= borders.start
    if call.mask is not None or bool(later.any()):
        of_mask = _hidden(call)
        if of_mask is None:
            return None
        rows = max(len(later), len(of_mask))
        parts = [of_mask[..., :head] | later[:, None, None].to(of_mask.device), of_mask[..., near:]]
        hidden = torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=-1)
        if bool(hidden.all(dim=-1).any()):
            return None  # padding that sees no key
    spans = ((0, head, 1), (near, total, 0))
    return _Step(tuple(span for span in spans if span[0] < span[1]), 0, lengths, hidden)


def _hidden(call: AttentionCall) -> Tensor | None:
    """The keys that the mask of a call hides, `[1 or batch, 1, 1, keys]`; None if its form is another."""
    mask, keys = call.mask, call.key.shape[2]
    if mask is None:
        return torch.zeros(1, 1, 1, keys, dtype=torch.bool, device=call.key.device)
    if mask.dim() == 2:
        return ~mask.bool()[:, None, None]
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    return ~mask


def _rotated(
    call: AttentionCall, forward: RemapForward, step: _Step, adapter: FamilyAdapter
) -> tuple[list[Tensor], Growing]:
    """The query, rotated for the region of each span, and all keys, each rotated for its region."""
    query, key, total = call.query, call.key, call.key.shape[2]
    kept = kept_keys(forward.past, call.module.layer_idx)
    continued = kept is not None and _continues(kept, step, key)
    tokens = [_Token("query", region, 0) for *_, region in step.spans]
    states = [query] * len(tokens)
    # After a crop, the border of the step before may lie beyond all keys that are left.
    border = min(kept.state[0], total - 1) if kept is not None and continued else step.border
    if continued:
        tokens.append(_Token("key", 0, total - 1))
        if step.border == border + 1:  # the usual case: one key is no longer near
            tokens.append(_Token("key", 1, border))
        states += [key[:, :, token.column, None] for token in tokens[len(states) :]]
    rotated = _rotate_tokens(forward, step, tokens, states, adapter)
    queries = rotated[: len(step.spans)]
    if kept is None or not continued:
        return queries, _all_keys(forward, step, key, adapter)
    keys = kept.keys.extended(rotated[len(step.spans)])
    if step.border == border + 1:
        keys.whole.narrow(2, border, 1).copy_(rotated[-1])
    elif step.border != border:  # tokens were removed
        first, last = sorted((border, step.border))
        region = 1 if border < step.border else 0
        columns = _columns(forward, step, (first, last, region), key, adapter)
        keys.whole.narrow(2, first, last - first).copy_(columns)
    return queries, keys


def _continues(kept: RotatedKeys, step: _Step, key: Tensor) -> bool:
    """Whether these are the rotated keys of all tokens but the last, for the same regions."""
    _, *lengths = kept.state
    return (
        kept.source is key and tuple(lengths) == step.lengths and kept.keys.view.shape[2] == key.shape[2] - 1
    )


class _Token(NamedTuple):
    """A query or a key that is rotated for pairs of a region."""

    of: str
    region: int
    column: int


def _rotate_tokens(
    forward: RemapForward, step: _Step, tokens: list[_Token], states: list[Tensor], adapter: FamilyAdapter
) -> list[Tensor]:
    """Rotate queries and keys of one column each, `[batch, heads, 1, head_dim]`, in one go."""
    heads, like = [each.shape[1] for each in states], states[0]
    name = ("tokens", *tokens, *heads, like.dtype, like.device)
    found = forward.tables.get(name)
    if found is None:
        found = forward.tables[name] = _of_tokens(forward, step, tokens, heads, like, adapter)
    cos, sin, by_channel = found
    together = torch.cat(states, dim=1)
    if by_channel:
        together = rotate_channels(together, cos, sin)
    else:
        together = rotate(together, cos, sin, pairs=adapter.pairs, rotated=adapter.rotated)
    return list(together.split_with_sizes(heads, dim=1))


def _of_tokens(
    forward: RemapForward, step: _Step, tokens: list[_Token], heads: list[int], like: Tensor,
    adapter: FamilyAdapter,
) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
    """cos and sin for each head of each token, `[1 or batch, heads, 1, dim or dim/2]`; whether by channel."""
    positions, tables = [], []
    for token in tokens:
        own = forward.queries if token.of == "query" else forward.keys[:, token.column, None]
        used, table = forward.used(own, token.of, token.region, step.lengths)
        positions.append(used)
        tables.append(table)
    rows = max(map(len, positions))
    together = torch.cat([each.expand(rows, -1) for each in positions], dim=1)
    angles = together[..., None] * torch.stack([each.expand(rows, -1) for each in tables], dim=1)
    cos, sin = angles.cos(), angles.sin()
    sin = -sin if adapter.backwards else sin
    by_channel = adapter.pairs == "halves" and like.shape[-1] == 2 * cos.shape[-1]
    if by_channel:
        cos, sin = channels_of(cos, sin)
    both = torch.stack([cos, sin]).to(like.device, like.dtype)
    which = [number for number, count in enumerate(heads) for _ in range(count)]
    cos, sin = both[:, :, which, None].unbind()
    return cos, sin, by_channel


def _columns(
    forward: RemapForward, step: _Step, span: tuple[int, int, int], key: Tensor, adapter: FamilyAdapter
) -> Tensor:
    """The keys of some columns, rotated for a region; its tables are computed once for all layers."""
    start, stop, region = span
    name = ("columns", span, key.dtype, key.device)
    if name not in forward.tables:
        positions = forward.keys[:, start:stop]
        forward.tables[name] = forward.rotation_at(positions, "key", region, step.lengths, key)
    cos, sin = forward.tables[name]
    sin = -sin if adapter.backwards else sin
    return rotate(key[:, :, start:stop], cos, sin, pairs=adapter.pairs, rotated=adapter.rotated)


def _all_keys(forward: RemapForward, step: _Step, key: Tensor, adapter: FamilyAdapter) -> Growing:
    """All keys, each rotated for its region."""
    parts = [
        _columns(forward, step, span, key, adapter)
        for span in ((0, step.border, 1), (step.border, key.shape[2], 0))
        if span[0] < span[1]
    ]
    rotated = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return with_room(rotated, spare(key.shape[2]))


def _attend(call: AttentionCall, step: _Step, queries: list[Tensor], keys: Tensor) -> Tensor:
    """Attention of a query to all spans, `[batch, 1, heads, value_dim]`, without copying keys."""
    values, scale = call.value, call.kwargs["scaling"]
    rows, heads, *_ = call.query.shape
    groups = (rows, keys.shape[1], heads // keys.shape[1], -1)
    # The heads of a group see the same keys, so they are several queries of one head.
    grouped = [query.reshape(groups) for query in queries]
    if kernel_dtype(call.query).itemsize < 4:
        with without_cudnn():  # each token has another number of keys
            parts = [
                partial_attention(
                    query, keys[:, :, start:stop], values[:, :, start:stop], causal=False, scale=scale
                )
                for query, (start, stop, _) in zip(grouped, step.spans, strict=True)
            ]
        output = reduce(lambda one, other: merge(*one, *other), parts)[0]
        return output.to(values.dtype).reshape(rows, 1, heads, -1)
    # `bmm` takes views of three axes; `matmul` would add six operations to each product.
    flat = keys.flatten(0, 1)
    logits = torch.cat(
        [
            torch.bmm(query.flatten(0, 1), flat[:, start:stop].mT)
            for query, (start, stop, _) in zip(grouped, step.spans, strict=True)
        ],
        dim=-1,
    )
    logits = logits * scale
    if step.hidden is not None:
        logits = logits.unflatten(0, groups[:2]).masked_fill(step.hidden, -math.inf).flatten(0, 1)
    weights = logits.softmax(dim=-1)
    return _weighted(weights, values.flatten(0, 1), step.spans).reshape(rows, 1, heads, -1)


def _weighted(weights: Tensor, values: Tensor, spans: tuple[tuple[int, int, int], ...]) -> Tensor:
    """The mean of the values `[n, keys, value_dim]` of all spans; spans without a gap are one product."""
    runs: list[tuple[int, int]] = []
    for start, stop, _ in spans:
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], stop
        else:
            runs.append((start, stop))
    outputs, done = [], 0
    for start, stop in runs:
        outputs.append(torch.bmm(weights[..., done : done + stop - start], values[:, start:stop]))
        done += stop - start
    return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]
