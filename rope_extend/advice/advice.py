"""What to do for a window: the verdict with its reason, the recipe, the commands, and what success is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from shlex import quote
from typing import Any

import yaml

from rope_extend.advice.advised_recipe import Work
from rope_extend.advice.question import CurrentWindow
from rope_extend.checks import field_hints
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.verdicts import LEAST_FOUND, MOST_COST
from rope_extend.method_names import PRETRAINED
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import TrainingPlan
from rope_extend.units import format_bytes, format_length

READS_ALREADY = "reads already"
LOCAL = "local attention"
STANZA = "recommended by its makers"
UNTRAINED = "try without training first"
TRAIN = "train"
DOES_NOT_FIT = "does not fit"
FINETUNE = "finetune recipe.yaml"
"""The end of the command that trains, until the file of the recipe has a name."""
CRITERIA = (
    "perplexity beyond the present window is below that of the control cropped to that window, with all of "
    "the 99.5 % interval. The control is the model as it is, or after training, plain RoPE trained on as "
    "many tokens within that window",
    f"passkeys are found in at least {100 * LEAST_FOUND:.0f} % of the trials at every depth, at the target "
    "length",
    f"perplexity within the present window is at most {100 * (MOST_COST - 1):.0f} % above that of the model "
    "as it is, and of the trained control",
)
"""What an extension must reach before it can be called a success."""


@dataclass(frozen=True)
class Advice:
    """What to do to let a model read a longer window.

    Attributes:
        model: the directory or hub id.
        model_type: its family.
        window: what the model reads without any change.
        target_length: the window that is wanted, in tokens.
        verdict: one of the constants of this module, such as `reads already` or `train`.
        reason: why, in a sentence or two.
        trained_length: the window that is extended, in tokens: that of pretraining, or with `start` `current`
            what the model reads today; None if nothing is to be done.
        factor: target divided by that window; None if nothing is to be done.
        method: the method to use, and to train with; None if nothing is to be done.
        untrained_method: the method to try first without training; None if there is none.
        recipe: fields of a fine-tuning recipe; empty if no training is needed, or none fits the GPU.
        memory: the plan of the recipe's steps; if none fits, with every memory option and weights of 4 bits;
            None if no training is needed.
        work: tokens, operations and hours of the recipe; None without one, or if they cannot be counted.
        commands: the commands that follow, in order; those that measure if nothing is to be done.
        criteria: what to reach before it can be called a success; empty if there is nothing to measure.
        notes: what to know in addition.
        serving: the commands with which the chosen engine serves the result, of the training if there is one;
            a line with `#` is a comment. Empty if no engine was chosen, or nothing changes.
        start: what is extended: plain RoPE (`pretrained`), or the scaling of a model that was trained under
            it (`current`).
        engines: the engines that compute `method` for this family without rope_extend, as far as we know.
    """

    model: str
    model_type: str
    window: CurrentWindow
    target_length: int
    verdict: str
    reason: str
    trained_length: int | None = None
    factor: float | None = None
    method: str | None = None
    untrained_method: str | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    memory: TrainingPlan | None = None
    work: Work | None = None
    commands: tuple[str, ...] = ()
    criteria: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    start: str = PRETRAINED
    engines: tuple[str, ...] = ()

    def __repr__(self) -> str:
        method = self.untrained_method or self.method
        how = f" with {method}" if method else ""
        lengths = f"{format_length(self.window.tokens)} to {format_length(self.target_length)}"
        return f"Advice({self.model}, {lengths}: {self.verdict}{how})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        memory = None if self.memory is None else self.memory.to_dict()
        return {**asdict(replace(self, memory=None)), "memory": memory}

    def with_recipe_file(self, file: str) -> Advice:
        """The advice with the name of the recipe's file in its commands, quoted for a shell."""
        named = f"finetune {quote(file)}"
        return replace(self, commands=tuple(line.replace(FINETUNE, named) for line in self.commands))

    def recipe_yaml(self) -> str:
        """The recipe, with what each field is as a comment.

        Raises:
            RopeExtendError: no training is advised, so there is no recipe.
        """
        if not self.recipe:
            raise RopeExtendError(f"no recipe for {self.model}: {self.reason}")
        old, new = format_length(self.trained_length or 0), format_length(self.target_length)
        lines = [f"# {self.method} with LoRA: {self.model} from {old} to {new}"]
        if self.memory:
            step, available = self.memory.chosen, format_bytes(self.memory.budget.available)
            lines.append(f"# A step needs {format_bytes(step.total)}, estimated for a GPU with {available}.")
            lines.append(f"# Memory options: {step.options}.")
        for name, value in self.recipe.items():
            text = format_length if name.endswith(("_length", "_lengths")) else lambda each: each
            several = isinstance(value, tuple)
            plain = [text(each) for each in value] if several else text(value)
            flow = None if several else False  # a list stays on its line
            line = yaml.safe_dump({name: plain}, default_flow_style=flow, allow_unicode=True, width=1000)
            lines.append(f"{line.strip():<35}  # {field_hints(Recipe)[name][1]}")
        return "\n".join(lines) + "\n"
