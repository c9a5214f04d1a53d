"""Progress of long work: a bar on a terminal, and lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import tqdm

LINE_EVERY = 30.0
"""Seconds between lines of progress, where there is no terminal."""

LINE = "{desc}: {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
"""A line of progress, in tqdm's terms: as its bar, without the bar."""


class _Lines:
    """A file for tqdm that logs what would be drawn."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger

    def write(self, text: str) -> None:
        if line := text.strip():
            self.logger.info("%s", line)

    def flush(self) -> None:
        """Nothing is kept back."""


def progress_bar(logger: logging.Logger, *, shown: bool = True, **settings: Any) -> Any:
    """A tqdm bar, which is drawn on a terminal. Elsewhere it is a line in the log now and then.

    Work that takes less than `LINE_EVERY` seconds has no line.

    Args:
        logger: the log of the lines.
        shown: whether progress is shown at all.
        settings: arguments of `tqdm`, such as `total`, `unit` and `desc`.
    """
    if not shown or sys.stderr.isatty():
        return tqdm(disable=not shown, **settings)
    every = LINE_EVERY
    return tqdm(
        file=_Lines(logger), bar_format=LINE, miniters=1, mininterval=every, maxinterval=every, delay=every,
        **settings,
    )  # fmt: skip
