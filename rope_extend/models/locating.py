"""Where a checkpoint is: a directory, or a hub id, found out before transformers asks the network."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError, followed_by
from rope_extend.files import expand_home
from rope_extend.models.checkpoint_directory import ADAPTER_CONFIG, CONFIG, DOWNLOADED

GGUF = ".gguf"
"""The suffix of a model in one file of llama.cpp's."""
TIMEOUT = 10.0
"""Seconds to wait for the hub's answer; there is no second attempt."""
ACCESS = ("revision", "token", "cache_dir", "local_files_only")
"""The options of `from_pretrained` that also apply to the question whether there is such a checkpoint."""
_HUB_OPTIONS = (*ACCESS, "force_download")
_OTHER_FILES = ("subfolder", "variant", "gguf_file")


def check_path(name: str) -> None:
    """Refuse a name that can only be a path, if nothing has that path."""
    if is_path(name) and not os.path.exists(expand_home(name)):  # False too for a name that no file can have
        what = "file" if name.endswith(GGUF) else "directory"
        raise RopeExtendError(f"no such {what}: {name!r} (seen from {Path.cwd()}).{_nearest(name)}")


def is_path(name: str) -> bool:
    """Whether a name cannot be a hub id, which is `NAME` or `OWNER/NAME` and no GGUF file's name."""
    hub_id = re.fullmatch(r"[\w.-]*\w[\w.-]*(/[\w.-]*\w[\w.-]*)?", name) is not None
    return not hub_id or name.startswith(".") or name.endswith(GGUF)


def check_checkpoint(name: str, **access: Any) -> None:
    """Refuse a name that is neither a path, nor in the hub's cache, nor on the hub.

    One request is made for a name that is neither a path nor cached. transformers would repeat it for half a
    minute if there is no network, and then speak of the network where a path was mistyped. `access` has the
    options of `from_pretrained` that `ACCESS` names.
    """
    check_path(name)
    if Path(expand_home(name)).exists():
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    files, revision = (CONFIG, ADAPTER_CONFIG), access.get("revision")
    where = {"cache_dir": access.get("cache_dir"), "revision": revision}
    cached = (try_to_load_from_cache(name, file, **where) for file in files)
    missing = f"no directory {name!r} (seen from {Path.cwd()}), and"
    try:
        if access.get("local_files_only") or any(isinstance(path, str) for path in cached):
            return
        address = hf_hub_url(name, files[0], revision=revision)
        get_hf_file_metadata(address, timeout=TIMEOUT, token=access.get("token"))
    except (EntryNotFoundError, GatedRepoError):
        return  # of a repository that is gated, transformers says how to get access
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise RopeExtendError(
            f"{missing} no model of that name on the hub, or it is private.{_nearest(name)}"
        ) from error
    except HfHubHTTPError:
        return  # transformers says what to do
    except Exception as error:  # no network, a proxy, or offline mode: the classes differ between versions
        raise RopeExtendError(
            f"{missing} the hub cannot be asked for a model of that name ({type(error).__name__}). "
            f"Check the path, or the network.{_nearest(name)}"
        ) from error


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

    `kind` and `argument` are for the error message: what it is, and which argument sets it. `options` are for
    `snapshot_download`, such as `allow_patterns`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = expand_home(name)
    try:
        if Path(name).exists():
            return Path(name)
        access = {key: options[key] for key in ACCESS if key in options}
        check_checkpoint(name, **access)
        return Path(snapshot_download(name, **{"allow_patterns": list(DOWNLOADED), **options}))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        given = f"{argument} a" if argument else "a"
        advice = followed_by(str(error), f"Give {given} hub id, or a directory with a checkpoint")
        raise RopeExtendError(f"cannot find the {kind} {name!r}: {advice}") from error


def base_name(name: str, revision: str | None) -> str:
    """The name by which an adapter's base model is loaded: itself, or the directory of a pinned revision."""
    files = DOWNLOADED if revision else (CONFIG,)
    directory = local_directory(
        name, "base model", "base_model= (--base-model)", revision=revision, allow_patterns=list(files)
    )
    return str(directory) if revision else name


def _nearest(name: str) -> str:
    """A hint at the most similar name in the same directory; empty if there is none."""
    path = Path(expand_home(name))
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == GGUF]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
