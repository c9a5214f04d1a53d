"""Uploading a checkpoint to the Hugging Face hub, with all that loading it needs and nothing else."""

from __future__ import annotations

from fnmatch import fnmatch
from os import PathLike
from pathlib import Path

from rope_extend.checkpoint.card_mark import CARD_NAME
from rope_extend.checkpoint.hub import HUB_FILES
from rope_extend.checkpoint.local_paths import private_fields
from rope_extend.checkpoint.manifest import RECORD_NAME, check_directory
from rope_extend.checkpoint.record import read_record
from rope_extend.errors import RopeExtendError

_ALSO = (CARD_NAME, "*.png")
_OURS = ("metrics.jsonl", "positions.json", "verification.json", "trainer_state.json")
"""Files of a run that loading does not need."""


def push_to_hub(
    directory: str | PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload by rope_extend",
) -> str:
    """Upload a checkpoint to the hub; returns the address of the commit.

    Its weights, configs, tokenizer, `rope_extend.json`, card and pictures are uploaded. The recipe, the log
    and the checkpoints inside a run stay here, because they hold local paths and loading needs none of them.
    Before the upload, the files are compared with their digests.

    Args:
        directory: an adapter or a full checkpoint, with its `rope_extend.json`.
        repo_id: `owner/name`; created if missing.
        private: whether a new repository is private; default: as the account says.
        token: access token; default: the one that `hf auth login` stored.
        revision: branch; default: the main one.
        commit_message: message of the commit.

    Raises:
        RopeExtendError: the directory has no record or is damaged, a file names a local path as the base
            model, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    directory = Path(directory)
    record = read_record(directory)
    check_directory(directory, record.weights, record.configs)
    for name, fields in private_fields(directory, ("adapter_config.json", RECORD_NAME)).items():
        raise RopeExtendError(
            f"{directory / name} names a local path in {', '.join(fields)}, which nobody else can load; "
            "write the hub id of the base model instead"
        )
    names = files_to_push(directory)
    try:
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=directory, allow_patterns=names, revision=revision,
            commit_message=commit_message,
        )  # fmt: skip
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise RopeExtendError(
            f"the hub did not take {str(repo_id)!r}: {error}. Log in with `hf auth login`, and give "
            "owner/name"
        ) from error
    return str(commit.commit_url)


def files_to_push(directory: Path) -> list[str]:
    """The names of the files that are uploaded, sorted: those of the checkpoint itself, without links."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.is_file()
        and not path.is_symlink()
        and path.name not in _OURS
        and any(fnmatch(path.name, pattern) for pattern in (*HUB_FILES, *_ALSO))
    )
