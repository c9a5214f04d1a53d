"""Progress is a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import logging
import sys

import pytest

from rope_extend import progress

logger = logging.getLogger("rope_extend.test")


def work(*, shown: bool = True) -> None:
    with progress.progress_bar(logger, shown=shown, total=40, unit="doc", desc="search") as bar:
        for _ in range(4):
            bar.set_postfix_str("best 3.2 nats", refresh=False)
            bar.update(10)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_on_a_terminal_and_lines_elsewhere(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    caplog.set_level(logging.INFO, "rope_extend")
    if not terminal:
        work()  # shorter than LINE_EVERY
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    work(shown=False)
    assert not caplog.messages
    assert capsys.readouterr().err == ""
    work()
    assert ("search: 100%|" in capsys.readouterr().err) == terminal
    assert bool(caplog.messages) != terminal
    if not terminal:
        assert caplog.messages[1].startswith("search: 10/40 doc [00:00<00:00, ")
        assert caplog.messages[-1].startswith("search: 40/40 doc [00:00<00:00, ")
        assert caplog.messages[-1].endswith("doc/s, best 3.2 nats]")
