"""Progress of long work: tqdm's bar, drawn often on a terminal, and as a line now and then elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINE_EVERY = 30.0
"""Seconds between lines of progress, where there is no terminal; shorter work has none."""


def progress_bar(*, shown: bool = True, **settings: Any) -> Any:
    """A tqdm bar on the standard error.

    Args:
        shown: whether progress is shown at all.
        settings: arguments of `tqdm`, such as `total`, `unit` and `desc`.
    """
    if not sys.stderr.isatty():
        settings |= {"miniters": 1, "mininterval": LINE_EVERY, "maxinterval": LINE_EVERY, "delay": LINE_EVERY}
    return tqdm(disable=not shown, **settings)
