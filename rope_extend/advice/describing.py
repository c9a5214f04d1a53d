"""Advice as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from textwrap import fill

from rope_extend.advice.advice import Advice
from rope_extend.advice.estimates import Work
from rope_extend.advice.serving import Serving
from rope_extend.memory.gpus import UTILISATION
from rope_extend.training.step_plan import TrainingPlan
from rope_extend.units import format_bytes, format_duration, format_length

_WIDTH = 100


def describe(advice: Advice, recipe_file: str | None = None) -> str:
    """The advice in words, with the commands that follow.

    Args:
        advice: the advice.
        recipe_file: where its recipe was written; None if it was not.
    """
    named = advice if recipe_file is None else advice.with_recipe_file(recipe_file)
    return "\n".join(_lines(named, recipe_file))


def _lines(advice: Advice, recipe_file: str | None) -> Iterator[str]:
    window = advice.window
    yield _row("model", f"{advice.model} ({advice.model_type})")
    yield _row("reads today", f"{format_length(window.tokens)} tokens: {window.source}")
    yield _row("you want", f"{format_length(advice.target_length)} tokens")
    yield _row("verdict", f"{advice.verdict}. {advice.reason}")
    if advice.untrained_method and advice.memory:
        yield _row("untrained", f"{advice.untrained_method}: {_UNTRAINED_WHY[advice.untrained_method]}")
    if advice.method:
        served = f"; {_listed(advice.engines)} can run it" if advice.engines else ""
        yield _row("method", f"{advice.method}: {_WHY}{served}")
    if advice.memory:
        yield _row("memory", _memory(advice.memory))
    if advice.work:
        yield _row("training", _training(advice.work, short_blocks="positions" in advice.recipe))
        yield _row("hours", _hours(advice.work))
    for note in advice.notes:
        yield _row("note", note)
    if advice.commands:
        yield "\nnext:"
        if advice.recipe and recipe_file is None:
            yield "  (first write the recipe: add --output recipe.yaml to this command)"
        for command in advice.commands:
            yield f"  {command}"
    if advice.untrained_serving:
        yield from _serving(advice.untrained_serving, ", if it is good enough without training")
    if advice.serving:
        yield from _serving(advice.serving, ", after the training" if advice.untrained_serving else "")
    if advice.criteria:
        yield "\nit is a success if"
        for criterion in advice.criteria:
            yield fill(criterion, _WIDTH, initial_indent="  - ", subsequent_indent="    ")


_WHY = "fast channels stay as they are and slow ones are interpolated (2309.00071)"
_EVIDENCE = (
    "Published: 105M tokens (2306.15595) to 1.7 billion (2309.00071); 1 billion for windows of 1M to 4M "
    "(2504.06214)"
)
_UNTRAINED_WHY = {
    "dynamic_yarn": "its factor follows the length of the text",
    "yarn": "it has one factor for texts of all lengths, so short ones become somewhat worse",
}


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _row(name: str, text: str) -> str:
    return fill(f"{name:<13}{text}", _WIDTH, subsequent_indent=" " * 13, break_on_hyphens=False)


def _memory(memory: TrainingPlan) -> str:
    verdict = "fits" if memory.fits else "does not fit"
    needed = f"{format_bytes(memory.chosen.total)} of {format_bytes(memory.budget.available)}"
    return f"{needed}, estimated: {verdict}. Memory options: {memory.chosen.options}"


def _training(work: Work, *, short_blocks: bool) -> str:
    amount = f"{work.steps} steps, {work.tokens / 1e6:,.0f}M tokens, {work.operations:.2g} operations"
    return amount if short_blocks else f"{amount}. {_EVIDENCE}"


def _hours(work: Work) -> str:
    least, most = (f"{100 * share:.0f}" for share in UTILISATION)
    if not work.hours:
        return "unknown: no GPU with this memory is known; name one with --gpu"
    spans = "; ".join(
        f"{hours.gpu} {format_duration(3600 * hours.least)} to {format_duration(3600 * hours.most)}"
        for hours in work.hours
    )
    return f"{spans}. Calculated for {least} to {most} % of the GPU's peak; not measured"


def _serving(serving: Serving, when: str = "") -> Iterator[str]:
    yield f"\nserve with {serving.engine}{when} ({serving.reason}):"
    if not serving.steps:
        yield "  so there are no steps for it; choose another engine, or another method"
        return
    if any(step.language == "python" for step in serving.steps):
        yield "  >>> import rope_extend as rx"
        yield "  >>> from transformers import AutoModelForCausalLM, AutoTokenizer"
    for step in serving.steps:
        yield f"  >>> {step.line}" if step.language == "python" else f"  {step.line}"
    if serving.config:
        yield f"  # its config.json then has: {json.dumps(serving.config)}"
