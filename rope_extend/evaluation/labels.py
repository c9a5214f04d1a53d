"""Names that tell rows apart: of methods, adapters and runs; and names that may be published."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rope_extend.checkpoint.record import Record
from rope_extend.encodings import composed_name
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.files import expand_home, is_private, public_name
from rope_extend.units import format_length

_NAMELESS = re.compile(
    r"None|models?|final|merged|best|output|latest|snapshots|checkpoint-\d+|[0-9a-f]{12,}|"
)
"""Directories whose name does not say which model they hold."""


def distinct_names(directories: Sequence[str | Path]) -> list[str]:
    """Names of directories: the ends of their paths, with as many parts as are needed to tell them apart."""
    paths = [Path(directory).resolve() for directory in directories]
    paths = [path.parent if path.name == RESULTS else path for path in paths]
    for count in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[1:][-count:]) for path in paths]
        if len({*names}) == len({*paths}):
            return names
    return [*map(str, paths)]


def distinct_labels(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """The labels of rows; those that occur more than once get a name in brackets, such as that of a run."""
    return [
        f"{label} ({name})" if labels.count(label) > 1 else label
        for label, name in zip(labels, names, strict=True)
    ]


def from_here(name: str) -> str:
    """An absolute path inside the working directory as seen from there; any other text as it is."""
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return name


def model_name(name: str) -> str:
    """What a model is called in texts that people publish: its name and not `model`, `final` or a hash.

    Of a directory, this is its name in the hub's cache or its own. If they say nothing, it is the
    `_name_or_path` of its config, or the name of the directory above it.
    """
    if not Path(name).is_dir():
        return public_name(from_here(name))
    directory = Path(name).resolve()
    names = [part[8:].replace("--", "/") for part in directory.parts if part.startswith("models--")]
    names.append(directory.name)
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not is_private(stored := str(config.get("_name_or_path"))):
            names.append(stored)
    if directory.parent != Path(expand_home("~")).resolve():
        names.append(directory.parent.name)
    return next((each for each in names if not _NAMELESS.fullmatch(Path(each).name)), public_name(name))


def method_labels(methods: Collection[str]) -> dict[str, str]:
    """Labels of untrained rows: the name of the method, or the end of the path of a saved encoding."""
    short = [public_name(from_here(method)) for method in methods]
    labels = dict(zip(methods, distinct_labels(short, distinct_names([*methods])), strict=True))
    twice = [method for method, label in labels.items() if [*labels.values()].count(label) > 1]
    if twice:
        raise RopeExtendError(f"{' and '.join(twice)} are the same path; give each method once")
    return labels


def adapter_labels(records: Mapping[str, Record]) -> dict[str, str]:
    """Labels of adapters such as `yarn + LoRA`, or `none + LoRA at 256` for plain RoPE.

    Adapters with equal labels also get the name of their directory, with as much of its path as is needed.
    """
    labels = [
        f"{composed_name(record.encoding)} + LoRA"
        + (f" at {format_length(record.target_length)}" if record.encoding.name == PLAIN else "")
        for record in records.values()
    ]
    names = distinct_names([*records])
    twice = [adapter for adapter, name in zip(records, names, strict=True) if names.count(name) > 1]
    if twice:
        raise RopeExtendError(f"{' and '.join(twice)} are the same directory; give each adapter once")
    return dict(zip(records, distinct_labels(labels, names), strict=True))
