"""The directory of a report: what may be written there, and which files in it are ours.

A directory can hold files of other people, also in our folders. They are neither changed nor deleted, and no
link is followed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.cells import ARRAYS, holds_cells
from rope_extend.files import check_creatable

RESULTS = "results.jsonl"
FILES = (RESULTS, "report.md", "table.csv", "perplexity.png", "loss_by_position.png", "report.html")
"""The files of a report of perplexity."""

LOSSES = "losses"
"""Folder of the losses by token, if they were kept."""


def check_measurement(
    directory: str | Path, names: Sequence[str], *, overwrite: bool = False, resume: bool = False
) -> Path:
    """Check that a measurement can use a directory; call it before the measurement.

    Args:
        directory: directory of the report.
        names: the files of the report.
        overwrite: what is measured in the directory may be replaced.
        resume: what is measured in the directory will be used.

    Raises:
        RopeExtendError: as `check_files`, or the directory holds a measurement and neither `overwrite` nor
            `resume` is set, or both are.
    """
    if overwrite and resume:
        raise RopeExtendError("resume uses what is on disk and overwrite replaces it; choose one of them")
    directory = check_folders(directory)
    begun = holds_cells(directory)
    if begun and not (overwrite or resume):
        raise RopeExtendError(
            f"{str(directory)!r} holds a measurement; give resume=True to measure what is missing, or "
            "overwrite=True to replace it"
        )
    return check_files(directory, names, overwrite=overwrite or (resume and begun))


def check_files(directory: str | Path, names: Sequence[str], *, overwrite: bool = False) -> Path:
    """Check that files can be written to a directory.

    Args:
        directory: the directory; it may be missing.
        names: the files.
        overwrite: they may replace files.

    Raises:
        RopeExtendError: as `check_folders` and `existing_names`, or the directory holds one of the files and
            `overwrite` is not set.
    """
    directory = check_folders(directory)
    existing = existing_names(directory, names)
    if existing and not overwrite:
        raise RopeExtendError(
            f"{str(directory)!r} already holds {', '.join(existing)}; use another directory, or "
            "overwrite=True to replace them"
        )
    return directory


def check_folders(directory: str | Path) -> Path:
    """Check that a directory can hold a report.

    Raises:
        RopeExtendError: the directory or one of our folders in it is a file, or our folder is a link, or has
            links in it, or the directory can neither be made nor written to.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise RopeExtendError(f"{str(directory)!r} is a file; a report needs a directory")
    check_creatable(directory)
    folders = [directory / LOSSES, directory / ARRAYS]
    links = [path for path in (*folders, *directory.glob("cells*.jsonl")) if path.is_symlink()]
    if links:
        raise RopeExtendError(
            f"{str(links[0])!r} is a link, and links are not followed; remove it, or use another directory"
        )
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise RopeExtendError(
                f"{str(folder)!r} is a file, but a report needs a directory of that name; move it, or use "
                "another directory"
            )
    return directory


def existing_names(directory: Path, names: Sequence[str]) -> list[str]:
    """Those of the names of files that a directory holds, links to nothing among them.

    Raises:
        RopeExtendError: one of them is a directory.
    """
    existing = [name for name in names if os.path.lexists(directory / name)]
    for path in (directory / name for name in existing):
        if path.is_dir() and not path.is_symlink():
            raise RopeExtendError(
                f"{str(path)!r} is a directory, but a report needs a file of that name; move it, or use "
                "another directory"
            )
    return existing


def losses_in(directory: Path) -> set[str]:
    """The files of losses that the report in a directory names, such as `losses/yarn-1a2b3c.npz`."""
    names = set()
    with suppress(OSError, ValueError, AttributeError, TypeError):
        for line in (directory / RESULTS).read_text(encoding="utf-8").splitlines():
            names.add(json.loads(line).get("losses"))
    return {name for name in names if re.fullmatch(rf"{LOSSES}/[A-Za-z0-9-]+\.npz", str(name))}


def remove_losses(directory: Path, names: Collection[str]) -> None:
    """Delete files of losses, and their folder if it is empty then."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
    if names:
        with suppress(OSError):  # it has other files
            (directory / LOSSES).rmdir()
