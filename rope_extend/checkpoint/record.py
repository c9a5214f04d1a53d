"""`rope_extend.json`, the record of how a checkpoint reads positions.

It has a file name of its own, because a `config.json` beside an adapter keeps
`AutoModelForCausalLM.from_pretrained(adapter_directory)` from finding the base model.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch import nn

from rope_extend.encodings import Encoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.patching import current_patch, unwrap

RECORD_NAME = "rope_extend.json"
SCHEMA_VERSION = 1

_TYPES: dict[str, Any] = {
    "shape": dict, "target_length": int, "model_type": str, "base_model": str | None, "versions": dict,
}  # fmt: skip


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
        versions: versions of the libraries that wrote it.
        schema_version: layout of the file.
    """

    encoding: Encoding
    shape: RopeShape
    target_length: int
    model_type: str
    base_model: str | None
    versions: dict[str, str] = field(default_factory=lambda: dict(library_versions()))
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def of(cls, model: nn.Module, base_model: str | None = None) -> Self:
        """The record of a patched model.

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
        return cls(patch.encoding, patch.shape, patch.target_length, config.model_type, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON; `from_dict` is the exact inverse."""
        return {
            "schema_version": self.schema_version,
            "encoding": self.encoding.to_dict(),
            "shape": asdict(self.shape),
            "target_length": self.target_length,
            "model_type": self.model_type,
            "base_model": self.base_model,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record that `to_dict` described.

        Raises:
            RopeExtendError: another layout, a missing or unknown key, or a value that is not valid.
        """
        if not isinstance(data, dict):
            raise RopeExtendError(f"a record is a mapping, got {type(data).__name__}")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise RopeExtendError(
                f"schema_version is {data.get('schema_version')!r}, and this version of rope_extend reads "
                f"{SCHEMA_VERSION}; a newer rope_extend may have written it"
            )
        keys = set(cls.__dataclass_fields__)
        if data.keys() != keys:
            missing, unknown = sorted(keys - data.keys()), sorted(map(str, data.keys() - keys))
            raise RopeExtendError(f"missing keys: {missing}; unknown keys: {unknown}")
        for key, kinds in _TYPES.items():
            if not isinstance(data[key], kinds) or isinstance(data[key], bool):
                raise RopeExtendError(f"{key} is {data[key]!r}")
        if data["target_length"] < 1:
            raise RopeExtendError(f"target_length is {data['target_length']}")
        try:
            shape = RopeShape(**data["shape"])
        except TypeError as error:
            raise RopeExtendError(f"shape is {data['shape']!r}") from error
        return cls(**{**data, "encoding": Encoding.from_dict(data["encoding"]), "shape": shape})


def write_record(directory: str | PathLike[str], record: Record) -> Path:
    """Write `rope_extend.json` into a directory, whole or not at all; returns its path."""
    path = Path(directory) / RECORD_NAME
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(record.to_dict(), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path


def read_record(directory: str | PathLike[str]) -> Record:
    """Read `rope_extend.json` from a checkpoint's directory.

    Raises:
        RopeExtendError: there is none, or it is damaged or of another layout.
    """
    path = Path(directory) / RECORD_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RopeExtendError(
            f"no {RECORD_NAME} in {directory}: this is not a checkpoint of rope_extend. Load others with "
            "stock from_pretrained, and extend them with rope_extend.extend"
        ) from error
    except (OSError, ValueError) as error:
        raise RopeExtendError(
            f"cannot read {path}: {error}; restore the file, or save the model again"
        ) from error
    try:
        return Record.from_dict(data)
    except RopeExtendError as error:
        raise RopeExtendError(f"{path}: {error}") from error
