"""Commands and programs in processes of their own, without the time that imports take.

They are forked from a process that has imported the libraries: that takes three seconds, most of a short
command's time. `rope_extend` is not among them, so each process imports it as a user's process does.
`front/test_quick_start.py` starts Python itself, for all orders of imports.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LIMIT = 900.0
"""Seconds that a command may take: many times what the longest takes on a slow machine."""

LIBRARIES = (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.generation", "peft",
    "datasets", "accelerate", "matplotlib.pyplot",
)  # fmt: skip
"""What commands import: all of it is imported once."""

_SERVER = """
import gc, importlib, json, os, runpy, select, signal, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, tests still have to end what they have started
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "rope_extend" not in sys.modules
gc.collect()
gc.freeze()  # or each process would look for garbage among all that is imported, for two seconds
process = None

def end(*_):
    "Nobody waits for the command any longer. Once this process has ended, it has too."
    if process:
        os.killpg(process, signal.SIGKILL)
        try:
            os.waitpid(process, 0)
        except ChildProcessError:  # the signal came after its end
            pass
    os._exit(0)

signal.signal(signal.SIGTERM, end)
childs_end, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of a command is written to the pipe
while line := sys.stdin.readline():
    words, where, output, environment = json.loads(line)
    process = os.fork()
    os.setpgid(process, process)  # processes that it starts end with it
    if process == 0:
        break
    print(process, flush=True)
    while not (found := os.waitpid(process, os.WNOHANG))[0]:
        if sys.stdin in select.select([sys.stdin, childs_end], [], [])[0]:  # no line comes now: it has ended
            end()
        os.read(childs_end, 4096)
    process = None
    print(os.waitstatus_to_exitcode(found[1]), flush=True)
else:
    sys.exit()
signal.set_wakeup_fd(-1)
for kind in (signal.SIGTERM, signal.SIGCHLD):
    signal.signal(kind, signal.SIG_DFL)
os.close(childs_end)
os.close(wake)
os.chdir(where)
os.environ.update(environment)
for stream, opened in ((0, open(os.devnull)), (1, open(output, "a")), (2, open(output, "a"))):
    os.dup2(opened.fileno(), stream)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore Ctrl-C
if words[0] == "-c":
    sys.argv = words[:1]
    exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
elif words[0].endswith(".py"):
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
else:
    module, *rest = words[1:] if words[0] == "-m" else ["rope_extend", *words]
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


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
        libraries: modules that are imported before they are forked.
    """

    def __init__(
        self,
        where: Path,
        environment: dict[str, str] | None = None,
        libraries: Sequence[str] = LIBRARIES,
    ) -> None:
        self.where = where
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *libraries], bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        )  # fmt: skip
        self._count = 0
        self._running: int | None = None

    def start(self, *words: str, where: Path = ROOT, environment: dict[str, str] | None = None) -> int:
        """Start `rope-extend` with these arguments.

        They may also be what Python gets: `-c` and a program, `-m` and a module with its arguments, or a file
        with its arguments.

        Returns the process id.
        """
        assert self._server.stdin is not None
        self._kill()  # of a test that failed
        self._count += 1
        job = json.dumps([words, str(where), str(self._output), environment or {}])
        self._server.stdin.write(f"{job}\n".encode())
        self._running = self._answer(LIMIT)
        return self._running

    def wait(self, limit: float = LIMIT) -> int:
        """The exit status of the process that was started last, negative if a signal ended it.

        Raises:
            AssertionError: it still ran after `limit` seconds, and was killed.
        """
        try:
            status = self._answer(limit)
        except TimeoutError:
            self._kill()
            raise AssertionError(f"killed after {limit:g} s: {self.printed()[-6000:]}") from None
        self._running = None
        return status

    def _kill(self) -> None:
        """End the process that runs, if one does, and those that it has started."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)
            with suppress(ConnectionError):
                self._answer(LIMIT)
            self._running = None

    def _answer(self, limit: float) -> int:
        """The next number from the process that starts the others.

        Raises:
            TimeoutError: there is none after `limit` seconds.
            ConnectionError: that process has ended.
        """
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], limit)[0]:
            raise TimeoutError
        if not (answer := self._server.stdout.readline()):
            raise ConnectionError("the process that starts commands has ended")
        return int(answer)

    @property
    def _output(self) -> Path:
        return self.where / f"command-{self._count}.txt"

    def printed(self) -> str:
        """What the process that was started last has printed so far."""
        return self._output.read_text(encoding="utf-8")

    def run(
        self,
        *words: str,
        where: Path = ROOT,
        environment: dict[str, str] | None = None,
        limit: float = LIMIT,
    ) -> str:
        """Start a process and wait for its end; returns what it printed.

        Raises:
            AssertionError: it failed, or still ran after `limit` seconds.
        """
        self.start(*words, where=where, environment=environment)
        assert self.wait(limit) == 0, f"{words}: {self.printed()[-6000:]}"
        return self.printed()

    def close(self) -> None:
        """End the process that starts the others."""
        assert self._server.stdin is not None
        self._kill()
        self._server.stdin.close()
        self._server.wait()
