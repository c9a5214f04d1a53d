"""The recipe that `advise` writes: its fields, as much training as evidence says, and what it costs.

Memory is that of a dry run of the recipe's step, and hours follow from its operations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rope_extend.advice.question import Question
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.flops import operations_of
from rope_extend.memory.gpus import LEAST_STEP, UTILISATION, Gpu
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.recipe import STEPS, Recipe
from rope_extend.training.step_plan import TrainingPlan, plan
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

STEP_TOKENS = 262_144
"""Tokens of a step, if one sequence has no more: with `STEPS`, 105 million tokens at 32k and beyond.

What is published does not grow with the window. Position interpolation needed 200 steps of 64 sequences of
8k tokens, also 105 million (2306.15595). Full fine-tuning used more: 1.7 billion from 4k to 64k (2309.00071),
0.5 to 5 billion from 4k to 128k (2402.10171), 1 billion from 128k to 1M, 2M and 4M each (2504.06214). A LoRA
from 8k to 80k took 64 hours of an A800, with 8 sequences per step (2404.19553).
"""
MOST_SEQUENCES = 8
"""The largest number of sequences per step."""
SHORT_BLOCK_STEPS = 1000
"""The PoSE paper's steps (2309.10400)."""
FEWEST_STEPS = 200
"""Position interpolation is below the original perplexity after 200 steps (2306.15595, section 3.3)."""
BOOKS = "emozilla/pg19"
LONGEST_BOOKS = 131_072
"""Tokens that enough books of PG-19 have: the mean is about 100k."""


@dataclass(frozen=True)
class Work:
    """What the training computes.

    Attributes:
        steps: optimizer steps.
        tokens: tokens in all steps.
        operations: floating-point operations in all steps, recomputation included.
        gpu: the name of the GPU, with the number of several.
        hours: on it, at the higher and at the lower share of its peak, and at least `LEAST_STEP` for a step;
            None if only its memory is known. What several GPUs send each other is not counted.
    """

    steps: int
    tokens: int
    operations: float
    gpu: str
    hours: tuple[float, float] | None = None

    def on(self, gpu: Gpu) -> Work:
        """The same work on a GPU."""
        hours = None
        if gpu.peak is not None:
            floor, peak = self.steps * LEAST_STEP, gpu.peak * gpu.count
            seconds = (max(floor, self.operations / peak / share) for share in reversed(UTILISATION))
            least, most = (each / 3600 for each in seconds)
            hours = least, most
        return replace(self, gpu=str(gpu), hours=hours)


