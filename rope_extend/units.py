"""Lengths, sizes and durations as people write them."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import SupportsIndex

from rope_extend.errors import RopeExtendError

_LENGTHS = {"": 1, "k": 1024, "m": 1024**2}
_SIZES = {
    f"{prefix}{binary}{unit}": (1024 if binary else 1000) ** power
    for power, prefix in enumerate(["", "k", "m", "g", "t"])
    for binary in (["", "i"] if prefix else [""])
    for unit in ("", "b")
}
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def _parse(value: object, units: Mapping[str, int]) -> Fraction | None:
    """The number that text with a unit, or a whole number, stands for; None for anything else."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-z]*)", value.strip().lower(), re.ASCII)
        return Fraction(match[1]) * units[match[2]] if match and match[2] in units else None
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    return Fraction(operator.index(value))


def parse_length(length: str | SupportsIndex) -> int:
    """Turn `"32k"`, `"1M"`, `"4096"` or `4096` into a number of tokens; k is 1024, M is 1024².

    Raises:
        RopeExtendError: for anything that is not a whole, positive number of tokens.
    """
    tokens = _parse(length, _LENGTHS)
    if tokens is None or tokens <= 0 or tokens.denominator != 1:
        raise RopeExtendError(
            f"not a length in tokens: {length!r}. A length is a whole number above zero, such as 4096, "
            "'4096', '32k' (32 × 1024) or '1M' (1024 × 1024)"
        )
    return int(tokens)


def parse_lengths(lengths: str | SupportsIndex | Iterable[str | SupportsIndex]) -> list[int]:
    """Turn one length or several, such as `"4k,8k"`, into numbers of tokens, ascending and each once.

    Raises:
        RopeExtendError: a length that `parse_length` refuses.
    """
    several = [lengths] if isinstance(lengths, str) or not isinstance(lengths, Iterable) else lengths
    # What a program gets from `--lengths 4k, 8k` is a list with a comma in it.
    parts = (re.findall(r"[^\s,]+", each) or [each] if isinstance(each, str) else [each] for each in several)
    return sorted({parse_length(part) for each in parts for part in each})


def format_length(tokens: int) -> str:
    """Write a number of tokens as people say it: 32768 is `"32k"`, 1048576 is `"1M"`, 1000 is `"1000"`.

    Inverse of `parse_length`.
    """
    for unit in ("m", "k"):
        if tokens >= _LENGTHS[unit] and tokens % _LENGTHS[unit] == 0:
            return f"{tokens // _LENGTHS[unit]}{'M' if unit == 'm' else unit}"
    return str(tokens)


def memory_size(size: str | SupportsIndex) -> int:
    """Turn `"20GB"`, `"1.5GiB"`, `"512M"` or a number of bytes into a number of bytes.

    Raises:
        RopeExtendError: for anything else, and for a number below a million that has no unit: it was meant
            with one.
    """
    number = _parse(size, _SIZES)
    if number is None or number < 1 or (number < 1_000_000 and _parse(size, {"": 1}) is not None):
        raise RopeExtendError(
            f"not a size in memory: {size!r}. Give a size with its unit, such as 20GB or 512MiB"
        )
    return int(number)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun, in the plural if it is not 1: `8 documents`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


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
    seconds: float | Fraction | None = duration if isinstance(duration, float) else None
    if isinstance(duration, str | int):
        seconds = _parse(duration, _SECONDS)
    if seconds is None or not 0 < seconds < float("inf"):
        raise RopeExtendError(
            f"not a duration: {duration!r}. Give a time with its unit, such as 30min, 2h or 90s"
        )
    return float(seconds)
