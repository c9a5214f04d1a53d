"""Whether a model was trained on the texts that it is measured on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rope_extend.data.sources import Source, source_files
from rope_extend.errors import RopeExtendError


def was_trained_on(adapter: str | Path, data: Source | None, split: str = "train") -> bool:
    """Whether an adapter or model was trained on some of these texts, as far as the files beside it say.

    `rope-extend finetune` writes what it reads, and so does scripts/finetune.py; other trainers do not. Files
    are compared by their real paths, and datasets of the hub by name and split.

    Args:
        adapter: its directory.
        data: texts as for `load_documents`; None for none.
        split: the split, if `data` is a dataset.
    """
    for name in ("settings.json", "recipe.yaml"):
        known = settings_of(adapter, name)
        if not _texts(known.get("data"), known.get("split") or "train").isdisjoint(_texts(data, split)):
            return True
    return False


def settings_of(adapter: str | Path, name: str) -> dict[str, Any]:
    """What a YAML or JSON file of a run says; empty if its directory has none, or a damaged one."""
    with suppress(OSError, ValueError, TypeError, yaml.YAMLError):
        return dict(yaml.safe_load((Path(adapter) / name).read_text(encoding="utf-8")))
    return {}


def _texts(source: Any, split: str) -> set[Path | tuple[str, str]]:
    """The files of a source; what has none, such as a dataset, by its name and split."""
    found = set[Path | tuple[str, str]]()
    for entry in [source] if isinstance(source, str | Path) else source or ():
        files = {}
        with suppress(RopeExtendError):
            files = source_files(entry)
        found.update({path.resolve() for path in files} or {(str(entry), split)})
    return found
