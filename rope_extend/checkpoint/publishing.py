"""Uploading a checkpoint to the Hugging Face hub, with all that loading it needs and nothing else.

Who publishes an adapter publishes the local paths in its files too, so they are named.
"""

from __future__ import annotations

import logging
from glob import escape
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from rope_extend.checkpoint.manifest import check_directory
from rope_extend.checkpoint.record import read_record
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, is_private
from rope_extend.models.checkpoint_directory import (
    ADAPTER_CONFIG,
    CHECKPOINT,
    PUBLISHED,
    RECORD_NAME,
    TOKENIZER,
    matches,
)
from rope_extend.models.loading import one_error

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_FIELDS = {
    ADAPTER_CONFIG: ("base_model_name_or_path",),
    RECORD_NAME: ("base_model",),
    "recipe.yaml": ("model", "data", "eval_data", "output_dir"),
}
"""The fields that may hold paths, by file. JSON is read as YAML."""


def push_to_hub(
    directory: str | PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload a checkpoint to the hub; returns the address of the commit.

    Its weights, configs, tokenizer, `rope_extend.json`, license, card and the card's picture are uploaded.
    Files of other names stay here, and the log names them. The files are compared with their digests before.

    In the repository, they replace what is there of another model or adapter: weights, shards, their index,
    configs and record, which a loader would mix with the new ones, and if a tokenizer comes with it, those of
    the former tokenizer. No other file is deleted, and a repository whose model was not uploaded by
    rope_extend, such as the base model itself, is refused.

    Args:
        directory: an adapter or a full checkpoint, with its `rope_extend.json`.
        repo_id: `owner/name`; created if missing.
        private: whether a new repository is private; default: as the account says. If True, a public
            repository of that name is refused.
        token: access token; default: the one that `hf auth login` stored.
        revision: branch; default: the main one.

    Raises:
        RopeExtendError: the directory has no record or is damaged, a file names a local path as the base
            model, the repository is public and should be private, the repository holds a model without a
            record, or the hub refuses or cannot be reached.
    """
    import huggingface_hub

    directory = Path(expand_home(directory))
    record = read_record(directory)
    check_directory(directory, record.weights, record.configs)
    names = sorted(
        path.name
        for path in directory.iterdir()
        if path.is_file() and not path.is_symlink() and matches(path.name, PUBLISHED)
    )
    for name, fields in private_fields(directory).items():
        if name in names:
            raise RopeExtendError(
                f"{directory / name} names a local path in {', '.join(fields)}, which nobody else can load; "
                "write the hub id of the base model instead"
            )
    left_out = sorted(path.name for path in directory.iterdir() if path.name not in names)
    if left_out:
        logger.info("not uploaded from %s: %s", directory, ", ".join(left_out))
    advice = "Check the network, log in with `hf auth login`, and give owner/name"
    with one_error(f"the hub did not take {str(repo_id)!r}", advice):
        api = huggingface_hub.HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.repo_info(repo_id).private:
            raise RopeExtendError(
                f"{repo_id} exists and is public, so private=True cannot hold; nothing was uploaded. Make it "
                "private in its settings on the hub, or give another name"
            )
        there = api.list_repo_files(repo_id, revision=revision)
        if RECORD_NAME not in there and (held := [name for name in there if matches(name, CHECKPOINT)]):
            raise RopeExtendError(
                f"{repo_id} holds a model that rope_extend did not upload ({held[0]}), and an upload would "
                "replace it; nothing was uploaded. Give another repository"
            )
        own_tokenizer = any(matches(name, TOKENIZER) for name in names)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=directory, allow_patterns=[escape(name) for name in names],
            revision=revision, commit_message="Upload by rope_extend",
            delete_patterns=[*CHECKPOINT, *(TOKENIZER if own_tokenizer else ())],
        )  # fmt: skip
    return str(commit.commit_url)


def warn_of_local_paths(directory: Path) -> None:
    """Log which fields of an adapter's files hold paths outside the working directory.

    Stock loaders find an adapter's base model by the path in its config, so that path stays. The path of the
    bundled model does not count: its adapters only demonstrate.
    """
    found = private_fields(directory, bundled=False)
    if found:
        listed = ", ".join(f"{name} ({', '.join(fields)})" for name, fields in found.items())
        advice = ["write the hub id of the base model instead"] if [*found] != ["recipe.yaml"] else []
        advice += ["leave recipe.yaml out, which is not needed to load it"] if "recipe.yaml" in found else []
        logger.warning(
            "%s holds local paths: %s. Before you publish it, %s", directory, listed, ", and ".join(advice)
        )


def private_fields(directory: Path, *, bundled: bool = True) -> dict[str, list[str]]:
    """The fields of an adapter's files that hold paths outside the working directory, by file.

    `bundled`: whether paths in the installed package count.
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
