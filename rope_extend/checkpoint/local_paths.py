"""Local paths in the files of an adapter: who publishes the directory would publish them too.

A full checkpoint needs no base model, so its record has no local path. Stock loaders find an adapter's base
model by the path in its config, seen from the working directory. So that path stays, and a warning names it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.report.tables import is_private

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_FIELDS = {
    "adapter_config.json": ("base_model_name_or_path",),
    RECORD_NAME: ("base_model",),
    "recipe.yaml": ("model", "data", "eval_data", "output_dir"),
}
"""The fields that may hold paths, by file. JSON is read as YAML."""


def warn_of_local_paths(directory: Path) -> None:
    """Log which fields of an adapter's files hold paths outside the working directory.

    The path of the bundled model does not count: its adapters only demonstrate.
    """
    found = private_fields(directory, bundled=False)
    if found:
        listed = ", ".join(f"{name} ({', '.join(fields)})" for name, fields in found.items())
        hint = ". recipe.yaml is not needed to load it" if "recipe.yaml" in found else ""
        logger.warning(
            "%s holds local paths: %s. Before you publish it, write the hub id of the base model instead%s",
            directory, listed, hint,
        )  # fmt: skip


def private_fields(directory: Path, *, bundled: bool = True) -> dict[str, list[str]]:
    """The fields of an adapter's files that hold paths outside the working directory, by file.

    Args:
        directory: the adapter.
        bundled: whether paths in the installed package count.
    """
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
            if any(bundled or not Path(path).is_relative_to(_PACKAGE) for path in paths):
                found.setdefault(name, []).append(field)
    return found
