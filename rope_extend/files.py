"""Writing files and directories so that a reader finds the old one or the new one, never a part of it.

Everything is written under a new temporary name in the same directory, and then renamed. The temporary name
is random and is created with `O_EXCL`, so an existing file or link of that name is never written to.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import uuid4

from rope_extend.errors import RopeExtendError

PARTIAL = ".partial"
"""Suffix of temporary names. A process that is killed may leave such files behind; they can be deleted."""


def expand_home(path: str | os.PathLike[str]) -> str:
    """A path that a user gave, with the home directory instead of a leading `~`; other names are unchanged.

    A shell does not expand `--output=~/run` or what stands in quotes, and nobody expands a YAML file. So
    every path is expanded where it comes in: in arguments of commands, settings, and public functions.

    Raises:
        RopeExtendError: no file can have such a name.
    """
    expanded = os.path.expanduser(os.fspath(path))
    try:
        os.lstat(expanded)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RopeExtendError(
                f"no file can be called {expanded[:80]!r} ({reason}); give another name"
            ) from error
    return expanded


def public_name(name: str) -> str:
    """A name for texts that people publish: of a path outside the working directory only the last part."""
    return _last_part(name) or name


def is_private(name: str) -> bool:
    """Whether a name is a path outside the working directory: absolute, or through `~` or `..`."""
    return _last_part(name) is not None


def _last_part(name: str) -> str | None:
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or name.startswith("~") or ".." in path.parts:
            return path.name
    return None


def flush(path: Path) -> None:
    """Wait until a file, or the list of entries of a directory, is on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows neither needs nor allows it
    # Opened for reading only, so that files without write permission can be flushed. Windows needs more.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary_name(path: Path) -> Path:
    """A name in the same directory that no other process uses. The old name is cut to fit in 255 bytes."""
    return path.with_name(f".{path.name[:40]}.{uuid4().hex[:8]}{PARTIAL}")


def check_creatable(directory: Path) -> None:
    """Check that a directory is there or can be made, and that files can be written to it; leaves nothing.

    Raises:
        RopeExtendError: a file or a link to nothing is in the way, or nothing may be written there.
    """
    nearest = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        kind = "a file" if nearest.exists() else "a link to nothing"
        raise RopeExtendError(
            f"cannot make the directory {str(directory)!r}: {str(nearest)!r} is {kind}; choose another output"
        )
    try:
        tempfile.TemporaryFile(dir=nearest).close()  # on Linux it never has a name, so nothing can be left
    except OSError as error:
        raise RopeExtendError(
            f"cannot write to {str(directory)!r}: {error.strerror} in {str(nearest)!r}; choose another output"
        ) from error


def check_new(file: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file without being asked, and a file that cannot be written.

    Raises:
        RopeExtendError: the file exists and `overwrite` is false, it is a directory, or its own directory
            cannot be made.
    """
    if file.is_dir():
        raise RopeExtendError(f"cannot write {file}: it is a directory; choose another file")
    if file.exists() and not overwrite:
        raise RopeExtendError(f"{file} exists; choose another file, or overwrite=True")
    check_creatable(file.parent)


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Write a file that appears under `path` when the block ends; an earlier file stays if the block raises.

    The block gets the path of a new empty file in the same directory, and writes that file.

    Args:
        path: the final name. A link of that name is replaced, not followed.
        durable: wait until the contents are on disk before the file is renamed, so that a power cut cannot
            leave an empty file under the final name.

    Raises:
        OSError: the file cannot be written.
    """
    partial = _temporary_name(path)
    exclusive = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(partial, exclusive, 0o666))
    try:
        yield partial
        if durable:
            flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a UTF-8 text file, whole or not at all; see `replacing`.

    Raises:
        OSError: the file cannot be written; an earlier one is unchanged.
    """
    with replacing(path, durable=durable) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any, *, durable: bool = False, sort_keys: bool = False) -> None:
    """Write a JSON file, as `write_text`."""
    write_text(path, json.dumps(data, indent=2, sort_keys=sort_keys) + "\n", durable=durable)


def publish_directory(partial: Path, final: Path) -> None:
    """Rename a complete directory to its final name once it is on disk; an earlier one of that name goes.

    Raises:
        OSError: the directory cannot be renamed.
    """
    for path in (*partial.rglob("*"), partial):
        flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    flush(final.parent)


@contextmanager
def replacing_files(directory: Path, *, last: str) -> Iterator[Path]:
    """Write several files that appear in a directory together when the block ends; none if it raises.

    The block gets the path of a new empty directory in `directory`, and writes the files there, also in
    directories of their own. Other files of `directory` stay as they are.

    Args:
        directory: where the files appear; made if it does not exist.
        last: name of the file that is renamed last: if it is there, so are the others.

    Raises:
        OSError: a file cannot be written or renamed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = _temporary_name(directory / last)
    partial.mkdir()
    try:
        yield partial
        names = [path.relative_to(partial) for path in sorted(partial.rglob("*")) if path.is_file()]
        for name in sorted(names, key=lambda name: name == Path(last)):
            (directory / name).parent.mkdir(exist_ok=True)
            os.replace(partial / name, directory / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
