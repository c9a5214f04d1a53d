"""Advice as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from textwrap import fill
from typing import Any

from rope_extend.advice.advice import UNTRAINED, Advice
from rope_extend.advice.advised_recipe import Work, work
from rope_extend.memory.gpus import LEAST_STEP, UTILISATION, find_gpu
from rope_extend.training.step_plan import TrainingPlan
from rope_extend.units import format_bytes, format_duration, format_length

_WIDTH = 100
_LEAST, _MOST = (f"{100 * share:.0f}" for share in UTILISATION)


def describe(advice: Advice, recipe_file: str | None = None) -> str:
    """The advice in words, with the commands that follow.

    Args:
        advice: the advice.
        recipe_file: where its recipe was written; None if it was not.
    """
    named = advice if recipe_file is None else advice.with_recipe_file(recipe_file)
    rows = [f"{name:<13}{text}" for name, text in _rows(advice)]
    lines = [fill(row, _WIDTH, subsequent_indent=" " * 13, break_on_hyphens=False) for row in rows]
    if named.commands:
        lines.append("\nnext:")
        if advice.recipe and recipe_file is None:
            lines.append("  (first write the recipe: add --output recipe.yaml to this command)")
        lines += [f"  {command}" for command in named.commands]
    if advice.serving:
        when = ", after the training" if advice.recipe else ""
        lines += [f"\nserve{when}:", *(f"  {line}" for line in advice.serving)]
    if advice.criteria:
        lines.append("\nit is a success if")
        lines += [fill(f"  - {criterion}", _WIDTH, subsequent_indent="    ") for criterion in advice.criteria]
    return "\n".join(lines)


def _rows(advice: Advice) -> Iterator[tuple[str, str]]:
    window = advice.window
    yield "model", f"{advice.model} ({advice.model_type})"
    yield "reads today", f"{format_length(window.tokens)} tokens: {window.source}"
    yield "you want", f"{format_length(advice.target_length)} tokens"
    yield "verdict", f"{advice.verdict}. {advice.reason}"
    if advice.method:
        engines = ", ".join(advice.engines[:-1])
        engines = " and ".join(filter(None, [engines, *advice.engines[-1:]]))
        served = f"; {engines} can run it" if engines else ""
        why = "fast channels stay as they are and slow ones are interpolated (2309.00071)"
        name = "if trained" if advice.verdict == UNTRAINED else "method"
        yield name, f"{advice.method}: {why}{served}"
    if advice.memory:
        yield "memory", _memory(advice.memory)
    if advice.work:
        yield "training", _amount(advice.work)
        yield "time", _time(advice.work)
    for note in advice.notes:
        yield "note", note


def _memory(memory: TrainingPlan) -> str:
    verdict = "fits" if memory.fits else "does not fit"
    needed = f"{format_bytes(memory.chosen.total)} of {format_bytes(memory.budget.available)}"
    where = f" on each of {memory.sharding.ranks} GPUs{memory.shared}" if memory.sharding.ranks > 1 else ""
    return f"{needed}{where}, estimated: {verdict}. Memory options: {memory.chosen.options}"


def describe_work(fields: Mapping[str, Any], memory: TrainingPlan) -> str:
    """The tokens of a planned run, and its hours on two GPUs; `fields` are those of its recipe."""
    small, large = (replace(find_gpu(name), count=memory.sharding.ranks) for name in ("rtx-4090", "h100"))
    least = work(fields, memory, small)
    if least is None:
        return "time: the operations of this family cannot be counted"
    return f"{_amount(least)}: {_time(least, least.on(large))}"


def _amount(work: Work) -> str:
    return f"{work.steps} steps, {work.tokens / 1e6:,.3g}M tokens, {work.operations:.2g} operations"


def _time(*works: Work) -> str:
    """How long a training takes on each of several GPUs, and what decides that."""
    times, bounds = list[str](), set[bool]()
    for each in works:
        if each.hours is None:
            return "name the GPU for an estimate, as in --gpu h100"
        ends = dict.fromkeys(format_duration(3600 * hours) for hours in each.hours)
        times.append(f"{each.gpu} {' to '.join(ends)}")
        bounds |= {3600 * hours < 1.001 * each.steps * LEAST_STEP for hours in each.hours}
    least = f"a step is assumed to take at least {LEAST_STEP:g} s"
    calculated = f"Calculated for {_LEAST} to {_MOST} % of the GPU's peak, without evaluations; not measured"
    if bounds == {True}:
        return f"{', '.join(times)}: {least}, and its operations take less. Without evaluations; not measured"
    return f"{', '.join(times)}. {calculated}{f'; {least}' if True in bounds else ''}"
