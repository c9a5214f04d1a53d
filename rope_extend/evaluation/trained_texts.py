"""Whether a model was trained on the texts that it is measured on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rope_extend.data.sources import Source, dataset_of, source_files
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home


def was_trained_on(model: str | Path, data: Source | None, split: str = "train") -> bool:
    """Whether an adapter or model was trained on some of these texts, as far as the files beside it say.

    `rope-extend finetune` writes what it reads, and so does scripts/finetune.py; other trainers do not, and
    merging keeps no note of it. Files are compared by their real paths, as seen from the working directory,
    and datasets of the hub by name and split.

    Args:
        model: its directory, or one of its checkpoints.
        data: texts as for `load_documents`; None for none.
        split: the split, if `data` is a dataset.
    """
    directory = Path(expand_home(model)).absolute()
    if directory.name.startswith("checkpoint-"):
        directory = directory.parents[directory.parent.name == "checkpoints"]
    for name in ("settings.json", "recipe.yaml"):
        known = settings_of(directory, name)
        trained = _texts(known.get("data"), known.get("split") or "train")
        if trained and not trained.isdisjoint(_texts(data, split)):
            return True
    return False


def settings_of(run: str | Path, name: str) -> dict[str, Any]:
    """What a YAML or JSON file of a run says; empty if its directory has none, or a damaged one."""
    with suppress(OSError, ValueError, TypeError, yaml.YAMLError):
        return dict(yaml.safe_load((Path(run) / name).read_text(encoding="utf-8")))
    return {}


def _texts(source: Any, split: Any) -> set[Path | tuple[str, str]]:
    """The files of a source; what has none, such as a dataset, by its name and split."""
    found = set[Path | tuple[str, str]]()
    for entry in source if isinstance(source, list | tuple) else [source]:
        if isinstance(entry, str | Path):
            files = {}
            with suppress(RopeExtendError):
                files = source_files(entry)
            named = dataset_of(entry) or str(entry)
            part = (named.partition(":")[0], str(split).partition("[")[0])
            found.update({path.resolve() for path in files} or {part})
    return found
