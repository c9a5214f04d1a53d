"""Names that tell rows apart: of adapters, and of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path, PureWindowsPath

from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.report.tables import is_private


def distinct_names(directories: Sequence[str | Path]) -> list[str]:
    """Names of directories: the ends of their paths, with as many parts as are needed to tell them apart.

    The same directory gets the same name. `results.jsonl` has the name of its directory.
    """
    paths = [Path(directory).resolve() for directory in directories]
    paths = [path.parent if path.name == RESULTS else path for path in paths]
    names: list[str] = []
    for count in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = [str(Path(*path.parts[-count:])) for path in paths]
        if len({*names}) == len({*paths}):
            break
    return names


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
    counts = dict.fromkeys(parts, 1)
    while True:
        shown |= {name: "/".join(every[-counts[name] :]) for name, every in parts.items()}
        texts = [*shown.values()]
        same = [name for name in parts if texts.count(shown[name]) > 1]
        longer = [name for name in same if counts[name] < len(parts[name])]
        if not longer:
            break
        for name in longer:
            counts[name] += 1
    for name in same[1:]:  # paths that differ only in `..` or in their root
        texts = [*shown.values()]
        numbered = (f"{shown[name]}-{number}" for number in range(2, len(texts) + 2))
        shown[name] = next(text for text in numbered if text not in texts)
    return shown


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
