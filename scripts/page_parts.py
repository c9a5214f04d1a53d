"""Parts of pages that scripts write: filled lines, differences with intervals, and text between two marks."""

from __future__ import annotations

import textwrap

from rope_extend.evaluation.statistics import Difference
from rope_extend.report.tables import interval, signed


def filled(text: str, bullet: str = "") -> str:
    """A paragraph in lines of 110 characters, or an item of a list."""
    return textwrap.fill(
        text, 110, break_long_words=False, break_on_hyphens=False, initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
    )  # fmt: skip


def difference_text(change: Difference) -> str:
    """A difference in nats, with its 95 % interval if there are documents enough."""
    if change.low is None or change.high is None:
        return signed(change.nats)
    return f"{signed(change.nats)} ({interval(change.low, change.high)})"


def with_part(text: str, part: str, begin: str, end: str) -> str:
    """A page with a part between two marks; without the marks it stays as it is."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    return f"{before}{begin}\n{part}\n{end}{after}" if first and last else text
