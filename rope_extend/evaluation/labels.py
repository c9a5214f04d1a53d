"""Names that tell rows apart: of adapters, and of runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath

from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.report.tables import is_private


def distinct_names(directories: Sequence[str | Path]) -> list[str]:
    """Names of directories: the ends of their paths, with as many parts as are needed to tell them apart.

    The same directory gets the same name. `results.jsonl` has the name of its directory.
    """
    paths = [Path(directory).resolve() for directory in directories]
    paths = [path.parent if path.name == RESULTS else path for path in paths]
    names = _shortest_names({str(path): _parts(str(path)) for path in paths})
    return [names[str(path)] for path in paths]


def distinct_labels(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """The labels of rows; those that occur more than once get a name in brackets.

    Args:
        labels: one for each row.
        names: one for each row, such as the name of its run.
    """
    return [
        f"{label} ({name})" if labels.count(label) > 1 else label
        for label, name in zip(labels, names, strict=True)
    ]


def public_names(names: Iterable[str]) -> dict[str, str]:
    """What a text that people publish shows for each name; names that are no paths stay as they are.

    Paths are as seen from the working directory. Of a path outside it, only the last part is shown, or as
    many parts as tell it from the other names.
    """
    shown = {name: from_here(name) for name in names}
    parts = {name: _parts(text) for name, text in shown.items() if is_private(text)}
    others = [text for name, text in shown.items() if name not in parts]
    return shown | _shortest_names(parts, others)


def _shortest_names(paths: Mapping[str, Sequence[str]], others: Sequence[str] = ()) -> dict[str, str]:
    """The ends of paths, each with as many of its parts as tell it from the other paths and names.

    Paths whose parts are all equal get a number.
    """
    counts = dict.fromkeys(paths, 1)
    while True:
        names = {path: "/".join(parts[-counts[path] :]) for path, parts in paths.items()}
        taken = [*others, *names.values()]
        same = [path for path in paths if taken.count(names[path]) > 1]
        longer = [path for path in same if counts[path] < len(paths[path])]
        if not longer:
            break
        for path in longer:
            counts[path] += 1
    seen = set(others)
    for path in same:  # they differ only in `..` or in their root
        taken = [*others, *names.values()]
        if names[path] in seen:
            numbered = (f"{names[path]}-{number}" for number in range(2, len(taken) + 2))
            names[path] = next(name for name in numbered if name not in taken)
        seen.add(names[path])
    return names


def from_here(name: str) -> str:
    """An absolute path inside the working directory as seen from there; any other text as it is."""
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return name


def _parts(name: str) -> list[str]:
    """The names in a path, without its root and without steps upwards; at least one."""
    path = PureWindowsPath(name)  # takes both kinds of slashes
    return [part for part in path.parts if part not in (path.anchor, "..", "~")] or ["path"]
