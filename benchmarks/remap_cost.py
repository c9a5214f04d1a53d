"""Methods that rotate distant pairs in another way: time and bytes of a token after a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from decoding import TARGET, filled, patched, real_shape, seconds, tensors_of
from measuring import Row, document, row

import rope_extend as rx

WINDOW, CONTEXT = 4096, 8192
METHODS = ("self_extend", "rerope", "string", "jet_long", "near_far", "dual_chunk", "sinks")


@torch.no_grad()
def changed_positions(
    repetitions: int, window: int = WINDOW, context: int = CONTEXT, methods: tuple[str, ...] = METHODS
) -> Iterator[Row]:
    """Tokens after twice the window. The cache is a `DynamicCache`; for `sinks`, the bounded one too."""
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
