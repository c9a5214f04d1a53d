"""Finding a checkpoint's files: a local directory, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.models.locating import check_checkpoint

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*"]
"""The files that are downloaded from the hub: never a pickle, never code."""


def local_directory(
    name: str | PathLike[str], kind: str = "checkpoint", argument: str = "", **hub_options: Any
) -> Path:
    """The directory of a checkpoint: `name` itself, or the cached snapshot of a hub id, downloaded if needed.

    Args:
        name: a directory or a hub id.
        kind: a noun for the error message.
        argument: the argument that sets it, for the error message.
        hub_options: options for `snapshot_download`, such as `revision`.

    Raises:
        RopeExtendError: there is no such checkpoint.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        if Path(name).exists():
            return Path(name)
        check_checkpoint(str(name))
        return Path(snapshot_download(str(name), allow_patterns=_HUB_FILES, **hub_options))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        advice = f"Give {argument} a" if argument else "Give a"
        raise RopeExtendError(
            f"cannot find the {kind} {str(name)!r}: {str(error).rstrip('.')}. {advice} hub id, or a "
            "directory with a checkpoint"
        ) from error
