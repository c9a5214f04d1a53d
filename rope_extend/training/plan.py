"""What a training step will take in memory, lever by lever, said before any weights are read.

No formula for each family: the step itself, with its adapter, loss, backward pass and optimizer, runs on the
meta device, where tensors have shapes and no values, and the bytes are counted that it would hold. What
kernels and allocators take beside tensors is in the margin that a plan leaves.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_extend.attention.functions import PREFIX
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.plan import (
    MARGIN,
    META,
    MetaBytes,
    OwnCalls,
    Reading,
    ReadingRehearsal,
    attending,
    available_memory,
    foretold,
    format_bytes,
    quantized_savings,
    quiet,
    weight_bytes,
)
from rope_extend.hardware import Hardware
from rope_extend.learned import learned_parameters
from rope_extend.loss import CHUNK_BYTES, NextTokenLoss
from rope_extend.training.levers import TILE, Levers, pull, recomputes, tileable
from rope_extend.training.loop import adapted, extended
from rope_extend.training.packing import UNPACKED, takes_no_mask
from rope_extend.training.recipe import AUTO, CONSECUTIVE, Recipe
from rope_extend.training.resume import RunState

logger = logging.getLogger(__name__)

DEPTH = 2
"""How many layers of many that are alike are rehearsed, and one more to know what each adds."""
GRAIN = 64
"""To how many tokens the longest block that fits is found, or to a 64th of it."""


@dataclass(frozen=True)
class StepMemory:
    """What one step takes, in bytes.

    Attributes:
        levers: with these.
        quantized: whether the frozen weights are of 4 bits.
        weights: of the frozen model.
        trained: trained weights in float32, and the optimizer's two moments of each.
        saved: what the forward pass keeps for the backward pass.
        forward: the most that is held beside the three before the backward pass: a layer's inner states, or
            the logits of a chunk and their gradient.
        backward: the most that is held beside the three after that: a layer that is recomputed, gradients,
            and what the optimizer needs for its step.
        host: inputs of layers in host memory.
    """

    levers: Levers
    quantized: bool
    weights: int
    trained: int
    saved: int
    forward: int
    backward: int
    host: int = 0

    @property
    def total(self) -> int:
        """The most bytes held on the device at one time."""
        return self.weights + self.trained + self.saved + max(self.forward, self.backward)


@dataclass(frozen=True)
class TrainingPlan:
    """What the steps of a run take, by levers.

    Attributes:
        steps: with one lever more each, the cheapest first. Of those that a recipe leaves to be chosen, only
            as many as are needed, if not all were asked for.
        chosen: the one the run takes: the first that fits, or else the last.
        length: tokens per block.
        batch: blocks per step and device.
        available: bytes to be had on the device, or of the limit.
        host: bytes to be had in host memory.
        place: the device.
        most: the longest block that fits with the levers chosen, in tokens; None where the block does.
        remarks: on levers that this model does not have.
        quantized: the last of them with weights of 4 bits, where all steps were asked for.
        evaluation: how the run's longest evaluation reads, what is trained included in what it takes; None
            where there are none.
        most_evaluated: the longest window that can be evaluated, in tokens; None where that one fits.
    """

    steps: tuple[StepMemory, ...]
    chosen: StepMemory
    length: int
    batch: int
    available: int
    host: int
    place: torch.device
    most: int | None
    remarks: tuple[str, ...] = ()
    quantized: StepMemory | None = None
    evaluation: Reading | None = None
    most_evaluated: int | None = None

    @property
    def total(self) -> int:
        """The most bytes held on the device at one time of the run."""
        return max(self.chosen.total, self.evaluation.memory if self.evaluation else 0)

    def fits(self, step: StepMemory) -> bool:
        """Whether the memory is to be had."""
        return _fits(step, self.available, self.host)

    def check(self) -> None:
        """Refuse a block, or a window to evaluate at, that cannot fit.

        Raises:
            RopeExtendError: naming the longest that does.
        """
        step, evaluation = self.chosen, self.evaluation
        if self.fits(step):
            if evaluation is None or evaluation.fits:
                return
            nearest = f"up to {self.most_evaluated:,} tokens fit" if self.most_evaluated else "no length fits"
            raise RopeExtendError(
                f"the run's evaluations at {evaluation.length:,} tokens need about "
                f"{format_bytes(evaluation.memory)}, {evaluation.reading}, and "
                f"{format_bytes(self.available)} are to be had on {self.place}; {nearest}. Give shorter "
                f"eval_lengths, or leave eval_data out and evaluate when the run is done"
            )
        nearest = f"blocks of up to {self.most:,} tokens fit" if self.most else "no block fits"
        needed, room, where = step.total, self.available, f"on {self.place}"
        if step.total <= MARGIN * self.available:
            needed, room, where = step.host, self.host, "in host memory"
        raise RopeExtendError(
            f"a step of {self.batch} x {self.length:,} tokens needs about {format_bytes(needed)}, and "
            f"{format_bytes(room)} are to be had {where} (levers: {step.levers}; weights take "
            f"{format_bytes(step.weights)}); {nearest}. {self._advice()}"
        )

    def _advice(self) -> str:
        step = self.chosen
        more = ["a shorter block_length with positions: pose"] if self.length > GRAIN else []
        more += ["a smaller batch_size"] if self.batch > 1 else []
        off = [name for name in ("gradient_checkpointing", "mlp_tiles") if not getattr(step.levers, name)]
        more += [f"{' and '.join(off)} on auto"] if off and not self.remarks else []
        more += ["quantize: 4bit"] if not step.quantized else []
        return f"What makes room: {', '.join(more)}"

    def __str__(self) -> str:
        heads = ("weights", "trained", "saved", "forward", "backward", "total", "in host")
        lines = [
            f"plan: steps of {self.batch} x {self.length:,} tokens, {format_bytes(self.available)} to be had "
            f"on {self.place}",
            f"{'levers':<44}" + "".join(f"{head:>12}" for head in heads),
        ]
        before: Levers | None = None
        for step in (*self.steps, *([self.quantized] if self.quantized else [])):
            values = [getattr(step, head) for head in heads[:-1]]
            cells = "".join(f"{format_bytes(value):>12}" for value in values)
            cells += f"{format_bytes(step.host) if step.host else '-':>12}"
            verdict = "chosen" if step is self.chosen and self.fits(step) else ""
            verdict = verdict or ("fits" if self.fits(step) else "does not fit")
            name = "+ quantize: 4bit" if step is self.quantized else _added(step.levers, before)
            lines.append(f"{name:<44}{cells}  {verdict}")
            before = step.levers
        if (found := self.evaluation) is not None:
            cells = f"{format_bytes(found.memory):>{12 * len(heads[:-1])}}{'-':>12}"
            verdict = "fits" if found.fits else "does not fit"
            lines.append(f"{f'evaluation at {found.length:,} tokens':<44}{cells}  {verdict}, {found.reading}")
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def _added(levers: Levers, before: Levers | None) -> str:
    """What a row of the plan has beyond the row before it."""
    if before is None:
        return str(levers) if levers != Levers() else "no levers"
    known = before.parts
    return "+ " + ", ".join(part for part in levers.parts if part not in known)


def _fits(step: StepMemory, available: int, host: int) -> bool:
    return _share(step, available, host) <= 1


def _share(step: StepMemory, available: int, host: int) -> float:
    """How much of the memory that is to be had with a margin a step takes."""
    return max(step.total / max(1, available), step.host / max(1, host)) / MARGIN


def plan_training(
    recipe: Recipe,
    *,
    hardware: Hardware,
    model: Any | None = None,
    levers: Levers | None = None,
    processes: int = 1,
    every: bool = False,
    place: torch.device | None = None,
    evaluated: Sequence[int] = (),
) -> TrainingPlan | None:
    """Foretell what the steps of a run take, and choose the levers that its recipe leaves open.

    Args:
        recipe: the run.
        hardware: where and how the model will be loaded.
        model: a model that is loaded already, in place of the recipe's; only its shapes are read.
        levers: those of a run that goes on: nothing is left open then.
        processes: how many share the step; on a CPU they share its memory too.
        every: rehearse all levers, also where fewer fit.
        place: a device that is not here, with the memory that `hardware` is limited to.
        evaluated: windows that the run evaluates at, in tokens.

    Returns:
        The plan; None, with a word in the log, for a family that does not run on the meta device.

    Raises:
        RopeExtendError: the model has none of what a lever that the recipe names acts on.
    """
    place = place or hardware.place
    empty = _without_weights(recipe, hardware, model)
    if model is None:
        weights = weight_bytes(recipe.model, empty, hardware)
    else:
        weights = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    ladder, remarks = ([levers], []) if levers is not None else ladder_of(recipe, empty, place)
    pull(empty, ladder[0]).close()  # refuses what a lever named by the recipe finds nothing to act on
    limit = sys.maxsize if hardware.limit_memory is None else hardware.limit_memory
    available = host = sys.maxsize
    if place == hardware.place:
        available, host = (
            available_memory(replace(each, limit_memory=None)) for each in (hardware, Hardware(device="cpu"))
        )
    host //= processes
    if place.type == "cpu":
        available //= processes
    if model is not None and model.device.type == place.type:
        available += weights  # they are there already
    available = min(available, limit)

    def steps() -> TrainingPlan:
        rehearsal = _StepRehearsal(recipe, empty, weights, place, processes)
        return _planned(rehearsal, ladder, remarks, available, host, every)

    found = foretold(steps, empty, "a step")
    if found is None or not evaluated:
        return found
    anew = _without_weights(recipe, hardware, model)
    rest = foretold(partial(_with_evaluation, found, recipe, anew, max(evaluated)), anew, "an evaluation")
    return rest or found


def _without_weights(recipe: Recipe, hardware: Hardware, model: Any | None) -> Any:
    """A model of the recipe's, or of the shapes of `model`, on the meta device."""
    if model is None:
        return hardware.empty(recipe.model)
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config)).to(model.dtype)


