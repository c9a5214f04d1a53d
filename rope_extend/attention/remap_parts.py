"""Attention under changed positions in parts without a mask, in memory linear in the length.

A text of T tokens is cut so that each part is plain causal or full attention:

- all pairs, under tables that follow the length: the queries of a table, with their own tokens, causal, and
  with all before;
- pairs closer than W: blocks of W queries; each with its own W tokens, causal, and with the block before, of
  which query i sees the keys after i. With both in reverse order, and without one query and one key, that is
  causal too;
- pairs from W on: the queries from W on, with the keys up to T - W, are a causal square;
- chunks: each with its own tokens, causal; with the chunk before; and with all earlier ones.

The parts are merged by their log-sum-exp in float32. They compute exactly the pairs that attend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.attention.log_sum_exp import Partial, merge_partials, partial_attention
from rope_extend.encodings.core.regions import Bands, Borders, Chunks, Everywhere, StartAndWindow

Turn = Callable[[str, Tensor, int, int, Any], Tensor]
"""Turns states of a `query` or `key`: by the column of the first, a region and a table."""


@dataclass(frozen=True)
class Text:
    """Rows of consecutive tokens without padding; the queries are the last of the keys.

    Attributes:
        query: `[batch, heads, Q, head_dim]`, as the model rotates them.
        key: `[batch, kv_heads, K, head_dim]`, as the model rotates them.
        value: `[batch, kv_heads, K, value_dim]`.
        turn: turns queries or keys on to the positions of a region.
        segments: the queries, cut where their table changes: first column, column after the last, table.
        lowest: the position of column 0.
        scale: the factor on the products of queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    turn: Turn
    segments: Sequence[tuple[int, int, Any]]
    lowest: int
    scale: float

    @property
    def first(self) -> int:
        """The column of the first query."""
        return self.key.shape[2] - self.query.shape[2]

    def queries(self, start: int, stop: int, region: int, table: Any) -> Tensor:
        """The rotated queries of columns `start` to `stop`."""
        states = self.query[:, :, start - self.first : stop - self.first]
        return self.turn("query", states, start, region, table)

    def keys(self, start: int, stop: int, region: int, table: Any) -> Tensor:
        """The rotated keys of columns `start` to `stop`."""
        return self.turn("key", self.key[:, :, start:stop], start, region, table)


def can_be_cut(borders: Borders, lowest: int, first: int) -> bool:
    """Whether `attend` computes a text with column 0 at position `lowest` and the first query in `first`."""
    if isinstance(borders, Chunks):
        return lowest % borders.size == 0
    if isinstance(borders, StartAndWindow):
        return first == 0 or first >= borders.start - lowest
    return True


def attend(text: Text, borders: Borders) -> Tensor:
    """Causal attention of a text under changed positions, `[batch, heads, Q, value_dim]`."""
    if isinstance(borders, Everywhere):
        return _everywhere(text)
    if isinstance(borders, Bands):
        return _bands(text, borders.window)
    if isinstance(borders, Chunks):
        return _chunks(text, borders.size)
    return _start_and_window(text, borders)


def _everywhere(text: Text) -> Tensor:
    outputs = [
        _of_last(
            text.queries(start, stop, 0, table), text.keys(0, stop, 0, table), text.value[:, :, :stop],
            text.scale,
        )[0] for start, stop, table in text.segments
    ]  # fmt: skip
    return torch.cat(outputs, dim=2)


def _bands(text: Text, window: int) -> Tensor:
    first, total = text.first, text.key.shape[2]
    table = text.segments[0][2]
    low = max(0, first - window)
    near, near_sums = _near(
        text.queries(first, total, 0, table), text.keys(low, total, 0, table), text.value[:, :, low:],
        window, text.scale,
    )  # fmt: skip
    outputs = []
    for start, stop, table in text.segments:
        begin = max(start, window)  # the first query that has distant keys
        split = begin - first
        outputs.append(near[:, :, start - first : min(split, stop - first)])
        if begin >= stop:
            continue
        query, key = text.queries(begin, stop, 1, table), text.keys(0, stop - window, 1, table)
        far = _of_last(query, key, text.value[:, :, : stop - window], text.scale)
        rows = slice(split, stop - first)
        outputs.append(merge_partials((near[:, :, rows], near_sums[:, :, rows]), far)[0])
    return torch.cat(outputs, dim=2)


