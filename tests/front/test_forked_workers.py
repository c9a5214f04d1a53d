"""`--workers`: forked processes run each test once, and every kind of result is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_workers import BLOCK, in_blocks

TESTS = Path(__file__).parents[1]

CONFTEST = """
import forked_workers
pytest_plugins = ["forked_workers"]
def pytest_addoption(parser):
    forked_workers.add_option(parser)
"""

MODULE = """
import os, time, warnings
from pathlib import Path
import pytest

def test_two_workers_run_at_once():
    Path(f"{__name__}.begun").touch()
    until = time.monotonic() + 60
    while len(list(Path().glob("*.begun"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)

@pytest.mark.parametrize("number", range(6))
def test_runs_once(number, tmp_path):
    with open("ran.txt", "a") as file:
        file.write(f"{__name__} {number} {os.getpid()} {tmp_path}\\n")
"""

FIXTURES = """
import os
import pytest

@pytest.fixture(scope="session")
def of_the_session():
    with open("made.txt", "a") as file:
        file.write(f"session {os.getpid()}\\n")
    yield
    with open("made.txt", "a") as file:
        file.write(f"end {os.getpid()}\\n")
"""

OTHERS = """
def test_fails():
    print("what the test printed")
    assert 1 == 2

def test_warns():
    warnings.warn("a warning of a worker")

def test_is_skipped():
    pytest.skip("for a reason")
"""


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", f"--basetemp={directory / 'temp'}", *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_test_runs_once_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(MODULE)
    (tmp_path / "test_two.py").write_text(MODULE + OTHERS)
    done = run(tmp_path, "--workers", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 15 passed, 1 skipped" in done.stdout
    for text in ("assert 1 == 2", "what the test printed", "a warning of a worker", "for a reason"):
        assert text in done.stdout
    ran = [line.split() for line in (tmp_path / "ran.txt").read_text().splitlines()]
    assert sorted(line[:2] for line in ran) == [
        [f"test_{name}", str(n)] for name in ("one", "two") for n in range(6)
    ]
    assert len({process for *_, process, _ in ran}) == 2
    assert len({path for *_, path in ran}) == 12


def test_a_fixture_of_the_session_is_made_once_in_each_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST + FIXTURES)
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text("def test_first(of_the_session):\n    pass\n")
    done = run(tmp_path, "--workers", "2")
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    made = (tmp_path / "made.txt").read_text().splitlines()
    assert len(made) == len(set(made)) <= 4
    assert len([line for line in made if line.startswith("end")]) == len(made) / 2


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_dies_is_a_failure(tmp_path: Path, code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dies.py").write_text(f"import os\n\ndef test_dies():\n    os._exit({code})\n")
    done = run(tmp_path, "--workers", "2")
    assert done.returncode == 1
    assert f"ended with exit code {code} while it ran test_dies.py::test_dies" in done.stdout


def test_blocks_with_long_tests_are_the_first() -> None:
    def tests(name: str, *seconds: float) -> list[Any]:
        marks = [[pytest.mark.slow(seconds=each).mark, pytest.mark.slow.mark] for each in seconds]
        return [
            SimpleNamespace(path=Path(name), name=f"{name}{number}", iter_markers=lambda _, own=own: own)
            for number, own in enumerate(marks)
        ]

    short, long, longest = tests("short", 0, 0), tests("long", 30, 30), tests("longest", 0, 50, 40)
    many = tests("many", *[0] * (BLOCK + 1))
    blocks = in_blocks([*short, *long, *many, *longest])
    assert blocks == [longest, long, short, many[:BLOCK], many[BLOCK:]]


def test_the_first_failure_may_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text("def test_fails():\n    assert 0\n" + MODULE)
    done = run(tmp_path, "--workers", "2", "-x")
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert not (tmp_path / "ran.txt").exists()