def _with_evaluation(found: TrainingPlan, recipe: Recipe, empty: Any, tokens: int) -> TrainingPlan:
    """The plan of a run that also evaluates: beside what is trained and the optimizer's moments of it."""
    step, dtype = found.chosen, empty.dtype
    with quiet(), extended(empty, recipe):  # what is learned is the encoding's, and counted as trained
        learned = sum(value.nbytes for value in learned_parameters(empty).values())
    model = adapted(empty, recipe).eval()

    @contextmanager
    def as_trained() -> Iterator[None]:
        with quiet(), extended(empty, recipe), pull(empty, step.levers), _casting(model, dtype):
            yield

    rehearsal = ReadingRehearsal(
        model, found.place, weights=step.weights + step.trained - learned, available=found.available,
        ways=[as_trained],
    )  # fmt: skip
    reading = rehearsal.reading(tokens)
    most = None if reading.fits else rehearsal.most(tokens)
    return replace(found, evaluation=reading, most_evaluated=most)


def _planned(
    rehearsal: _StepRehearsal,
    ladder: Sequence[Levers],
    remarks: Sequence[str],
    available: int,
    host: int,
    every: bool,
) -> TrainingPlan:
    recipe = rehearsal.recipe
    steps: list[StepMemory] = []
    chosen: StepMemory | None = None
    for levers in ladder:
        steps.append(rehearsal.step(levers, recipe.length))
        if chosen is None and _fits(steps[-1], available, host):
            chosen = steps[-1]
            if not every:
                break
    most = None
    if chosen is None:
        chosen = steps[-1]
        most = _most(
            lambda tokens: _share(rehearsal.step(ladder[-1], tokens), available, host), recipe.length
        )
    quantized = None
    if every and not chosen.quantized:
        less = steps[-1].weights - rehearsal.quantized_savings
        quantized = replace(steps[-1], quantized=True, weights=less)
    return TrainingPlan(
        steps=tuple(steps),
        chosen=chosen,
        length=recipe.length,
        batch=recipe.batch_size,
        available=available,
        host=host,
        place=rehearsal.place,
        most=most,
        remarks=tuple(remarks),
        quantized=quantized,
    )


