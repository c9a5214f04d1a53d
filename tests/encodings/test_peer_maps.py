"""The maps of the authors' own programs, pair by pair, as these go through a text.

Each function follows the tables of positions, masks, slices and caches of a program, for texts that it
computes without an error of its own. STRING's map is that of its paper, as its code counts the pairs at
the first changed distance twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_extend as rx
from rope_extend.encodings import RemapEncoding, RopeShape

LENGTH, TRAINED = 70, 16
SHAPE = RopeShape(16, 10_000.0, TRAINED)


def nothing() -> Tensor:
    return torch.full((LENGTH, LENGTH), math.nan, dtype=torch.float64)


def self_extend(group: int, window: int) -> Tensor:
    """LongLM, `self_extend_patch/Llama.py`: two tables of logits, and a mask that chooses between them."""
    position = torch.arange(LENGTH).double()
    near = position[:, None] - position
    far = (position // group + window - window / group)[:, None] - position // group
    chosen = torch.ones(LENGTH, LENGTH).tril()
    chosen[window:, :-window] -= torch.ones(LENGTH - window, LENGTH - window).tril()
    return torch.where(chosen.bool(), near, far)


def rerope(window: int) -> Tensor:
    """`rerope_patch.py`: the query at the window and the key not rotated, outside of a mask."""
    position = torch.arange(LENGTH).double()
    near = (position[:, None] - position).abs() < window
    return torch.where(near, position[:, None] - position, float(window))


def leaky_rerope(window: int, leak: float) -> Tensor:
    """`leaky_rerope_patch.py`: a second rotary module divides positions, and queries have an offset there."""
    position, offset = torch.arange(LENGTH).double(), window * (leak - 1)
    near = (position[:, None] - position).abs() < window
    return torch.where(
        near, position[:, None] - position, (position + offset)[:, None] / leak - position / leak
    )


def string(shift: int, local: int) -> Tensor:
    """Section 4.1 of 2410.18745: from S on, tokens are shifted by S, and W further."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return torch.where(distance < shift, distance, distance - shift + local).double()


def chunk_tables(chunk: int, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """ChunkLlama's positions of queries in their own chunk, of queries for the chunk before, and of keys."""
    own = torch.arange(chunk).double()
    return own, (own + chunk).clamp(max=chunk + local), torch.arange(LENGTH).double() % chunk


def dual_chunk(chunk: int, local: int) -> Tensor:
    """ChunkLlama, `chunkllama_attn_replace.py`: a loop over the chunks that remain, three calls for each."""
    own, next_chunk, key = chunk_tables(chunk, local)
    found = nothing()
    found[:chunk, :chunk] = own[:, None] - key[:chunk]
    before, remaining = slice(0, chunk), LENGTH - chunk
    while remaining > 0:
        begin = LENGTH - remaining
        here = slice(begin, begin + min(chunk, remaining))
        place = torch.arange(here.start, here.stop) % chunk
        found[here, here] = own[place][:, None] - key[here]
        found[here, before] = next_chunk[place][:, None] - key[before]
        if begin - chunk > 0:
            found[here, : begin - chunk] = next_chunk[chunk - 1] - key[: begin - chunk]
        before, remaining = here, remaining - chunk
    return found


def sinks(sinks: int, window: int) -> Tensor:
    """StreamingLLM: room is made before each token, and positions count the tokens of the cache."""
    found, cache = nothing(), list[int]()
    for i in range(LENGTH):
        if len(cache) + 1 > sinks + window:
            cache = cache[:sinks] + cache[len(cache) - window + 1 :]
        cache.append(i)
        found[i, cache] = (len(cache) - 1 - torch.arange(len(cache))).double()
    return found


def jet_long(near: int, window: int) -> Tensor:
    """Jet-Long, `modeling_qwen3_jetlong.py`: the group from the last position, for keys below a border."""
    found = nothing()
    for i in range(LENGTH):
        key = torch.arange(i + 1)
        group = max(1, math.ceil((i + 1) / window))
        border = max(i - near, 0) if i + 1 > window else 0
        found[i, : i + 1] = torch.where(key < border, i // group - key // group, i - key).double()
    return found


PROGRAMS: list[tuple[str, Callable[..., Tensor], dict[str, Any]]] = [
    ("self_extend", self_extend, {"group": 4, "window": 8}),
    ("self_extend", self_extend, {"group": 3, "window": 9}),
    ("self_extend", self_extend, {"group": 8, "window": 16}),
    ("rerope", rerope, {"window": 8}),
    ("rerope", rerope, {"window": 1}),
    ("rerope", leaky_rerope, {"window": 8, "leak": 16}),
    ("rerope", leaky_rerope, {"window": 5, "leak": 3}),
    ("string", string, {"shift": 12, "local": 4}),
    ("string", string, {"shift": 1, "local": 1}),
    ("dual_chunk", dual_chunk, {"chunk": 10, "local": 2}),
    ("dual_chunk", dual_chunk, {"chunk": 8, "local": 4}),
    ("dual_chunk", dual_chunk, {"chunk": 7, "local": 7}),
    ("sinks", sinks, {"sinks": 4, "window": 12}),
    ("sinks", sinks, {"sinks": 1, "window": 1}),
    ("jet_long", jet_long, {"near": 4, "window": 16}),
    ("jet_long", jet_long, {"near": 2, "window": 9}),
]


@pytest.mark.parametrize(("name", "program", "parameters"), PROGRAMS)
def test_a_map_is_that_of_the_authors_program(
    name: str, program: Callable[..., Tensor], parameters: dict[str, Any]
) -> None:
    """Equal in float64, except for the rounding of divisions by a group or a leak."""
    method = rx.encoding(name, **parameters)
    assert isinstance(method, RemapEncoding)
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    causal = keys <= queries
    ours = method.distance(SHAPE, queries, keys.clamp(max=queries))
    theirs = program(**parameters)
    torch.testing.assert_close(ours[causal], theirs[causal], rtol=0, atol=1e-13, equal_nan=True)
