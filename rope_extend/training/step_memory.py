"""The memory of a training step, for each combination of memory options, and what a run does with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.forward_plan import ForwardEstimate
from rope_extend.memory.budget import MARGIN, usable_share
from rope_extend.training.memory_options import MemoryOptions
from rope_extend.units import format_bytes

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
        quantizable: whether the weights can be loaded with 4 bits; those of a GGUF file cannot.
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
    quantizable: bool = True
    quantized: StepMemory | None = None
    evaluation: ForwardEstimate | None = None
    longest_evaluation: int | None = None

    @property
    def total(self) -> int:
        """Peak memory of the run on the device."""
        return max(self.chosen.total, self.evaluation.memory if self.evaluation else 0)

    def fits(self, step: StepMemory) -> bool:
        """Whether the memory for a step is available."""
        return memory_share(step, self.available, self.host, self.device) <= 1

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
        advice += ["quantize: 4bit"] if self.quantizable and not step.quantized else []
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


def memory_share(step: StepMemory, available: int, host: int, device: torch.device) -> float:
    """Fraction of the usable memory, after the safety margin, that a step needs."""
    return max(step.total / max(1, available) / usable_share(device), step.host / max(1, host) / MARGIN)
