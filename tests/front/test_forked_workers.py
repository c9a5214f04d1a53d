"""`--workers`: forked processes run each test once, and every kind of result is reported."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_commands import running
from forked_workers import BLOCK, add_option, in_blocks

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


def start(directory: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """pytest, with a file for what it prints: what tests leave behind keeps a pipe open."""
    with (directory / "output.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "-ra", f"--basetemp={directory / 'temp'}", *options],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": str(TESTS),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                **environment,
            },
            process_group=0,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def ended(process: subprocess.Popen[str], directory: Path) -> subprocess.CompletedProcess[str]:
    try:
        code = process.wait(120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return subprocess.CompletedProcess(process.args, code, (directory / "output.txt").read_text(), "")


def run(directory: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ended(start(directory, *options, **environment), directory)


def appears(path: Path) -> str:
    """The text of a file, as soon as it has one."""
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return path.read_text()


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


PARALLEL = """
import torch
torch.ones(1 << 20).add_(1)

def test_parallel_operation():
    assert torch.get_num_threads() == 2
    assert torch.ones(1 << 20).add_(1).sum() == 2 << 20
"""


@pytest.mark.slow
def test_threads_of_a_worker_are_its_own(tmp_path: Path) -> None:
    """Threads of the parent do not survive the fork: a parallel operation would wait for them for ever."""
    configure = "def pytest_configure(config):\n    forked_workers.one_thread()\n"
    limit = "forked_workers.LIMIT = 20.0\n"
    (tmp_path / "conftest.py").write_text(CONFTEST + configure + limit)
    (tmp_path / "test_parallel.py").write_text(PARALLEL)
    done = run(tmp_path, "--workers", "2", "--threads", "2", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stdout


LEAVES_A_CHILD = """
import os, time
from pathlib import Path

def test_leaves_a_child():
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    Path("child.txt").write_text(str(child))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["pass", "os._exit(3)"])
def test_a_worker_that_leaves_a_process_behind_is_not_waited_for(tmp_path: Path, rest: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaves.py").write_text(f"{LEAVES_A_CHILD}    {rest}\n")
    begun = time.monotonic()
    done = run(tmp_path, "--workers", "2")
    assert time.monotonic() - begun < 60
    os.kill(int((tmp_path / "child.txt").read_text()), signal.SIGKILL)
    assert done.returncode == (rest != "pass"), done.stdout
    assert ("ended with exit code 3 while it ran" in done.stdout) == (rest != "pass")


@pytest.mark.slow
def test_a_test_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST + "forked_workers.LIMIT = 0.5\n")
    (tmp_path / "test_hangs.py").write_text("import time\n\ndef test_hangs():\n    time.sleep(100)\n")
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    done = run(tmp_path, "--workers", "2")
    assert "while it ran test_hangs.py::test_hangs for more than 0.5 s" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


COMMAND = """
import pytest
from forked_commands import Commands

@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"), libraries=())
    yield commands
    commands.close()

def test_command(commands, tmp_path):
    commands.run("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_ends_the_run_and_the_command_that_a_test_started(tmp_path: Path, workers: str) -> None:
    """SIGINT for the whole group, as a terminal sends it; the command has a group of its own."""
    heard = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # not in the background
    )
    (tmp_path / "conftest.py").write_text(CONFTEST + heard)
    (tmp_path / "test_command.py").write_text(COMMAND)
    (tmp_path / "test_sleep.py").write_text("import time\n\ndef test_sleep():\n    time.sleep(100)\n")
    process = start(tmp_path, "--workers", workers)
    until = time.monotonic() + 60
    while not (printed := list(tmp_path.glob("temp/**/command-1.txt"))):
        assert time.monotonic() < until
        time.sleep(0.01)
    command = int(appears(printed[0]))
    os.killpg(process.pid, signal.SIGINT)
    done = ended(process, tmp_path)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "KeyboardInterrupt" in done.stdout
    assert "Traceback" not in done.stdout
    until = time.monotonic() + 60
    while running(command):  # what a killed worker has started ends a moment after it
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--workers", "x", "needs a number of 1 or more, or auto, got 'x'"),
        ("--workers", "0", "needs a number of 1 or more, or auto, got '0'"),
        ("--workers", "-2", "needs a number of 1 or more, or auto, got '-2'"),
        ("--threads", "4,2", "needs a number of 1 or more, got '4,2'"),
    ],
)
def test_another_number_is_refused(
    option: str, given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_option(SimpleNamespace(addoption=parser.add_argument))  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        parser.parse_args([f"{option}={given}"])
    assert f"argument {option}: {message}" in capsys.readouterr().err
