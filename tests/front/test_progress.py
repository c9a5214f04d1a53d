"""Progress is a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from rope_extend import progress

logger = logging.getLogger("rope_extend.test")


def work(**settings: object) -> None:
    with progress.progress_bar(logger, total=40, unit="doc", desc="search", **settings) as bar:
        for _ in range(4):
            bar.set_postfix_str("best 3.2 nats", refresh=False)
            bar.update(10)


def test_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "rope_extend")
    work()  # shorter than LINE_EVERY
    assert not caplog.messages
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    work(shown=False)
    assert not caplog.messages
    work()
    assert caplog.messages[1].startswith("search: 10/40 doc [00:00<00:00, ")
    assert caplog.messages[-1].startswith("search: 40/40 doc [00:00<00:00, ")
    assert caplog.messages[-1].endswith("doc/s, best 3.2 nats]")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    caplog.set_level(logging.INFO, "rope_extend")
    work()
    drawn = terminal.getvalue()
    assert "search: 100%|" in drawn
    work(shown=False)
    assert terminal.getvalue() == drawn
    assert not caplog.messages
