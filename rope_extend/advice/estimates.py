"""Memory, tokens and hours of a recipe on a GPU, from the dry run of its step and from its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rope_extend.advice.gpus import UTILISATION, Gpu, gpus_with
from rope_extend.errors import RopeExtendError
from rope_extend.memory.budget import usable_share
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.finetune import plan
from rope_extend.training.lora import adapted
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_memory import StepMemory, TrainingPlan
from rope_extend.training.utilisation import training_operations


@dataclass(frozen=True)
class Memory:
    """What a step of the recipe needs.

    Attributes:
        gpu: the GPU that was planned for.
        available: its memory in bytes.
        needed: estimated bytes on the GPU, at the peak.
        host: estimated bytes in host memory.
        options: the memory options that are turned on, as a phrase.
        fits: whether the step fits, with a margin.
        evaluates: whether the evaluation at the target length fits as well.
        recomputes: whether layers are recomputed in the backward pass.
        longest_block: if the step does not fit: the longest block that does, in tokens.
        no_short_blocks: if the step does not fit: why short blocks with positions from the whole target
            window are not an answer; None if they do not fit either.
    """

    gpu: str
    available: int
    needed: int
    host: int
    options: str
    fits: bool
    evaluates: bool
    recomputes: bool
    longest_block: int | None = None
    no_short_blocks: str | None = None


@dataclass(frozen=True)
class Hours:
    """How long the training takes on a GPU: at the higher and at the lower share of its peak."""

    gpu: str
    least: float
    most: float


@dataclass(frozen=True)
class Work:
    """What the training computes.

    Attributes:
        steps: optimizer steps.
        tokens: tokens in all steps.
        operations: floating-point operations in all steps, recomputation included.
        hours: for each GPU whose peak is known.
    """

    steps: int
    tokens: int
    operations: float
    hours: tuple[Hours, ...]


def fit(fields: Mapping[str, Any], trained_length: int, gpu: Gpu) -> tuple[dict[str, Any], Memory]:
    """Fields of a recipe that fits a GPU, and its memory.

    The memory options are left to the run, which chooses as this estimate does. If they are not enough, the
    weights get 4 bits. If that is not enough either, the blocks become as short as the trained window, with
    positions from the whole target window (PoSE, 2309.10400).

    Args:
        fields: of the recipe.
        trained_length: the pretrained window in tokens.
        gpu: the GPU.

    Returns:
        The fields and their memory. If nothing fits: the given fields, and the memory of the step with all
        options and weights of 4 bits.

    Raises:
        RopeExtendError: the recipe does not work with its model.
    """
    attempts: list[dict[str, Any]] = [dict(fields)]
    if "positions" not in fields:
        attempts.append(short_blocks(fields, trained_length))
    first: Memory | None = None
    for attempt in attempts:
        try:
            estimate = plan(Recipe.from_dict(attempt), limit_memory=gpu.memory, elsewhere=True)
        except RopeExtendError as error:
            if first is None:
                raise
            return dict(fields), replace(first, no_short_blocks=str(error))
        for step in (estimate.chosen, estimate.quantized):
            if step is not None and estimate.fits(step):
                if step.quantized:
                    attempt = {**attempt, "quantize": "4bit"}
                return attempt, _memory(estimate, step, gpu)
        first = first or _memory(estimate, estimate.quantized or estimate.chosen, gpu)
    assert first is not None
    return dict(fields), first


def short_blocks(fields: Mapping[str, Any], trained_length: int) -> dict[str, Any]:
    """The recipe with blocks of the trained window and positions from the target window."""
    return {**fields, "block_length": trained_length, "positions": "pose"}


def _memory(estimate: TrainingPlan, step: StepMemory, gpu: Gpu) -> Memory:
    evaluation, evaluates = estimate.evaluation, True
    if evaluation is not None and not evaluation.fits:  # it was estimated with the weights of `chosen`
        needed = evaluation.memory - (estimate.chosen.weights - step.weights)
        evaluates = needed <= usable_share(estimate.device) * estimate.available
    return Memory(
        gpu.name, gpu.memory, step.total, step.host,
        f"{step.memory_options}, weights in 4 bits" if step.quantized else str(step.memory_options),
        estimate.fits(step), evaluates, step.memory_options.gradient_checkpointing, estimate.longest_block,
    )  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Operations of a recipe's parts.

    Attributes:
        token: of a training step, per token, recomputation included.
        evaluation: of one evaluation: a forward pass over each document, at the longest window.
    """

    token: float
    evaluation: float

    def evaluations(self, fields: Mapping[str, Any]) -> float:
        """Operations of all evaluations of a run: before it, every `eval_every` steps, and at the end."""
        recipe = Recipe.from_dict(fields)
        between = (recipe.steps - 1) // recipe.eval_every if recipe.eval_every else 0
        return self.evaluation * (2 + between)


def cost_of(fields: Mapping[str, Any], memory: Memory) -> Cost | None:
    """Operations of a training step and of an evaluation; None if not countable.

    Args:
        fields: of the recipe.
        memory: its estimate, which says whether layers are recomputed.
    """
    recipe = Recipe.from_dict({**fields, "quantize": None})  # without bitsandbytes
    empty: Any = LoadOptions(dtype=torch.bfloat16).empty(recipe.model)
    head = empty.get_output_embeddings().weight.numel()
    counted = training_operations(adapted(empty, recipe))
    if counted is None or counted.forward is None:
        return None
    total = counted.per_token({recipe.length: 1})
    if memory.recomputes:
        layers = counted.forward.linear - 2 * head
        total += layers + counted.forward.attention(recipe.length) / recipe.length
    evaluation = 0.0
    if recipe.eval_data is not None and memory.evaluates:
        window = max(recipe.eval_lengths or (recipe.target_length,))
        document = counted.forward.linear * window + counted.forward.attention(window)
        evaluation = recipe.eval_documents * document
    return Cost(total, evaluation)


def work(fields: Mapping[str, Any], operations: float, gpu: Gpu) -> Work:
    """Tokens, operations and hours of a recipe.

    Args:
        fields: of the recipe.
        operations: of training, per token.
        gpu: if only its memory is known, the hours are those of all known GPUs with that memory.
    """
    recipe = Recipe.from_dict(fields)
    tokens = recipe.steps * recipe.gradient_accumulation * recipe.batch_size * recipe.length
    named: Sequence[Gpu] = [gpu] if gpu.peak else gpus_with(gpu.memory)
    hours = [
        Hours(one.name, *(tokens * operations / (one.peak * share) / 3600 for share in reversed(UTILISATION)))
        for one in named
        if one.peak
    ]
    return Work(recipe.steps, tokens, tokens * operations, tuple(hours))
