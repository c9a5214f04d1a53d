"""Writing a checkpoint into a directory: all of it or nothing, and over another only if asked to."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, flush
from rope_extend.journal import only_writer, writes_to
from rope_extend.models.checkpoint_directory import CARD_NAME, CHECKPOINT, RECORD_NAME, TOKENIZER, matches

_MARK = re.compile(r"\n<!-- written by rope_extend, ([0-9a-f]{64}) -->\n\Z")
"""The mark in a model card by which we recognise one that we wrote and nobody has edited."""

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


@contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty directory for the block to fill; its contents appear in `target` when the block ends.

    If anything fails, in the block or after it, `target` is unchanged: it is only touched once all is
    written, and files that were replaced are put back.

    Raises:
        RopeExtendError: `target` holds a checkpoint or a file of the same name and `overwrite` is false; it
            cannot be written to; another process writes to it; or the disk is full.
    """
    if target.exists() and not target.is_dir():
        raise RopeExtendError(f"cannot save to {target}: it is a file; give a directory")
    present = checkpoint_files(target)
    if present and not overwrite:
        raise _in_use(target, f"a checkpoint ({present[0]})")
    try:
        with nullcontext() if writes_to(target) else only_writer(target, "save"):
            # A directory has one writer at a time, so those of other processes are left of killed ones.
            ours = f"{_UNFINISHED}{os.getpid()}-"
            for leftover in target.glob(f"{_UNFINISHED}*"):
                if not leftover.name.startswith(ours):
                    shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=target, prefix=ours, ignore_cleanup_errors=True) as name:
                yield Path(name).resolve()
                _publish(Path(name).resolve(), target, overwrite)
    except RopeExtendError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise RopeExtendError(f"cannot save to {target}: {error}. What was there before is intact") from error


def refuse_base_model(target: Path, base_model: str | None) -> None:
    """Refuse to write an adapter, or what is made of it, over the base model that it needs.

    transformers loads an adapter that lies next to a GGUF file together with that file, so the directory of
    the file is refused as well.
    """
    base = Path(expand_home(base_model or ""))  # transformers names a model that was made from its config ""
    same = False
    with suppress(OSError, ValueError):  # there is no such directory, or no file can have the name
        places = (base.parent, base.resolve().parent) if base.is_file() else (base,)
        same = bool(base_model) and any(os.path.samefile(place, target) for place in places)
    if same:
        holds = f"holds {base.name}," if base.is_file() else "is"
        raise RopeExtendError(f"{target} {holds} the base model of the adapter; choose another directory")


def marked(text: str) -> str:
    """The text of a card with our mark."""
    return f"{text}\n<!-- written by rope_extend, {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_our_card(path: Path) -> bool:
    """Whether a file is a card that we wrote and nobody has edited. A link is never ours."""
    if path.is_symlink() or not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and text == marked(text[: mark.start()])


def how_to_restore(directory: Path) -> str:
    """How to get back what a killed save was about to replace, as a sentence; empty if there is none."""
    with suppress(OSError):
        backups = sorted(directory.glob(f"{_REPLACED}*"), key=lambda path: path.stat().st_mtime)
        if backups:
            new = ", ".join(checkpoint_files(directory))
            remove = f"remove {new} from {directory} and " if new else ""
            return (
                f"a save was killed, and left the earlier checkpoint in {backups[-1]}. To restore it, "
                f"{remove}move the files of that directory back; or save again"
            )
    return ""


def checkpoint_files(directory: Path) -> list[str]:
    """The names of the files of a checkpoint in a directory, if there are any."""
    names = _files(directory) if directory.exists() else []
    return [name for name in names if matches(name, CHECKPOINT)]


def _files(directory: Path) -> list[str]:
    """The names of the files and links in a directory, sorted."""
    try:
        return sorted(path.name for path in directory.iterdir() if path.is_symlink() or not path.is_dir())
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

    def record_last(name: str) -> tuple[bool, str]:
        return name == RECORD_NAME, name

    new = sorted(_files(source), key=record_last)
    for name in new:
        flush(source / name)
        if (target / name).is_dir() and not (target / name).is_symlink():
            raise RopeExtendError(
                f"cannot save to {target}: {name} in it is a directory; move it away, or choose another"
            )
    old = {name for name in (*checkpoint_files(target), *new) if os.path.lexists(target / name)}
    if any(matches(name, TOKENIZER) for name in new):
        old |= {name for name in _files(target) if matches(name, TOKENIZER)}
    if old and not overwrite:
        raise _in_use(target, min(old))
    if old and is_our_card(target / CARD_NAME):  # it describes the former checkpoint
        old.add(CARD_NAME)
    backup = target / f"{_REPLACED}{uuid4().hex[:8]}"
    with ExitStack() as undo:

        def move(name: str, here: Path, there: Path) -> None:
            undo.callback(_move_back, here / name, there / name)
            os.replace(here / name, there / name)

        backup.mkdir()
        undo.callback(backup.rmdir)
        for name in sorted(old, key=record_last, reverse=True):
            move(name, target, backup)
        for name in new:
            move(name, source, target)
        flush(target)
        undo.pop_all()
    for path in target.glob(f"{_REPLACED}*"):  # also what an earlier save left that was killed
        shutil.rmtree(path, ignore_errors=True)


def _move_back(here: Path, there: Path) -> None:
    if os.path.lexists(there) and not os.path.lexists(here):  # else it was not moved
        os.replace(there, here)
