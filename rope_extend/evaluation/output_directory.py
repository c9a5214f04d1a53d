"""The directory of a report: what may be written there, and which files in it are ours.

A directory can hold files of other people, also in our folders. They are neither changed nor deleted, and no
link is followed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.cells import our_parts
from rope_extend.evaluation.tasks import TASKS
from rope_extend.files import check_creatable
from rope_extend.report.page import PAGE, TEXT

RESULTS, TABLE, PROMPTS = "results.jsonl", "table.csv", "prompts.jsonl"
FILES = (
    RESULTS, TEXT, TABLE, PAGE, PROMPTS, "perplexity.png", "loss_by_position.png",
    *(f"accuracy_{task}.png" for task in TASKS),
)  # fmt: skip
"""The files of a report; it has those for which something was measured."""


def check_measurement(directory: str | Path, *, overwrite: bool = False, resume: bool = False) -> Path:
    """Check that a measurement can use a directory; call it before the measurement."""
    if overwrite and resume:
        raise RopeExtendError("resume uses what is on disk and overwrite replaces it; choose one of them")
    directory = check_files(directory, ())
    begun = bool(our_parts(directory))
    if begun and not (overwrite or resume):
        raise RopeExtendError(
            f"{str(directory)!r} holds a measurement; give resume=True to measure what is missing, or "
            "overwrite=True to replace it"
        )
    return check_files(directory, FILES, overwrite=overwrite or (resume and begun))


def check_files(directory: str | Path, names: Sequence[str], *, overwrite: bool = False) -> Path:
    """Check that files can be written to a directory, which may be missing; none is replaced unasked."""
    directory = Path(directory)
    check_creatable(directory)
    for path in directory.glob("cells*.jsonl"):
        if path.is_symlink():
            raise RopeExtendError(
                f"{str(path)!r} is a link, and links are not followed; remove it, or use another directory"
            )
    existing = [directory / name for name in names if os.path.lexists(directory / name)]
    if wrong := [path for path in existing if path.is_dir() and not path.is_symlink()]:
        raise RopeExtendError(
            f"{str(wrong[0])!r} is a directory, but a report needs a file of that name; move it, or use "
            "another directory"
        )
    if existing and not overwrite:
        raise RopeExtendError(
            f"{str(directory)!r} already holds {', '.join(path.name for path in existing)}; use another "
            "directory, or overwrite=True to replace them"
        )
    return directory
