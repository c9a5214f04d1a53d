"""Writing files so that none is ever half there."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file or a directory's entries are on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows neither needs nor allows it
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a text file, UTF-8, that replaces an earlier one only when it is complete.

    Raises:
        OSError: it cannot be written; an earlier one is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
