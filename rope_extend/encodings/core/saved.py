"""Files of saved encodings: JSON with the encoding, the shape of its model and its window."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rope_extend.encodings.core.checks import check_length
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import write_json


class EncodingFile(NamedTuple):
    """The content of a file of a saved encoding."""

    encoding: Mapping[str, Any]
    """The encoding's `to_dict()`."""
    shape: RopeShape | None = None
    """The rotary shape of the model that it belongs to."""
    target_length: int | None = None
    """The longest window that it is meant for, in tokens."""


def read_encoding_file(file: Path) -> EncodingFile:
    """Read the file of a saved encoding.

    The `to_dict()` of an encoding alone is taken too; it then fits any model that its parameters fit.

    Raises:
        RopeExtendError: the file is damaged, or is no such file.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError(f"its JSON is a {type(values).__name__}, and not an object with keys")
        if "name" in values:
            return EncodingFile(values)
        shape = RopeShape(**values["shape"])
        target_length = check_length(str(file), "target_length", values["target_length"])
        return EncodingFile(dict(values["encoding"]), shape, target_length)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RopeExtendError(
            f"{file} is not the file of a saved encoding ({error}); it needs encoding, shape and "
            "target_length, as `rope-extend search` writes them"
        ) from error


def write_encoding_file(file: Path, content: EncodingFile) -> None:
    """Write the file of a saved encoding, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    assert content.shape is not None
    values = {
        "encoding": dict(content.encoding),
        "shape": asdict(content.shape),
        "target_length": content.target_length,
    }
    write_json(file, values)
