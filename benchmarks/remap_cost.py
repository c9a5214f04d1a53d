"""Methods that change positions: the time of a prefill and of a token, compared with the unpatched model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from measuring import Row, document, model, row, timed

import rope_extend as rx

WINDOW, TARGET = 4096, 65_536
PREFILLS, CONTEXT, STEPS = (4096 + 1024, 16_384), 8192, 4


@torch.no_grad()
def changed_positions(repetitions: int) -> Iterator[Row]:
    """Prefills a little beyond the trained window and at four times it, and tokens after twice the window."""
    stock = model(window=WINDOW, layers=2, width=384)
    text = document(PREFILLS[-1], 4096).input_ids[None].to(stock.device)
    for method in ("self_extend", "rerope", "jet_long", "dual_chunk", "sinks"):
        lm = model(window=WINDOW, layers=2, width=384)
        rx.extend(lm, TARGET, method)
        for length in PREFILLS:
            times = timed(
                lambda lm=lm, length=length: lm(text[:, :length], use_cache=False, logits_to_keep=1),
                lambda length=length: stock(text[:, :length], use_cache=False, logits_to_keep=1),
                repetitions=repetitions,
            )
            yield row(f"{method}: time to prefill {length} tokens", "unpatched", "s", *times)
        caches = [each(text[:, :CONTEXT], logits_to_keep=1).past_key_values for each in (lm, stock)]

        def decode(each: object, cache: object) -> None:
            for at in range(CONTEXT, CONTEXT + STEPS):
                each(text[:, at, None], past_key_values=cache, logits_to_keep=1)  # type: ignore[operator]
            cache.crop(-STEPS)  # type: ignore[attr-defined]

        times = timed(
            lambda lm=lm, cache=caches[0], decode=decode: decode(lm, cache),
            lambda cache=caches[1], decode=decode: decode(stock, cache),
            repetitions=max(repetitions, 5),
            summary=statistics.median,
        )
        yield row(
            f"{method}: median time of a token after {CONTEXT}", "unpatched", "s",
            *(taken / STEPS for taken in times),
        )  # fmt: skip
