"""`--workers N`: tests are collected once, and run by N processes that are forked then.

A worker that imports and collects by itself, as those of pytest-xdist do, takes eight seconds of CPU time
for that. A fork has it all. A worker that is done with a block of tests takes the next one.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe, Value
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

BLOCK = 120
"""Tests of one file that one worker runs, at most: they share its fixtures."""


def add_option(parser: pytest.Parser) -> None:
    """Let the command line say how many processes run the tests."""
    parser.addoption(
        "--workers", default="1", help="processes that run the tests: a number, or auto for one for each core"
    )


def workers(config: pytest.Config) -> int:
    """The number of processes that the command line asks for; `auto` is one for each core."""
    number = config.getoption("--workers")
    if number != "auto":
        return int(number)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_blocks(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests as blocks. Those with long tests come first: at the end, no process waits for one of them."""
    files = [list(tests) for _, tests in itertools.groupby(items, lambda item: item.path)]
    blocks = [tests[start : start + BLOCK] for tests in files for start in range(0, len(tests), BLOCK)]
    return sorted(blocks, key=lambda block: -sum(map(_seconds, block)))


def _seconds(item: pytest.Item) -> float:
    """The time that the mark of a long test gives: `slow(seconds=100)`."""
    return max((mark.kwargs.get("seconds", 0) for mark in item.iter_markers("slow")), default=0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Fork the workers, and report what they send."""
    config = session.config
    if workers(config) < 2 or config.option.collectonly or session.testsfailed:
        return None
    blocks = in_blocks(session.items)
    begun = Value("i", 0)

    def take() -> list[pytest.Item]:
        """The next block; an empty one if there is none."""
        with begun.get_lock():
            begun.value += 1
            return blocks[begun.value - 1] if begun.value <= len(blocks) else []

    config._tmp_path_factory.getbasetemp()
    config.pluginmanager.getplugin("terminalreporter").showfspath = False
    sys.stdout.flush()
    forked = dict(_fork(session, number, take) for number in range(workers(config)))
    running: dict[Connection, tuple[str, Any]] = {}
    ended: set[Connection] = set()
    try:
        while forked:
            for receiver in wait(list(forked)):
                try:
                    kind, *values = receiver.recv()
                except EOFError:
                    _, status = os.waitpid(forked.pop(receiver), 0)
                    if receiver not in ended:
                        _report_death(config, status, *running.get(receiver, ("no test", ("", None, ""))))
                    continue
                if kind == "ended":
                    ended.add(receiver)
                elif kind == "started":
                    running[receiver] = tuple(values)
                elif kind == "finished":
                    config.hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
                elif kind == "warning":
                    config.hook.pytest_warning_recorded.call_historic(kwargs=pickle.loads(values[0]))
                else:
                    report = config.hook.pytest_report_from_serializable(config=config, data=values[0])
                    config.hook.pytest_runtest_logreport(report=report)
            if session.shouldfail or session.shouldstop:
                begun.value = len(blocks)
    finally:
        for pid in forked.values():  # after an error in this process
            os.kill(pid, 15)
            os.waitpid(pid, 0)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _fork(
    session: pytest.Session, number: int, take: Callable[[], list[pytest.Item]]
) -> tuple[Connection, int]:
    """Start a worker: the connection from it, and its process id."""
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        sender.close()
        return receiver, pid
    try:
        receiver.close()
        _work(session, number, take, sender)
        sender.close()
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(1)


def _work(
    session: pytest.Session, number: int, take: Callable[[], list[pytest.Item]], sender: Connection
) -> None:
    """Run blocks of tests until there are none, or until a failure stops the run."""
    if torch := sys.modules.get("torch"):
        # After a fork, torch makes its pool of threads anew when it is next used. If two threads do so at
        # once, as in loading weights, one may find none and raise "Invalid thread pool!".
        torch.set_num_threads(torch.get_num_threads())
    config = session.config
    config._tmp_path_factory._basetemp = config._tmp_path_factory.getbasetemp() / f"worker-{number}"
    config._tmp_path_factory._basetemp.mkdir()
    # Both would otherwise write to one temporary file.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, sender))
    while not (session.shouldfail or session.shouldstop) and (block := take()):
        # What the session has is kept from block to block. A block is not taken before it can begin.
        for item, successor in itertools.zip_longest(block, block[1:], fillvalue=session):
            sender.send(("started", item.nodeid, item.location))
            config.hook.pytest_runtest_protocol(item=item, nextitem=successor)
            sender.send(("finished", item.nodeid, item.location))
            if session.shouldfail or session.shouldstop:
                break
    session._setupstate.teardown_exact(None)
    sender.send(("ended",))  # a test may end the process with exit code 0, and others would be lost


class _Sender:
    """A plugin of a worker that sends reports and warnings."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self.config, self.sender = config, sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sender.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        values = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        try:
            self.sender.send(("warning", pickle.dumps(values)))
        except Exception:  # a warning with a value that cannot be sent is only not in the summary
            return


def _report_death(config: pytest.Config, status: int, nodeid: str, location: Any) -> None:
    code = os.waitstatus_to_exitcode(status)
    text = f"a worker ended with exit code {code} while it ran {nodeid}; tests that it had taken are not run"
    config.hook.pytest_runtest_logreport(
        report=pytest.TestReport(nodeid, location, {}, "failed", text, "call")
    )
