"""Decoding with a cache: length-dependent methods, changed positions, and linear attention."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator

import torch
from measuring import Memory, Row, clock_of_steps, document, model, row, timed
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, LlamaForCausalLM

import rope_extend as rx


def tensors_of(cache: Cache) -> float:
    """Bytes of all tensors that a cache and its layers hold."""
    storages = {}
    for owner in (cache, *cache.layers):
        for tensor in tree_leaves(list(vars(owner).values())):
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return float(sum(storages.values()))


CONTEXTS = (512, 2048, 8192)
STEPS = 16
TARGET = 1.7
"""The highest ratio of the time of a token beyond the trained window to that without a patch."""
REMAPS = ("self_extend", "rerope", "string", "jet_long", "near_far", "dual_chunk", "sinks")
"""Methods that rotate distant pairs in another way."""
WITHIN = 1.03
"""The highest ratio within it, where nothing is turned."""


def real_shape(window: int) -> LlamaForCausalLM:
    """A random Llama in the shape of SmolLM2-135M. The more layers share angles, the less a token costs."""
    return model(49_152, window, layers=30, width=576, heads=9)


def filled(lm: LlamaForCausalLM, context: int) -> Cache:
    """A cache of random keys and values, as if a text had been read."""
    config, cache = lm.config, DynamicCache()
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, device=lm.device) for _ in range(2)), layer)
    return cache


def patched(stock: LlamaForCausalLM, target: int, method: str) -> LlamaForCausalLM:
    """The same weights under a method. One model per method: the cache of one method is wrong for another."""
    lm = copy.deepcopy(stock, {id(weight): weight for weight in stock.parameters()})
    if method == "string":  # the arithmetic is that of any length, but its reach is below two windows
        shift = stock.config.max_position_embeddings // 3
        rx.patch_model(lm, rx.encoding(method, shift=shift, local=128), target_length=target)
    else:
        rx.extend(lm, target, method)
    return lm


@torch.no_grad()
def seconds(models: tuple[LlamaForCausalLM, ...], caches: tuple[Cache, ...], repetitions: int) -> list[float]:
    """Time of a token of each model, in the turn whose ratio is the median.

    The models take turns at each token, and each turn begins with the same caches, so that caches of the
    processor and other programs serve all alike.
    """
    clock, totals = clock_of_steps(), []
    token = torch.zeros(1, 1, dtype=torch.long, device=models[0].device)
    for turn in range(repetitions + 1):
        own, total = copy.deepcopy(caches), [0.0 for _ in models]
        for step in range(STEPS):
            for index in range(len(models))[:: -1 if (step + turn) % 2 else 1]:
                started = clock()
                models[index](token, past_key_values=own[index], use_cache=True)
                if token.is_cuda:
                    torch.cuda.synchronize()
                total[index] += clock() - started
        totals.append([each / STEPS for each in total])  # the first turn warms up
    return sorted(totals[1:], key=lambda total: total[0] / total[-1])[repetitions // 2]


def dynamic_cache(repetitions: int) -> Iterator[Row]:
    """Decoding with keys that are turned for each token beyond the window, compared with the unpatched model.

    The bytes are those of a small model with a window of 512, as the first context. Its first new token uses
    another table than the tokens before. The time is that of a real shape, within its window too.
    """
    window, target = CONTEXTS[0], 2 * CONTEXTS[-1]
    stock = model(window=window, width=384, layers=4)
    text = document(CONTEXTS[-1] + STEPS, 4096).input_ids[None].to(stock.device)
    peer = "stock cache, unpatched"

    @torch.no_grad()
    def decode(lm: LlamaForCausalLM, cache: Cache, context: int) -> torch.Tensor:
        """Logits of STEPS tokens after the context."""
        steps = range(context, context + STEPS)
        return torch.cat([lm(text[:, at, None], past_key_values=cache).logits for at in steps], dim=1)

    @torch.no_grad()
    def prefill(lm: LlamaForCausalLM, context: int) -> Cache:
        return lm(text[:, :context], use_cache=True, logits_to_keep=1).past_key_values

    def peak(lm: LlamaForCausalLM, cache: Cache, context: int) -> float:
        """The most bytes during the steps, of the cache and of all that they compute."""
        with Memory(states for layer in cache.layers for states in (layer.keys, layer.values)) as memory:
            decode(lm, cache, context)
        return float(memory.peak)

    for method in ("dynamic_ntk", "dynamic_yarn", "short_original(yarn)"):
        lm = patched(stock, target, method)
        for context in CONTEXTS:
            where = f"{method}: %s at {context} tokens"
            ours, theirs = prefill(lm, context), prefill(stock, context)
            yield row(
                where % "peak of a step", peer, "B", peak(lm, ours, context), peak(stock, theirs, context)
            )
            yield row(where % "cache", peer, "B", tensors_of(ours), tensors_of(theirs))
            if context < CONTEXTS[-1]:  # check the result against one forward over the whole text
                with torch.no_grad():
                    whole = lm(text[:, : context + STEPS], use_cache=False, logits_to_keep=STEPS).logits
                torch.testing.assert_close(
                    decode(lm, prefill(lm, context), context), whole, rtol=0, atol=1e-3
                )
        times = timed(
            lambda lm=lm: prefill(lm, CONTEXTS[1]),
            lambda: prefill(stock, CONTEXTS[1]),
            repetitions=repetitions,
        )
        yield row(f"{method}: time to prefill {CONTEXTS[1]} tokens", peer, "s", *times)
    stock = real_shape(window)
    lm = patched(stock, target, "dynamic_ntk")
    for context in (window // 2, *CONTEXTS):
        times = seconds((lm, stock), (filled(lm, context), filled(stock, context)), repetitions)
        within = context + STEPS <= window
        name = f"dynamic_ntk, 135M: time of a token {'within the window' if within else f'after {context}'}"
        yield row(name, peer, "s", *times, target=WITHIN if within else TARGET)


@torch.no_grad()
def changed_positions(
    repetitions: int, window: int = 4096, context: int = 8192, methods: tuple[str, ...] = REMAPS
) -> Iterator[Row]:
    """Tokens after twice the window, with changed positions: their time and bytes.

    The cache is a `DynamicCache`; for `sinks`, the bounded one too.
    """
    stock = real_shape(window)
    for method in methods:
        lm = patched(stock, 2 * context, method)
        caches = {"": filled(lm, context)}
        if method == "sinks":
            text = document(context, 4096).input_ids[None].to(lm.device)
            bounded = caches[", sink_cache"] = rx.sink_cache(lm)
            lm(text, past_key_values=bounded, logits_to_keep=1)
        for name, ours in caches.items():
            theirs = filled(stock, context)
            times = seconds((lm, stock), (ours, theirs), repetitions)
            yield row(
                f"{method}{name}: cache at {context} tokens", "unpatched", "B",
                tensors_of(ours), tensors_of(theirs),
            )  # fmt: skip
            what = f"{method}{name}, 135M: time of a token after {context}"
            yield row(what, "unpatched", "s", *times, target=TARGET)


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
        float(sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values)))
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
