"""Methods that rotate distant pairs in another way: time and bytes of a token after a cache."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from decoding import STEPS, tensors_of
from measuring import Row, clock_of_steps, document, model, row, timed

import rope_extend as rx

WINDOW, CONTEXT = 4096, 8192
METHODS = ("self_extend", "rerope", "string", "jet_long", "near_far", "dual_chunk", "sinks")
TARGET = 1.7
"""The highest ratio of the time of a token to that without a patch; its layers share the angles."""


@torch.no_grad()
def changed_positions(
    repetitions: int, window: int = WINDOW, context: int = CONTEXT, layers: int = 8
) -> Iterator[Row]:
    """Tokens after twice the window. The cache is a `DynamicCache`; for `sinks`, the bounded one too."""
    stock = model(window=window, layers=layers, width=384)
    text = document(context + STEPS, 4096).input_ids[None].to(stock.device)

    def filled(lm: Any, cache: Any = None) -> Any:
        return lm(text[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def decode(lm: Any, cache: Any) -> None:
        for at in range(context, context + STEPS):
            lm(text[:, at, None], past_key_values=cache, logits_to_keep=1)
        if cache.is_croppable:
            cache.crop(-STEPS)

    for method in METHODS:
        lm = model(window=window, layers=layers, width=384)
        if method == "string":  # the arithmetic is that of any length, but its reach is below two windows
            rx.patch_model(lm, rx.encoding(method, shift=window // 3, local=128), target_length=2 * context)
        else:
            rx.extend(lm, 2 * context, method)
        caches = {"": None} if method != "sinks" else {"": None, ", sink_cache": rx.sink_cache(lm)}
        for name, empty in caches.items():
            ours, theirs = filled(lm, empty), filled(stock)
            decode(lm, ours)
            decode(stock, theirs)  # removed tokens stay in memory
            yield row(
                f"{method}{name}: cache at {context} tokens", "unpatched", "B",
                tensors_of(ours), tensors_of(theirs),
            )  # fmt: skip
            times = timed(
                lambda lm=lm, cache=ours: decode(lm, cache),
                lambda cache=theirs: decode(stock, cache),
                repetitions=max(repetitions, 7),
                summary=statistics.median,
                clock=clock_of_steps(),
            )
            yield row(
                f"{method}{name}: median time of a token after {context}", "unpatched", "s",
                *(taken / STEPS for taken in times), target=TARGET,
            )  # fmt: skip
