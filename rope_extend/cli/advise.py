"""Commands that answer "I want 32k": advise, and recipes, which come with the package."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from shlex import quote

from rope_extend.advice.shipped import check_new, copy_recipe, shipped_path, shipped_recipes, write_recipe
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.arguments import (
    add_output,
    add_trained_length,
    argument,
    checkpoint,
    export_target,
    in_flags,
    length,
    path,
)
from rope_extend.errors import RopeExtendError
from rope_extend.memory.gpus import find_gpu
from rope_extend.models.locating import check_checkpoint


@argument
def gpu(text: str) -> str:
    """A GPU's name or its memory, as it was written."""
    find_gpu(text)
    return text


@argument
def hours(text: str) -> float:
    """A number of hours above 0."""
    try:
        value = float(text)
    except ValueError as error:
        raise RopeExtendError(f"a number of hours, such as 8 or 0.5: {text!r}") from error
    if not 0 < value < float("inf"):
        raise RopeExtendError(f"a number of hours above 0: {text!r}")
    return value


def advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `advise`."""
    parser.add_argument(
        "model", type=checkpoint, help="directory or hub id of a checkpoint; only its config is read"
    )
    parser.add_argument(
        "--target-length", type=length, required=True, metavar="N", help="window that you want, such as 32k"
    )
    parser.add_argument(
        "--gpu", type=gpu, metavar="GPU",
        help="GPU to train on: its name, such as h100 or rtx-4090, or its memory, such as 24GB (default: "
        "80GB)",
    )  # fmt: skip
    parser.add_argument(
        "--hours", type=hours, metavar="N", help="longest training time; needs --gpu with a name"
    )
    parser.add_argument(
        "--engine", type=export_target, metavar="ENGINE",
        help=f"add how to serve the result: {', '.join(TARGETS)}",
    )  # fmt: skip
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="long documents to train on (default: PG-19 from the hub, which are books)",
    )
    add_trained_length(parser)
    add_output(parser, "FILE", "write the recipe to this file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def advise(arguments: argparse.Namespace) -> None:
    """Say how to reach a window: whether to train, the recipe, memory, hours, and how to serve it.

    Only the config is read; no weights are loaded. Memory is estimated by a dry run of the training step, and
    hours follow from its operations and the GPU's peak.
    """
    file = None if arguments.output is None else Path(arguments.output)
    if file is not None:
        check_new(file, overwrite=arguments.overwrite)
    check_checkpoint(arguments.model)  # before torch is imported

    from rope_extend.advice.answer import advise as run
    from rope_extend.advice.describing import describe

    advice = run(
        arguments.model, arguments.target_length, gpu=arguments.gpu, hours=arguments.hours,
        engine=arguments.engine, data=arguments.data, trained_length=arguments.trained_length,
    )  # fmt: skip
    written = None
    if file is not None and advice.recipe:
        write_recipe(file, advice.recipe_yaml())
        written = str(file)
    if arguments.json:
        named = advice.with_recipe_file(written) if written else advice
        print(json.dumps({**named.to_dict(), "recipe_file": written}, indent=2))
        return
    print(in_flags(describe(advice, written), {"trained_length": "--trained-length", "data": "--data"}))
    if written:
        print(f"\nwritten: {written}")
    elif file is not None:
        why = (
            "because no step fits the GPU" if advice.memory else f"because the verdict is {advice.verdict!r}"
        )
        print(f"\nnothing is written to {file}: there is no recipe, {why}")


@argument
def recipe_name(text: str) -> str:
    """The name of a recipe of the package."""
    shipped_path(text)
    return text


def recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recipes`."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "show", "copy"),
        default="list",
        help="list (default), show or copy",
    )
    parser.add_argument("name", nargs="?", type=recipe_name, help="recipe to show or copy")
    add_output(parser, "FILE", "file of the copy (default: NAME.yaml)")
    parser.add_argument(
        "--model",
        type=path,
        metavar="NAME",
        help="another model of the same family, such as the Instruct version",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def recipes(arguments: argparse.Namespace) -> None:
    """List the fine-tuning recipes that come with the package, show one, or copy one to edit it.

    `rope-extend finetune NAME` runs a recipe without a copy. The memory in the list is estimated, not
    measured. An Instruct model keeps its chat template: `merge` and `export` copy the tokenizer.
    """
    action = arguments.action
    if action != "list":
        if arguments.json:
            raise RopeExtendError(f"recipes {action} prints no list; --json belongs to recipes list")
        if arguments.name is None:
            raise RopeExtendError(
                f"recipes {action} needs the name of a recipe; `rope-extend recipes` lists them"
            )
    if action == "copy":
        file = copy_recipe(
            arguments.name, arguments.output or f"{arguments.name}.yaml", model=arguments.model,
            overwrite=arguments.overwrite,
        )  # fmt: skip
        print("written:", file)
        print(f"will it fit: rope-extend finetune {quote(str(file))} --plan --limit-memory 24GB")
        return
    for flag in ("output", "model", "overwrite"):
        if getattr(arguments, flag) not in (None, False):
            raise RopeExtendError(f"recipes {action} writes no file; --{flag} belongs to recipes copy NAME")
    if action == "show":
        print(shipped_path(arguments.name).read_text(encoding="utf-8"), end="")
        return
    if arguments.name is not None:
        raise RopeExtendError(f"recipes list takes no name; to copy it: recipes copy {arguments.name}")
    found = shipped_recipes()
    if arguments.json:
        print(json.dumps([asdict(recipe) for recipe in found], indent=2))
        return
    for recipe in found:
        print(f"{recipe.name}\n    {recipe.title}")
        for size, said in recipe.memory.items():
            print(f"    on {size} GB: {said}")
    print("\nfor any other model: rope-extend advise MODEL --target-length 32k --output recipe.yaml")
