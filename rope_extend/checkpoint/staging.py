"""Putting a checkpoint in its place: whole or not at all, and over another only when asked."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from rope_extend.checkpoint.manifest import INDEX_NAME, RECORD_NAME, WEIGHTS
from rope_extend.errors import RopeExtendError
from rope_extend.files import flush

_CHECKPOINT_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "adapter_model.*", *WEIGHTS, INDEX_NAME,
    "pytorch_model*.bin*", RECORD_NAME, "verification.json",
)  # fmt: skip
"""What makes a directory a checkpoint; `overwrite` replaces these and leaves all else."""

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


@contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory; what the block puts into it is in `target` once the block has ended.

    Whatever fails, in the block or after it, `target` is as it was: nothing of it is changed before all is
    written, and what is then replaced is put back.

    Raises:
        RopeExtendError: `target` holds a checkpoint or a file of the same name, and is not to be overwritten;
            it cannot be written to, or the disk is full.
    """
    if target.exists() and not target.is_dir():
        raise RopeExtendError(f"cannot save to {target}: it is a file; give a directory")
    present = _present(target)
    if present and not overwrite:
        raise _in_use(target, f"a checkpoint ({present[0].name})")
    made = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        for left in target.glob(f"{_UNFINISHED}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            dir=target, prefix=_UNFINISHED, ignore_cleanup_errors=True
        ) as directory:
            yield Path(directory)
            _publish(Path(directory), target, overwrite)
    except BaseException as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, RopeExtendError) or not isinstance(
            error, OSError | SafetensorError | ValueError
        ):
            raise
        raise RopeExtendError(f"cannot save to {target}: {error}. What was there before is intact") from error


def backups(directory: Path) -> list[Path]:
    """Where saves that were killed left what `directory` held before, the latest last."""
    with suppress(OSError):
        return sorted(directory.glob(f"{_REPLACED}*"), key=lambda path: path.stat().st_mtime)
    return []


def _present(directory: Path) -> list[Path]:
    """The files of a checkpoint in a directory, if there are any."""
    try:
        return sorted({path for pattern in _CHECKPOINT_FILES for path in directory.glob(pattern)})
    except OSError as error:
        raise RopeExtendError(f"cannot read {directory}: {error}") from error


def _in_use(target: Path, what: str) -> RopeExtendError:
    return RopeExtendError(
        f"{target} already holds {what}; choose another directory, or overwrite=True (--overwrite)"
    )


def _publish(source: Path, target: Path, overwrite: bool) -> None:
    """Put all files of `source` in the place of those in `target`, and of a checkpoint's, or change nothing.

    A directory with other files in it cannot be exchanged in one step. So the old files wait in a directory
    beside the new until all are in place. The record goes first and comes last: a directory that has one is
    whole, and one that a killed process left has none, so that reading it says where the old files are.
    """
    for path in source.rglob("*"):
        flush(path)

    def record_last(path: Path) -> tuple[bool, str]:
        return path.name == RECORD_NAME, path.name

    placed = sorted((target / path.name for path in source.iterdir()), key=record_last)
    there = {path for path in (*_present(target), *placed) if path.exists() or path.is_symlink()}
    if there and not overwrite:
        raise _in_use(target, min(there).name)
    backup = target / f"{_REPLACED}{uuid4().hex[:8]}"
    try:
        backup.mkdir()
        for path in sorted(there, key=record_last, reverse=True):
            os.replace(path, backup / path.name)
        for path in placed:
            os.replace(source / path.name, path)
        flush(target)
    except BaseException:
        for path in placed:
            if path.exists() and not (source / path.name).exists():
                os.replace(path, source / path.name)
        if backup.exists():
            for path in sorted(backup.iterdir(), key=record_last):
                os.replace(path, target / path.name)
            backup.rmdir()
        raise
    shutil.rmtree(backup, ignore_errors=True)
