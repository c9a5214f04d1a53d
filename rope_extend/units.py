"""Lengths, sizes and durations as people write them."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import SupportsIndex

from rope_extend.errors import RopeExtendError

_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(length: str | SupportsIndex) -> int:
    """Turn `"32k"`, `"1M"`, `"4096"` or `4096` into a number of tokens; k is 1024, M is 1024².

    Raises:
        RopeExtendError: for anything that is not a whole, positive number of tokens.
    """
    tokens: float | None = None
    if isinstance(length, str):
        match = re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([km]?)\s*", length, re.IGNORECASE | re.ASCII)
        if match and "." in match[1]:
            tokens = float(match[1]) * _UNITS[match[2].lower()]
        elif match:
            tokens = int(match[1]) * _UNITS[match[2].lower()]
    elif not isinstance(length, bool) and hasattr(length, "__index__"):
        tokens = operator.index(length)
    if tokens is None or tokens <= 0 or tokens != int(tokens):
        raise RopeExtendError(
            f"not a length in tokens: {length!r}. A length is a whole number above zero, such as 4096, "
            "'4096', '32k' (32 × 1024) or '1M' (1024 × 1024)"
        )
    return int(tokens)


def parse_lengths(lengths: str | SupportsIndex | Iterable[str | SupportsIndex]) -> list[int]:
    """Turn one length or several into numbers of tokens, ascending and each once.

    Raises:
        RopeExtendError: a length that `parse_length` refuses.
    """
    several = [lengths] if isinstance(lengths, str) or not isinstance(lengths, Iterable) else lengths
    return sorted({parse_length(length) for length in several})


def format_length(tokens: int) -> str:
    """Write a number of tokens as people say it: 32768 is `"32k"`, 1048576 is `"1M"`, 1000 is `"1000"`.

    Inverse of `parse_length`.
    """
    for unit, size in (("M", _UNITS["m"]), ("k", _UNITS["k"])):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def memory_size(size: str | SupportsIndex) -> int:
    """Turn `"20GB"`, `"1.5GiB"`, `"512M"` or a number of bytes into a number of bytes.

    Raises:
        RopeExtendError: for anything else, and for a number below a million that has no unit: it was meant
            with one.
    """
    number: float | None = None
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?(b?)", size.strip().lower(), re.ASCII)
        if match:
            digits, prefix, binary, unit = match.groups()
            number = float(digits) * (1024 if binary else 1000) ** " kmgt".index(prefix or " ")
            plain = not prefix and not unit
    elif not isinstance(size, bool) and hasattr(size, "__index__"):
        number, plain = operator.index(size), True
    if number is None or number < 1:
        raise RopeExtendError(
            f"not a size in memory: {size!r}. Give a size with its unit, such as 20GB or 512MiB"
        )
    if plain and number < 1e6:
        raise RopeExtendError(
            f"not a size in memory: {size!r} is only {number:.0f} bytes. Give the unit, such as {size}GB"
        )
    return int(number)


def format_bytes(count: float) -> str:
    """A number of bytes in GB or MB, with one decimal."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def format_duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours, such as `42 s` or `3.5 h`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def parse_duration(duration: str | float) -> float:
    """Turn `"30min"`, `"2h"`, `"90s"` or a number of seconds into seconds.

    Raises:
        RopeExtendError: for anything that is not a duration above zero.
    """
    seconds: float | None = None
    if isinstance(duration, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", duration.strip().lower(), re.ASCII)
        if match:
            seconds = float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
    if seconds is None or not 0 < seconds < float("inf"):
        raise RopeExtendError(
            f"not a duration: {duration!r}. Give a time with its unit, such as 30min, 2h or 90s"
        )
    return seconds
