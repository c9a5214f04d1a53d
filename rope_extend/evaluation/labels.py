"""Names that tell rows apart: of adapters, and of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rope_extend.evaluation.output_directory import RESULTS


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
