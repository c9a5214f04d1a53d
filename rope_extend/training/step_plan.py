"""Plans the memory of a training run before weights are loaded, and chooses the memory options left open."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers.integrations import integration_utils

from rope_extend.config import AUTO
from rope_extend.data.choices import CONSECUTIVE, UNPACKED
from rope_extend.data.mixed_windows import check_mixed_windows
from rope_extend.data.packing import check_packing
from rope_extend.data.sampled_positions import check_sampled
from rope_extend.encodings import RopeShape
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.evaluation.forward_plan import ForwardEstimator, WindowEstimate, planned_split
from rope_extend.memory.budget import expand_segments, weight_bytes
from rope_extend.memory.meta_device import quiet_patching, try_estimate
from rope_extend.memory.plan import Budget, MemoryEstimate, longest, table
from rope_extend.models.gguf_checkpoint import gguf_file
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import default_dtype, empty_model
from rope_extend.models.parameters import learned_parameters
from rope_extend.training.chunked_loss import chunked_loss
from rope_extend.training.lora import TextReach, extended, lora_config, text_reach
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options, tileable
from rope_extend.training.recipe import Recipe
from rope_extend.training.sharding import Sharding
from rope_extend.training.step_estimator import StepEstimate, StepEstimator, casting_as_autocast

ALONE = Sharding()

TILE, GPU_TILE = 1024, 4096
"""Default numbers of tokens per tile of an MLP; the second in steps of at least `MANY` tokens on a GPU.

A tile takes about 60 kernels. In such a step a GPU may be done with small tiles before the CPU has started
the next ones, and the peak is not in the MLPs.
"""
MANY = 65_536


@dataclass(frozen=True)
class TrainingPlan:
    """The memory that the steps of a run need in each process, by memory options.

    Attributes:
        recipe: the run.
        steps: one step per combination of options, each with one option more, the cheapest first, and at the
            end one with weights of 4 bits, if the model can have them.
        chosen: the step of the run: the first that fits, or else the last with the weights of the recipe.
        budget: the memory of the device and of the host.
        longest_block: the longest block that fits with the chosen options, in tokens; None if the block fits.
        evaluation: the run's longest evaluation, including what is trained; None if the run does not
            evaluate.
        longest_evaluation: the longest window that can be evaluated, in tokens; None if the evaluation fits.
        sharding: the share of the run that each process has.
        lora: number of weights in LoRA's matrices.
    """

    recipe: Recipe
    steps: tuple[StepEstimate, ...]
    chosen: StepEstimate
    budget: Budget
    longest_block: int | None = None
    evaluation: WindowEstimate | None = None
    longest_evaluation: int | None = None
    sharding: Sharding = ALONE
    lora: int = 0

    @property
    def total(self) -> int:
        """Peak memory of the run on the device."""
        return max(self.chosen.total, self.evaluation.total if self.evaluation else 0)

    @property
    def fits(self) -> bool:
        """Whether the memory for the chosen step is available."""
        return self.budget.fits(self.chosen)

    @property
    def evaluates(self) -> bool:
        """Whether the evaluations fit as well, if there are any."""
        return self.evaluation is None or self.budget.fits(self.evaluation)

    def in_four_bits(self) -> TrainingPlan:
        """The plan with weights of 4 bits, if the model can have them."""
        chosen = self.steps[-1] if self.steps[-1].quantized else self.chosen
        evaluation = self.evaluation
        if evaluation is not None:  # in the chunks that the larger weights left memory for
            evaluation = replace(evaluation, weights=chosen.weights)
        return replace(self, chosen=chosen, evaluation=evaluation)

    def check(self) -> None:
        """Refuse a block or an evaluation that does not fit.

        Raises:
            RopeExtendError: names the longest length that fits.
        """
        self.budget.check(
            self.chosen, subject=f"a step of {self._blocks} needs", longest=self.longest_block,
            how=f"memory options: {self.chosen.memory_options}",
            advice="To need less memory, use a shorter block_length with positions: pose, a smaller "
            "batch_size, gradient_checkpointing and mlp_tiles on auto, or quantize: 4bit",
        )  # fmt: skip
        if (window := self.evaluation) is not None:
            self.budget.check(
                window, subject=f"the run's evaluations at {window.length:,} tokens need",
                how=window.description, longest=self.longest_evaluation,
                advice="Use shorter eval_lengths, or leave eval_data out and evaluate after the run",
            )  # fmt: skip

    @property
    def shared(self) -> str:
        """What several processes share, as the end of a phrase."""
        window, weights = self.recipe.split_window, self.sharding.weights
        shared = f", {window} of which share a block" if window > 1 else ""
        return f"{shared}, which share the weights (FSDP2)" if weights else shared

    @property
    def _blocks(self) -> str:
        return f"{self.recipe.batch_size} x {self.recipe.length:,} tokens"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: bytes, tokens and texts."""
        plain = self.budget.as_dict
        return {
            "length": self.recipe.length,
            "batch": self.recipe.batch_size,
            "sharding": asdict(self.sharding),
            "device": str(self.budget.device),
            "available": self.budget.available,
            "host": self.budget.host,
            "steps": [
                {**plain(step), "memory_options": str(step.memory_options), "chosen": step is self.chosen}
                for step in self.steps
            ],
            "evaluation": plain(self.evaluation) if self.evaluation else None,
            "longest_block": self.longest_block,
            "longest_evaluation": self.longest_evaluation,
        }

    def __str__(self) -> str:
        options = ", ".join(self.steps[0].parts) or "no memory options"
        rows: list[tuple[str, MemoryEstimate, str]] = [(options, self.steps[0], "")]
        for before, step in pairwise(self.steps):
            added = [part for part in step.parts if part not in before.parts]
            rows.append((f"+ {', '.join(added)}", step, ""))
        if (window := self.evaluation) is not None:
            rows.append((f"evaluation at {window.length:,} tokens", window, window.description))
        ranks, subject = self.sharding.ranks, f"steps of {self._blocks}"
        subject += f" in each of {ranks} processes{self.shared}" if ranks > 1 else ""
        return table(subject, rows, self.budget, self.chosen)


