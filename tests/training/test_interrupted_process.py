"""Ctrl-C on the real commands in their own processes: they stop at once, and resume to the same numbers."""

from __future__ import annotations

import json
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


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_an_interrupted_evaluation_resumes_to_the_same_numbers(
    texts: Path, tmp_path: Path, commands: Commands
) -> None:
    """Interrupted when each row has some documents."""
    command = f"evaluate {MODEL_DIR} --data {texts} --lengths 512 --methods yarn,linear --retrieval 1"
    out = tmp_path / "stopped"

    def ready() -> bool:
        return len(finished_in(out)) >= 10

    said = interrupted(commands, f"{command} --output {out}", ready)
    assert "the same command with --resume continues" in said
    assert not (out / "results.jsonl").exists()
    assert 10 <= len(finished_in(out)) < 27  # eight documents and a batch of passkeys of three rows
    main(shlex.split(f"{command} --output {out} --resume"))
    main(shlex.split(f"{command} --output {tmp_path / 'whole'}"))
    again, whole = read_results(out), read_results(tmp_path / "whole")
    assert [one.label for one in again] == ["yarn", "linear", "none, cropped to 256"]
    assert [numbers(one.to_dict()) for one in again] == [numbers(one.to_dict()) for one in whole]
    assert {len(one.retrieval.cells) for one in again} == {5}


@pytest.mark.slow
def test_interrupted_retrieval_resumes_to_the_same_answers(tmp_path: Path, commands: Commands) -> None:
    command = f"retrieve {MODEL_DIR} --lengths 256,320 --depths 2 --trials 4 --methods none,yarn"
    out = tmp_path / "stopped"
    cells = out / "cells.jsonl"
    said = interrupted(commands, f"{command} --output {out}", lambda: len(finished_in(out)) >= 2)
    assert "the same command with --resume continues" in said
    assert not (out / "results.jsonl").exists()
    before = cells.read_text()
    main(shlex.split(f"{command} --output {out} --resume"))
    assert cells.read_text().startswith(before[: before.rfind("\n") + 1])  # nothing is answered twice
    main(shlex.split(f"{command} --output {tmp_path / 'whole'}"))
    resumed, whole = (read_results(directory) for directory in (out, tmp_path / "whole"))
    assert [row.retrieval for row in resumed] == [row.retrieval for row in whole]
    assert answers(cells) == answers(tmp_path / "whole" / "cells.jsonl")


def numbers(value: Any) -> Any:
    """All measurements, without time and memory."""
    cost = ("seconds", "peak_memory_bytes", "forward_tokens", "tokens_per_second")
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items() if name not in cost}
    return [numbers(one) for one in value] if isinstance(value, list) else value


def answers(file: Path) -> list[Any]:
    """The trials of all cells, without the first line, which is the identity."""
    return [json.loads(line)["trials"] for line in file.read_text().splitlines()[1:]]
