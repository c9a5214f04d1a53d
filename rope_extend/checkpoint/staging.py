"""Writing a checkpoint into a directory: all of it or nothing, and over another only if asked to."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from rope_extend.checkpoint.card_mark import CARD_NAME, is_our_card
from rope_extend.checkpoint.manifest import RECORD_NAME, is_weight_file
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, flush
from rope_extend.journal import only_writer, writes_to

_CHECKPOINT_FILES = re.compile(
    r"(config|generation_config|adapter_config|rope_extend|verification)\.json|adapter_model\.(safetensors|bin)"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
"""The files of a checkpoint besides its weight files. `overwrite` replaces these and leaves all others."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The directory of a tokenizer's chat templates besides the default one."""
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|chat_template\.jinja|tokenizer\.model|spiece\.model|merges\.txt|vocab\.txt"
    rf"|{CHAT_TEMPLATES}(/[^/]+\.jinja)?"
)
"""The files of a tokenizer. A checkpoint that brings its own replaces them all, since a loader mixes them."""

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"
_being_filled: set[Path] = set()
"""The directories that this process fills. Others of their kind are left of killed processes: a directory has
one writer at a time."""


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
            for leftover in target.glob(f"{_UNFINISHED}*"):
                if leftover.resolve() not in _being_filled:
                    shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                dir=target, prefix=_UNFINISHED, ignore_cleanup_errors=True
            ) as name:
                directory = Path(name).resolve()
                _being_filled.add(directory)
                try:
                    yield directory
                    _publish(directory, target, overwrite)
                finally:
                    _being_filled.discard(directory)
    except RopeExtendError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise RopeExtendError(f"cannot save to {target}: {error}. What was there before is intact") from error


def refuse_base_model(target: Path, base_model: str | None) -> None:
    """Refuse to write an adapter, or what is made of it, over the base model that it needs.

    transformers loads an adapter that lies next to a GGUF file together with that file, so the directory of
    the file is refused as well.
    """
    if not base_model:  # transformers names a model that was made from its config ""
        return
    base, holds = Path(expand_home(base_model)), ""
    with suppress(OSError, ValueError):  # there is no such directory, or no file can have the name
        for place in (base.parent, base.resolve().parent) if base.is_file() else (base,):
            if os.path.samefile(place, target):
                holds = f"holds {base.name}, the base model" if base.is_file() else "is the base model"
    if holds:
        raise RopeExtendError(f"{target} {holds} of the adapter; choose another directory")


def how_to_restore(directory: Path) -> str:
    """How to get back what a killed save was about to replace, as a sentence; empty if there is none."""
    with suppress(OSError):
        backups = sorted(directory.glob(f"{_REPLACED}*"), key=lambda path: path.stat().st_mtime)
        if backups:
            new = ", ".join(path.name for path in checkpoint_files(directory))
            remove = f"remove {new} from {directory} and " if new else ""
            return (
                f"a save was killed, and left the earlier checkpoint in {backups[-1]}. To restore it, "
                f"{remove}move the files of that directory back; or save again"
            )
    return ""


def checkpoint_files(directory: Path) -> list[Path]:
    """The names of the files of a checkpoint in a directory, if there are any."""
    try:
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
    except OSError as error:
        raise RopeExtendError(f"cannot read {directory}: {error}") from error
    known = [name for name in sorted(names) if _CHECKPOINT_FILES.fullmatch(name) or is_weight_file(name)]
    return [Path(name) for name in known if not _is_directory(directory / name)]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _present_tokenizer(directory: Path) -> list[Path]:
    """The names of the files of a tokenizer in a directory, below it for additional chat templates."""
    templates = directory / CHAT_TEMPLATES
    below = templates.iterdir() if _is_directory(templates) else ()
    names = [path.relative_to(directory) for path in (*directory.iterdir(), *below)]
    known = [name for name in names if _TOKENIZER_FILES.fullmatch(name.as_posix())]
    return [name for name in known if not _is_directory(directory / name)]


def _in_use(target: Path, contents: str) -> RopeExtendError:
    return RopeExtendError(f"{target} already holds {contents}; choose another directory, or overwrite=True")


def _publish(source: Path, target: Path, overwrite: bool) -> None:
    """Move all files of `source` into `target`, replacing the checkpoint there, or change nothing.

    A directory with other files in it cannot be exchanged in one step. So the old files wait in a directory
    inside `target` until all new ones are in place. The record is removed first and written last. A directory
    with a record is therefore complete. After a killed save there is no record, and the error on loading says
    where the old files are.
    """

    def record_last(name: Path) -> tuple[bool, Path]:
        return name.name == RECORD_NAME, name

    for path in source.rglob("*"):
        flush(path)
    files = [path.relative_to(source) for path in source.rglob("*") if not path.is_dir()]
    new = sorted(files, key=record_last)
    old = _replaced_by(new, target)
    if old and not overwrite:
        raise _in_use(target, min(old).as_posix())
    for name in old:
        if _is_directory(target / name):
            raise RopeExtendError(
                f"cannot save to {target}: {name} in it is a directory; move it away, or choose another"
            )
    backup = target / f"{_REPLACED}{uuid4().hex[:8]}"
    try:
        backup.mkdir()
        for name in sorted(old, key=record_last, reverse=True):
            _move(target / name, backup / name)
        for name in new:
            _move(source / name, target / name)
        flush(target)
    except BaseException:
        for name in new:
            if os.path.lexists(target / name) and not os.path.lexists(source / name):
                os.replace(target / name, source / name)
        for name in sorted(old, key=record_last):
            if os.path.lexists(backup / name):
                _move(backup / name, target / name)
        made = [target / name.parent for name in new if len(name.parts) > 1]
        for path in (*made, *backup.glob("*"), backup):
            with suppress(OSError):  # it is not empty
                path.rmdir()
        raise
    for path in target.glob(f"{_REPLACED}*"):  # also what an earlier save left that was killed
        shutil.rmtree(path, ignore_errors=True)


def _replaced_by(new: list[Path], target: Path) -> set[Path]:
    """The names of all files in `target` that a checkpoint with the files `new` replaces."""
    old = {name for name in (*checkpoint_files(target), *new) if os.path.lexists(target / name)}
    if any(_TOKENIZER_FILES.fullmatch(name.as_posix()) for name in new):
        old |= set(_present_tokenizer(target))
    if old and is_our_card(target / CARD_NAME):  # it describes the former checkpoint
        old.add(Path(CARD_NAME))
    # A link or a file that has the name of one of our directories is replaced; no link is written through.
    for name in new:
        for parent in name.parents[:-1]:
            if os.path.lexists(target / parent) and not _is_directory(target / parent):
                old.add(parent)
    return {name for name in old if not old & set(name.parents)}


def _move(path: Path, to: Path) -> None:
    """Rename a file, also into a directory that does not exist yet."""
    if not to.parent.exists():
        to.parent.mkdir()
    os.replace(path, to)
