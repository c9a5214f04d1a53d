"""`--workers N`: tests are collected once, and run by N processes that are forked then.

A worker that imports and collects by itself, as those of pytest-xdist do, takes eight seconds of CPU time
for that. A fork has it all. A worker that is done with a block of tests takes the next one.

OpenMP's threads do not survive a fork: a worker would wait for them for ever, if its parent had several.
So tests are collected with one thread, and `--threads N` counts from the fork on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe, Value
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

BLOCK = 120
"""Tests of one file that one worker runs, at most: they share its fixtures."""


LIMIT = 3600.0
"""Seconds that one test may take in a worker: many times what the longest takes."""

GRACE = 5.0
"""Seconds that workers have to tear down their fixtures when the run is interrupted."""

POLL = 0.5
"""Seconds after which workers are looked at that send nothing."""


def add_option(parser: pytest.Parser) -> None:
    """Let the command line say how many processes run the tests, and how many threads each of them has."""
    parser.addoption(
        "--workers",
        default="1",
        type=_workers,
        help="processes that run the tests: a number, or auto for one for each core",
    )
    parser.addoption(
        "--threads",
        default=os.environ.get("OMP_NUM_THREADS", "1"),
        type=_number,
        help="threads of torch in each of them; the default is OMP_NUM_THREADS, or else 1",
    )


def _number(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"needs a number of 1 or more, got {text!r}")
    return int(text)


def _workers(text: str) -> int:
    if text == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return _number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(str(error).replace("or more", "or more, or auto")) from None


def one_thread() -> None:
    """Keep this process, in OpenMP and in MKL, to one thread until the tests run."""
    import torch

    torch.set_num_threads(1)


def _set_threads(config: pytest.Config) -> None:
    """Give this process the threads that the command line asks for.

    After a fork, torch makes its pool of threads anew when it is next used. If two threads do so at once, as
    in loading weights, one may find none and raise "Invalid thread pool!": this makes it.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(config.getoption("--threads"))


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
    workers = config.getoption("--workers")
    if workers < 2 or config.option.collectonly or session.testsfailed:
        _set_threads(config)
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
    running = [_fork(session, number, take) for number in range(workers)]
    try:
        while running:
            ready = wait([worker.receiver for worker in running], POLL)
            for worker in list(running):
                worker.look()
                if worker.receiver in ready or worker.receiver.poll():
                    worker.receive(config)
                elif worker.status is not None:
                    worker.report_death(config)
                if worker.done:
                    running.remove(worker)
            if session.shouldfail or session.shouldstop:
                begun.value = len(blocks)
    finally:
        _stop([worker.pid for worker in running if worker.status is None])  # after an error in this process
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


class _Worker:
    """A worker as its parent sees it."""

    def __init__(self, receiver: Connection, pid: int) -> None:
        self.receiver, self.pid = receiver, pid
        self.done = False
        self.status: int | None = None
        """What `os.waitpid` gave, once it has ended."""
        self._test: tuple[str, Any] = ("no test", ("", None, ""))
        self._until = float("inf")
        self._hung = False

    def look(self) -> None:
        """Find out whether it has ended: what a test has forked may keep the pipe open. End what hangs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        if self.status is None and time.monotonic() > self._until:
            os.kill(self.pid, signal.SIGABRT)  # pytest prints where it was
            self._hung, self._until = True, float("inf")

    def receive(self, config: pytest.Config) -> None:
        """Report a message that it has sent."""
        try:
            kind, *values = self.receiver.recv()
        except EOFError:
            self.report_death(config)
            return
        if kind == "ended":
            self._reap()
        elif kind == "started":
            self._test, self._until = (values[0], values[1]), time.monotonic() + LIMIT
        elif kind == "finished":
            self._until = float("inf")
            config.hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
        elif kind == "warning":
            config.hook.pytest_warning_recorded.call_historic(kwargs=pickle.loads(values[0]))
        else:
            report = config.hook.pytest_report_from_serializable(config=config, data=values[0])
            config.hook.pytest_runtest_logreport(report=report)

    def report_death(self, config: pytest.Config) -> None:
        """Report a failure, as it has not run all that it has taken."""
        code, (nodeid, location) = os.waitstatus_to_exitcode(self._reap()), self._test
        why = f" for more than {LIMIT:g} s" if self._hung else ""
        text = (
            f"a worker ended with exit code {code} while it ran {nodeid}{why}; "
            "tests that it had taken are not run"
        )
        config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(nodeid, location, {}, "failed", text, "call")
        )

    def _reap(self) -> int:
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        self.receiver.close()
        self.done = True
        return self.status


def _stop(running: list[int]) -> None:
    """End processes: they have time to tear down, and more of it after SIGTERM, before they are killed."""
    for kind in (0, signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            os.kill(pid, kind)
        until = time.monotonic() + GRACE
        with suppress(KeyboardInterrupt):  # a second one ends the wait
            while running and time.monotonic() < until:
                running = [pid for pid in running if not os.waitpid(pid, os.WNOHANG)[0]]
                time.sleep(0.01)


def _fork(session: pytest.Session, number: int, take: Callable[[], list[pytest.Item]]) -> _Worker:
    """Start a worker."""
    receiver, sender = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        sender.close()
        return _Worker(receiver, pid)
    try:
        receiver.close()
        _work(session, number, take, sender)
        sender.close()
        os._exit(0)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
        os._exit(1)


def _work(
    session: pytest.Session, number: int, take: Callable[[], list[pytest.Item]], sender: Connection
) -> None:
    """Run blocks of tests until there are none, or until a failure stops the run."""
    config = session.config
    _set_threads(config)
    config._tmp_path_factory._basetemp = config._tmp_path_factory.getbasetemp() / f"worker-{number}"
    config._tmp_path_factory._basetemp.mkdir()
    # Both would otherwise write to one temporary file.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, sender))
    try:
        while not (session.shouldfail or session.shouldstop) and (block := take()):
            # What the session has is kept from block to block. A block is not taken before it can begin.
            for item, successor in itertools.zip_longest(block, block[1:], fillvalue=session):
                sender.send(("started", item.nodeid, item.location))
                config.hook.pytest_runtest_protocol(item=item, nextitem=successor)
                sender.send(("finished", item.nodeid, item.location))
                if session.shouldfail or session.shouldstop:
                    break
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave what fixtures have started
        raise
    finally:
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
