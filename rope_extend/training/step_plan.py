"""Estimates the memory of a training step, for each combination of memory options, before weights are loaded.

There is no formula per family. The step itself, with adapter, loss, backward pass and optimizer, runs on the
meta device, where tensors have shapes and no values, and the bytes that it would hold are counted. The memory
that kernels and allocators need apart from tensors is covered by the margin of the plan.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from rope_extend.attention.functions import acts_inside
from rope_extend.attention.packed import takes_no_mask
from rope_extend.config import AUTO
from rope_extend.data.choices import CONSECUTIVE
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.forward_plan import ForwardEstimate, ForwardEstimator
from rope_extend.loss import NextTokenLoss, default_chunk_bytes
from rope_extend.memory.budget import MARGIN, available_memory, quantized_savings, usable_share, weight_bytes
from rope_extend.memory.meta_device import (
    META,
    DirectKernelCalls,
    MetaBytes,
    dry_run_attention,
    quiet_patching,
    try_estimate,
)
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.parameters import learned_parameters
from rope_extend.models.planned_device import planned_for
from rope_extend.models.view import decoder_layers
from rope_extend.training.host_offload import HostOffload
from rope_extend.training.lora import adapted, extended
from rope_extend.training.memory_options import (
    MemoryOptions,
    apply_memory_options,
    default_tile,
    recomputes,
    tileable,
)
from rope_extend.training.meta_autocast import casting_as_autocast
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import RunState
from rope_extend.training.text_reach import TextReach, text_reach
from rope_extend.units import format_bytes

logger = logging.getLogger(__name__)

DEPTH = 2
"""Number of layers of a dry run, if all layers are equal; one more layer shows what each adds."""
GRAIN = 64
"""Accuracy in tokens with which the longest block that fits is found; or a 64th of it, if that is more."""


@dataclass(frozen=True)
class StepMemory:
    """The memory that one step needs, in bytes.

    Attributes:
        memory_options: the options of the step.
        quantized: whether the frozen weights have 4 bits.
        weights: the frozen model.
        trained: trained weights in float32, and the optimizer's two moments of each.
        saved: what the forward pass saves for the backward pass.
        forward: the peak before the backward pass, in addition to the three above: a layer's inner states, or
            the logits of a chunk and their gradient.
        backward: the peak after that, in addition to the same three: a recomputed layer, gradients, and what
            the optimizer needs for its step.
        host: inputs of layers in host memory.
    """

    memory_options: MemoryOptions
    quantized: bool
    weights: int
    trained: int
    saved: int
    forward: int
    backward: int
    host: int = 0

    @property
    def total(self) -> int:
        """Peak memory on the device."""
        return self.weights + self.trained + self.saved + max(self.forward, self.backward)


@dataclass(frozen=True)
class TrainingPlan:
    """The memory that the steps of a run need, by memory options.

    Attributes:
        steps: one step per combination of options, each with one option more, the cheapest first. If not all
            were requested, the list ends with the first that fits.
        chosen: the step of the run: the first that fits, or else the last.
        length: tokens per block.
        batch: blocks per step and device.
        available: bytes available on the device, or its limit.
        host: bytes available in host memory.
        device: the device.
        longest_block: the longest block that fits with the chosen options, in tokens; None if the block fits.
        remarks: options that this model does not support, and why.
        quantized: the last step with weights of 4 bits, if all combinations were requested.
        evaluation: the estimate of the run's longest evaluation, including what is trained; None if the run
            does not evaluate.
        longest_evaluation: the longest window that can be evaluated, in tokens; None if the evaluation fits.
    """

    steps: tuple[StepMemory, ...]
    chosen: StepMemory
    length: int
    batch: int
    available: int
    host: int
    device: torch.device
    longest_block: int | None
    remarks: tuple[str, ...] = ()
    quantized: StepMemory | None = None
    evaluation: ForwardEstimate | None = None
    longest_evaluation: int | None = None

    @property
    def total(self) -> int:
        """Peak memory of the run on the device."""
        return max(self.chosen.total, self.evaluation.memory if self.evaluation else 0)

    def fits(self, step: StepMemory) -> bool:
        """Whether the memory for a step is available."""
        return _memory_share(step, self.available, self.host, self.device) <= 1

    def check(self) -> None:
        """Refuse a block or an evaluation that does not fit.

        Raises:
            RopeExtendError: names the longest length that fits.
        """
        step, evaluation = self.chosen, self.evaluation
        if self.fits(step):
            if evaluation is None or evaluation.fits:
                return
            longest = self.longest_evaluation
            fitting = f"up to {longest:,} tokens fit" if longest else "no length fits"
            raise RopeExtendError(
                f"the run's evaluations at {evaluation.length:,} tokens need about "
                f"{format_bytes(evaluation.memory)} {evaluation.description}, but only "
                f"{format_bytes(self.available)} are available on {self.device}; {fitting}. Use shorter "
                "eval_lengths, or leave eval_data out and evaluate after the run"
            )
        fitting = (
            f"blocks of up to {self.longest_block:,} tokens fit" if self.longest_block else "no block fits"
        )
        needed, available, where = step.total, self.available, f"on {self.device}"
        if step.total <= usable_share(self.device) * self.available:
            needed, available, where = step.host, self.host, "in host memory"
        raise RopeExtendError(
            f"a step of {self.batch} x {self.length:,} tokens needs about {format_bytes(needed)}, but only "
            f"{format_bytes(available)} are available {where} (memory options: {step.memory_options}; "
            f"weights: {format_bytes(step.weights)}); {fitting}. {self._advice()}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: bytes, tokens and texts."""
        rows = [*self.steps, *([self.quantized] if self.quantized else [])]
        return {
            "length": self.length,
            "batch": self.batch,
            "device": str(self.device),
            "available": self.available,
            "host": self.host,
            "steps": [
                {
                    **asdict(step), "memory_options": str(step.memory_options), "total": step.total,
                    "fits": self.fits(step), "chosen": step is self.chosen,
                }
                for step in rows
            ],
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "longest_block": self.longest_block,
            "longest_evaluation": self.longest_evaluation,
            "remarks": list(self.remarks),
        }  # fmt: skip

    def _advice(self) -> str:
        step = self.chosen
        advice = ["a shorter block_length with positions: pose"] if self.length > GRAIN else []
        advice += ["a smaller batch_size"] if self.batch > 1 else []
        off = [
            name for name in ("gradient_checkpointing", "mlp_tiles") if not getattr(step.memory_options, name)
        ]
        advice += [f"{' and '.join(off)} on auto"] if off and not self.remarks else []
        advice += ["quantize: 4bit"] if not step.quantized else []
        return f"To need less memory, use {', or '.join(advice)}"

    def __str__(self) -> str:
        heads = ("weights", "trained", "saved", "forward", "backward", "total", "in host")
        lines = [
            f"plan: steps of {self.batch} x {self.length:,} tokens, {format_bytes(self.available)} available "
            f"on {self.device}",
            f"{'memory options':<44}" + "".join(f"{head:>12}" for head in heads),
        ]
        before: MemoryOptions | None = None
        for step in (*self.steps, *([self.quantized] if self.quantized else [])):
            values = [getattr(step, head) for head in heads[:-1]]
            cells = "".join(f"{format_bytes(value):>12}" for value in values)
            cells += f"{format_bytes(step.host) if step.host else '-':>12}"
            verdict = "chosen" if step is self.chosen and self.fits(step) else ""
            verdict = verdict or ("fits" if self.fits(step) else "does not fit")
            name = "+ quantize: 4bit" if step is self.quantized else _added(step.memory_options, before)
            lines.append(f"{name:<44}{cells}  {verdict}")
            before = step.memory_options
        if (estimate := self.evaluation) is not None:
            cells = f"{format_bytes(estimate.memory):>{12 * len(heads[:-1])}}{'-':>12}"
            verdict = "fits" if estimate.fits else "does not fit"
            name = f"evaluation at {estimate.length:,} tokens"
            lines.append(f"{name:<44}{cells}  {verdict}, {estimate.description}")
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def _added(memory_options: MemoryOptions, before: MemoryOptions | None) -> str:
    """The options of a row of the plan that the row before it does not have."""
    if before is None:
        return str(memory_options) if memory_options.parts else "no memory options"
    return "+ " + ", ".join(part for part in memory_options.parts if part not in before.parts)


