"""Local paths in the files of an adapter: who publishes the directory would publish them too.

A full checkpoint needs no base model, so its record has no local path. Stock loaders find an adapter's base
model by the path in its config, seen from the working directory. So that path stays, and a warning names it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.report.tables import is_private

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPE = "recipe.yaml"
_FIELDS = {
    "adapter_config.json": ("base_model_name_or_path",),
    RECORD_NAME: ("base_model",),
    _RECIPE: ("model", "data", "eval_data", "output_dir"),
}
"""The fields that may hold paths, by file. JSON is read as YAML."""


def warn_of_local_paths(directory: Path) -> None:
    """Log which fields of an adapter's files hold paths outside the working directory.

    The path of the bundled model does not count: its adapters only demonstrate.
    """
    found = {name: _private_fields(directory / name, fields) for name, fields in _FIELDS.items()}
    listed = [f"{name} ({', '.join(fields)})" for name, fields in found.items() if fields]
    if not listed:
        return
    logger.warning(
        "%s holds local paths: %s. Before you publish it, write the hub id of the base model instead%s",
        directory, ", ".join(listed), f". {_RECIPE} is not needed to load it" if found[_RECIPE] else "",
    )  # fmt: skip


def private_fields(directory: Path, names: Collection[str]) -> dict[str, list[str]]:
    """The fields of some of an adapter's files that hold private paths, the bundled model's included."""
    found = {
        name: [field for field, value in _fields(directory / name, _FIELDS[name]) if _any_private(value)]
        for name in names
    }
    return {name: fields for name, fields in found.items() if fields}


def _private_fields(file: Path, fields: tuple[str, ...]) -> list[str]:
    return [name for name, value in _fields(file, fields) if _is_private(value)]


def _fields(file: Path, fields: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """The texts in some fields of a file, by field."""
    try:
        data: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []  # there is none, or it is not ours
    values = {name: data.get(name) for name in fields} if isinstance(data, dict) else {}
    return [
        (name, [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)])
        for name, value in values.items()
    ]


def _is_private(names: list[str]) -> bool:
    return _any_private([name for name in names if not Path(name).is_relative_to(_PACKAGE)])


def _any_private(names: list[str]) -> bool:
    return any(map(is_private, names))
