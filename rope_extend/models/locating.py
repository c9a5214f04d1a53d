"""Whether a checkpoint is a directory or a hub id, found out before transformers asks the network."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home

GGUF = ".gguf"
"""The suffix of a model in one file of llama.cpp's."""
TIMEOUT = 10.0
"""Seconds to wait for the hub's answer; there is no second attempt."""
ACCESS = ("revision", "token", "cache_dir", "local_files_only")
"""The options of `from_pretrained` that also apply to the question whether there is such a checkpoint."""


def check_path(name: str) -> None:
    """Refuse a name that can only be a path, if nothing has that path.

    Raises:
        RopeExtendError: there is no such file or directory; the message names the nearest.
    """
    if is_path(name) and not os.path.exists(expand_home(name)):  # False too for a name that no file can have
        what = "file" if name.endswith(GGUF) else "directory"
        raise RopeExtendError(f"no such {what}: {name!r} (seen from {Path.cwd()}).{_nearest(name)}")


def is_path(name: str) -> bool:
    """Whether a name cannot be a hub id, which is `NAME` or `OWNER/NAME` and no GGUF file's name."""
    hub_id = re.fullmatch(r"[\w.-]*\w[\w.-]*(/[\w.-]*\w[\w.-]*)?", name) is not None
    return not hub_id or name.startswith(".") or name.endswith(GGUF)


def check_checkpoint(
    name: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> None:
    """Refuse a name that is neither a path, nor in the hub's cache, nor on the hub.

    One request is made for a name that is neither a path nor cached. transformers would repeat it for half a
    minute if there is no network, and then speak of the network where a path was mistyped. `revision`,
    `token`, `cache_dir` and `local_files_only` are as `from_pretrained` takes them.

    Raises:
        RopeExtendError: the name leads to no checkpoint.
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

    files = ("config.json", "adapter_config.json")
    cached = (try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision) for file in files)
    missing = f"no directory {name!r} (seen from {Path.cwd()}), and"
    try:
        if local_files_only or any(isinstance(path, str) for path in cached):
            return
        get_hf_file_metadata(hf_hub_url(name, files[0], revision=revision), timeout=TIMEOUT, token=token)
    except EntryNotFoundError:
        return
    except GatedRepoError as error:
        raise RopeExtendError(
            f"{name} is gated: accept its conditions at https://huggingface.co/{name}, then log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from error
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


def _nearest(name: str) -> str:
    """A hint at the most similar name in the same directory; empty if there is none."""
    path = Path(expand_home(name))
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir() or entry.suffix == GGUF]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""
