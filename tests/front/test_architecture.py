"""The rules of `docs/architecture.md`: what a room may import.

Read from the source by `ast`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import rope_extend

ROOT = Path(__file__).parents[2]
PACKAGE = "rope_extend"
FRONT_DOOR_USER = f"{PACKAGE}.cli.main"
"""The command line imports the package itself, for the version."""


def module_name(file: Path) -> str:
    """The name under which a file is imported; `patches/` installs inside the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = (PACKAGE, *parts) if parts[0] == "patches" else parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    module_name(file): file
    for folder in (PACKAGE, "patches")
    for file in sorted((ROOT / folder).rglob("*.py"))
}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """Names of this project's modules that `nodes` import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES or node.module in MODULES:
                    yield full if full in MODULES else node.module


@cache
def imports(module: str) -> set[str]:
    """What a module imports anywhere in its file: at the top, in functions, and under `TYPE_CHECKING`."""
    return set(imported(ast.walk(tree(MODULES[module])))) - {module}


def room(module: str) -> str:
    """The second part of a module's name; the package's own `__init__` and `__main__` are the front door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else "front door"


def page_text() -> str:
    return (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def shared_rooms() -> set[str]:
    """The rooms that every other may import, from the sentence above the table of the page."""
    sentence = re.search(r"^Every room may import (.*?)\.$", page_text(), re.MULTILINE)
    assert sentence
    return set(re.findall(r"`(\w+)\.py`", sentence.group(1)))


def allowed() -> dict[str, set[str]]:
    """What each room may import besides itself, in the order of the page's table."""
    rooms: dict[str, set[str]] = {}
    for line in page_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        names = re.findall(r"`(\w+)(?:\.py|/)`", cells[0]) if len(cells) == 3 else []
        for name in names:
            above = set(rooms) if cells[2] == "everything above" else set(re.findall(r"`(\w+)`", cells[2]))
            rooms[name] = above | shared_rooms()
    return rooms


def test_every_room_is_on_the_page() -> None:
    assert {room(module) for module in MODULES} - {"front door"} == set(allowed())


def test_a_room_is_below_what_it_imports() -> None:
    """The table is in layer order: a room may be told to import only rooms above its own line."""
    above: set[str] = set()
    for name, targets in allowed().items():
        assert targets - shared_rooms() <= above, name
        above.add(name)


def test_rooms_import_only_what_the_page_says() -> None:
    rules = allowed()
    wrong = [
        f"{module} imports {target}"
        for module in MODULES
        if room(module) != "front door"
        for target in sorted(imports(module))
        if room(target) not in {*rules[room(module)], room(module)}
        and not (target == PACKAGE and module == FRONT_DOOR_USER)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("everything", [False, True], ids=["top-level", "lazy-included"])
def test_no_import_circles(everything: bool) -> None:
    """The front door is left out of the second: it offers every room's names, and loads them when asked."""
    if everything:
        graph = {module: imports(module) for module in MODULES if module != PACKAGE}
    else:
        graph = {module: set(imported(tree(file).body)) - {module} for module, file in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


@pytest.mark.parametrize("package", [rope_extend, rope_extend.encodings])
def test_no_module_is_hidden_by_a_name_of_its_package(package: ModuleType) -> None:
    """`import rope_extend.x as m` gives whatever the package calls `x`: it must be the module."""
    below = {parts[2] for module in MODULES if (parts := module.rpartition("."))[0] == package.__name__}
    assert all(isinstance(getattr(package, name, package), ModuleType) for name in below)


def test_paths_on_pages_exist() -> None:
    """A file or folder that a page names in code type, from the repository's root or from the package's."""
    rooms = {room(module) for module in MODULES if module != PACKAGE}
    folders = "|".join(rooms | {"benchmarks", "configs", "docs", "examples", "scripts", "tests", "tools"})
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        paths = re.findall(rf"`((?:rope_extend/)?(?:{folders})/(?:[\w./-]*(?:/|\.py|\.yaml|\.md))?)`", text)
        missing = [path for path in paths if not any((top / path).exists() for top in (ROOT, ROOT / PACKAGE))]
        assert not missing, page
