"""Writing a checkpoint into a directory: all of it or nothing, and over another only if asked to."""

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
"""The files of a checkpoint. `overwrite` replaces these and leaves all others."""

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


@contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory for the block to fill; its contents appear in `target` when the block ends.

    If anything fails, in the block or after it, `target` is unchanged: it is only touched once all is
    written, and files that were replaced are put back.

    Raises:
        RopeExtendError: `target` holds a checkpoint or a file of the same name and `overwrite` is false; it
            cannot be written to; or the disk is full.
    """
    if target.exists() and not target.is_dir():
        raise RopeExtendError(f"cannot save to {target}: it is a file; give a directory")
    present = _present(target)
    if present and not overwrite:
        raise _in_use(target, f"a checkpoint ({present[0].name})")
    new_directories = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        for leftover in target.glob(f"{_UNFINISHED}*"):  # by a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            dir=target, prefix=_UNFINISHED, ignore_cleanup_errors=True
        ) as directory:
            yield Path(directory)
            _publish(Path(directory), target, overwrite)
    except BaseException as error:
        for path in new_directories:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, RopeExtendError) or not isinstance(
            error, OSError | SafetensorError | ValueError
        ):
            raise
        raise RopeExtendError(f"cannot save to {target}: {error}. What was there before is intact") from error


def backups(directory: Path) -> list[Path]:
    """Directories in which killed saves left the earlier contents of `directory`, the latest last."""
    with suppress(OSError):
        return sorted(directory.glob(f"{_REPLACED}*"), key=lambda path: path.stat().st_mtime)
    return []


def _present(directory: Path) -> list[Path]:
    """The files of a checkpoint in a directory, if there are any."""
    try:
        return sorted({path for pattern in _CHECKPOINT_FILES for path in directory.glob(pattern)})
    except OSError as error:
        raise RopeExtendError(f"cannot read {directory}: {error}") from error


def _in_use(target: Path, contents: str) -> RopeExtendError:
    return RopeExtendError(f"{target} already holds {contents}; choose another directory, or overwrite=True")


def _publish(source: Path, target: Path, overwrite: bool) -> None:
    """Move all files of `source` into `target`, replacing the checkpoint there, or change nothing.

    A directory with other files in it cannot be exchanged in one step. So the old files wait in a directory
    inside `target` until all new ones are in place. The record is removed first and written last. A directory
    with a record is therefore complete. After a killed save there is no record, and the error on loading says
    where the old files are.
    """
    for path in source.rglob("*"):
        flush(path)

    def record_last(path: Path) -> tuple[bool, str]:
        return path.name == RECORD_NAME, path.name

    new = sorted((target / path.name for path in source.iterdir()), key=record_last)
    old = {path for path in (*_present(target), *new) if path.exists() or path.is_symlink()}
    if old and not overwrite:
        raise _in_use(target, min(old).name)
    backup = target / f"{_REPLACED}{uuid4().hex[:8]}"
    try:
        backup.mkdir()
        for path in sorted(old, key=record_last, reverse=True):
            os.replace(path, backup / path.name)
        for path in new:
            os.replace(source / path.name, path)
        flush(target)
    except BaseException:
        for path in new:
            if path.exists() and not (source / path.name).exists():
                os.replace(path, source / path.name)
        if backup.exists():
            for path in sorted(backup.iterdir(), key=record_last):
                os.replace(path, target / path.name)
            backup.rmdir()
        raise
    shutil.rmtree(backup, ignore_errors=True)
