"""Memory, tokens and hours of a recipe on a GPU, from the dry run of its step and from its operations."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.flops import Operations, operations_of
from rope_extend.loss import causal_lm
from rope_extend.memory.gpus import UTILISATION, Gpu, gpus_with
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.finetune import plan
from rope_extend.training.lora import adapted
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import TrainingPlan

logger = logging.getLogger(__name__)


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


def fit(
    fields: Mapping[str, Any], trained_length: int, gpu: Gpu
) -> tuple[dict[str, Any], TrainingPlan, str | None]:
    """Fields of a recipe that fits a GPU, and its plan.

    The memory options are left to the run, which chooses as this estimate does. If they are not enough, the
    weights get 4 bits. If that is not enough either, the blocks become as short as the trained window, with
    positions from the whole target window (PoSE, 2309.10400).

    Args:
        fields: of the recipe.
        trained_length: the pretrained window in tokens.
        gpu: the GPU.

    Returns:
        The fields, their plan, and None. If nothing fits: the given fields, the plan of the step with all
        options and weights of 4 bits, and why short blocks are not an answer, if they are not even possible.

    Raises:
        RopeExtendError: the recipe does not work with its model.
    """
    attempts: list[dict[str, Any]] = [dict(fields)]
    if "positions" not in fields:
        attempts.append(short_blocks(fields, trained_length))
    first: TrainingPlan | None = None
    for attempt in attempts:
        try:
            estimate = plan(Recipe.from_dict(attempt), limit_memory=gpu.memory, elsewhere=True)
        except RopeExtendError as error:
            if first is None:
                raise
            return dict(fields), first, str(error)
        if estimate.fits:
            return attempt, estimate, None
        small = estimate.in_four_bits()
        if small.fits:
            return {**attempt, "quantize": "4bit"}, small, None
        first = first or small
    assert first is not None
    return dict(fields), first, None


def short_blocks(fields: Mapping[str, Any], trained_length: int) -> dict[str, Any]:
    """The recipe with blocks of the trained window and positions from the target window."""
    return {**fields, "block_length": trained_length, "positions": "pose"}


@dataclass(frozen=True)
class TrainingOperations:
    """Operations of training, counted as PaLM counts them (2204.02311, appendix B).

    A trained weight takes 6 operations per token: 2 in the forward pass, 2 for the gradient of the
    activations, and 2 for that of the weight. A frozen weight has no gradient, so it takes 4. Attention takes
    three times the operations of its forward pass, of pairs within the causal mask. Norms, activations,
    rotations, dropout and the optimizer do not count.

    Attributes:
        linear: operations per token, without attention.
        forward: those of the forward pass.
    """

    linear: float
    forward: Operations

    def per_token(self, length: int) -> float:
        """Operations per token of a sequence."""
        return self.linear + 3 * self.forward.attention(length) / length


def training_operations(model: nn.Module) -> TrainingOperations | None:
    """The operations of training a model with its adapter, whose trained parameters have `requires_grad`.

    Those of the base model are counted on a copy without weights. So experts that a token does not use do not
    count, nor do encoders of images or sound.

    Returns:
        The operations; None, with a log line, for a family that does not run on the meta device.
    """
    lm = causal_lm(model)
    try:
        config = copy.deepcopy(lm.config)
        config._attn_implementation = "eager"  # every family supports it, and the count is equal
        with torch.device("meta"):
            forward = operations_of(type(lm)(config))
    except Exception as error:  # any error: a family may need values, which the meta device does not have
        logger.info("cannot count the operations of %s (%r)", lm.config.model_type, error)
        return None
    adapter = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "lora_" in name and parameter.requires_grad and parameter.dim() == 2
    )
    head = lm.get_output_embeddings().weight
    trained_head = head.numel() if head.requires_grad else 0
    return TrainingOperations(2 * forward.linear + 2 * trained_head + 6 * adapter, forward)


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


def cost_of(fields: Mapping[str, Any], memory: TrainingPlan) -> Cost | None:
    """Operations of a training step and of an evaluation; None if not countable.

    Args:
        fields: of the recipe.
        memory: its plan, which says whether layers are recomputed.
    """
    recipe = Recipe.from_dict({**fields, "quantize": None})  # without bitsandbytes
    empty: Any = LoadOptions(dtype=torch.bfloat16).empty(recipe.model)
    head = empty.get_output_embeddings().weight.numel()
    counted = training_operations(adapted(empty, recipe))
    if counted is None:
        return None
    total = counted.per_token(recipe.length)
    if memory.chosen.memory_options.gradient_checkpointing:
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
