"""Decoding with a cache: exact caches of length-dependent methods, and linear attention."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator

import torch
from measuring import Row, clock_of_steps, document, model, row, timed
from torch.utils._pytree import tree_leaves
from transformers import Cache, LlamaForCausalLM

import rope_extend as rx
from rope_extend.memory.live_bytes import LiveBytes


def tensors_of(cache: Cache) -> float:
    """Bytes of all tensors that a cache and its layers hold."""
    storages = {}
    for owner in (cache, *cache.layers):
        for tensor in tree_leaves(list(vars(owner).values())):
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return float(sum(storages.values()))


CONTEXTS = (512, 2048, 8192)
STEPS = 32
TARGET = 1.7
"""The highest ratio of the time of a token beyond the trained window to that without a patch."""


def dynamic_cache(repetitions: int) -> Iterator[Row]:
    """Decoding with keys that are turned for each token beyond the window, compared with the unpatched model.

    Decodes one token at a time after a cached context. The smallest context is the trained window: its first
    new token uses another table than the tokens before. Both models have the same weights in memory, and take
    turns at each token, so that caches of the processor and other programs serve both alike.
    """
    window, target = CONTEXTS[0], 2 * CONTEXTS[-1]
    stock = model(window=window, width=384, layers=4)
    text = document(CONTEXTS[-1] + STEPS, 4096).input_ids[None].to(stock.device)

    @torch.no_grad()
    def decode(lm: LlamaForCausalLM, cache: Cache, context: int) -> torch.Tensor:
        """Logits of STEPS tokens after the context; the cache then holds the context again."""
        steps = [
            lm(text[:, at, None], past_key_values=cache, use_cache=True).logits
            for at in range(context, context + STEPS)
        ]
        cache.crop(-STEPS)
        return torch.cat(steps, dim=1)

    @torch.no_grad()
    def prefill(lm: LlamaForCausalLM, context: int) -> Cache:
        return lm(text[:, :context], use_cache=True, logits_to_keep=1).past_key_values

    @torch.no_grad()
    def most(context: int, lm: LlamaForCausalLM) -> tuple[float, float]:
        """Bytes of our cache and of the stock one after the token at which their ratio is highest."""
        ours, theirs = prefill(lm, context), prefill(stock, context)
        sizes = []
        for at in range(context, context + STEPS):
            for each, cache in ((lm, ours), (stock, theirs)):
                each(text[:, at, None], past_key_values=cache, use_cache=True)
            sizes.append((tensors_of(ours), tensors_of(theirs)))
        return max(sizes, key=lambda pair: pair[0] / pair[1])

    @torch.no_grad()
    def seconds(lm: LlamaForCausalLM, caches: tuple[Cache, Cache], context: int, turns: int) -> list[float]:
        """Time of a token, ours and stock, in the turn whose ratio is the median.

        Each turn begins with the same caches. What slows the machine for a while slows both of a turn.
        """
        clock, totals = clock_of_steps(), []
        for turn in range(turns + 1):
            own, total = copy.deepcopy(caches), [0.0, 0.0]
            for at in range(context, context + STEPS):
                for index in (0, 1) if (at + turn) % 2 else (1, 0):
                    started = clock()
                    (lm, stock)[index](text[:, at, None], past_key_values=own[index], use_cache=True)
                    if stock.device.type == "cuda":
                        torch.cuda.synchronize()
                    total[index] += clock() - started
            totals.append(total)  # the first turn warms up
        ratios = [ours / theirs for ours, theirs in totals[1:]]
        middle = ratios.index(statistics.median_low(ratios))
        return [each / STEPS for each in totals[1 + middle]]

    @torch.no_grad()
    def peak(lm: LlamaForCausalLM, cache: Cache, context: int) -> float:
        """The most bytes during the steps, of the cache and of all that they compute."""
        own, counter = copy.deepcopy(cache), LiveBytes()
        for layer in own.layers:
            counter.add(layer.keys)
            counter.add(layer.values)
        with counter:
            for at in range(context, context + STEPS):
                lm(text[:, at, None], past_key_values=own, use_cache=True)
        return float(counter.peak)

    # One model per method: the cache of one method is wrong for another.
    for method in ("dynamic_ntk", "dynamic_yarn", "short_original(yarn)"):
        lm = copy.deepcopy(stock, {id(weight): weight for weight in stock.parameters()})
        rx.extend(lm, target, method)
        for context in CONTEXTS:
            ours, theirs = prefill(lm, context), prefill(stock, context)
            where, peer = f"{method}: %s at {context} tokens", "stock cache, unpatched"
            yield row(where % "largest cache", peer, "B", *most(context, lm))
            if context < CONTEXTS[-1]:  # check the result against one forward over the whole text
                with torch.no_grad():
                    whole = lm(text[:, : context + STEPS], use_cache=False, logits_to_keep=STEPS).logits
                torch.testing.assert_close(decode(lm, ours, context), whole, rtol=0, atol=1e-3)
            yield row(
                where % "peak of a step", peer, "B", peak(lm, ours, context), peak(stock, theirs, context)
            )
            times = seconds(lm, (ours, theirs), context, max(repetitions, 7))
            yield row(where % "time of a token", peer, "s", *times, target=TARGET)
        times = timed(
            lambda lm=lm: prefill(lm, CONTEXTS[1]),
            lambda: prefill(stock, CONTEXTS[1]),
            repetitions=repetitions,
        )
        yield row(f"{method}: time to prefill {CONTEXTS[1]} tokens", peer, "s", *times)


def linear_attention(repetitions: int) -> Iterator[Row]:
    """Decoding with a state instead of keys: constant time and bytes for texts of any length."""
    lm = model(layers=2)
    rx.patch_model(lm, rx.encoding("linear_attention"))
    caches, lengths = [], (1024, 65_536)
    text = document(lengths[-1] + 1, 4096).input_ids[None].to(lm.device)

    @torch.no_grad()
    def read(ids: torch.Tensor, cache: Cache | None = None) -> Cache:
        return lm(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    for length in lengths:
        caches.append(read(text[:, :length]))
    sizes = [
        float(sum(each.nbytes for layer in cache.layers for each in layer.state))
        for cache in (read(text[:, -1:], cache) for cache in caches)
    ]
    yield row("linear attention: cache after 64k tokens", "after 1k", "B", sizes[1], sizes[0])
    times = timed(
        *(lambda cache=cache: [read(text[:, -1:], cache) for _ in range(STEPS)] for cache in caches),
        repetitions=max(repetitions, 7),
        summary=statistics.median,
    )
    yield row(
        "linear attention: median time of a token after 64k", "after 1k", "s",
        *(taken / STEPS for taken in reversed(times)),
    )  # fmt: skip
    long, short = timed(
        lambda: read(text[:, :16_384]), lambda: read(text[:, :4096]), repetitions=min(repetitions, 3)
    )
    yield row("linear attention: time to read a token of 16k", "of 4k", "s", long / 16_384, short / 4096)
