"""Local paths in the files of an adapter: who publishes it publishes them too, so they are named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from rope_extend.files import is_private
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, RECORD_NAME

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_FIELDS = {
    ADAPTER_CONFIG: ("base_model_name_or_path",),
    RECORD_NAME: ("base_model",),
    "recipe.yaml": ("model", "data", "eval_data", "output_dir"),
}
"""The fields that may hold paths, by file. JSON is read as YAML."""


def warn_of_local_paths(directory: Path) -> None:
    """Log which fields of an adapter's files hold paths outside the working directory.

    Stock loaders find an adapter's base model by the path in its config, so that path stays. The path of the
    bundled model does not count: its adapters only demonstrate.
    """
    found = _private_fields(directory)
    if found:
        listed = ", ".join(f"{name} ({', '.join(fields)})" for name, fields in found.items())
        hint = ". recipe.yaml is not needed to load it" if "recipe.yaml" in found else ""
        logger.warning(
            "%s holds local paths: %s. Before you publish it, write the hub id of the base model instead%s",
            directory, listed, hint,
        )  # fmt: skip


def _private_fields(directory: Path) -> dict[str, list[str]]:
    """The fields of an adapter's files that hold paths outside the working directory, by file."""
    found: dict[str, list[str]] = {}
    for name, fields in _FIELDS.items():
        try:
            data: Any = yaml.safe_load((directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue  # there is none, or it is not ours
        for field in fields if isinstance(data, dict) else ():
            values = data.get(field)
            texts = values if isinstance(values, list) else [values]
            paths = [text for text in texts if isinstance(text, str) and is_private(text)]
            if any(not Path(path).is_relative_to(_PACKAGE) for path in paths):
                found.setdefault(name, []).append(field)
    return found