def first_fields(question: Question) -> dict[str, Any]:
    """The recipe for long blocks, before memory and hours are known."""
    name, target = Path(question.model).name or "model", question.target
    fields: dict[str, Any] = {
        "model": question.model,
        "data": question.data[0] if len(question.data) == 1 else question.data or BOOKS,
        "output_dir": f"runs/{name}-{format_length(target)}-yarn",
        "target_length": target,
        **({"trained_length": question.stated} if question.stated else {}),
        "method": "yarn",
        **({"start": question.start} if question.current is not None else {}),
        "steps": max(FEWEST_STEPS, min(STEPS, STEPS * STEP_TOKENS // target)),
        "batch_size": 1,
        "gradient_accumulation": sequences_per_step(target),
        "dtype": "bfloat16",
    }
    if not question.data:
        reached = {"eval_lengths": (LONGEST_BOOKS,)} if target > LONGEST_BOOKS else {}
        fields |= {
            "eval_data": BOOKS, "eval_split": "test", **reached, "eval_documents": 8, "eval_every": 50,
            "max_documents": 1000,
        }  # fmt: skip
    return {**fields, "save_every": 50}


def sequences_per_step(length: int) -> int:
    """The number of sequences of `length` tokens in a step of the recipe."""
    return max(1, min(MOST_SEQUENCES, STEP_TOKENS // length))


def fit(
    fields: Mapping[str, Any], trained_length: int, gpu: Gpu
) -> tuple[dict[str, Any], TrainingPlan, str | None]:
    """Fields of a recipe that fits a GPU, or several, and its plan.

    The memory options are left to the run, which chooses as this estimate does. Several GPUs have sequences
    of their own; if that is not enough, they share the weights (FSDP2), or else each block (`split_window`).
    If memory is still short, the weights get 4 bits. If that is not enough either, the blocks become as short
    as the trained window, with positions from the whole target window (PoSE, 2309.10400).

    Returns:
        The fields, their plan, and None. If nothing fits: the given fields, the plan of the step with all
        options and weights of 4 bits, and why short blocks are not an answer, if they are not even possible.

    Raises:
        RopeExtendError: the recipe does not work with its model.
    """
    short = {"block_length": trained_length, "positions": "pose", "steps": SHORT_BLOCK_STEPS}
    ways: list[tuple[dict[str, Any], bool]] = [({}, False)]
    ways += [({}, True), ({"split_window": gpu.count}, False)] if gpu.count > 1 else []
    misfit: TrainingPlan | None = None
    for blocks in ({}, short):
        plans: list[tuple[dict[str, Any], TrainingPlan]] = []
        for way, fsdp in ways:
            attempt = _per_gpu({**fields, **blocks, **way}, gpu.count)
            try:
                recipe = Recipe.from_dict(attempt)
                estimate = plan(
                    recipe, limit_memory=gpu.memory, elsewhere=True, processes=gpu.count, fsdp=fsdp
                )
            except RopeExtendError as error:
                if way and plans:  # not every model can share a block
                    continue
                if misfit is None:
                    raise
                return dict(fields), misfit, str(error)
            if estimate.fits:
                return attempt, estimate, None
            plans.append((attempt, estimate.in_four_bits()))
        for attempt, small in plans:
            if small.fits:
                return {**attempt, "quantize": "4bit"}, small, None
        misfit = misfit or min((small for _, small in plans), key=lambda small: small.chosen.total)
    assert misfit is not None
    return dict(fields), misfit, None


def _per_gpu(fields: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The fields with the accumulation of each GPU, and as few steps as the tokens of a step allow."""
    length = fields.get("block_length", fields["target_length"])
    groups = gpus // fields.get("split_window", 1)
    accumulation = max(1, sequences_per_step(length) // groups)
    steps = max(FEWEST_STEPS, min(fields["steps"], fields["steps"] * STEP_TOKENS // (groups * length)))
    return {**fields, "gradient_accumulation": accumulation, **({"steps": steps} if groups > 1 else {})}


def operations_per_token(fields: Mapping[str, Any], memory: TrainingPlan) -> float | None:
    """Operations of a training step per token, with the recomputation of its plan; None if not countable.

    Counted as in PaLM (2204.02311, appendix B): 6 for each trained weight, 2 in the forward pass, 2 for the
    gradient of the activations and 2 for that of the weight. A frozen weight has no gradient, so it takes 4.
    Attention takes three times its forward pass, of pairs within the causal mask. Experts that a token does
    not use, norms, activations, rotations and the optimizer do not count.
    """
    recipe = Recipe.from_dict({**fields, "quantize": None})  # without bitsandbytes
    empty: Any = LoadOptions(dtype=torch.bfloat16).empty(recipe.model)
    empty.set_attn_implementation("eager")  # every family supports it, and the count is equal
    try:
        forward = operations_of(empty)
    except Exception as error:  # any error: a family may need values, which the meta device does not have
        logger.info("cannot count the operations of %s (%r)", recipe.model, error)
        return None
    attention = forward.attention(recipe.length) / recipe.length
    head = empty.get_output_embeddings().weight
    trained_head = head.numel() * (recipe.train_norm_embed and head is empty.get_input_embeddings().weight)
    total = (3 if recipe.full else 2) * forward.linear + 2 * trained_head + 6 * memory.lora + 3 * attention
    if memory.chosen.memory_options.gradient_checkpointing:
        total += forward.linear - 2 * head.numel() + attention
    return total


def work(fields: Mapping[str, Any], memory: TrainingPlan, gpu: Gpu) -> Work | None:
    """Tokens, operations and hours of a recipe; None if the operations of its family cannot be counted."""
    operations = operations_per_token(fields, memory)
    if operations is None:
        return None
    recipe = Recipe.from_dict(fields)
    tokens = recipe.steps * recipe.gradient_accumulation * recipe.batch_size * recipe.length
    tokens *= memory.sharding.replicas
    return Work(recipe.steps, tokens, tokens * operations, str(gpu)).on(gpu)
