"""The recipes that come with the package: listed, and found by name. Imports nothing heavy."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe that comes with the package.

    Attributes:
        name: its name.
        title: what it does, in a sentence.
        model: the hub id of its model.
        window: its old and new window, such as `8k to 32k`.
        memory: for a GPU's memory in GB: what a step needs there, as a sentence; an estimate.
    """

    name: str
    title: str
    model: str
    window: str
    memory: dict[int, str]


def shipped_names() -> list[str]:
    """The names of the recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def shipped_recipes() -> list[ShippedRecipe]:
    """All recipes, by family, and the smallest model first."""
    recipes = []
    for name in shipped_names():
        text = shipped_path(name).read_text(encoding="utf-8")
        memory = {int(size): said for size, said in re.findall(r"^# On (\d+) GB: (.*)$", text, re.MULTILINE)}
        title = text.splitlines()[0].removeprefix("# ")
        window = " to ".join(re.findall(r" from (\S+) to (\w+)", title)[0])
        recipes.append(ShippedRecipe(name, title, yaml.safe_load(text)["model"], window, memory))
    return sorted(recipes, key=lambda recipe: _family_and_size(recipe.name))


def _family_and_size(name: str) -> tuple[str, float]:
    """`("gemma", 2.0)` for gemma2_2b_16k_yarn."""
    family, size = re.findall(r"^([a-z]+).*_([\d.]+)b_", name)[0]
    return family, float(size)


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
    """What `finetune` starts from: the file of a recipe of the package, or what was written, a path or model.

    A file comes first, so a name never hides one.

    Raises:
        RopeExtendError: the name of a recipe is misspelt.
    """
    path = expand_home(text)
    if Path(path).exists():
        return path
    near = difflib.get_close_matches(text, shipped_names(), n=1, cutoff=0.8)
    return str(shipped_path(text)) if near else path
