"""LoRA at the 8B shape on a card of 80 GB: memory against the plan, offloading, and the peer's window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from measuring import document, in_bfloat16
from torch import Tensor
from training_cost import PLAN, Trained

from gpu.steps import Figure, Setting, Step, free_cache, seconds_of
from rope_extend.memory.budget import available_memory
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options
from rope_extend.training.step_memory import TrainingPlan
from rope_extend.training.step_plan import plan_training

SUBJECT = (
    "LoRA of rank 16 on all linear layers of 8 billion random weights in bfloat16. What a card has beyond "
    "80 GB is taken before each step. The longest window is trained with 8 of the 32 layers: the others "
    "would add weights, which are taken instead, and checkpoints in host memory."
)
OF_PLAN = 0.97
"""Share of the plan's longest window that is trained."""
FEW_LAYERS = 8
"""Layers of the model that trains the longest window: all layers would take longer than a section may."""


@contextmanager
def card(setting: Setting, layers: int) -> Iterator[tuple[Trained, float]]:
    """A model with some of the layers, and the bytes that it may use with its weights."""
    config = type(setting.config)(**{**setting.config.to_dict(), "num_hidden_layers": layers})
    sizes = [
        sum(parameter.nbytes for parameter in in_bfloat16(each, "meta").parameters())
        for each in (setting.config, config)
    ]
    budget = setting.budget - (sizes[0] - sizes[1])
    options = LoadOptions(setting.device, dtype=torch.bfloat16)
    surplus = int(available_memory(options) - budget) if setting.device == "cuda" else 0
    ballast = torch.empty(max(0, surplus), dtype=torch.uint8, device=setting.device)
    try:
        yield Trained(in_bfloat16(config, setting.device)), budget
    finally:
        del ballast
        free_cache()


def planned(
    setting: Setting, case: Trained, budget: float, tokens: int, options: MemoryOptions
) -> TrainingPlan:
    """The plan of a step with these memory options."""
    plan = plan_training(
        replace(PLAN, target_length=tokens),
        load_options=LoadOptions(setting.device, dtype=torch.bfloat16, limit_memory=int(budget)),
        model=case.lm, memory_options=options,
    )  # fmt: skip
    assert plan is not None
    return plan


def ids_of(setting: Setting, tokens: int) -> Tensor:
    """Random tokens on the device."""
    return document(tokens, setting.config.vocab_size).input_ids[None].to(setting.device)


def step_peak(
    case: Trained, ids: Tensor, options: MemoryOptions, *, theirs: bool = False
) -> tuple[float, float]:
    """Peak bytes of a step in addition to the ballast, weights included; and its seconds.

    `theirs` takes the loss as the peer computes it.
    """
    before = torch.cuda.memory_allocated() if ids.is_cuda else 0
    held = sum(tensor.nbytes for tensor in (*case.model.parameters(), *case.model.buffers()))
    peaks: list[float] = []
    how = case.theirs if theirs else case.ours
    seconds = seconds_of(lambda: peaks.append(case.peak(how, ids, options)), ids.device.type)
    return peaks[0] - max(0, before - held), seconds


def offloading(setting: Setting) -> Iterator[Figure]:
    """Checkpoints in host memory, compared with checkpoints on the device: time and gradients."""
    offloaded = MemoryOptions(True, setting.tile, True)
    kept = replace(offloaded, offload_checkpoints=False)
    with card(setting, setting.config.num_hidden_layers) as (case, _):
        ids = ids_of(setting, setting.block)

        def gradients(options: MemoryOptions) -> list[Tensor]:
            with apply_memory_options(case.lm, options):
                case.loss(case.ours, ids).backward()
            found = [parameter.grad for parameter in case.parameters if parameter.grad is not None]
            for parameter in case.parameters:
                parameter.grad = None
            return found

        worst = 0.0
        for ours, theirs in zip(gradients(offloaded), gradients(kept), strict=True):
            size = float(theirs.abs().max())
            worst = max(worst, float((ours - theirs).abs().max()) / size if size else float(ours.abs().max()))
        # The same kernels on the same inputs; sums of atomics may round to bfloat16 in another order.
        yield Figure("difference of gradients, relative", worst, at_most=4 * 2**-8)
        case.step(ids, offloaded)  # pins host memory
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(1 if setting.dry else 3):
            for options in (offloaded, kept) if turn % 2 else (kept, offloaded):
                seconds = seconds_of(lambda options=options: case.step(ids, options), setting.device)  # type: ignore[misc]
                times[options.offload_checkpoints].append(seconds)
        yield Figure(f"step of {setting.block:,} tokens, offloaded", min(times[True]), "s")
        ratio = min(times[True]) / min(times[False])
        yield Figure("time offloaded / on the device", ratio, at_most=setting.target(1.03))


def _one_step(setting: Setting, layers: int, tokens: int | None) -> Iterator[Figure]:
    """A step of a given window, or of the longest that the plan allows."""
    options = MemoryOptions(True, setting.tile, True)
    with card(setting, layers) as (case, budget):
        if tokens is None:
            longest = planned(setting, case, budget, setting.longest, options).longest_block
            assert longest, "the plan allows no window"
            grain = min(128, setting.tile)  # kernels have trouble with odd lengths
            tokens = int(OF_PLAN * longest) // grain * grain
            yield Figure("longest window of the plan", longest, "tokens")
        plan = planned(setting, case, budget, tokens, options)
        case.step(ids_of(setting, setting.tile), options)  # the optimizer's moments, which the plan counts
        peak, seconds = step_peak(case, ids_of(setting, tokens), options)
        name = f"{tokens:,} tokens, {layers} layers"
        yield Figure(f"{name}: time of a step", seconds, "s")
        yield Figure(f"{name}: peak memory", peak / 1e9, "GB", at_most=budget / 1e9)
        yield Figure(
            f"{name}: peak memory / plan",
            peak / plan.chosen.total,
            at_most=setting.target(1.02),
            at_least=setting.target(0.8),
        )


def all_layers(setting: Setting) -> Iterator[Figure]:
    """A long window with all layers."""
    yield from _one_step(setting, setting.config.num_hidden_layers, setting.long_block)


def longest_window(setting: Setting) -> Iterator[Figure]:
    """One step of the longest window that the plan allows."""
    yield from _one_step(setting, min(FEW_LAYERS, setting.config.num_hidden_layers), None)


def longest_of_the_peer(setting: Setting) -> Iterator[Figure]:
    """The longest window of Trainer and peft without memory options, to within a quarter of 4,096 tokens."""
    with card(setting, setting.config.num_hidden_layers) as (case, budget):

        def fits(tokens: int) -> bool:
            return step_peak(case, ids_of(setting, tokens), MemoryOptions(), theirs=True)[0] < budget

        found, step = 0, setting.tile
        while fits(found + step):  # by powers of two
            found, step = found + step, found + step
        while step > setting.tile // 4:  # then between the last two
            step //= 2
            found += step * fits(found + step)
        yield Figure("Trainer and peft: longest window", found, "tokens")


STEPS = (
    Step("offloading", offloading, 120),
    Step("all layers", all_layers, 110),
    Step("longest window", longest_window, 330),
    Step("the peer", longest_of_the_peer, 100),
)
