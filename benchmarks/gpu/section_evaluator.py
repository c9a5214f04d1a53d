"""The evaluator at the 8B shape: time and memory against the plan, in one pass and in pieces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from evaluator import PEAK
from measuring import device_name, document, in_bfloat16
from transformers import LlamaForCausalLM

import rope_extend as rx
from gpu.steps import Figure, Setting, Step, free_cache, peak_of
from rope_extend.encodings import Encoding
from rope_extend.evaluation.forward_plan import LengthPlan, plan_forward
from rope_extend.evaluation.perplexity import RunOptions, perplexity
from rope_extend.models.load_options import LoadOptions

SUBJECT = (
    "Perplexity of a model with 8 billion random weights in bfloat16. Memory and time are compared with the "
    "plan that was made before the weights existed."
)


def planned(
    setting: Setting, tokens: int, encoding: Encoding | None = None, chunk: int | None = None
) -> LengthPlan:
    """The plan of one document."""
    plan = plan_forward(
        "random weights", [tokens], load_options=LoadOptions(setting.device, dtype=torch.bfloat16),
        empty=in_bfloat16(setting.config, "meta"), encodings=[encoding],
        chunk=chunk,
    )  # fmt: skip
    assert plan is not None
    return plan.longest


def measured(
    setting: Setting, lm: LlamaForCausalLM, lengths: list[int], chunk: int | None = None
) -> tuple[float, int]:
    """Seconds of a document, and peak bytes including the weights."""
    text = document(lengths[-1], setting.config.vocab_size)
    seconds = []

    def run() -> None:
        options = RunOptions(chunk=chunk)
        seconds.append(perplexity(lm, [text], lengths, options=options, progress=False).seconds)

    peak = peak_of(run, lm, setting.device)
    return seconds[0], peak


def against_plan(
    name: str, plan: LengthPlan, seconds: float, peak: int, setting: Setting
) -> Iterator[Figure]:
    """Time and memory, and their ratios to the plan's."""
    yield Figure(f"{name}: time", seconds, "s", note=plan.description)
    yield Figure(f"{name}: time / plan", seconds / plan.seconds, at_most=setting.target(1.25))
    yield Figure(
        f"{name}: peak memory / plan",
        peak / plan.memory,
        at_most=setting.target(1.02),
        at_least=setting.target(0.8),
    )


def curve(setting: Setting) -> Iterator[Figure]:
    """A curve of 64 lengths, without a patch and with YaRN."""
    tokens = setting.curve
    lengths = [tokens * step // 64 for step in range(1, 65)]
    yarn = rx.encoding("yarn", factor=tokens / setting.config.max_position_embeddings)
    plan, patched_plan = planned(setting, tokens), planned(setting, tokens, yarn)
    lm = in_bfloat16(setting.config, setting.device)
    weights = sum(parameter.nbytes for parameter in lm.parameters())
    measured(setting, lm, lengths)  # a warm-up
    seconds, peak = min(measured(setting, lm, lengths) for _ in range(2))
    name = f"64 lengths to {tokens:,} tokens"
    yield from against_plan(name, plan, seconds, peak, setting)
    yield Figure(f"{name}: time of the plan", plan.seconds, "s", at_most=on_hopper(setting, 12.0))
    yield Figure(f"{name}: time", seconds, "s", at_most=setting.target(16.0))
    rate = next((rate for gpu, rate in PEAK.items() if gpu in device_name()), None)
    if rate is not None:
        yield Figure(f"{name}: share of the device's peak", plan.flops / seconds / rate, at_least=0.4)
    yield Figure(f"{name}: memory in addition to the weights", (peak - weights) / 1e9, "GB", at_most=20.0)
    with rx.patch_model(lm, yarn):
        measured(setting, lm, lengths)
        patched, patched_peak = min(measured(setting, lm, lengths) for _ in range(2))
    yield from against_plan(f"YaRN, {name}", patched_plan, patched, patched_peak, setting)
    yield Figure(f"YaRN, {name}: time / unpatched", patched / seconds, at_most=setting.target(1.03))


def length_dependent(setting: Setting) -> Iterator[Figure]:
    """A method that rotates inside attention, because its table follows the length."""
    tokens = setting.curve
    encoding = rx.encoding("dynamic_ntk", factor=tokens / setting.config.max_position_embeddings)
    plan = planned(setting, tokens, encoding)
    lm = in_bfloat16(setting.config, setting.device)
    plain = min(measured(setting, lm, [tokens])[0] for _ in range(2))
    with rx.patch_model(lm, encoding):
        measured(setting, lm, [tokens])
        seconds, peak = measured(setting, lm, [tokens])
    name = f"dynamic_ntk, {tokens:,} tokens"
    yield from against_plan(name, plan, seconds, peak, setting)
    yield Figure(f"{name}: time / unpatched", seconds / plain)


def pieces(setting: Setting) -> Iterator[Figure]:
    """A window beyond those that are processed in one pass."""
    plan = planned(setting, setting.pieces, chunk=setting.chunk)
    lm = in_bfloat16(setting.config, setting.device)
    measured(setting, lm, [setting.chunk])
    seconds, peak = measured(setting, lm, [setting.pieces], setting.chunk)
    yield from against_plan(f"{setting.pieces:,} tokens", plan, seconds, peak, setting)
    longer = 4 * setting.pieces
    million = planned(setting, longer, chunk=setting.chunk)
    yield Figure(
        f"{longer:,} tokens: time of the plan", million.seconds, "s", at_most=on_hopper(setting, 600)
    )
    yield Figure(f"{longer:,} tokens: memory of the plan", million.memory / 1e9, "GB")


def on_hopper(setting: Setting, value: float) -> float | None:
    """A target that holds for an H100, and for what is faster."""
    rate = next((rate for gpu, rate in PEAK.items() if gpu in device_name()), 0.0)
    return setting.target(value) if rate >= PEAK["H100"] else None


def out_of_memory(setting: Setting) -> Iterator[Figure]:
    """Memory that is too small for one pass: the evaluator resumes in chunks, with the same losses."""
    tokens = setting.curve // 4
    plan = planned(setting, tokens)
    lm = in_bfloat16(setting.config, setting.device)
    weights = sum(parameter.nbytes for parameter in lm.parameters())
    text = document(tokens, setting.config.vocab_size)

    def losses() -> Any:
        return perplexity(lm, [text], [tokens], save_losses=True, progress=False).losses[tokens][0]

    expected = losses()
    free_cache()
    log = logging.getLogger("rope_extend.evaluation.loss_computer")
    retries: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: retries.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        with scarce(setting, lm, weights + (plan.memory - weights) * 2 // 3):
            found = losses()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    yield Figure("retries in chunks", len(retries), at_least=1)
    gap = float(np.abs(found - expected).mean())
    # Of a loss of about 12 nats: hidden states are rounded to bfloat16 in another order.
    yield Figure("mean difference of a token's loss", gap, "nat", at_most=12 * 2**-8)


@contextmanager
def scarce(setting: Setting, lm: LlamaForCausalLM, memory: int) -> Iterator[None]:
    """Leave this many bytes of the device to torch. A dry run refuses windows in one pass instead."""
    if setting.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.mem_get_info()[1])
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > setting.curve // 8:
            raise torch.OutOfMemoryError("refused by the dry run")

    hook = lm.model.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


STEPS = (
    Step("curve", curve, 140),
    Step("length-dependent", length_dependent, 120),
    Step("pieces", pieces, 90),
    Step("out of memory", out_of_memory, 40),
)
