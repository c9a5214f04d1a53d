"""The recipes that come with the package: listed, found by name, and copied. Imports nothing heavy."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import yaml

from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, write_text

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with the package.

    Attributes:
        name: its name.
        title: what it does, in a sentence.
        model: the hub id of its model.
        memory: for a GPU's memory in GB: what a step needs there, as a sentence; an estimate.
    """

    name: str
    title: str
    model: str
    memory: dict[int, str]


def shipped_names() -> list[str]:
    """The names of the recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def shipped_recipes() -> list[ShippedRecipe]:
    """All recipes, by name."""
    recipes = []
    for name in shipped_names():
        text = shipped_path(name).read_text(encoding="utf-8")
        memory = {int(size): said for size, said in re.findall(r"^# On (\d+) GB: (.*)$", text, re.MULTILINE)}
        title = text.splitlines()[0].removeprefix("# ")
        recipes.append(ShippedRecipe(name, title, yaml.safe_load(text)["model"], memory))
    return recipes


def shipped_path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        RopeExtendError: no recipe has that name; the message has the nearest.
    """
    names = shipped_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RopeExtendError(f"no recipe is named {name!r}.{hint} `rope-extend recipes` lists them")
    return FOLDER / f"{name}.yaml"


def find_recipe(text: str) -> str:
    """The file of a recipe, from a path or from the name of one that comes with the package.

    A file comes first, so a name never hides one.
    """
    path = expand_home(text)
    if not Path(path).exists() and text in shipped_names():
        return str(shipped_path(text))
    return path


def copy_recipe(
    name: str, output: str | PathLike[str], *, model: str | None = None, overwrite: bool = False
) -> Path:
    """Copy a recipe to a file of your own, to edit it; returns the file.

    The command in its comments names the copy. With another model, they say for which one they were written.

    Args:
        name: the recipe.
        output: the new file.
        model: another model of the same family, such as the Instruct version.
        overwrite: replace the file.

    Raises:
        RopeExtendError: no such recipe, an empty name of a model, the file exists, or it cannot be written.
    """
    if model is not None and not model.strip():
        raise RopeExtendError(f"model must be a hub id or a directory, got {model!r}")
    text = shipped_path(name).read_text(encoding="utf-8")
    file = Path(expand_home(output))
    check_new(file, overwrite=overwrite)
    command = f"# rope-extend finetune {shlex.quote(str(file)) if str(file).isprintable() else 'FILE'}"
    text = text.replace(f"# rope-extend finetune {name}\n", f"{command}\n", 1)
    if model is not None:
        text = _with_model(text, name, model, command)
    write_recipe(file, text)
    return file


def _with_model(text: str, name: str, model: str, command: str) -> str:
    """A recipe with another model; `command` is the comment with the command that runs it."""
    shipped = yaml.safe_load(text)["model"]
    line = yaml.safe_dump({"model": model}, width=1000, allow_unicode=True).strip()
    text = re.sub(
        r"^model: \S+ *(?=#)", lambda found: f"{line:<{len(found[0]) - 2}}  ", text, flags=re.MULTILINE
    )
    text = re.sub(r"^# The Instruct model: .*\n", "", text, flags=re.MULTILINE).replace(f"{command}\n", "", 1)
    return (
        f"# The recipe {name} with another model. What a step needs: the next command with --plan.\n"
        f"{command}\n"
        f"# The comments below on windows and memory were written for {shipped}:\n{text}"
    )


def check_new(file: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file without being asked, and a file in a directory that does not exist.

    Raises:
        RopeExtendError: the file exists and `overwrite` is false, or it is to replace a directory, or its own
            directory does not exist.
    """
    if not file.parent.is_dir() or file.is_dir():
        problem = f"{file} is a directory" if file.is_dir() else f"there is no directory {file.parent}"
        raise RopeExtendError(f"cannot write {file}: {problem}; choose another output")
    if file.exists() and not overwrite:
        raise RopeExtendError(f"{file} exists; choose another output, or overwrite=True")


def write_recipe(file: Path, text: str) -> None:
    """Write the file of a recipe.

    Raises:
        RopeExtendError: it cannot be written.
    """
    try:
        write_text(file, text)
    except OSError as error:
        raise RopeExtendError(f"cannot write {file}: {error}; choose another output") from error
