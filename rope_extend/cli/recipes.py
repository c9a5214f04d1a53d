"""The command that lists and copies the recipes of the package: recipes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from shlex import quote

from rope_extend.advice.shipped import copy_recipe, shipped_path, shipped_recipes
from rope_extend.cli.arguments import argument, path
from rope_extend.errors import RopeExtendError


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
    parser.add_argument("--output", type=path, metavar="FILE", help="file of the copy (default: NAME.yaml)")
    parser.add_argument(
        "--model",
        type=path,
        metavar="NAME",
        help="another model of the same family, such as the Instruct version",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
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
