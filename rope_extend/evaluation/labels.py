"""Names that tell rows apart: of adapters, and of runs; and names that may be published."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath

from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.report.tables import is_private


def distinct_names(directories: Sequence[str | Path]) -> list[str]:
    """Names of directories: the ends of their paths, with as many parts as are needed to tell them apart.

    The same directory gets the same name. `results.jsonl` has the name of its directory.
    """
    paths = [Path(directory).resolve() for directory in directories]
    texts = [str(path.parent if path.name == RESULTS else path) for path in paths]
    names = _ends(texts)
    return [names[text] for text in texts]


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
    private = [name for name, text in shown.items() if is_private(text)]
    ends = _ends([shown[name] for name in private], {text for text in shown.values() if not is_private(text)})
    return shown | {name: ends[shown[name]] for name in private}


def _ends(paths: Collection[str], others: Collection[str] = ()) -> Mapping[str, str]:
    """The ends of paths, with as many parts as tell them from each other and from other names."""
    parts = {path: _parts(path) for path in paths}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(each[-count:]) for path, each in parts.items()}
        if len({*names.values(), *others}) == len(names) + len({*others}):
            return names
    return {path: f"{parts[path][-1]}-{number}" for number, path in enumerate(parts, start=1)}


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
