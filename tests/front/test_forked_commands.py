"""A command that a test starts has a time limit, and what it has started ends with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from forked_commands import Commands, running

STARTS_ANOTHER = """
import os, time
from pathlib import Path
child = os.fork()
if child:
    print("started", flush=True)
    Path("child.txt").write_text(str(child))
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_command_that_hangs_is_killed_with_what_it_started(commands: Commands, tmp_path: Path) -> None:
    process = commands.start("-c", STARTS_ANOTHER, where=tmp_path)
    child = tmp_path / "child.txt"
    until = time.monotonic() + 60
    while not (child.exists() and child.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert running(process)
    assert running(int(child.read_text()))
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"killed after 0\.2 s: started"):
        commands.wait(0.2)
    assert time.monotonic() - begun < 60
    assert not running(process)
    while running(int(child.read_text())):
        assert time.monotonic() < until + 60
        time.sleep(0.01)
    with pytest.raises(AssertionError, match=r"killed after 0\.2 s"):
        commands.run("-c", "import time; time.sleep(600)", limit=0.2)
    assert commands.run("-c", "import os; print(os.getpgid(0) == os.getpid())") == "True\n"


@pytest.mark.parametrize("end", ["its input ends", "SIGTERM"])
def test_a_command_ends_with_the_process_that_started_it(tmp_path: Path, end: str) -> None:
    commands = Commands(tmp_path, libraries=())
    process = commands.start("-c", "import time; time.sleep(600)")
    server = commands._server
    assert server.stdin is not None
    server.stdin.close() if end == "its input ends" else server.terminate()
    assert server.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    with pytest.raises(ConnectionError, match="has ended"):
        commands.wait()
    commands.close()


@pytest.mark.slow
def test_a_command_that_ends_is_not_taken_for_another(commands: Commands) -> None:
    """What is left of a test that failed does not answer for the next command."""
    left = commands.start("-c", "import time; time.sleep(600)")
    assert commands.start("-c", "raise SystemExit(7)") != left
    assert commands.wait() == 7
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)
