"""The maps of the authors' own programs, pair by pair, as these go through a text.

Each function follows the tables of positions, masks, slices and caches of a program, for texts that it
computes without an error of its own. STRING's map is that of its paper, as its code counts the pairs at
the first changed distance twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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


def self_extend_steps(group: int, window: int) -> Tensor:
    """LongLM's flash attention, token by token: keys by their distance, the last ones by the true one."""
    found = nothing()
    for i in range(window, LENGTH):
        key = torch.arange(i + 1)
        grouped = i // group - key // group + (window - window // group)
        found[i, : i + 1] = torch.cat([grouped[:-window], (i - key)[-window:]]).double()
    return found


def rerope(window: int) -> Tensor:
    """`rerope_patch.py`: the query at the window and the key not rotated, outside of a mask."""
    position = torch.arange(LENGTH).double()
    near = (position[:, None] - position).abs() < window
    return torch.where(near, position[:, None] - position, float(window))


def rerope_steps(window: int) -> Tensor:
    """The same file, token by token."""
    position = torch.arange(LENGTH).double()
    return (position[:, None] - position).clip(max=window)


def leaky_rerope(window: int, leak: float) -> Tensor:
    """`leaky_rerope_patch.py`: a second rotary module divides positions, and queries have an offset there."""
    position, offset = torch.arange(LENGTH).double(), window * (leak - 1)
    near = (position[:, None] - position).abs() < window
    return torch.where(
        near, position[:, None] - position, (position + offset)[:, None] / leak - position / leak
    )


def leaky_rerope_steps(window: int, leak: float) -> Tensor:
    """The same file, token by token: a table of both modules, of which the second begins after the offset."""
    offset = int(window * (leak - 1))
    index = torch.arange(LENGTH + offset).double()
    table = torch.cat([index[:window], index[window + offset :] / leak])
    found = nothing()
    for i in range(LENGTH):
        found[i, : i + 1] = table[i - torch.arange(i + 1)]
    return found


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


def dual_chunk_steps(chunk: int, local: int) -> Tensor:
    """The same file, token by token: the chunk of the last token, the one before, and all others."""
    own, next_chunk, key = chunk_tables(chunk, local)
    found = nothing()
    for i in range(LENGTH):
        here, place = i // chunk, i % chunk
        found[i, chunk * here : i + 1] = own[place] - key[chunk * here : i + 1]
        if here >= 1:
            found[i, chunk * (here - 1) : chunk * here] = next_chunk[place] - key[:chunk]
        if here >= 2:
            found[i, : chunk * (here - 1)] = next_chunk[chunk - 1] - key[: chunk * (here - 1)]
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


def jet_long_steps(near: int, window: int) -> Tensor:
    """Jet-Long, `modeling_qwen3_jetlong.py`: the group from the last position, for keys below a border."""
    found = nothing()
    for i in range(LENGTH):
        key = torch.arange(i + 1)
        group = max(1, math.ceil((i + 1) / window))
        border = max(i - near, 0) if i + 1 > window else 0
        found[i, : i + 1] = torch.where(key < border, i // group - key // group, i - key).double()
    return found


def jet_long(near: int, window: int) -> Tensor:
    """A prefill of the same file: one group for all queries, so it is the same for the last ones only."""
    group, position = math.ceil(LENGTH / window), torch.arange(LENGTH)
    distance = position[:, None] - position
    grouped = (position // group)[:, None] - position // group
    found = torch.where(distance <= near, distance, grouped).double()
    found[: (group - 1) * window] = math.nan
    return found


def cases() -> Iterator[Any]:
    programs: dict[str, tuple[Callable[..., Tensor], ...]] = {
        "self_extend": (self_extend, self_extend_steps), "rerope": (rerope, rerope_steps),
        "leaky": (leaky_rerope, leaky_rerope_steps), "dual_chunk": (dual_chunk, dual_chunk_steps),
        "string": (string,), "sinks": (sinks,), "jet_long": (jet_long, jet_long_steps),
    }  # fmt: skip
    parameters: dict[str, list[dict[str, Any]]] = {
        "self_extend": [{"group": 4, "window": 8}, {"group": 3, "window": 9}, {"group": 8, "window": 16}],
        "rerope": [{"window": 8}, {"window": 1}],
        "leaky": [{"window": 8, "leak": 16}, {"window": 5, "leak": 3}],
        "dual_chunk": [{"chunk": 10, "local": 2}, {"chunk": 8, "local": 4}, {"chunk": 7, "local": 7}],
        "string": [{"shift": 12, "local": 4}, {"shift": 1, "local": 1}],
        "sinks": [{"sinks": 4, "window": 12}, {"sinks": 1, "window": 1}],
        "jet_long": [{"near": 4, "window": 16}, {"near": 2, "window": 9}],
    }
    for name, functions in programs.items():
        for function in functions:
            for each in parameters[name]:
                label = f"{function.__name__}-{'-'.join(map(str, each.values()))}"
                yield pytest.param("rerope" if name == "leaky" else name, function, each, id=label)


@pytest.mark.parametrize(("name", "program", "parameters"), list(cases()))
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
    computed = ~theirs.isnan().all(dim=1, keepdim=True) & causal
    assert computed.sum() > LENGTH  # pairs, among them distant ones
    torch.testing.assert_close(ours[computed], theirs[computed], rtol=0, atol=1e-13, equal_nan=True)
