"""Finding a checkpoint's files: a local directory, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import DOWNLOADED
from rope_extend.models.locating import ACCESS, check_checkpoint

_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_OTHER_FILES = ("subfolder", "variant", "gguf_file")


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for `local_directory` among those for `from_pretrained`."""
    return {name: options[name] for name in _HUB_OPTIONS if name in options}


def refuse_other_files(options: Mapping[str, Any]) -> None:
    """Refuse options for `from_pretrained` that select other weights than those next to the record."""
    for name in _OTHER_FILES:
        if options.get(name):
            raise RopeExtendError(
                f"{name}={options[name]!r} selects other weights than those that the record next to it "
                f"describes. Leave {name} out, and give the directory that holds rope_extend.json"
            )


def local_directory(
    name: str | PathLike[str], kind: str = "checkpoint", argument: str = "", **options: Any
) -> Path:
    """The directory of a checkpoint: `name` itself, or the cached snapshot of a hub id, downloaded if needed.

    Args:
        name: a directory or a hub id.
        kind: a noun for the error message.
        argument: the argument that sets it, for the error message.
        options: options for `snapshot_download`, such as `revision`; see `hub_options`.

    Raises:
        RopeExtendError: there is no such checkpoint.
    """
    from huggingface_hub import snapshot_download

    name = expand_home(name)
    with _not_found(name, kind, argument):
        if Path(name).exists():
            return Path(name)
        access = {key: options[key] for key in ACCESS if key in options}
        check_checkpoint(name, **access)
        return Path(snapshot_download(name, allow_patterns=list(DOWNLOADED), **options))


def base_name(name: str, revision: str | None) -> str:
    """The name by which an adapter's base model is loaded: itself, or the directory of a pinned revision.

    Args:
        name: as `Record.base` returns it.
        revision: the same.

    Raises:
        RopeExtendError: there is no such model.
    """
    if revision is not None:
        return str(local_directory(name, "base model", "base_model=", revision=revision))
    with _not_found(name, "base model", "base_model="):
        check_checkpoint(name)
    return name


@contextmanager
def _not_found(name: str, kind: str, argument: str) -> Iterator[None]:
    """Say which argument gives what was not found."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        advice = f"{str(error).rstrip('.')}. {f'Give {argument} a' if argument else 'Give a'}"
        raise RopeExtendError(
            f"cannot find the {kind} {name!r}: {advice} hub id, or a directory with a checkpoint"
        ) from error