def plan(
    recipe: Recipe,
    *,
    limit_memory: int | None = None,
    elsewhere: bool = False,
    processes: int | None = None,
    fsdp: bool = False,
) -> TrainingPlan:
    """Estimate the memory of a run's steps, with each memory option, and of its evaluations; loads nothing.

    Args:
        recipe: the run.
        limit_memory: bytes of the device to plan with; by default what is free. On a machine without a GPU,
            the memory of the GPU that the run will use; an `auto` dtype is then bfloat16.
        elsewhere: the run will use a GPU of another machine, even if this one has a GPU.
        processes: number of processes that the launcher will start, one for each GPU; by default the
            `split_window` of the recipe. The plan is that of each.
        fsdp: whether accelerate will spread the weights over them by FSDP2.

    Raises:
        RopeExtendError: the recipe does not work with its model or the processes, the package of a tracker is
            missing on the machine that is planned for, or the model's family does not run on the meta device.
    """
    processes = processes or recipe.split_window
    refuse_if(
        fsdp and processes == 1,
        "FSDP2 shares the weights of several processes; give processes=8, or their number",
    )
    sharding = Sharding(weights=fsdp, parts=recipe.split_window, ranks=processes)
    expand_segments()  # as the run does, before anything asks the device
    device = LoadOptions().torch_device
    absent = limit_memory is not None and (elsewhere or device.type == "cpu")
    if not absent:
        check_trackers(recipe.trackers)
    planned_gpu = torch.device("cuda") if absent else None  # it has no index, unlike those of this machine
    dtype = torch.bfloat16 if planned_gpu and recipe.dtype == "auto" else weights_dtype(recipe, device)
    shape, reach = check_recipe(recipe, sharding)
    load_options = LoadOptions(dtype=dtype, quantize=recipe.quantize, limit_memory=limit_memory)
    estimate = plan_training(
        recipe, load_options=load_options, sharding=sharding, device=planned_gpu,
        evaluation_lengths=evaluation_lengths(recipe, shape), reach=reach,
    )  # fmt: skip
    if estimate is None:
        raise RopeExtendError(
            f"cannot estimate the memory of a step of {recipe.model!r}: its family does not run on the meta "
            "device. Run a few steps instead, and read peak_memory_bytes in metrics.jsonl"
        )
    return estimate


