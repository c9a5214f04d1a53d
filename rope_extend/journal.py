"""Finished parts of long work on disk, so that it can be resumed: JSON lines of one writer at a time.

The first line says what the work is: its identity, a dict of plain JSON values. Every other line is a record
of one finished part. Whoever resumes the work has the same identity, or is refused. Numbers are written with
all their digits, so a resumed run decides as one that was not interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from rope_extend.errors import RopeExtendError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Identity = dict[str, Any]
"""Plain JSON values by name. Two pieces of work are the same if all values are equal."""

_IDENTITY = "identity"
"""Key of the first line."""
_BEGINNING = f'{{"{_IDENTITY}": '.encode()
"""The first bytes of a file."""

_written: set[tuple[int, Path]] = set()
"""The directories of which a process is the only writer, with its id: a fork of it is not."""


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What differs between two identities, such as `crop (64 there, None here)`; empty if nothing does."""
    stored, current = (json.loads(json.dumps(values)) for values in (stored, current))
    return ", ".join(
        f"{name} ({stored.get(name)!r} there, {current.get(name)!r} here)"
        for name in {**stored, **current}
        if stored.get(name) != current.get(name)
    )


@contextmanager
def only_writer(directory: Path, work: str) -> Iterator[None]:
    """Be the only process that writes to a directory while the block runs.

    The lock is the system's, on the directory itself. It leaves no file, and ends with the process, however
    that ends. File systems without locks, and Windows, do not notice a second process.

    Args:
        directory: made if it does not exist, and removed if it is still empty at the end.
        work: what the block does, such as `training run`; begins the error message.

    Raises:
        RopeExtendError: another process writes to the directory.
        OSError: the directory cannot be made; see `files.check_creatable`.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    place = os.getpid(), directory.resolve()
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        directory.mkdir(parents=True, exist_ok=True)
        if fcntl is not None:
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                made.clear()  # the other process is about to fill them
                raise RopeExtendError(
                    f"another {work} is writing to {str(directory)!r}; wait until it has ended, or use "
                    "another directory"
                ) from error
            except OSError:  # this file system has no locks
                pass
        _written.add(place)
        stack.callback(_written.discard, place)
        yield


def _remove_empty(directories: list[Path]) -> None:
    for path in directories:
        with suppress(OSError):  # not empty
            path.rmdir()


def writes_to(directory: Path) -> bool:
    """Whether this process is the only writer of a directory already."""
    return (os.getpid(), directory.resolve()) in _written


class Journal:
    """The records of one piece of work, in memory and on disk.

    Nothing is written before the first record. A last line that an interruption cut short is dropped. Two
    processes never write to a file: each is the `only_writer` of its directory, or has a file of its own.

    Args:
        path: the file; None keeps the records in memory alone.
        identity: everything that the records depend on.
        holds: what the records are, such as `evaluations`; part of error messages.
        advice: what to do if the file belongs to other work; ends that error message.
        check: takes each record that is read, and raises an error for a damaged one.

    Attributes:
        records: all records, in the order in which they were written.

    Raises:
        RopeExtendError: the file belongs to other work, it cannot be opened, or a line is damaged.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Identity,
        *,
        holds: str,
        advice: str = "use another directory, or overwrite=True to start again",
        check: Callable[[dict[str, Any]], object] = lambda record: None,
    ) -> None:
        self.path, self.identity, self._holds, self._check = path, identity, holds, check
        self.records: list[dict[str, Any]] = []
        self._descriptor: int | None = None
        self._size = 0
        if path is not None and path.exists():
            self._open(path, os.O_RDWR)
            try:
                self._read(path, advice)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the records stay in memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record and write its line; the first record makes the file.

        Args:
            record: plain JSON values by name, without infinite numbers and NaN.

        Raises:
            RopeExtendError: the line cannot be written, for example because the disk is full. The file then
                ends with the record before it.
        """
        line = json.dumps(record, allow_nan=False)
        if self.path is not None:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            first = json.dumps({_IDENTITY: self.identity}) + "\n" if self._size == 0 else ""
            self._write(self.path, f"{first}{line}\n".encode())
        self.records.append(json.loads(line))  # as it will be read again

    def _open(self, path: Path, flags: int) -> None:
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise RopeExtendError(f"cannot write {str(path)!r}: {error}; use another directory") from error

    def _read(self, path: Path, advice: str) -> None:
        content = path.read_bytes()
        self._size = content.rfind(b"\n") + 1
        if not self._size and not content.startswith(_BEGINNING[: len(content)]):
            raise RopeExtendError(f"{str(path)!r} holds no {self._holds}; {advice}")
        lines = content[: self._size].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                values = json.loads(line)
                if not isinstance(values, dict):
                    raise ValueError("not an object")
                if number > 1:
                    self._check(values)
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                ArithmeticError,
                RecursionError,
            ) as error:
                raise RopeExtendError(
                    f"line {number} of {str(path)!r} is damaged ({type(error).__name__}: {error}); "
                    f"{advice if number == 1 else 'delete the line'}"
                ) from error
            stored = values.get(_IDENTITY)
            if number > 1:
                self.records.append(values)
            elif changed := differences(stored if isinstance(stored, dict) else {}, self.identity):
                raise RopeExtendError(
                    f"{str(path)!r} holds {self._holds} of other work, which differ in {changed}; {advice}"
                )
        os.truncate(path, self._size)  # a file of other work is left as it is

    def _write(self, path: Path, content: bytes) -> None:
        assert self._descriptor is not None
        try:
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            written = 0
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise RopeExtendError(
                f"cannot write {str(path)!r}: {error.strerror}; free space on the disk, and resume"
            ) from error
        self._size += len(content)
