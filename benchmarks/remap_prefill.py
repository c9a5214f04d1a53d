"""Methods that rotate distant pairs in another way: time and memory of a prefill."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from decoding import patched
from measuring import Row, clock_of_steps, document, model, peak_bytes, row, timed
from torch import Tensor

import rope_extend as rx

WINDOW = 2048
METHODS = ("self_extend", "rerope", "string", "jet_long", "near_far", "sinks", "dual_chunk")
LONGEST = ("self_extend", "jet_long", "dual_chunk")
"""The methods of the longest prefill: two regions, groups that grow with the text, and chunks."""
TARGET = 1.25
"""The highest ratio to causal attention at 16k tokens, for methods with two regions."""
NAIVE = 4096
"""Tokens at which the naive computation is timed; it holds several tables of all pairs."""


def changed_positions_prefill(
    repetitions: int, lengths: Sequence[int] = (4096, 16_384), longest: int | None = 65_536
) -> Iterator[Row]:
    """Prefills of 2, 8 and 32 trained windows, and one layer's attention as its authors compute it."""
    yield from naive_attention(repetitions)
    stock = one_layer()
    text = document(max(*lengths, longest or 0), 4096).input_ids[None].to(stock.device)
    for method in METHODS:
        lm = patched(stock, 32 * WINDOW, method)
        cases = [(length, repetitions) for length in lengths]
        if longest and method in LONGEST:
            cases.append((longest, 1))
        for length, turns in cases:
            both = (partial(prefill, each, text[:, :length]) for each in (lm, stock))
            times = timed(*both, repetitions=turns, clock=clock_of_steps())
            target = TARGET if length == lengths[-1] and method != "dual_chunk" else None
            yield row(f"{method}: time to prefill {length} tokens", "unpatched", "s", *times, target=target)
        peaks = [
            [peak_bytes(partial(prefill, each, text[:, :length])) for length in lengths]
            for each in (lm, stock)
        ]
        grown = math.log(lengths[-1] / lengths[0])
        exponents = [math.log(each[-1] / each[0]) / grown for each in peaks]
        yield row(f"{method}: exponent of peak bytes in the length", "unpatched", "", *exponents)
        yield row(
            f"{method}: peak bytes at {lengths[-1]} tokens", "unpatched", "B", *(each[-1] for each in peaks)
        )


def one_layer() -> Any:
    """A Llama of one layer with 6 heads of 64 channels, for 2,048 tokens."""
    return model(window=WINDOW, layers=1, width=384)


@torch.no_grad()
def prefill(lm: Any, input_ids: Tensor) -> None:
    """One forward, with the logits of the last token only."""
    lm(input_ids, use_cache=False, logits_to_keep=1)


@torch.no_grad()
def naive_attention(repetitions: int, length: int = NAIVE) -> Iterator[Row]:
    """One layer's attention under SelfExtend, compared with both tables of all logits and a mask."""
    lm = one_layer()
    encoding = rx.extend(lm, 32 * WINDOW, "self_extend").encoding
    layer = lm.model.layers[0].self_attn
    hidden = torch.randn(1, length, 384, generator=torch.Generator().manual_seed(0)).to(lm.device)
    positions = torch.arange(length, device=lm.device)[None]

    def ours() -> Tensor:
        rotation = lm.model.rotary_emb(hidden, positions)
        return layer(hidden, position_embeddings=rotation, attention_mask=None, position_ids=positions)[0]

    def naive() -> Tensor:
        return naive_self_extend(layer, hidden, encoding.group, encoding.window)

    torch.testing.assert_close(ours(), naive(), rtol=0, atol=1e-4)
    times = timed(ours, naive, repetitions=repetitions, clock=clock_of_steps())
    yield row(f"self_extend: one layer's attention, {length} tokens", "two masked tables", "s", *times, 1 / 5)


def naive_self_extend(layer: Any, hidden: Tensor, group: int, window: int) -> Tensor:
    """SelfExtend as its authors compute it: keys repeated, all logits twice, and a mask that chooses."""
    heads = [
        project(hidden).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]
    query, key, value = heads[0], *(part.repeat_interleave(2, dim=1) for part in heads[1:])
    position = torch.arange(hidden.shape[1], device=hidden.device)
    frequencies = 10_000.0 ** (-torch.arange(0, layer.head_dim, 2, device=hidden.device) / layer.head_dim)

    def rotated(states: Tensor, at: Tensor) -> Tensor:
        angles = (at[:, None] * frequencies).repeat(1, 2)
        a, b = states.chunk(2, dim=-1)
        return states * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()

    def logits(of_query: Tensor, of_key: Tensor) -> Tensor:
        product = rotated(query, of_query) @ rotated(key, of_key).mT / math.sqrt(layer.head_dim)
        later = torch.full(product.shape[-2:], torch.finfo(product.dtype).min).triu(1).to(product.device)
        return product + later

    near = logits(position, position)
    far = logits(position // group + window - window / group, position // group)
    is_near = position[:, None] - position < window
    weights = torch.where(is_near, near, far).softmax(dim=-1, dtype=torch.float32)
    return layer.o_proj((weights @ value).transpose(1, 2).flatten(2))
