"""Commands that train and search: finetune, search."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rope_extend.advice.shipped import find_recipe
from rope_extend.cli.arguments import add_existing, add_json, add_settings, argument, size
from rope_extend.config import add_flags, from_arguments
from rope_extend.data.sources import source_files
from rope_extend.errors import RopeExtendError
from rope_extend.method_names import CURRENT
from rope_extend.models.locating import check_checkpoint
from rope_extend.models.processes import is_main_process
from rope_extend.models.processes import process_count as launched
from rope_extend.searching.search_config import SearchConfig
from rope_extend.training.recipe import Recipe

if TYPE_CHECKING:
    from rope_extend.patching import Patch

recipe_or_model = argument(find_recipe)
"""The file of a recipe, also by the name of one of the package, or a model."""


@argument
def process_count(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or int(text) == 0:
        raise RopeExtendError(f"must be a number of processes, 1 or more, got {text!r}")
    return int(text)


def _finetune_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "directory or hub id of the checkpoint, or a YAML file with the settings of the recipe, or the name "
        "of a recipe that `rope-extend recipes` lists"
    )
    parser.add_argument("config", nargs="?", type=recipe_or_model, metavar="MODEL_OR_CONFIG", help=text)
    add_flags(parser, Recipe)
    add_existing(parser, "a run")
    text = (
        "print the estimated memory of a step, for each memory option, and of an evaluation, and stop; "
        "nothing is loaded or written"
    )
    parser.add_argument("--plan", action="store_true", help=text)
    add_json(parser, "print the plan as JSON")
    text = (
        "with --plan: processes of the run, one for each GPU, of which one is planned (default: split_window "
        "of the recipe)"
    )
    parser.add_argument("--processes", type=process_count, metavar="N", help=text)
    text = "with --plan: they share the weights by FSDP2, as with configs/accelerate/fsdp2.yaml"
    parser.add_argument("--fsdp", action="store_true", help=text)
    text = "memory of the device to plan with, such as 80GB (default: what is free)"
    parser.add_argument("--limit-memory", type=size, metavar="SIZE", help=text)


@dataclass(frozen=True)
class _PlannedRecipe(Recipe):
    """A recipe whose model is there. The method's defaults, which come after this check, import torch."""

    def check_early(self) -> None:
        super().check_early()
        check_checkpoint(self.model)


@dataclass(frozen=True)
class _RunRecipe(_PlannedRecipe):
    """A recipe whose model and texts are there."""

    def check_early(self) -> None:
        super().check_early()
        source_files(self.data)
        source_files(self.eval_data or ())


def recipe_of(arguments: argparse.Namespace, cls: type[Recipe] = Recipe) -> Recipe:
    """The recipe of parsed arguments as `cls` checks it; with `--plan`, data and output may be missing."""
    defaults = {"data": "not-read", "output_dir": "not-written"} if arguments.plan else None
    return Recipe.from_dict(from_arguments(cls, arguments, defaults).to_dict())


def finetune(arguments: argparse.Namespace) -> None:
    """Extend a model and train LoRA, or all weights, from a YAML recipe, flags, or both.

    The output directory holds the adapter or the model, and rope_extend.json with its position encoding. Runs
    on the devices that accelerate finds. For several GPUs:
    torchrun --nproc-per-node N -m rope_extend finetune ...
    """
    if arguments.json and not arguments.plan:
        raise RopeExtendError("--json belongs to --plan; a run writes metrics.jsonl")
    if (arguments.processes or arguments.fsdp) and not arguments.plan:
        raise RopeExtendError(
            "--processes and --fsdp belong to --plan; a run is divided as its launcher starts it"
        )
    recipe = recipe_of(arguments, _PlannedRecipe if arguments.plan else _RunRecipe)

    from rope_extend.training.finetune import finetune as run  # imports torch
    from rope_extend.training.step_plan import plan

    if arguments.plan:
        estimate = plan(
            recipe, limit_memory=arguments.limit_memory, processes=arguments.processes, fsdp=arguments.fsdp
        )
        if arguments.json:
            print(json.dumps(estimate.to_dict(), indent=2))
        else:
            from rope_extend.advice.describing import describe_work

            print(f"{estimate}\n{describe_work(recipe.to_dict(), estimate)}")
        estimate.check()
        return
    result = run(
        recipe, resume=arguments.resume, overwrite=arguments.overwrite, limit_memory=arguments.limit_memory
    )
    if not is_main_process():
        return
    print(f"{result.steps} steps, {result.tokens:,} tokens, {result.seconds:.0f} s: {result.output_dir}")
    if result.skipped:
        print(f"{result.skipped} steps were skipped, because the loss or gradient was not finite")
    print(_next(recipe, str(result.output_dir), result.patch))


