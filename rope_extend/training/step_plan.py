"""Plans the memory of a training run before weights are loaded, and chooses the memory options left open."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rope_extend.evaluation.forward_plan import ForwardEstimator
from rope_extend.memory.budget import available_memory, weight_bytes
from rope_extend.memory.meta_device import quiet_patching, try_estimate
from rope_extend.models.gguf_checkpoint import gguf_file
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.parameters import learned_parameters
from rope_extend.training.lora import adapted, extended
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options
from rope_extend.training.meta_autocast import casting_as_autocast
from rope_extend.training.option_choice import candidate_options
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_estimator import StepEstimator
from rope_extend.training.step_memory import GRAIN, StepMemory, TrainingPlan, memory_share
from rope_extend.training.text_reach import TextReach, text_reach


def plan_training(
    recipe: Recipe,
    *,
    load_options: LoadOptions,
    model: Any | None = None,
    memory_options: MemoryOptions | None = None,
    processes: int = 1,
    all_options: bool = False,
    device: torch.device | None = None,
    evaluation_lengths: Sequence[int] = (),
    reach: TextReach | None = None,
) -> TrainingPlan | None:
    """Estimate the memory of a run's steps, and choose the memory options that its recipe leaves open.

    Args:
        recipe: the run.
        load_options: where and how the model will be loaded.
        model: a loaded model, used instead of the recipe's; only its shapes matter.
        memory_options: the options of a resumed run; then none is left open.
        processes: number of processes that share the step. On a CPU they also share its memory.
        all_options: estimate all combinations of options, even if fewer fit.
        device: a device that this machine does not have, with the memory of `load_options.limit_memory`.
        evaluation_lengths: windows that the run evaluates at, in tokens.
        reach: as in `lora_config`.

    Returns:
        The plan; None, with a log line, for a family that does not run on the meta device.

    Raises:
        RopeExtendError: the model does not support a memory option that the recipe turns on.
    """
    device = device or load_options.torch_device
    empty = _without_weights(recipe, load_options, model)
    if model is None:
        weights = weight_bytes(recipe.model, empty, load_options)
    else:
        weights = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    candidates, remarks = (
        ([memory_options], []) if memory_options is not None else candidate_options(recipe, empty, device)
    )
    apply_memory_options(empty, candidates[0]).close()  # refuses an option that the model does not support
    reach = reach or text_reach(empty)
    available = host = sys.maxsize
    if device == load_options.torch_device:
        available, host = (
            available_memory(replace(options, limit_memory=None))
            for options in (load_options, LoadOptions(device="cpu"))
        )
    host //= processes
    if device.type == "cpu":
        available //= processes
    if model is not None and model.device.type == device.type:
        available += weights  # they are loaded already
    if load_options.limit_memory is not None:
        available = min(available, load_options.limit_memory)

    def estimate_steps() -> TrainingPlan:
        with StepEstimator(recipe, empty, weights, device, processes, reach) as estimator:
            return _plan_steps(estimator, candidates, remarks, available, host, all_options)

    plan = try_estimate(estimate_steps, empty, "a step")
    if plan is None or not evaluation_lengths:
        return plan
    fresh = _without_weights(recipe, load_options, model)
    estimate_evaluation = partial(_with_evaluation, plan, recipe, fresh, max(evaluation_lengths), reach)
    return try_estimate(estimate_evaluation, fresh, "an evaluation") or plan


def _without_weights(recipe: Recipe, load_options: LoadOptions, model: Any | None) -> Any:
    """The recipe's model, or one with the shapes of `model`, on the meta device."""
    if model is None:
        return load_options.empty(recipe.model)
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config)).to(model.dtype)


def _with_evaluation(
    plan: TrainingPlan, recipe: Recipe, empty: Any, tokens: int, reach: TextReach
) -> TrainingPlan:
    """Add the estimate of an evaluation to a plan, including trained weights and the optimizer's moments."""
    step, dtype = plan.chosen, empty.dtype
    with quiet_patching(), extended(empty, recipe):  # what the encoding learns is counted as trained
        learned = sum(value.nbytes for value in learned_parameters(empty).values())
    model = adapted(empty, recipe, reach).eval()

    @contextmanager
    def as_trained() -> Iterator[None]:
        with (
            quiet_patching(),
            extended(empty, recipe),
            casting_as_autocast(model, dtype),
            apply_memory_options(empty, step.memory_options),
        ):
            yield

    estimator = ForwardEstimator(
        model, plan.device, weights=step.weights + step.trained - learned, available=plan.available,
        setups=[as_trained],
    )  # fmt: skip
    evaluation = estimator.estimate(tokens)
    longest = None if evaluation.fits else estimator.longest_fit(tokens)
    return replace(plan, evaluation=evaluation, longest_evaluation=longest)


def _plan_steps(
    estimator: StepEstimator,
    candidates: Sequence[MemoryOptions],
    remarks: Sequence[str],
    available: int,
    host: int,
    all_options: bool,
) -> TrainingPlan:
    recipe = estimator.recipe

    def share(step: StepMemory) -> float:
        return memory_share(step, available, host, estimator.device)

    steps: list[StepMemory] = []
    chosen: StepMemory | None = None
    for memory_options in candidates:
        steps.append(estimator.step(memory_options, recipe.length))
        if chosen is None and share(steps[-1]) <= 1:
            chosen = steps[-1]
            if not all_options:
                break
    longest = None
    if chosen is None:
        chosen = steps[-1]
        longest = _longest_block(lambda tokens: share(estimator.step(candidates[-1], tokens)), recipe.length)
    quantizable = gguf_file(recipe.model) is None
    quantized = None
    if all_options and quantizable and not chosen.quantized:
        weights = steps[-1].weights - estimator.quantized_savings
        quantized = replace(steps[-1], quantized=True, weights=weights)
    return TrainingPlan(
        steps=tuple(steps),
        chosen=chosen,
        length=recipe.length,
        batch=recipe.batch_size,
        available=available,
        host=host,
        device=estimator.device,
        longest_block=longest,
        remarks=tuple(remarks),
        quantizable=quantizable,
        quantized=quantized,
    )


def _longest_block(share: Callable[[int], float], tokens: int) -> int:
    """The longest block whose `share` of the usable memory is at most 1; 0 if there is none.

    Found to within a 64th, or `GRAIN` tokens, below `tokens`, which do not fit. Memory is mostly linear in
    the length, so the first guess is on the line through the two nearest lengths.
    """
    low, high = 1, -(-tokens // GRAIN)  # in grains: the longest known to fit, the shortest known not to fit
    if high <= low or (least := share(GRAIN)) > 1:
        return 0
    shares = {low: least, high: share(tokens)}
    halve = False
    while high - low > max(1, low // 64):
        slope = (shares[high] - shares[low]) / (high - low)
        guess = low + int((1 - shares[low]) / slope) if slope > 0 else low
        if halve:  # the line alone may converge slowly near a bend
            guess = math.isqrt(low * high) if high > 4 * low else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        shares[guess] = share(guess * GRAIN)
        low, high = (low, guess) if shares[guess] > 1 else (guess, high)
        halve = not halve
    return low * GRAIN
