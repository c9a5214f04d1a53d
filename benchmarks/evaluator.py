"""The evaluator: memory, time and exactness of perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import measuring
import torch
import torch.nn.functional as F
from measuring import (
    EIGHT_BILLION,
    Memory,
    Row,
    device_name,
    document,
    in_bfloat16,
    model,
    peak_bytes,
    row,
    timed,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from rope_extend.data.documents import Document
from rope_extend.evaluation.flops import operations_of
from rope_extend.evaluation.forward_plan import plan_forward
from rope_extend.evaluation.loss_computer import RunOptions
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.models.load_options import LoadOptions


def evaluator_memory(
    repetitions: int,
    cases: Sequence[tuple[int, int, int, float]] = ((2**15, 1024, 4096, 1 / 10), (2**17, 256, 1024, 1 / 20)),
) -> Iterator[Row]:
    """Growth of peak memory per token, and time, compared with computing all logits at once.

    `cases`: vocabulary size, two lengths, and the target of the growth.
    """
    for vocabulary, short, long, target in cases:
        lm = model(vocabulary)
        text = document(long, vocabulary)

        def ours(length: int, lm: LlamaForCausalLM = lm, text: Document = text) -> None:
            perplexity(lm, [text], [length], progress=False)

        @torch.no_grad()
        def naive(length: int, lm: LlamaForCausalLM = lm, text: Document = text) -> None:
            ids = text.input_ids[None, :length].to(lm.device)
            lm(ids, labels=ids, use_cache=False)

        def growth(run: Callable[[int], None], short: int = short, long: int = long) -> float:
            fewer, more = (peak_bytes(partial(run, length)) for length in (short, long))
            return (more - fewer) / (long - short)

        peer, size = "model(input_ids, labels=...)", f"{vocabulary // 1024}k vocabulary"
        grown = growth(ours), growth(naive)
        yield row(f"evaluator: peak bytes per further token, {size}", peer, "B", *grown, target)
        times = timed(lambda: ours(long), lambda: naive(long), repetitions=repetitions)  # noqa: B023
        yield row(f"evaluator: time at {long} tokens, {size}", peer, "s", *times, 1.0)


def evaluator_agreement(repetitions: int, vocabulary: int = 32_768, length: int = 1024) -> Iterator[Row]:
    """The largest difference of a token's loss from that of a naive loop with all logits in float32."""
    lm, text = model(vocabulary), document(length, vocabulary)
    ids = text.input_ids.to(lm.device)
    with torch.no_grad():
        logits = lm(ids[None], use_cache=False).logits[0, :-1].float()
        naive = F.cross_entropy(logits, ids[1:], reduction="none").cpu().numpy()
    for how, chunk in (("whole", None), ("in chunks", length // 4)):
        result = perplexity(
            lm, [text], [length], options=RunOptions(chunk=chunk), save_losses=True, progress=False
        )
        gap = float(abs(result.losses[length][0] - naive).max())
        yield row(f"evaluator: difference of a token's loss, {how}", "the target", "nat", gap, 1e-5, 1.0)


def whole_curve(repetitions: int, window: int = 64, count: int = 64, reach: int = 32) -> Iterator[Row]:
    """A perplexity curve up to 32x the window, compared with one forward per length and the longest alone."""
    lm = model(window=window)
    lengths = [window * reach * step // count for step in range(1, count + 1)]
    text = document(lengths[-1], 4096)

    def ours() -> None:
        perplexity(lm, [text], lengths, progress=False)

    def loop() -> None:
        for length in lengths:
            perplexity(lm, [text], [length], progress=False)

    def longest() -> None:
        perplexity(lm, [text], lengths[-1:], progress=False)

    flops = []
    for run in (ours, loop):
        with FlopCounterMode(display=False) as counter:
            run()
        flops.append(float(counter.get_total_flops()))
    peer, what = "one forward per length", f"curve of {count} lengths to {reach}x the window"
    yield row(f"{what}: FLOPs", peer, "FLOP", *flops, 1 / 20)
    few = max(1, repetitions // 3)  # the loop is slow, and the ratio far from the target
    yield row(f"{what}: time", peer, "s", *timed(ours, loop, repetitions=few), 1 / 15)
    alone = timed(ours, longest, repetitions=max(repetitions, 7))
    yield row(f"{what}: time", "the longest alone", "s", *alone, 1.05)


PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Operations per second in bfloat16 without sparsity, from the manufacturers' data sheets."""


def evaluator_8b(
    repetitions: int, config: LlamaConfig = EIGHT_BILLION, lengths: tuple[int, int] = (131_072, 262_144),
    device: str | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A model of 8 billion random weights in bfloat16: a whole curve, and a window that is read in chunks.

    Runs on a GPU, with the attention kernels that a user gets.
    """
    device = device or ("cuda" if measuring.DEVICE == "cuda" else None)
    first, second = lengths
    curve = [first * step // 64 for step in range(1, 65)]
    name = f"{'8B' if config is EIGHT_BILLION else 'small'} model, bfloat16: %s at {first:,} tokens"
    longer = f"{name.partition(':')[0]}: time at {second:,} tokens"
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).to(torch.bfloat16)
    flops = operations_of(empty).of(first)
    if device is None:
        for what, target, unit, limit in (
            (name % "time of a curve of 64 lengths", "16 s", "s", 16.0),
            (name % "peak memory besides the weights", "20 GB", "B", 20e9),
            (longer, "finishes", "s", None),
        ):
            yield row(what, target, unit, None, limit, limit and 1.0)
        return
    plan = plan_forward(  # before there are weights
        "random weights", [first], load_options=LoadOptions(device, dtype=torch.bfloat16), empty=empty,
        encodings=[None],
    )  # fmt: skip
    assert plan is not None
    lm = in_bfloat16(config, device)
    weights = sum(parameter.nbytes for parameter in lm.parameters())
    text = document(second, config.vocab_size)

    def run(lengths: list[int]) -> tuple[float, float]:
        """Seconds, and peak bytes besides the weights."""
        if device == "cuda":
            result = perplexity(lm, [text], lengths, progress=False)
            return result.seconds, result.peak_memory_bytes - weights
        with Memory(lm.parameters()) as memory:
            result = perplexity(lm, [text], lengths, progress=False)
        return result.seconds, memory.grown

    runs = [run(curve) for _ in range(max(2, min(repetitions, 3)))]  # the first one is a warm-up
    seconds, memory = min(taken for taken, _ in runs[1:]), max(peak for _, peak in runs)
    yield row(name % "time of a curve of 64 lengths", "16 s", "s", seconds, 16.0, 1.0)
    peak = next((rate for gpu, rate in PEAK.items() if gpu in device_name()), None)
    if peak is not None:
        share = "40 % of the device's peak FLOP/s"
        yield row(name % "time of a curve of 64 lengths", share, "s", seconds, flops / (0.4 * peak), 1.0)
    yield row(name % "peak memory besides the weights", "20 GB", "B", memory, 20e9, 1.0)
    yield row(name % "time of a curve of 64 lengths", "the plan", "s", seconds, plan.longest.seconds, 1.25)
    yield row(name % "peak memory", "the plan", "B", memory + weights, plan.longest.total, 1.02)
    yield row(longer, "finishes", "s", run([second])[0], None)
