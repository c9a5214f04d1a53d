"""Commands and programs in processes of their own, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT = 900.0
"""Seconds that a command may take: many times what the longest takes on a slow machine."""


def running(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Commands:
    """Starts processes one after the other.

    Args:
        where: a directory for what they print.
        environment: variables that they have in addition to those of this process.
    """

    def __init__(self, where: Path, environment: dict[str, str]) -> None:
        self._output = where / "printed.txt"
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**os.environ, "PYTHONPATH": paths, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str, where: Path = ROOT, environment: dict[str, str] | None = None) -> int:
        """Start `rope-extend` with these arguments.

        They may also be what Python gets: `-c` and a program, `-m` and a module with its arguments, or a file
        with its arguments.

        Returns the process id.
        """
        self.close()  # what a test that failed has left
        python = words[0] in ("-c", "-m") or words[0].endswith(".py")
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *(words if python else ("-m", "rope_extend", *words))],
                cwd=where, env={**self._environment, **(environment or {})}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self._process.pid

    def wait(self, limit: float = LIMIT) -> int:
        """The exit status of the process that was started last, negative if a signal ended it.

        Raises:
            AssertionError: it still ran after `limit` seconds, and was killed.
        """
        assert self._process is not None
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"killed after {limit:g} s: {self.printed()[-6000:]}") from None

    def printed(self) -> str:
        """What the process that was started last has printed so far."""
        return self._output.read_text(encoding="utf-8")

    def run(self, *words: str, where: Path = ROOT, environment: dict[str, str] | None = None) -> str:
        """Start a process and wait for its end; returns what it printed.

        Raises:
            AssertionError: it failed.
        """
        self.start(*words, where=where, environment=environment)
        assert self.wait() == 0, f"{words}: {self.printed()[-6000:]}"
        return self.printed()

    def close(self) -> None:
        """End the process that runs, if one does, and those that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
