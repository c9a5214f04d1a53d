"""`rope_extend.json`, the record of how a checkpoint reads positions.

It has a file name of its own, because a `config.json` beside an adapter keeps
`AutoModelForCausalLM.from_pretrained(adapter_directory)` from finding the base model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Self

from peft import PeftModel
from torch import nn

from rope_extend.checkpoint.manifest import (
    RECORD_NAME,
    base_fingerprint,
    config_digests,
    locate,
    read_json,
    weight_digests,
)
from rope_extend.checkpoint.staging import backups
from rope_extend.encodings import Encoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import write_whole
from rope_extend.inspection import CONFIG_RECORD, unwrap
from rope_extend.patching import current_patch

SCHEMA_VERSION = 2
ADAPTER_MARK = "rope_extend"
"""The key in `auto_mapping` of an adapter's config under which it says what it was trained with.

It is the one part of that config which peft keeps as it is, on a live model and when it saves again; for a
model with a task type, nothing reads it.
"""

_TYPES: dict[str, Any] = {
    "shape": dict, "target_length": int, "model_type": str, "base_model": str | None,
    "base_fingerprint": str | None, "weights": dict, "configs": dict, "versions": dict,
}  # fmt: skip
_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda data: {**data, "schema_version": 2, "base_fingerprint": None, "weights": {}, "configs": {}},
}
"""From each earlier layout to the next."""


@cache
def library_versions() -> dict[str, str]:
    """The versions of the libraries that decide what a checkpoint computes, by package name."""
    from rope_extend import __version__  # here, because the package imports this module

    return {"rope_extend": __version__} | {name: version(name) for name in ("torch", "transformers", "peft")}


@dataclass(frozen=True)
class Record:
    """What `rope_extend.json` says: how a checkpoint reads positions, and what it was made from.

    Attributes:
        encoding: the position encoding.
        shape: the rotary shape of the model as it was pretrained.
        target_length: the window the checkpoint reads, in tokens.
        model_type: `config.model_type` of the base model.
        base_model: name or path of the base model; None where it has none, as for a model made in memory.
        base_fingerprint: of the base model that an adapter was trained on, see `manifest.base_fingerprint`;
            None in a full checkpoint, or where it could not be taken.
        weights: SHA-256 of every weight file beside the record, by name; empty where none was taken.
        configs: SHA-256 of what each config beside it says, by name; likewise.
        versions: versions of the libraries that wrote it.
        schema_version: layout of the file.
    """

    encoding: Encoding
    shape: RopeShape
    target_length: int
    model_type: str
    base_model: str | None
    base_fingerprint: str | None = None
    weights: dict[str, str] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: dict(library_versions()))
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, model: nn.Module, base_model: str | None = None) -> Self:
        """The record of a patched model, without digests; with an adapter, the base's fingerprint is taken.

        Raises:
            RopeExtendError: the model is not patched.
        """
        patch = current_patch(model)
        if patch is None:
            raise RopeExtendError(
                "this model carries no patch, so there is no encoding to record; apply rope_extend.extend "
                "first, or use the model's own save_pretrained"
            )
        config = unwrap(model).config
        name = base_model or config.name_or_path or None
        fingerprint = base_fingerprint(model) if isinstance(model, PeftModel) else None
        return cls(patch.encoding, patch.shape, patch.target_length, config.model_type, name, fingerprint)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON; `from_dict` is the exact inverse."""
        return {
            "schema_version": self.schema_version,
            "encoding": self.encoding.to_dict(),
            "shape": asdict(self.shape),
            "target_length": self.target_length,
            "model_type": self.model_type,
            "base_model": self.base_model,
            "base_fingerprint": self.base_fingerprint,
            "weights": dict(self.weights),
            "configs": dict(self.configs),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record that `to_dict` described, in this layout or an earlier one.

        Raises:
            RopeExtendError: an unknown layout, a missing or unknown key, or a value that is not valid.
        """
        if not isinstance(data, dict):
            raise RopeExtendError(f"a record is a mapping, got {type(data).__name__}")
        data = _migrate(data)
        keys = set(cls.__dataclass_fields__)
        if data.keys() != keys:
            missing, unknown = sorted(keys - data.keys()), sorted(map(str, data.keys() - keys))
            raise RopeExtendError(f"missing keys: {missing}; unknown keys: {unknown}")
        for key, kinds in _TYPES.items():
            if not isinstance(data[key], kinds) or isinstance(data[key], bool):
                raise RopeExtendError(f"{key} is {data[key]!r}")
        for key in ("weights", "configs"):
            if not all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in data[key].values()):
                raise RopeExtendError(f"{key} is {data[key]!r}, not SHA-256 digests by file name")
        if data["target_length"] < 1:
            raise RopeExtendError(f"target_length is {data['target_length']}")
        try:
            shape, encoding = RopeShape(**data["shape"]), Encoding.from_dict(data["encoding"])
        except RopeExtendError:
            raise
        except Exception as error:  # values of kinds that no encoding checks for
            raise RopeExtendError(
                f"shape is {data['shape']!r}, encoding is {data['encoding']!r}: {error}"
            ) from error
        return cls(**{**data, "encoding": encoding, "shape": shape})


def _migrate(data: dict[str, Any]) -> dict[str, Any]:
    """A record's contents in the present layout."""
    found = data.get("schema_version")
    while type(data.get("schema_version")) is int and data["schema_version"] in _MIGRATIONS:
        data = _MIGRATIONS[data["schema_version"]](data)
    if type(found) is not int or data["schema_version"] != SCHEMA_VERSION:
        known = ", ".join(map(str, (*_MIGRATIONS, SCHEMA_VERSION)))
        raise RopeExtendError(
            f"schema_version is {found!r}, and this version of rope_extend reads {known}; a newer one may "
            "have written it"
        )
    return data


def write_record(directory: str | PathLike[str], record: Record) -> Path:
    """Write `rope_extend.json` into a directory, whole or not at all; returns its path.

    Raises:
        RopeExtendError: it cannot be written.
    """
    return _write_json(Path(directory) / RECORD_NAME, record.to_dict())


def seal(directory: str | PathLike[str], record: Record) -> Record:
    """Write the record beside weights that are complete, with digests of all that is there; returns it.

    An adapter's config gets a note of the encoding, by which `rope_extend.info` knows a live model that was
    loaded without it. Call it last: what changes after it will be refused on loading.

    Raises:
        RopeExtendError: a file cannot be read or written.
    """
    directory = Path(directory)
    config = directory / "adapter_config.json"
    if config.exists():
        data = read_json(config)
        marked = {**(data.get("auto_mapping") or {}), ADAPTER_MARK: adapter_mark(record)}
        _write_json(config, {**data, "auto_mapping": marked})
    try:
        record = replace(record, weights=weight_digests(directory), configs=config_digests(directory))
    except OSError as error:
        raise RopeExtendError(f"cannot read the checkpoint {directory}: {error}") from error
    write_record(directory, record)
    return record


def adapter_mark(record: Record) -> dict[str, Any]:
    """What an adapter's own config says about its encoding."""
    return {
        "encoding": record.encoding.to_dict(),
        "shape": asdict(record.shape),
        "target_length": record.target_length,
        "note": "trained with this position encoding, which peft does not apply: use rope_extend.load",
    }


def check_agreement(directory: Path, record: Record) -> None:
    """Refuse a record that says something else than the config beside it, into which the same was written.

    Raises:
        RopeExtendError: they differ, or what the config says is damaged.
    """
    adapter = directory / "adapter_config.json"
    path = adapter if adapter.exists() else directory / "config.json"
    said: Any = read_json(path)
    for key in ("auto_mapping", ADAPTER_MARK) if path == adapter else (CONFIG_RECORD,):
        said = said.get(key) if isinstance(said, dict) else None
    if said is None:
        return
    try:
        found = Encoding.from_dict(said["encoding"]), RopeShape(**said["shape"]), said["target_length"]
    except Exception as error:
        raise RopeExtendError(
            f"what {path} says of its encoding is damaged: {said!r}; restore it, or save the model again"
        ) from error
    for one, other in zip(found, (record.encoding, record.shape, record.target_length), strict=True):
        if one != other:
            raise RopeExtendError(
                f"{directory / RECORD_NAME} says {other}, and {path.name} beside it {one}: one of the two is "
                "not what was saved; restore the directory, or save the model again"
            )


def _write_json(path: Path, data: dict[str, Any]) -> Path:
    try:
        write_whole(path, json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise RopeExtendError(f"cannot write {path}: {error}") from error
    return path


def read_record(directory: str | PathLike[str]) -> Record:
    """Read `rope_extend.json` from a checkpoint's directory, of this layout or an earlier one.

    Raises:
        RopeExtendError: there is none, or it is damaged or of an unknown layout.
    """
    path = Path(directory) / RECORD_NAME
    try:
        found = path.exists()
    except OSError as error:
        raise RopeExtendError(f"cannot read {directory}: {error}") from error
    if not found:
        if not path.parent.exists():
            raise RopeExtendError(f"there is no directory {directory} (seen from {Path.cwd()})")
        left = backups(path.parent)
        hint = (
            f". A save that was killed left what was there before in {left[-1]}; move it back, or save again"
            if left
            else ""
        )
        raise RopeExtendError(
            f"no {RECORD_NAME} in {directory}: this is not a checkpoint of rope_extend. Load others with "
            f"stock from_pretrained, and extend them with rope_extend.extend{hint}"
        )
    data = read_json(locate(path.parent, RECORD_NAME))
    try:
        return Record.from_dict(data)
    except RopeExtendError as error:
        raise RopeExtendError(f"{path}: {error}") from error