def _memory_share(step: StepMemory, available: int, host: int, device: torch.device) -> float:
    """Fraction of the usable memory, after the safety margin, that a step needs."""
    return max(step.total / max(1, available) / usable_share(device), step.host / max(1, host) / MARGIN)


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
        with _StepEstimator(recipe, empty, weights, device, processes, reach) as estimator:
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
    estimator: _StepEstimator,
    candidates: Sequence[MemoryOptions],
    remarks: Sequence[str],
    available: int,
    host: int,
    all_options: bool,
) -> TrainingPlan:
    recipe = estimator.recipe

    def share(step: StepMemory) -> float:
        return _memory_share(step, available, host, estimator.device)

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
    quantized = None
    if all_options and not chosen.quantized:
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


def candidate_options(
    recipe: Recipe, model: Any, device: torch.device
) -> tuple[list[MemoryOptions], list[str]]:
    """The combinations of memory options that a run may use, each with one more than the one before.

    The cheapest option comes first. Weights of 4 bits are not among them: they change what is trained.

    Returns:
        The combinations, and remarks on options that the model does not support.
    """
    automatic = {
        name
        for name in ("gradient_checkpointing", "mlp_tiles", "offload_checkpoints")
        if getattr(recipe, name) == AUTO
    }
    remarks = []
    memory_options = MemoryOptions(
        gradient_checkpointing=recipe.gradient_checkpointing is True or recipe.offload_checkpoints is True,
        mlp_tiles=0 if recipe.mlp_tiles == AUTO else int(recipe.mlp_tiles),
        offload_checkpoints=recipe.offload_checkpoints is True,
    )
    candidates = [memory_options]
    if "gradient_checkpointing" in automatic and not memory_options.gradient_checkpointing:
        if recomputes(model):
            memory_options = replace(memory_options, gradient_checkpointing=True)
            candidates.append(memory_options)
        else:
            remarks.append(f"{type(model).__name__} does not support gradient checkpointing")
    if recipe.mlp_tiles != 0:
        mlps = tileable(model)
        if mlps.reasons:
            which = "some MLPs do not" if mlps.modules else "no MLP can"
            remarks.append(f"{which} run in tiles: {'; '.join(mlps.reasons)}")
        tokens = recipe.length * recipe.batch_size
        tile = default_tile(tokens, device)
        if "mlp_tiles" in automatic and mlps.modules and tokens > tile:
            memory_options = replace(memory_options, mlp_tiles=tile)
            candidates.append(memory_options)
    if "offload_checkpoints" in automatic and memory_options.gradient_checkpointing and device.type == "cuda":
        candidates.append(replace(memory_options, offload_checkpoints=True))
    return candidates, remarks