def plan_training(
    recipe: Recipe,
    *,
    load_options: LoadOptions,
    sharding: Sharding = ALONE,
    device: torch.device | None = None,
    evaluation_lengths: Sequence[int] = (),
    reach: TextReach | None = None,
) -> TrainingPlan | None:
    """Estimate the memory of a run's steps, and choose the memory options that its recipe leaves open.

    Args:
        sharding: the share of each process. On a CPU, processes also share its memory.
        device: a device that this machine does not have, with the memory of `load_options.limit_memory`.
        evaluation_lengths: windows that the run evaluates at, in tokens.
        reach: as in `lora_config`.

    Returns:
        The plan; None, with a log line, for a family that does not run on the meta device.

    Raises:
        RopeExtendError: the model does not support a memory option that the recipe turns on.
    """
    device = device or load_options.torch_device
    empty = load_options.empty(recipe.model)
    weights = weight_bytes(recipe.model, empty, load_options)
    candidates = candidate_options(recipe, empty, device)
    with apply_memory_options(empty, candidates[0]):  # refuses an option that the model does not support
        pass
    reach = reach or text_reach(empty)
    if device == load_options.torch_device:
        budget = Budget.of(load_options, sharding.ranks)
    else:
        budget = Budget(device, load_options.limit_memory or sys.maxsize)

    def estimate_steps() -> tuple[TrainingPlan, StepEstimator]:
        with ExitStack() as stack:
            estimator = StepEstimator(stack, recipe, empty, weights, device, sharding, reach)
            return _plan_steps(estimator, candidates, budget), estimator

    estimated = try_estimate(estimate_steps, empty, "a step")
    if estimated is None or not evaluation_lengths:
        return estimated and estimated[0]
    estimate_evaluation = partial(_with_evaluation, *estimated, max(evaluation_lengths))
    return try_estimate(estimate_evaluation, empty, "an evaluation") or estimated[0]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        RopeExtendError: says what to install, and how trackers are called.
    """
    known = ", ".join(sorted(integration_utils.INTEGRATION_TO_CALLBACK))
    for name in sorted({*names} - {*integration_utils.get_available_reporting_integrations()}):
        to_have = f"pip install {name.replace('_', '-')}, or use one of {known}"
        raise RopeExtendError(f"recipe: the tracker {name} is not installed; {to_have}")


def weights_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of the frozen weights on a device."""
    return default_dtype(device) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)


def check_recipe(recipe: Recipe, sharding: Sharding) -> tuple[RopeShape, TextReach]:
    """The rotary shape of a recipe's model, and which of its parts text reaches.

    Raises:
        RopeExtendError: the model, the encoding, the data and the sharding do not go together.
    """
    model: Any = empty_model(recipe.model)
    reach = text_reach(model)
    if not recipe.full:
        lora_config(model, recipe, reach)
    chunked_loss(model).remove()
    with extended(model, recipe) as patch:
        if recipe.positions != CONSECUTIVE:
            check_sampled(recipe.positions, patch.encoding, patch.shape, model.config, recipe.target_length)
        if recipe.packing != UNPACKED:
            check_packing(patch.encoding, model.config)
        if recipe.mixed_windows:
            check_mixed_windows(recipe.length, patch.encoding, patch.shape, model.config)
        sharding.check(patch, model, recipe)
        return patch.shape, reach


