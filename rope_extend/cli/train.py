"""The command that trains: finetune."""

from __future__ import annotations

import argparse
import json
from shlex import quote

from rope_extend.advice.shipped import find_recipe
from rope_extend.cli.arguments import path, size
from rope_extend.errors import RopeExtendError
from rope_extend.training.recipe import add_recipe_arguments, recipe_from_arguments


def finetune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a recipe, and those of the command."""
    add_recipe_arguments(parser, find_recipe)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest intact checkpoint in the output directory",
    )
    existing.add_argument(
        "--resume-from", type=path, metavar="CHECKPOINT", help="resume from this checkpoint"
    )
    existing.add_argument("--overwrite", action="store_true", help="replace a run in the output directory")
    parser.add_argument(
        "--plan", action="store_true",
        help="print the estimated memory of a step, for each memory option, and of an evaluation, and stop; "
        "nothing is loaded or written",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--limit-memory", type=size, metavar="SIZE",
        help="memory of the device to plan with, such as 80GB (default: what is free)",
    )  # fmt: skip


def finetune(arguments: argparse.Namespace) -> None:
    """Extend a model and train a LoRA adapter, from a YAML recipe, flags, or both.

    The output directory holds the adapter, and rope_extend.json with its position encoding. Runs on the
    devices that accelerate finds. For several GPUs: torchrun --nproc-per-node N -m rope_extend finetune ...
    """
    recipe = recipe_from_arguments(arguments)
    if arguments.json and not arguments.plan:
        raise RopeExtendError("--json belongs to --plan; a run writes metrics.jsonl")

    from rope_extend.training.finetune import finetune as run  # imports torch
    from rope_extend.training.finetune import plan

    if arguments.plan:
        estimate = plan(recipe, limit_memory=arguments.limit_memory)
        print(json.dumps(estimate.to_dict(), indent=2) if arguments.json else estimate)
        estimate.check()
        return
    result = run(
        recipe, resume=arguments.resume_from or arguments.resume, overwrite=arguments.overwrite,
        limit_memory=arguments.limit_memory,
    )  # fmt: skip
    print(f"{result.steps} steps, {result.tokens:,} tokens, {result.seconds:.0f} s: {result.output_dir}")
    if result.skipped:
        print(f"{result.skipped} steps were skipped, because the loss or gradient was not finite")
    trained = f"{quote(recipe.model)} {quote(str(result.output_dir))}"
    print(f"evaluate it: rope-extend evaluate {trained} --data ...")