def default_memory_options(recipe: Recipe, model: Any, device: torch.device) -> MemoryOptions:
    """The options of a run whose memory cannot be estimated: the recipe's, with gradient checkpointing."""
    candidates, _ = candidate_options(recipe, model, device)
    return next((options for options in candidates if options.gradient_checkpointing), candidates[0])


def resumed_options(recipe: Recipe, state: RunState) -> MemoryOptions:
    """The options of a resumed run: those it had, except those set by the recipe that change no result."""
    if state.memory_options is not None:
        memory_options = MemoryOptions(**state.memory_options)
    else:  # a checkpoint from before options were chosen
        memory_options = MemoryOptions(
            gradient_checkpointing=state.recipe.get("gradient_checkpointing", True) is True
        )
    changes = {
        name: value
        for name in ("gradient_checkpointing", "offload_checkpoints")
        if (value := getattr(recipe, name)) != AUTO
    }
    if changes.get("gradient_checkpointing") is False:
        changes["offload_checkpoints"] = False
    elif changes.get("offload_checkpoints"):
        changes["gradient_checkpointing"] = True
    return replace(memory_options, **changes)


class _StepEstimator:
    """Runs steps on a model without weights, and counts bytes. Use it as a context manager.

    Attention of the model is replaced within the context, and restored at its end.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        weights: int,
        device: torch.device,
        processes: int,
        reach: TextReach,
    ) -> None:
        self.reach = reach
        self.recipe, self.base, self.weights = recipe, model, weights
        self.device, self.quantized, self.processes = device, recipe.quantize is not None, processes
        self.dtype = model.dtype
        self.quantized_savings = quantized_savings(model, "4bit")
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.scored = 3 * max(1, default_chunk_bytes(device) // (4 * vocabulary))  # tokens of three chunks

    def __enter__(self) -> Self:
        model, packed = self.base, self.recipe.packs
        with DirectKernelCalls(), MetaBytes(scored=2):
            self.masked = packed and not takes_no_mask(model)
        config = model.config.get_text_config(decoder=True)
        flash = "flash" in config._attn_implementation
        with ExitStack() as stack:
            stack.enter_context(planned_for(self.device))
            # Before the patch, which may wrap the attention function that it finds.
            stack.enter_context(dry_run_attention(model, maskless=False))
            with quiet_patching():
                stack.enter_context(extended(model, self.recipe))
            # Encodings that act inside attention need a mask, unless the kernel is flash attention.
            self.masked |= packed and acts_inside(model) and not flash
            self.model = adapted(model, self.recipe, self.reach).train()
            self._context = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def step(self, memory_options: MemoryOptions, tokens: int) -> StepMemory:
        """The memory of a step after the first, when the optimizer has its moments."""
        applied = memory_options
        if self.device.type == "cpu":  # all memory is host memory
            applied = replace(memory_options, offload_checkpoints=False)
        trained, saved, forward, backward, host = self._count(applied, tokens)
        return StepMemory(
            memory_options, self.quantized, self.weights, trained, saved, max(0, forward - saved),
            max(0, backward - saved), host,
        )  # fmt: skip

    def _count(self, memory_options: MemoryOptions, tokens: int) -> list[int]:
        """Bytes of what is trained; and in addition to that and the weights: at the end of the forward pass,
        the peak until then, and the peak after that; and bytes in host memory.

        If all layers are equal, each adds the same, so a few layers are enough.
        """
        decoder = decoder_layers(self.base)
        if decoder is None or not decoder.complete:
            return self._step(memory_options, tokens)
        parent, name, layers, _ = decoder
        # The embeddings, and the inputs of the two latest layers, are still on the device while a layer runs.
        least = DEPTH + memory_options.offload_checkpoints
        if len(layers) <= 2 * DEPTH or not _equal_layers(self.base, layers):
            return self._step(memory_options, tokens)
        counts = []
        for depth in (least, least + 1):
            setattr(parent, name, layers[:depth])
            try:
                counts.append(self._step(memory_options, tokens))
            finally:
                setattr(parent, name, layers)
        return [few + (len(layers) - least) * (more - few) for few, more in zip(*counts, strict=True)]

    def _step(self, memory_options: MemoryOptions, tokens: int) -> list[int]:
        recipe = self.recipe
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(self.parameters, foreach=self.device.type == "cuda")
        counter = MetaBytes(scored=self.scored)
        tensors = [tensor for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.is_meta]
        for tensor in tensors:
            counter.add(tensor)
        trainable = sum(parameter.nbytes for parameter in self.parameters)
        frozen = counter.live - trainable
        batch = {"input_ids": torch.zeros(recipe.batch_size, tokens, dtype=torch.int64, device=META)}
        if recipe.positions != CONSECUTIVE:
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
        buckets = self.processes > 1  # those of DistributedDataParallel hold a second copy of every gradient
        objective, offload = NextTokenLoss(self.model), HostOffload()
        with (
            # Before tiles, which take over a layer's forward.
            casting_as_autocast(self.model, self.dtype) as cast,
            apply_memory_options(self.base, memory_options, offload),
            DirectKernelCalls(),
            counter,
        ):
            self._gradients()
            optimizer.step()
            optimizer.zero_grad()
            held = counter.live
            if self.masked:
                _mask = torch.empty(recipe.batch_size, tokens, tokens, dtype=torch.bool, device=META)
            if recipe.gradient_accumulation > 1 or buckets:
                self._gradients()
            counter.peak = counter.live
            loss = objective(**batch)
            cast.clear()
            saved, forward = counter.live - held - offload.leaving_bytes, counter.peak - held
            counter.peak = counter.live
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            backward = counter.peak - held
        return [held - frozen + trainable * buckets, saved, forward, backward, offload.host_bytes]

    def _gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)


def _equal_layers(model: Any, layers: nn.ModuleList) -> bool:
    """Whether all layers of a model need the same memory."""
    if len(set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())) > 1:
        return False
    kinds = {
        tuple((name, type(part), *(tuple(value.shape) for value in part.parameters(recurse=False)))
              for name, part in layer.named_modules())
        for layer in layers
    }  # fmt: skip
    return len(kinds) == 1
