"""Commands and programs in processes of their own, without the time that imports take.

They are forked from a process that has imported the libraries: that takes three seconds, most of a short
command's time. `rope_extend` is not among them, so each process imports it as a user's process does.
`front/test_quick_start.py` starts Python itself, for all orders of imports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

_SERVER = """
import importlib, json, os, runpy, signal, sys

for name in (
    "torch", "transformers", "transformers.models.llama.modeling_llama", "transformers.generation", "peft",
    "datasets", "accelerate", "matplotlib.pyplot",
):
    importlib.import_module(name)
assert "rope_extend" not in sys.modules
for line in sys.stdin:
    words, where, output, environment = json.loads(line)
    process = os.fork()
    if process == 0:
        break
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
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


class Commands:
    """Starts processes one after the other.

    Args:
        where: a directory for what they print.
        environment: variables that they have in addition to those of this process.
    """

    def __init__(self, where: Path, environment: dict[str, str] | None = None) -> None:
        self.where = where
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
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
        if self._running is not None:  # of a test that failed
            with suppress(ProcessLookupError):
                os.kill(self._running, signal.SIGKILL)
            self.wait()
        self._count += 1
        job = json.dumps([words, str(where), str(self._output), environment or {}])
        print(job, file=self._server.stdin, flush=True)
        self._running = self._answer()
        return self._running

    def wait(self) -> int:
        """The exit status of the process that was started last, negative if a signal ended it."""
        status = self._answer()
        self._running = None
        return status

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    @property
    def _output(self) -> Path:
        return self.where / f"command-{self._count}.txt"

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
        """End the process that starts the others."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