def evaluation_lengths(recipe: Recipe, shape: RopeShape) -> Sequence[int]:
    """The windows that the run evaluates at, in tokens; empty without `eval_data`."""
    if recipe.eval_data is None:
        return ()
    if recipe.eval_lengths is not None:
        return recipe.eval_lengths
    doublings = math.ceil(math.log2(recipe.target_length / shape.trained_length))
    return (*(shape.trained_length * 2**i for i in range(doublings)), recipe.target_length)


def candidate_options(recipe: Recipe, model: Any, device: torch.device) -> list[MemoryOptions]:
    """The combinations of memory options that a run may use, each with one more than the one before.

    The cheapest option comes first, and those that the model does not support are left out. Weights of 4 bits
    are not among them: they change what is trained.
    """
    given = {item.name: getattr(recipe, item.name) for item in fields(MemoryOptions)}
    if recipe.offload_checkpoints is True:
        given["gradient_checkpointing"] = True
    candidates = [MemoryOptions(**{name: value for name, value in given.items() if value != AUTO})]
    tokens = recipe.length * recipe.batch_size
    tile = GPU_TILE if device.type == "cuda" and tokens >= MANY else TILE
    available = {
        "gradient_checkpointing": model.supports_gradient_checkpointing,
        "mlp_tiles": tile if tokens > tile and tileable(model) else 0,
        "offload_checkpoints": device.type == "cuda",
    }
    for name, value in available.items():
        offloads = name == "offload_checkpoints"
        if value and given[name] == AUTO and (not offloads or candidates[-1].gradient_checkpointing):
            candidates.append(replace(candidates[-1], **{name: value}))
    return candidates


def _plan_steps(
    estimator: StepEstimator, candidates: Sequence[MemoryOptions], budget: Budget
) -> TrainingPlan:
    recipe, last = estimator.recipe, candidates[-1]
    steps = [estimator.step(options, recipe.length) for options in candidates]
    chosen, longest_block = next(filter(budget.fits, steps), steps[-1]), None
    if not budget.fits(chosen):
        longest_block = longest(lambda tokens: budget.fits(estimator.step(last, tokens)), recipe.length)
    if not (chosen.quantized or recipe.full or estimator.sharding.weights or gguf_file(recipe.model)):
        weights = steps[-1].weights - estimator.quantized_savings
        steps.append(replace(steps[-1], quantized=True, weights=weights))
    named = estimator.model.named_parameters()
    return TrainingPlan(
        recipe, tuple(steps), chosen, budget, longest_block, sharding=estimator.sharding,
        lora=sum(value.numel() for name, value in named if "lora_" in name and value.dim() == 2),
    )  # fmt: skip


def _with_evaluation(plan: TrainingPlan, run: StepEstimator, tokens: int) -> TrainingPlan:
    """Add the estimate of an evaluation to a plan, including trained weights and the optimizer's moments."""
    step, recipe, empty, model = plan.chosen, plan.recipe, run.base, run.model.eval()
    with quiet_patching(), extended(empty, recipe):  # what the encoding learns is counted as trained
        learned = sum(value.nbytes for value in learned_parameters(empty).values())
        gathered = run.gathered(gradients=False) if run.sharding.weights else 0

    @contextmanager
    def as_trained() -> Iterator[None]:
        with (
            quiet_patching(),
            extended(empty, recipe),
            casting_as_autocast(model, run.dtype),
            apply_memory_options(empty, step.memory_options),
            planned_split(empty, recipe.split_window),
        ):
            yield

    estimator = ForwardEstimator(
        model, plan.budget, weights=step.weights + gathered, trained=step.trained - learned,
        setups=[as_trained],
    )  # fmt: skip
    window = estimator.estimate(tokens)
    fitting = None if plan.budget.fits(window) else estimator.longest_fit(tokens)
    return replace(plan, evaluation=window, longest_evaluation=fitting)
