"""The files of a checkpoint's directory: reading them safely, and whether they are those that were written.

The digests find damage and mix-ups. They do not stop an attacker, who can write them along with the weights.
What an attacker could use is refused in any case: pickles, which run code when they are read, names of
modules to import, and files outside the directory.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_extend.checkpoint.model_type import plain_config
from rope_extend.errors import RopeExtendError
from rope_extend.files import sha256
from rope_extend.models.checkpoint_directory import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIGS,
    INDEX_NAME,
    RECORD_NAME,
    WEIGHTS,
    is_adapter,
    matches,
)
from rope_extend.models.loading import RESTORE, open_weights

_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)", re.IGNORECASE)
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|training_args|custom_checkpoint"
    r"|pytorch_model_fsdp)[^/]*"
)
"""Pickles that Trainer and accelerate write next to the weights. Nothing here reads them."""
_IDLE_KEYS = re.compile(
    r"_name_or_path|base_model_name_or_path|revision|transformers_version|peft_version|use_cache|inference_mode"
    r"|.*_token_id"
)
"""Keys of a config that its owner may edit: they are names, and do not change what is computed."""


def check_directory(
    directory: Path, weights: dict[str, str], configs: dict[str, str], *, contents: bool = True
) -> None:
    """Refuse a checkpoint's directory that is incomplete, damaged, or not as it was written.

    `weights` and `configs` are the record's digests; of none, none are compared. With `contents`, all weights
    are read, to compare their digests and to find values that are not finite.
    """
    try:
        _refuse_pickles(directory)
        locate(directory, RECORD_NAME)
        for name in CONFIGS:
            if (directory / name).is_symlink() or (directory / name).exists():
                locate(directory, name)
        _refuse_imports(directory / ADAPTER_CONFIG)
        names = weight_files(directory)
        _check_complete(directory, names)
        for name in names:
            with open_weights(locate(directory, name)):
                pass
        if contents:
            if weights:
                _compare("weight file", directory, weights, weight_digests(directory))
            if configs:
                _compare("config", directory, configs, config_digests(directory))
            check_finite(directory)
    except OSError as error:
        raise RopeExtendError(f"cannot read the checkpoint {directory}: {error}") from error


def weight_files(directory: Path) -> list[str]:
    """Names of the weight files of a directory, sorted: the files that exist and those that the index names.

    An index that is damaged, or names a file elsewhere, is refused.
    """
    names = {path.name for path in directory.iterdir() if matches(path.name, WEIGHTS)}
    path = directory / INDEX_NAME
    if path.exists():
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RopeExtendError(f"{path} has no weight_map; {RESTORE}")
        for name in weight_map.values():
            # It must be in the same directory, on any system.
            if not isinstance(name, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", name):
                raise RopeExtendError(
                    f"{path} names {name!r}, which is not a safetensors file of this directory; {RESTORE}"
                )
        names.update(weight_map.values())
    return sorted(names)


def read_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; one that cannot be read, or holds no mapping, is refused."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise OSError("it is not a regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RopeExtendError(f"cannot read {path}: {error}; {RESTORE}") from error
    if not isinstance(data, dict):
        raise RopeExtendError(f"{path} holds a {type(data).__name__}, not a mapping; {RESTORE}")
    return data


def _refuse_pickles(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        if _PICKLE.fullmatch(path.name) and not _TRAINING_STATE.fullmatch(path.name):
            raise RopeExtendError(
                f"{path} is a pickle, which can run any code when it is read, so this directory is refused; "
                "rope_extend reads and writes safetensors only. Convert the file, or remove it"
            )


def _refuse_imports(config: Path) -> None:
    """Refuse an adapter's config that names a module, which some versions of peft import."""
    data = read_json(config) if config.exists() else {}
    if data.get("megatron_config") is not None or data.get("megatron_core") not in (None, "megatron.core"):
        raise RopeExtendError(
            f"{config} is for Megatron and names the module {data.get('megatron_core')!r}, which peft would "
            "import, so it is refused; remove megatron_config and megatron_core"
        )


def locate(directory: Path, name: str) -> Path:
    """The real path of a regular file of a directory, or of a hub cache's blob; others are refused."""
    path, root = directory / name, directory.resolve()
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: links in a circle, before Python 3.13. ValueError: a name that no file can have.
        raise RopeExtendError(f"{path} is missing or cannot be reached ({error}); {RESTORE}") from error
    blobs = [
        parent.parent / "blobs"
        for parent in root.parents
        if parent.name == "snapshots" and parent.parent.name.startswith("models--")
    ]
    if not any(real.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise RopeExtendError(
            f"{path} is a link to {real}, outside the checkpoint, and is not read; replace the link by a copy"
        )
    if not real.is_file():
        raise RopeExtendError(f"{path} is not a regular file")
    return real


def _check_complete(directory: Path, names: list[str]) -> None:
    """Refuse a directory without the weights that a loader would look for."""
    adapter = is_adapter(directory)
    expected = ADAPTER_WEIGHTS if adapter else "model.safetensors"
    if expected not in names and (adapter or not (directory / INDEX_NAME).exists()):
        raise RopeExtendError(f"{directory} holds no {expected}, so the checkpoint is incomplete; {RESTORE}")


def check_finite(directory: Path) -> None:
    """Refuse weight files with a NaN or an infinity. One tensor is read at a time."""
    for path in (directory / name for name in weight_files(directory)):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                if not _is_finite(tensor):
                    raise RopeExtendError(
                        f"{path}: {name} holds values that are NaN or infinite in {tensor.dtype}, so the "
                        "model's output would be too; go back to an earlier checkpoint, or choose another "
                        "dtype"
                    )


def _is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; computed in chunks, to save memory."""
    chunks = torch.split(tensor.flatten(), 2**24)
    return all(bool(torch.isfinite(c if c.itemsize > 1 else c.float()).all()) for c in chunks)


def weight_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every weight file of a directory, by name. A missing shard is left out."""
    return {name: sha256(directory / name) for name in weight_files(directory) if (directory / name).exists()}


def config_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of the contents of each config of a directory, by name; layout and idle keys do not count."""
    digests = {}
    for name in CONFIGS:
        if (directory / name).exists():
            data = plain_config(read_json(directory / name))
            used = {key: value for key, value in data.items() if not _IDLE_KEYS.fullmatch(key)}
            digests[name] = hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()
    return digests


def adapter_digests(directory: Path) -> dict[str, str]:
    """What identifies the contents of an adapter: 16 hexadecimal digits of each file, by name."""
    files = {**weight_digests(directory), **config_digests(directory)}
    return {name: digest[:16] for name, digest in files.items()}


def _compare(kind: str, directory: Path, recorded: dict[str, str], found: dict[str, str]) -> None:
    """Refuse files that differ from those in the record."""
    for change, names in (
        ("is missing", recorded.keys() - found.keys()),
        ("was added later", found.keys() - recorded.keys()),
        ("is not what was saved", {name for name in recorded if found.get(name) != recorded[name]}),
    ):
        if names:
            raise RopeExtendError(
                f"{kind} {sorted(names)[0]!r} in {directory} {change}, according to the digests in "
                f"{RECORD_NAME}; restore the directory. If the change is yours, load with check_files=False "
                "and save again"
            )
