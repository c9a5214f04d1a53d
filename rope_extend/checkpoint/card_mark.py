"""The mark in a model card by which we recognise a card that we wrote and nobody has edited."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

CARD_NAME = "README.md"
_MARK = re.compile(r"\n<!-- written by rope_extend, ([0-9a-f]{64}) -->\n\Z")


def marked(text: str) -> str:
    """The text of a card with our mark."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}\n<!-- written by rope_extend, {digest} -->\n"


def is_our_card(path: Path) -> bool:
    """Whether a file is a card that we wrote and nobody has edited. A link is never ours.

    Raises:
        OSError: the file cannot be read.
    """
    if path.is_symlink() or not path.is_file():
        return False
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    mark = _MARK.search(text)
    return mark is not None and hashlib.sha256(text[: mark.start()].encode()).hexdigest() == mark[1]
