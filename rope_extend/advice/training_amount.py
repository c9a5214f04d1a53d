"""The recipe that `advise` writes: its fields, and as many tokens and steps as evidence and hours say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rope_extend.advice.estimates import Cost, Work, cost_of, fit, short_blocks, work
from rope_extend.advice.question import Question
from rope_extend.errors import RopeExtendError
from rope_extend.memory.gpus import Gpu
from rope_extend.training.step_plan import TrainingPlan
from rope_extend.units import format_length

STEPS = 400
"""The YaRN paper's steps (2309.00071), there with 64 sequences each."""
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
LARGE_SHARE = 0.05
"""From this share of the operations of training, the operations of evaluations are worth a note."""
BOOKS = "emozilla/pg19"
LONGEST_BOOKS = 131_072
"""Tokens that enough books of PG-19 have: the mean is about 100k."""


def first_fields(question: Question, data: str | None) -> dict[str, Any]:
    """The recipe for long blocks, before memory and hours are known."""
    name = Path(question.model).name or "model"
    fields: dict[str, Any] = {
        "model": question.model,
        "data": data or BOOKS,
        "output_dir": f"runs/{name}-{format_length(question.target)}-yarn",
        "target_length": question.target,
        **({"trained_length": question.stated} if question.stated else {}),
        "method": "yarn",
        **({"start": question.start} if question.current is not None else {}),
        "steps": max(FEWEST_STEPS, min(STEPS, STEPS * STEP_TOKENS // question.target)),
        "batch_size": 1,
        "gradient_accumulation": sequences_per_step(question.target),
        "dtype": "bfloat16",
    }
    if data is None:
        fields |= {
            "eval_data": BOOKS, "eval_split": "test", **_lengths_of_books(question),
            "eval_documents": 8, "eval_every": 50, "max_documents": 1000,
        }  # fmt: skip
    return {**fields, "save_every": 50}


def _lengths_of_books(question: Question) -> dict[str, Any]:
    """The windows to evaluate at, if books do not reach the target; otherwise those of a run."""
    if question.target <= LONGEST_BOOKS:
        return {}
    lengths = [question.extended]
    while 2 * lengths[-1] <= LONGEST_BOOKS:
        lengths.append(2 * lengths[-1])
    return {"eval_lengths": tuple(min(length, LONGEST_BOOKS) for length in lengths)}


def notes_on_books(fields: Mapping[str, Any]) -> list[str]:
    """What to know of a recipe whose target is longer than the books that it trains on."""
    if fields["data"] != BOOKS or fields["target_length"] <= LONGEST_BOOKS:
        return []
    said = "PG-19 has books of about 100k tokens."
    block = fields.get("block_length", fields["target_length"])
    if block > LONGEST_BOOKS:
        said += f" Few fill a block of {format_length(block)}, and all are read to find them."
    if "eval_lengths" in fields:
        said += f" The run evaluates at up to {format_length(max(fields['eval_lengths']))}."
    return [f"{said} Give longer documents of your own with data=."]


def sequences_per_step(length: int) -> int:
    """The number of sequences of `length` tokens in a step of the recipe."""
    return max(1, min(MOST_SEQUENCES, STEP_TOKENS // length))


def within_hours(
    fields: dict[str, Any],
    memory: TrainingPlan,
    gpu: Gpu,
    hours: float | None,
    trained: int,
    notes: list[str],
) -> tuple[dict[str, Any], TrainingPlan, Work | None]:
    """The recipe with as many steps as the hours allow, its memory and its work; adds to the notes.

    Fewer hours give fewer steps, then shorter blocks, then fewer sequences per step.
    """
    if fields.get("positions"):
        sequences = sequences_per_step(fields["block_length"])
        fields = {**fields, "steps": SHORT_BLOCK_STEPS, "gradient_accumulation": sequences}
    cost = cost_of(fields, memory)
    if cost is None:
        notes.append("The operations of this family cannot be counted, so no hours are estimated.")
        return fields, memory, None
    amount = work(fields, cost.token, gpu)
    if hours is None or amount.hours[0].most <= hours:
        notes += _note_on_evaluations(fields, cost, amount)
        return fields, memory, amount
    steps = int(fields["steps"] * hours / amount.hours[0].most)
    if steps < FEWEST_STEPS and not fields.get("positions"):
        full = {key: value for key, value in fields.items() if key != "quantize"}  # short blocks need less
        with suppress(RopeExtendError):  # not every family takes sampled positions
            shorter, memory, _ = fit(short_blocks(full, trained), trained, gpu)
            return within_hours(shorter, memory, gpu, hours, trained, notes)
    if steps < FEWEST_STEPS:
        sequences = fields["gradient_accumulation"] * steps // FEWEST_STEPS
        if sequences < 1:
            notes.append(
                f"{hours:g} h are not enough for {FEWEST_STEPS} steps of one sequence, and fewer steps "
                f"change little. The recipe has {FEWEST_STEPS}; allow more hours, or use a faster GPU."
            )
        fields = {**fields, "gradient_accumulation": max(sequences, 1)}
    fields = {**fields, "steps": max(steps, FEWEST_STEPS)}
    amount = work(fields, cost.token, gpu)
    notes += _note_on_evaluations(fields, cost, amount)
    return fields, memory, amount


def _note_on_evaluations(fields: dict[str, Any], cost: Cost, amount: Work) -> list[str]:
    """That the run's evaluations take time as well, if it is more than the hours can leave out."""
    share = cost.evaluations(fields) / amount.operations
    if share < LARGE_SHARE:
        return []
    return [
        f"The hours are those of training. The run's evaluations have {100 * share:.0f} % of its operations "
        "in addition. For fewer, raise eval_every or lower eval_documents in the recipe."
    ]
