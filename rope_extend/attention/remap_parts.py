"""Attention under changed positions in a few calls without a mask, in memory linear in the length.

A text of T tokens is cut so that each part is plain causal or full attention:

- pairs closer than W: blocks of W tokens, each causal; and each block with the one before, of which query i
  sees the keys after i. With both in reverse order, and without one query and one key, that is causal too;
- pairs from W on: the queries from W on, with the keys up to T - W, are a causal square;
- chunks that are not neighbours: squares of 2^b chunks, one call for each b, and one call for a last part of
  a chunk.

The parts are merged by their log-sum-exp in float32. No pair is computed twice, and blocks and chunks of
equal size are one call. That call pads a part of a block or chunk to a whole one, if at least `LEAST_TO_PAD`
are whole: so no text takes more than 5/3 of the pairs that attend. Of fewer, as of a few tokens after a
cache, each part is a rectangle and a causal square of its own, and takes exactly those pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.attention.log_sum_exp import merge, partial_attention
from rope_extend.attention.registry import without_cudnn
from rope_extend.encodings.core.remap import Bands, Borders, Chunks, StartAndWindow

LEAST_TO_PAD = 2
"""The fewest whole blocks or chunks next to which parts of one are padded."""

FEW_QUERIES = 1024
"""Fewer queries see another number of earlier keys each time, for which cuDNN would build a plan."""

Result = tuple[Tensor, Tensor]
"""Outputs `[batch, heads, n, value_dim]` and log-sum-exps `[batch, heads, n]`."""


class Turn(Protocol):
    """Turns queries or keys `[batch, heads, n, head_dim]`, the first of which is the n-th of the text."""

    def __call__(self, states: Tensor, start: int, region: int, length: int) -> Tensor:
        """Turn them on for pairs of a region, for queries whose table has a length."""


@dataclass(frozen=True)
class Text:
    """Rows of consecutive tokens without padding; the queries are the last of the keys.

    Attributes:
        query: `[batch, heads, Q, head_dim]`, as the model rotates them.
        key: `[batch, kv_heads, K, head_dim]`, as the model rotates them.
        value: `[batch, kv_heads, K, value_dim]`.
        turn_query: turns queries on to the positions of a region.
        turn_key: turns keys on.
        segments: the queries, cut where their table changes: first column, column after the last, length.
        lowest: the position of column 0.
        scale: the factor on the products of queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    turn_query: Turn
    turn_key: Turn
    segments: Sequence[tuple[int, int, int]]
    lowest: int
    scale: float

    @property
    def first(self) -> int:
        """The column of the first query."""
        return self.key.shape[2] - self.query.shape[2]

    def queries(self, start: int, stop: int, region: int, length: int) -> Tensor:
        """The rotated queries of columns `start` to `stop`."""
        states = self.query[:, :, start - self.first : stop - self.first]
        return self.turn_query(states, start - self.first, region, length)

    def keys(self, start: int, stop: int, region: int, length: int) -> Tensor:
        """The rotated keys of columns `start` to `stop`."""
        return self.turn_key(self.key[:, :, start:stop], start, region, length)


def can_be_cut(borders: Borders, lowest: int, first: int) -> bool:
    """Whether `attend` computes a text with column 0 at position `lowest` and the first query in `first`."""
    if isinstance(borders, Chunks):
        return lowest % borders.size == 0
    if isinstance(borders, StartAndWindow):
        return first == 0 or first >= borders.start - lowest
    return True


def attend(text: Text, borders: Borders) -> Tensor:
    """Causal attention of a text under changed positions, `[batch, heads, Q, value_dim]`."""
    if isinstance(borders, Bands):
        return _bands(text, borders.window)
    if isinstance(borders, Chunks):
        return _chunks(text, borders.size)
    return _start_and_window(text, borders)


def _bands(text: Text, window: int) -> Tensor:
    first, total = text.first, text.key.shape[2]
    length = text.segments[0][2]
    low = max(0, first - window)
    near, near_sums = _near(
        text.queries(first, total, 0, length), text.keys(low, total, 0, length), text.value[:, :, low:],
        window, text.scale,
    )  # fmt: skip
    outputs = []
    for start, stop, length in text.segments:
        begin = max(start, window)  # the first query that has distant keys
        split = begin - first
        outputs.append(near[:, :, start - first : min(split, stop - first)])
        if begin >= stop:
            continue
        query, key = text.queries(begin, stop, 1, length), text.keys(0, stop - window, 1, length)
        far = _of_last(query, key, text.value[:, :, : stop - window], text.scale)
        rows = slice(split, stop - first)
        outputs.append(merge(near[:, :, rows], near_sums[:, :, rows], *far)[0])
    return torch.cat(outputs, dim=2)


