"""Ctrl-C on the real commands in their own processes: they stop at once, and resume to the same numbers."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands

from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.evaluation.cells import finished_in
from rope_extend.evaluation.report_files import read_results

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")


def interrupted(commands: Commands, command: str, ready: Callable[[], bool]) -> str:
    """Start a command, press Ctrl-C once it is ready, and return its output."""
    process = commands.start(*shlex.split(command))
    deadline = time.monotonic() + 240
    while not ready():
        os.kill(process, 0)  # raises if it has ended
        assert time.monotonic() < deadline, f"it never came so far: {commands.printed()}"
        time.sleep(0.002)
    os.kill(process, signal.SIGINT)
    status = commands.wait()
    assert status == 130, commands.printed()
    assert "Traceback" not in commands.printed()
    return commands.printed()


@pytest.fixture
def texts(work: Path, tmp_path: Path) -> Path:
    """Eight documents, so that there is time to press Ctrl-C."""
    (tmp_path / "data").mkdir()
    words = (work / "data" / "a.txt").read_text()
    for number in range(8):
        (tmp_path / "data" / f"{number:02d}.txt").write_text(f"{number} {words}")
    return tmp_path / "data"


COMMANDS = {
    "evaluate": ("--data {texts} --lengths 512 --methods yarn,linear --retrieval 1", 10),
    "retrieve": ("--lengths 256,320 --depths 2 --trials 4 --methods none,yarn", 2),
}
"""Flags of a command, and the number of finished cells after which it is interrupted."""


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_measurement_resumes_to_the_same_numbers(
    name: str, texts: Path, tmp_path: Path, commands: Commands
) -> None:
    flags, least = COMMANDS[name]
    command, out = f"{name} {MODEL_DIR} {flags.format(texts=texts)}", tmp_path / "stopped"
    said = interrupted(commands, f"{command} --output {out}", lambda: len(finished_in(out)) >= least)
    assert "the same command with --resume continues" in said
    assert not (out / "results.jsonl").exists()
    before = (out / "cells.jsonl").read_text()
    main(shlex.split(f"{command} --output {out} --resume"))
    assert (out / "cells.jsonl").read_text().startswith(before[: before.rfind("\n") + 1])  # nothing twice
    main(shlex.split(f"{command} --output {tmp_path / 'whole'}"))
    again, whole = read_results(out), read_results(tmp_path / "whole")
    assert len(finished_in(out)) == len(finished_in(tmp_path / "whole")) > len(before.splitlines())
    assert [numbers(one.to_dict()) for one in again] == [numbers(one.to_dict()) for one in whole]


def numbers(value: Any) -> Any:
    """All measurements, without time and memory."""
    cost = ("seconds", "peak_memory_bytes", "forward_tokens", "tokens_per_second")
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items() if name not in cost}
    return [numbers(one) for one in value] if isinstance(value, list) else value