def _start_and_window(text: Text, borders: StartAndWindow) -> Tensor:
    first, total, table = text.first, text.key.shape[2], text.segments[0][2]
    start = min(max(0, borders.start - text.lowest), total)  # the columns of the first tokens
    begin = max(first, start)
    low = max(start, begin - borders.window)
    near = _near(
        text.queries(begin, total, 0, table), text.keys(low, total, 0, table), text.value[:, :, low:],
        borders.window, text.scale,
    )  # fmt: skip
    sinks = partial_attention(
        text.queries(begin, total, 1, table), text.keys(0, start, 1, table), text.value[:, :, :start],
        causal=False, scale=text.scale,
    )  # fmt: skip
    output, _ = merge_partials(near, sinks)
    if begin == first:
        return output
    head, _ = partial_attention(
        text.queries(0, start, 0, table), text.keys(0, start, 0, table), text.value[:, :, :start],
        causal=True, scale=text.scale,
    )  # fmt: skip
    return torch.cat([head.to(output.dtype), output], dim=2)


def _of_last(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Causal attention of rotated queries, the last of the keys: a square, and a rectangle."""
    all_see = key.shape[2] - query.shape[2]
    found = partial_attention(query, key[:, :, all_see:], value[:, :, all_see:], causal=True, scale=scale)
    if all_see:
        before = partial_attention(
            query, key[:, :, :all_see], value[:, :, :all_see], causal=False, scale=scale
        )
        found = merge_partials(found, before)
    return found


def _near(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Partial:
    """Attention of rotated queries, the last of the keys, to keys closer than `window`, in float32."""
    total = key.shape[2]
    first = total - query.shape[2]
    if not query.numel():
        return query.float(), query.new_zeros(query.shape[:3], dtype=torch.float32)
    head = max(first, min(window, total))  # before it, queries see all keys before them
    parts = []
    if head > first:
        parts.append(_of_last(query[:, :, : head - first], key[:, :, :head], value[:, :, :head], scale))
    starts = range(head, total, window)
    for start in starts:
        if query.is_meta and not torch.is_grad_enabled() and starts[0] < start < starts[-2]:
            parts.append((torch.empty_like(parts[-1][0]), torch.empty_like(parts[-1][1])))
            continue  # of a dry run: the last two blocks need as much memory
        stop = min(total, start + window)
        keys, values = (part[:, :, start - window : stop] for part in (key, value))
        parts.append(_block(query[:, :, start - first : stop - first], keys, values, scale))
    outputs, sums = zip(*parts, strict=True)
    return torch.cat([output.to(sums[0].dtype) for output in outputs], dim=2), torch.cat(sums, dim=2)


def _block(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Attention of n queries, the last of W + n keys, each to the W keys that end with its own; n <= W."""
    count = query.shape[2]
    found = _of_last(query, key[:, :, count:], value[:, :, count:], scale)
    if count == 1:
        return found
    return merge_partials(found, _later_keys(query, key[:, :, :count], value[:, :, :count], scale))


def _later_keys(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Attention of query i to the keys after the i-th; the last query sees none of them."""
    query = query.flip(2)[:, :, 1:]
    key, value = (part.flip(2)[:, :, :-1] for part in (key, value))
    output, sums = partial_attention(query, key, value, causal=True, scale=scale)
    return functional.pad(output.flip(2), (0, 0, 0, 1)), functional.pad(sums.flip(2), (0, 1), value=-math.inf)


def _chunks(text: Text, size: int) -> Tensor:
    first, total, table = text.first, text.key.shape[2], text.segments[0][2]
    key, value = text.keys(0, total, 0, table), text.value  # at the same positions in all regions
    outputs = []
    for start, stop in itertools.pairwise([first, *range((first // size + 1) * size, total, size), total]):
        low = start // size * size
        own = text.queries(start, stop, 0, table)
        found = _of_last(own, key[:, :, low:stop], value[:, :, low:stop], text.scale)
        for region, keys in ((1, slice(max(0, low - size), low)), (2, slice(0, max(0, low - size)))):
            if keys.start < keys.stop:
                query = text.queries(start, stop, region, table)
                other = partial_attention(
                    query, key[:, :, keys], value[:, :, keys], causal=False, scale=text.scale
                )
                found = merge_partials(found, other)
        outputs.append(found[0])
    return torch.cat(outputs, dim=2)
