"""Run a script in several processes that find each other, as under `torchrun`.

The processes are forked from one that has imported what scripts import: importing takes far longer than the
scripts. `training/test_launch.py` and `models/test_processes.py` use `torchrun` itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

TIMEOUT = 280
"""Seconds."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "accelerate", "datasets", "matplotlib.pyplot", "peft", "pytest", "safetensors.torch",
    "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "rope_extend.training.finetune",
])  # fmt: skip


def launch(
    script: str, *arguments: str, where: Path, environment: dict[str, str] | None = None, processes: int = 2
) -> str:
    """Run a script in several processes; what they printed, one process after the other.

    Raises:
        AssertionError: One of them failed; the message is what it wrote to stderr.
    """
    path = where / "script.py"
    path.write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        **(environment or {}),
    }  # fmt: skip
    outputs = [where / f"process-{rank}" for rank in range(processes)]
    running = [
        _FORKS.Process(
            target=_run,
            args=(path, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, outputs[rank]),
        )
        for rank in range(processes)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(TIMEOUT)
    for process, output in zip(running, outputs, strict=True):
        process.kill()
        assert process.exitcode == 0, output.with_suffix(".err").read_text()[-6000:]
    return "".join(output.with_suffix(".out").read_text() for output in outputs)


def _run(path: Path, arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    """In a forked process: the script as `__main__`, with files for what it prints."""
    os.environ.update(environment)
    sys.argv = [str(path), *arguments]
    for stream, kind in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        with output.with_suffix(kind).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    runpy.run_path(str(path), run_name="__main__")
    atexit._run_exitfuncs()  # a forked process ends without them