def _next(recipe: Recipe, run: str, patch: Patch) -> str:
    """The commands that follow a run: the training of its control, and a report on both."""
    from rope_extend.data.blocks import control_flags  # imports torch

    output, control = quote(run), quote(f"{run}-control")
    data = f"--data path/to/other/documents --output {quote(f'{run}-report')}"
    if recipe.full:  # with a record of its window
        return f"evaluate it: rope-extend evaluate {output} {data}"
    if recipe.trained_length is not None:  # otherwise the adapters are of another model
        data = f"--trained-length {recipe.trained_length} {data}"
    if recipe.start == CURRENT:  # whose control `report` does not have
        return f"evaluate it: rope-extend evaluate {quote(recipe.model)} {output} {data}"
    window, target = patch.shape.trained_length, patch.target_length
    if target <= window:
        return "a control: give it to `rope-extend report`, with the adapter of the same training"
    report = f"rope-extend report {quote(recipe.model)} {output}"
    what = f"--target-length {target} --lengths {window},{target} {data}"
    if not (flags := control_flags(recipe.to_dict(), window)):
        return f"evaluate it: {report} {what}"
    train = f"{_launcher()} finetune {quote(f'{run}/recipe.yaml')} {flags} --output {control}"
    train += " --resume" * Path(f"{run}-control").exists()  # of a run that was trained for longer
    what += " --resume" * Path(f"{run}-report").exists()
    both = "next: train its control, and compare both on other documents"
    return f"{both}\n  {train}\n  {report} {control} {what}"


def _launcher() -> str:
    """What starts as many processes as this run has: fewer would train on fewer tokens."""
    if (count := launched()) == 1:
        return "rope-extend"
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # which `accelerate launch` sets
        return "accelerate launch --config_file path/to/the/same.yaml -m rope_extend"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    machines = f" --nnodes {count // local}" if local < count else ""
    return f"torchrun{machines} --nproc-per-node {local} -m rope_extend"


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    plan = (
        "the largest number of passes and tokens, the memory and the estimated time, for which neither "
        "--data nor weights are needed"
    )
    add_settings(parser, SearchConfig, "a search", plan)


def search(arguments: argparse.Namespace) -> None:
    """Find a divisor for the frequency of each channel pair, and an attention factor, on long documents.

    The first argument is a checkpoint or a YAML file, such as those in configs/search/. The output directory
    gets encoding.json, search.json and the log of all evaluations. It is then a method of every other
    command: --method DIR. After an interruption, the same command with --resume continues.
    """
    config = from_arguments(SearchConfig, arguments)
    if not arguments.plan and not (config.data and config.output):
        raise RopeExtendError(
            "search needs --data and --output, or --plan for an estimate without them\n"
            "See `rope-extend search --help`."
        )
    check_checkpoint(config.model)  # before torch is imported

    from rope_extend.searching.evaluations import LOG
    from rope_extend.searching.run_search import plan_search
    from rope_extend.searching.run_search import search as run

    if arguments.plan:
        plan = plan_search(config)
        print(plan)
        plan.check()
        return
    assert config.output is not None
    try:
        result = run(config, resume=arguments.resume, overwrite=arguments.overwrite)
    except KeyboardInterrupt:
        if (Path(config.output) / LOG).exists():
            print(f"\n{config.output} keeps what is measured; add --resume to continue", file=sys.stderr)
        raise
    cost = result.cost
    print(result.table_text())
    print("The winner was chosen by these losses, so its loss is too good: measure it on other documents.")
    work = f"{cost.evaluations:,} evaluations, {cost.passes:,} forward passes"
    print(f"{work}, {cost.forward_tokens:,} tokens, {cost.seconds:.0f} s\nwritten: {config.output}")