def _most(total: Callable[[int], float], tokens: int) -> int:
    """The longest block whose `total`, a share of the memory to be had, is 1 at most; 0 if there is none.

    Found to a 64th, or to GRAIN tokens, below `tokens`, which do not fit. Memory grows in a line for the most
    part, so where the line through the two nearest lengths says is looked first.
    """
    low, high = 1, -(-tokens // GRAIN)  # in grains: what fits, and what does not
    if high <= low or (least := total(GRAIN)) > 1:
        return 0
    shares = {low: least, high: total(tokens)}
    halve = False
    while high - low > max(1, low // 64):
        slope = (shares[high] - shares[low]) / (high - low)
        guess = low + int((1 - shares[low]) / slope) if slope > 0 else low
        if halve:  # the line alone may creep up to a bend
            guess = math.isqrt(low * high) if high > 4 * low else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        shares[guess] = total(guess * GRAIN)
        low, high = (low, guess) if shares[guess] > 1 else (guess, high)
        halve = not halve
    return low * GRAIN


def ladder_of(recipe: Recipe, model: Any, place: torch.device) -> tuple[list[Levers], list[str]]:
    """The levers that a run may pull, one more each time, the cheapest first; and remarks on what is missing.

    Weights of 4 bits are not among them: they change what is trained.
    """
    open_ = {name for name in ("gradient_checkpointing", "mlp_tiles", "offload_checkpoints")
             if getattr(recipe, name) == AUTO}  # fmt: skip
    remarks = []
    levers = Levers(
        gradient_checkpointing=recipe.gradient_checkpointing is True or recipe.offload_checkpoints is True,
        mlp_tiles=0 if recipe.mlp_tiles == AUTO else int(recipe.mlp_tiles),
        offload_checkpoints=recipe.offload_checkpoints is True,
    )
    ladder = [levers]
    if "gradient_checkpointing" in open_ and not levers.gradient_checkpointing:
        if recomputes(model):
            levers = replace(levers, gradient_checkpointing=True)
            ladder.append(levers)
        else:
            remarks.append(f"{type(model).__name__} does not recompute its layers")
    if recipe.mlp_tiles != 0:
        found = tileable(model)
        if found.others:
            which = "some MLPs are not" if found.modules else "no MLP is"
            remarks.append(f"{which} run in tiles: {'; '.join(found.others)}")
        if "mlp_tiles" in open_ and found.modules and recipe.length * recipe.batch_size > TILE:
            levers = replace(levers, mlp_tiles=TILE)
            ladder.append(levers)
    if "offload_checkpoints" in open_ and levers.gradient_checkpointing and place.type == "cuda":
        ladder.append(replace(levers, offload_checkpoints=True))
    return ladder, remarks


def default_levers(recipe: Recipe, model: Any, place: torch.device) -> Levers:
    """The levers of a run whose steps cannot be foretold: what the recipe says, and layers recomputed."""
    ladder, _ = ladder_of(recipe, model, place)
    return next((levers for levers in ladder if levers.gradient_checkpointing), ladder[0])


def continued(recipe: Recipe, state: RunState) -> Levers:
    """The levers of a run that goes on: its own, but for those the recipe names that change no bit of it."""
    if state.levers is not None:
        levers = Levers(**state.levers)
    else:  # before there was a choice
        levers = Levers(gradient_checkpointing=state.recipe.get("gradient_checkpointing", True) is True)
    named = {
        name: value
        for name in ("gradient_checkpointing", "offload_checkpoints")
        if (value := getattr(recipe, name)) != AUTO
    }
    if named.get("gradient_checkpointing") is False:
        named["offload_checkpoints"] = False
    elif named.get("offload_checkpoints"):
        named["gradient_checkpointing"] = True
    return replace(levers, **named)


class _StepRehearsal:
    """Takes steps on a model without weights, and counts."""

    def __init__(self, recipe: Recipe, model: Any, weights: int, place: torch.device, processes: int) -> None:
        self.recipe, self.base, self.weights = recipe, model, weights
        self.place, self.quantized, self.processes = place, recipe.quantize is not None, processes
        self.dtype = model.dtype
        self.quantized_savings = quantized_savings(model, "4bit")
        packed = recipe.packing != UNPACKED
        with OwnCalls(), MetaBytes(scored=2):
            self.masked = packed and not takes_no_mask(model)
        # Before the patch, which may build on the attention that it finds; the model is the rehearsal's own.
        config = model.config.get_text_config(decoder=True)
        flash = "flash" in config._attn_implementation
        self._attending = attending(model, maskless=False)
        self._attending.__enter__()
        with quiet():  # the run says the same of the model itself
            extended(model, recipe)
        # What acts inside attention reads a mask, where the kernel is not flash's.
        acts = config._attn_implementation.startswith(PREFIX)
        self.masked |= packed and acts and not flash
        self.model = adapted(model, recipe).train()
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.scored = 3 * max(1, CHUNK_BYTES // (4 * vocabulary))  # tokens of three chunks of logits

    def step(self, levers: Levers, tokens: int) -> StepMemory:
        """What a step takes once the optimizer has its moments."""
        kept = levers
        if self.place.type == "cpu":  # where host memory is all there is
            kept = replace(levers, offload_checkpoints=False)
        trained, saved, forward, backward = self._count(kept, tokens)
        host = 0
        if kept.offload_checkpoints:
            host = self._count(replace(kept, offload_checkpoints=False), tokens)[1] - saved
        return StepMemory(
            levers, self.quantized, self.weights, trained, saved, max(0, forward - saved),
            max(0, backward - saved), host,
        )  # fmt: skip

    def _count(self, levers: Levers, tokens: int) -> list[int]:
        """Bytes: of what is trained; and beside that and the weights, at the end of the forward pass, at most
        until then, and at most after that.

        Where all layers are alike, each adds as much as any other, so that a few are enough to know.
        """
        home, layers = _layers(self.base)
        if home is None or len(layers) <= 2 * DEPTH or not _alike(self.base, layers):
            return self._step(levers, tokens)
        counts = []
        for depth in (DEPTH, DEPTH + 1):
            home.layers = layers[:depth]
            try:
                counts.append(self._step(levers, tokens))
            finally:
                home.layers = layers
        return [few + (len(layers) - DEPTH) * (more - few) for few, more in zip(*counts, strict=True)]

    def _step(self, levers: Levers, tokens: int) -> list[int]:
        recipe = self.recipe
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(self.parameters, foreach=self.place.type == "cuda")
        counter = MetaBytes(scored=self.scored)
        tensors = [tensor for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.is_meta]
        for tensor in tensors:
            counter.add(tensor)
        trainable = sum(parameter.nbytes for parameter in self.parameters)
        frozen = counter.live - trainable
        batch = {"input_ids": torch.zeros(recipe.batch_size, tokens, dtype=torch.int64, device=META)}
        if recipe.positions != CONSECUTIVE:
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
        buckets = self.processes > 1  # of DistributedDataParallel, which hold every gradient once more
        objective = NextTokenLoss(self.model)
        with (
            pull(self.base, levers),
            OwnCalls(),
            _casting(self.model, self.dtype) as cast,
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
            saved, forward = counter.live - held, counter.peak - held
            counter.peak = counter.live
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            backward = counter.peak - held
        return [held - frozen + trainable * buckets, saved, forward, backward]

    def _gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)


def _layers(model: Any) -> tuple[Any, nn.ModuleList]:
    """The part of a model that holds its decoder layers, and these; (None, none) if it is not clear which."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    homes = [part for part in model.modules() if len(getattr(part, "layers", ())) == count]
    if len(homes) == 1 and isinstance(homes[0].layers, nn.ModuleList):
        return homes[0], homes[0].layers
    return None, nn.ModuleList()


def _alike(model: Any, layers: nn.ModuleList) -> bool:
    """Whether all layers of a model take as much memory as each other."""
    if len(set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())) > 1:
        return False
    kinds = {
        tuple((name, type(part), *(tuple(own.shape) for own in part.parameters(recurse=False)))
              for name, part in layer.named_modules())
        for layer in layers
    }  # fmt: skip
    return len(kinds) == 1


@contextmanager
def _casting(model: nn.Module, dtype: torch.dtype) -> Iterator[dict[nn.Module, Tensor]]:
    """Let the linear layers of a bfloat16 model multiply as under autocast, which the meta device has not.

    Yields:
        What autocast keeps until it ends: the trained weights that it has cast.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    kept: dict[nn.Module, Tensor] = {}
    for module in linear if dtype == torch.bfloat16 else ():
        module.__dict__["forward"] = partial(_multiplied, module, dtype, kept)
    try:
        yield kept
    finally:
        for module in linear:
            module.__dict__.pop("forward", None)


def _multiplied(
    module: nn.Linear, dtype: torch.dtype, kept: dict[nn.Module, Tensor], states: Tensor
) -> Tensor:
    bias = None if module.bias is None else module.bias.to(dtype)
    weight = kept.get(module, module.weight).to(dtype)
    if module.weight.requires_grad:
        kept[module] = weight
    return F.linear(states.to(dtype), weight, bias)
