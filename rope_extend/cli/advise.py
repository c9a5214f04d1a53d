"""Commands that answer "I want 32k": advise, and recipes, which come with the package."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from rope_extend.advice.shipped import shipped_path, shipped_recipes
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.arguments import (
    add_config_only,
    add_json,
    add_output,
    checked,
    export_target,
    in_flags,
    length,
    quick_imports,
    without_library,
)
from rope_extend.files import check_new, write_text
from rope_extend.memory.gpus import find_gpu
from rope_extend.models.locating import check_checkpoint

gpu = checked(find_gpu)
"""A GPU's name or its memory, as it was written."""
recipe_name = checked(shipped_path)
"""The name of a recipe of the package."""


def _advise_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_config_only(parser)
    add("--target-length", type=length, required=True, metavar="N", help="window that you want, such as 32k")
    text = (
        "GPU to train on: its name, such as h100 or rtx-4090, or its memory, such as 24GB; several as 8xh100 "
        "(default: h100)"
    )
    add("--gpu", type=gpu, metavar="GPU", help=text)
    text = f"add how to serve the result: {', '.join(TARGETS)}"
    add("--engine", type=export_target, metavar="ENGINE", help=text)
    text = "long documents to train on; may be given several times (default: PG-19 from the hub, books)"
    add("--data", action="append", metavar="PATH", help=text)
    add("--train", action="store_true", help="advise training: methods without it are not good enough")
    add_output(parser, "FILE", "write the recipe to this file")
    add_json(parser)


def _no_kernels_of_4_bits() -> AbstractContextManager[None]:
    """Keep peft from importing bitsandbytes, which takes seconds and is of no use without weights."""
    loaded = {"peft", "bitsandbytes"} & sys.modules.keys()  # what is loaded costs no more
    return nullcontext() if loaded else without_library("bitsandbytes")


def advise(arguments: argparse.Namespace) -> None:
    """Say how to reach a window: whether to train, the recipe, memory, hours, and how to serve it.

    Only the config is read; no weights are loaded. Memory is estimated by a dry run of the training step, and
    hours follow from its operations and the GPU's peak.
    """
    file = None if arguments.output is None else Path(arguments.output)
    if file is not None:
        check_new(file, overwrite=arguments.overwrite)
    check_checkpoint(arguments.model)  # before torch is imported
    with _no_kernels_of_4_bits(), quick_imports():
        from rope_extend.advice.answer import advise as run
        from rope_extend.advice.describing import describe

        advice = run(
            arguments.model, arguments.target_length, gpu=arguments.gpu, engine=arguments.engine,
            data=arguments.data, trained_length=arguments.trained_length, train=arguments.train,
        )  # fmt: skip
    written = None
    if file is not None and advice.recipe:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, advice.recipe_yaml())
        written = str(file)
    if arguments.json:
        named = advice.with_recipe_file(written) if written else advice
        print(json.dumps({**named.to_dict(), "recipe_file": written}, indent=2))
        return
    print(in_flags(describe(advice, written), {"train": "--train", "data": "--data"}))
    if advice.memory and arguments.gpu is None:
        print("\nmemory and time are assumed for an H100 in bfloat16; for another GPU, give --gpu")
    if written:
        print(f"\nwritten: {written}")
    elif file is not None:
        why = "no step fits the GPU" if advice.memory else f"the verdict is {advice.verdict!r}"
        print(f"\nnothing is written to {file}: there is no recipe, because {why}")


def _recipes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", type=recipe_name, help="recipe to print (default: list all)")
    add_json(parser, "print the list as JSON")


def recipes(arguments: argparse.Namespace) -> None:
    """List the fine-tuning recipes that come with the package, or print one, to edit it.

    `rope-extend finetune NAME` runs a recipe, with `--model` for another model of the same family. The memory
    in the list is estimated, not measured. An Instruct model keeps its chat template: `merge` and `export`
    copy the tokenizer.
    """
    if arguments.name is not None:
        print(shipped_path(arguments.name).read_text(encoding="utf-8"), end="")
    elif arguments.json:
        print(json.dumps([asdict(recipe) for recipe in shipped_recipes()], indent=2))
    else:
        print(f"{'recipe':<26}{'model':<34}{'window':<13}{'24 GB':<16}{'48 GB':<10}80 GB")
        for recipe in shipped_recipes():
            needs = [
                said.partition(",")[0].partition(";")[0] + (", 4 bit" if "4bit" in said else "")
                for said in recipe.memory.values()
            ]
            small, medium, large = needs
            print(f"{recipe.name:<26}{recipe.model:<34}{recipe.window:<13}{small:<16}{medium:<10}{large}")
        print("\nThe last columns are what a step needs on such a GPU; the run chooses its memory options.")
        print("For any other model: rope-extend advise MODEL --target-length 32k --output recipe.yaml")