def _start_and_window(text: Text, borders: StartAndWindow) -> Tensor:
    first, total, length = text.first, text.key.shape[2], text.segments[0][2]
    start = min(max(0, borders.start - text.lowest), total)  # the columns of the first tokens
    begin = max(first, start)
    low = max(start, begin - borders.window)
    near = _near(
        text.queries(begin, total, 0, length), text.keys(low, total, 0, length), text.value[:, :, low:],
        borders.window, text.scale,
    )  # fmt: skip
    sinks = partial_attention(
        text.queries(begin, total, 1, length), text.keys(0, start, 1, length), text.value[:, :, :start],
        causal=False, scale=text.scale,
    )  # fmt: skip
    output, _ = merge(*near, *sinks)
    if begin == first:
        return output
    head, _ = partial_attention(
        text.queries(0, start, 0, length), text.keys(0, start, 0, length), text.value[:, :, :start],
        causal=True, scale=text.scale,
    )  # fmt: skip
    return torch.cat([head.to(output.dtype), output], dim=2)


def _of_last(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Result:
    """Causal attention of rotated queries, the last of the keys: a square, and a rectangle."""
    all_see = key.shape[2] - query.shape[2]
    found = partial_attention(query, key[:, :, all_see:], value[:, :, all_see:], causal=True, scale=scale)
    if all_see:
        with without_cudnn() if query.shape[2] < FEW_QUERIES else nullcontext():
            before = partial_attention(
                query, key[:, :, :all_see], value[:, :, :all_see], causal=False, scale=scale
            )
        found = merge(*found, *before)
    return found


def _near(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Result:
    """Attention of rotated queries, the last of the keys, to keys closer than `window`, in float32."""
    total = key.shape[2]
    first = offset = total - query.shape[2]
    if not query.numel():
        return query.float(), query.new_zeros(query.shape[:3], dtype=torch.float32)
    parts = []
    if first or total < LEAST_TO_PAD * window:
        head = max(first, min(window, total))  # before it, queries see all keys before them
        if head > first:
            parts.append(_of_last(query[:, :, : head - first], key[:, :, :head], value[:, :, :head], scale))
        first = head
        while first < total < first + LEAST_TO_PAD * window:
            stop = min(total, first + window)
            states = query[:, :, first - offset : stop - offset]
            keys, values = (part[:, :, first - window : stop] for part in (key, value))
            parts.append(_block(states, keys, values, scale))
            first = stop
    if first < total:
        low = max(0, first - window)
        states = query[:, :, first - offset :]
        parts.append(_blocks(states, key[:, :, low:], value[:, :, low:], window, scale))
    outputs, sums = zip(*parts, strict=True)
    return torch.cat([output.to(sums[0].dtype) for output in outputs], dim=2), torch.cat(sums, dim=2)


def _block(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Result:
    """Attention of n queries, the last of W + n keys, each to the W keys that end with its own; n <= W."""
    count = query.shape[2]
    output, sums = _of_last(query, key[:, :, count:], value[:, :, count:], scale)
    if count == 1:
        return output, sums
    return merge(output, sums, *_later_keys(query, key[:, :, :count], value[:, :, :count], scale))


def _later_keys(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Result:
    """Attention of query i to the keys after the i-th; the last query sees none of them."""
    query = query.flip(2)[:, :, 1:]
    key, value = (part.flip(2)[:, :, :-1] for part in (key, value))
    output, sums = partial_attention(query, key, value, causal=True, scale=scale)
    return functional.pad(output.flip(2), (0, 0, 0, 1)), functional.pad(sums.flip(2), (0, 1), value=-math.inf)


def _blocks(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Result:
    """As `_near`, for queries that begin with the first key or `window` keys after it, in two calls."""
    batch, first, more = len(query), key.shape[2] - query.shape[2], -query.shape[2] % window
    query, key, value = (functional.pad(part, (0, 0, 0, more)) for part in (query, key, value))
    output, sums = _whole(query, key[:, :, first:], value[:, :, first:], window, scale, causal=True)
    skipped = window - first  # the first block of a text has none before it
    if output.shape[2] > skipped and window > 1:
        queries, keys, values = (
            _folded(part, window)
            for part in (query[:, :, skipped:], key[:, :, :-window], value[:, :, :-window])
        )
        other, other_sums = _later_keys(queries, keys, values, scale)
        other, other_sums = _unfolded(other, batch), _unfolded(other_sums[..., None], batch)[..., 0]
        rest = merge(output[:, :, skipped:], sums[:, :, skipped:], other, other_sums)
        output = torch.cat([output[:, :, :skipped].to(rest[0].dtype), rest[0]], dim=2)
        sums = torch.cat([sums[:, :, :skipped], rest[1]], dim=2)
    rows = slice(0, output.shape[2] - more)
    return output[:, :, rows], sums[:, :, rows]


def _whole(query: Tensor, key: Tensor, value: Tensor, size: int, scale: float, *, causal: bool) -> Result:
    """Attention of each block or chunk of queries to the one of the keys in the same place, in one call."""
    output, sums = partial_attention(
        _folded(query, size), _folded(key, size), _folded(value, size), causal=causal, scale=scale
    )
    return _unfolded(output, len(query)), _unfolded(sums[..., None], len(query))[..., 0]


def _chunks(text: Text, size: int) -> Tensor:
    first, total, length = text.first, text.key.shape[2], text.segments[0][2]
    key, value = text.keys(0, total, 0, length), text.value
    query = text.queries(first, total, 0, length)
    parts = [
        _of_chunks(query[:, :, start - first : stop - first], key, value, start, size, text.scale, back=0)
        for start, stop in _runs(first, total, size)
    ]
    outputs, sums = zip(*parts, strict=True)
    result = torch.cat(outputs, dim=2).to(sums[0].dtype), torch.cat(sums, dim=2)
    later = max(first, size)  # the first query that has a chunk before its own
    if later >= total:
        return result[0]
    query = text.queries(later, total, 1, length)
    rows = []
    for start, stop in _runs(later, total, size):
        states = query[:, :, start - later : stop - later]
        rows.append((start - first, _of_chunks(states, key, value, start, size, text.scale, back=1)))
    result = _with(result, later - first, rows)
    begin = max(first, 2 * size)  # the first query that has two chunks before its own
    if begin >= total:
        return result[0]
    query = text.queries(begin, total, 2, length)
    for groups in _far_chunks(begin, total, size):
        far = [
            (query[:, :, q[0] - begin : q[1] - begin], key[:, :, slice(*k)], value[:, :, slice(*k)])
            for group in groups
            for q, k in group
        ]
        found = _of_groups(far, [len(group) for group in groups], text.scale)
        starts = [group[0][0][0] - first for group in groups]
        rows_of = sorted(zip(starts, found, strict=True), key=lambda each: each[0])
        result = _with(result, begin - first, rows_of)
    return result[0]


def _runs(first: int, total: int, size: int) -> list[Range]:
    """The columns of queries, cut so that each run is one call: all of them, or the part of each chunk."""
    whole = total // size - -(-first // size)
    if whole >= LEAST_TO_PAD:
        return [(first, total)]
    borders = range((first // size + 1) * size, total, size)
    return list(itertools.pairwise([first, *borders, total]))


def _of_chunks(
    query: Tensor, key: Tensor, value: Tensor, start: int, size: int, scale: float, *, back: int
) -> Result:
    """Attention of a run of queries to their own chunks, causal, or `back` chunks before, in full.

    `start` is the column of the first query; keys and values begin with column 0.
    """
    stop, low = start + query.shape[2], start // size * size
    if stop <= low + size and back:
        keys, values = (part[:, :, low - back * size : low + size - back * size] for part in (key, value))
        return partial_attention(query, keys, values, causal=False, scale=scale)
    if stop <= low + size:
        return _of_last(query, key[:, :, low:stop], value[:, :, low:stop], scale)
    ahead, more = start - low, -stop % size
    query = functional.pad(query, (0, 0, ahead, more))
    keys, values = (
        functional.pad(part, (0, 0, 0, more))[:, :, low - back * size : stop + more - back * size]
        for part in (key, value)
    )
    output, sums = _whole(query, keys, values, size, scale, causal=not back)
    rows = slice(ahead, output.shape[2] - more)
    return output[:, :, rows], sums[:, :, rows]


Range = tuple[int, int]
Rectangle = tuple[Range, Range]
"""Columns of queries, and of the keys that all of them see."""


def _far_chunks(begin: int, total: int, size: int) -> Iterable[list[list[Rectangle]]]:
    """The pairs of chunks with at least one chunk between them, cut into rectangles, call by call.

    Queries count from the second chunk on: then query chunk u sees the key chunks before u. Whole query
    chunks are cut into runs of `2^b` chunks that begin at a multiple of `2^b`. A run sees all keys before
    itself, in squares of `2^b` chunks. Inside it is a tree: the second half sees the first. All squares of a
    size are one call, and so is a last part of a chunk. So n chunks from the first token on take at most
    `log2 n` calls, rounded up. After a cache, the keys before a run are one rectangle in a call of its own,
    since squares need copies of queries.

    Args:
        begin: the first column of queries; two chunks or more are before it.
        total: the column after the last one.
        size: the columns of a chunk.

    Returns:
        Rectangles of equal size for each call, in groups. Those of a group have the same queries, which are
        in no other group.
    """
    first, last = -(-begin // size), total // size  # the whole chunks
    if first * size > begin:
        yield [[((begin, min(total, first * size)), (0, (first - 2) * size))]]
    if last * size < total and last >= first:
        yield [[((last * size, total), (0, (last - 1) * size))]]
    calls: dict[int, list[list[Rectangle]]] = {}

    def square(query: int, key: int, run: int) -> Rectangle:
        return ((query + 1) * size, (query + 1 + run) * size), (key * size, (key + run) * size)

    start = 0 if first == 2 else first - 1  # query chunk 0 sees no keys
    whole_text = start == 0
    while start < last - 1:
        run = 1 << (last - 1 - start).bit_length() - 1
        while start % run:
            run //= 2
        if start and whole_text:
            calls.setdefault(run, []).append([square(start, key, run) for key in range(0, start, run)])
        elif start:
            yield [[(square(start, 0, run)[0], (0, start * size))]]
        half = run // 2
        while half:
            calls.setdefault(half, []).extend(
                [square(at + half, at, half)] for at in range(start, start + run, 2 * half)
            )
            half //= 2
        start += run
    yield from calls.values()


def _of_groups(parts: Iterable[Sequence[Tensor]], sizes: Sequence[int], scale: float) -> list[Result]:
    """Attention of each group of parts, with all parts in one call; those of a group have the same queries.

    Args:
        parts: queries, keys and values of each part, of equal sizes; those of a group follow each other.
        sizes: the number of parts of each group.
        scale: the factor on the products of queries and keys.
    """
    stacked = [torch.cat(states) for states in zip(*parts, strict=True)]
    output, sums = partial_attention(*stacked, causal=False, scale=scale)
    results = iter(zip(output.chunk(sum(sizes)), sums.chunk(sum(sizes)), strict=True))
    return [reduce(lambda ours, other: merge(*ours, *other), islice(results, size)) for size in sizes]


def _with(result: Result, start: int, found: Iterable[tuple[int, Result]]) -> Result:
    """A result, with those of other keys for some of the rows from `start` on, each at its first row."""
    outputs, sums = [], []
    row = start
    total = result[0].shape[2]
    for begin, (output, part) in [*found, (total, (result[0][:, :, :0], result[1][:, :, :0]))]:
        outputs += [result[0].new_zeros(*output.shape[:2], begin - row, output.shape[3]), output]
        sums += [part.new_full((*part.shape[:2], begin - row), -math.inf), part]
        row = begin + output.shape[2]
    merged = merge(
        result[0][:, :, start:], result[1][:, :, start:], torch.cat(outputs, dim=2), torch.cat(sums, dim=2)
    )
    return (
        torch.cat([result[0][:, :, :start], merged[0]], dim=2),
        torch.cat([result[1][:, :, :start], merged[1]], dim=2),
    )


def _folded(states: Tensor, size: int) -> Tensor:
    """`[batch, heads, n * size, d]` as `[batch * n, heads, size, d]`."""
    batch, heads, _, width = states.shape
    return states.reshape(batch, heads, -1, size, width).transpose(1, 2).flatten(0, 1)


def _unfolded(states: Tensor, batch: int) -> Tensor:
    """The inverse of `_folded`."""
    folded, heads, _, width = states.shape
    return states.reshape(batch, folded // batch, heads, -1, width).transpose(1, 2).flatten(2, 3)
