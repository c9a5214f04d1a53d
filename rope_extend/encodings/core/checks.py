"""Limits and checks of the numbers that encodings are made from."""

from __future__ import annotations

import math
from numbers import Integral, Real

from rope_extend.errors import RopeExtendError

MAX_FACTOR = 65_536.0
"""The largest extension factor that is accepted: 256 tokens to 16M. A larger one is a typing mistake."""
MAX_LENGTH = 2**40
"""The longest window that is accepted, in tokens."""
MAX_DIM = 2**16
"""The most rotated channels per head that are accepted: tables are half as long."""
FINEST_STEP = 1 / 1024
"""The smallest `step` of a growing schedule, except 0."""
ZERO_FREQUENCY = 1e-20
"""Radians per token. A channel pair below this frequency does not rotate."""
ZERO_FREQUENCY_DIVISOR = 1e28
"""The divisor that stands for frequency zero in `longrope` lists. No position makes the angle visible."""


def check_number(
    owner: str, field: str, value: object, *, minimum: float, maximum: float = math.inf, above: bool = False
) -> float:
    """Return `value` as a float, or raise with the range that is accepted.

    `above=True` excludes `minimum` itself. Booleans and numeric strings are refused: both come from
    configuration files by mistake, and both would silently become numbers.

    Raises:
        RopeExtendError: not a real number, NaN, infinite, or outside the range.
    """
    bound = f"{'above' if above else 'at least'} {minimum:g}"
    if maximum != math.inf:
        bound += f" and at most {maximum:g}"
    message = f"{owner}: {field} must be a finite number {bound}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RopeExtendError(f"{message} ({type(value).__name__})")
    number = float(value)
    if not math.isfinite(number) or number < minimum or (above and number == minimum) or number > maximum:
        raise RopeExtendError(message)
    return number


def check_length(owner: str, field: str, value: object) -> int:
    """Return `value` as an int number of tokens, or raise with the range that is accepted.

    Raises:
        RopeExtendError: not a whole number, or not between 1 and `MAX_LENGTH`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RopeExtendError(
            f"{owner}: {field} must be a whole number of tokens, got {value!r} ({type(value).__name__})"
        )
    length = int(value)
    if not 1 <= length <= MAX_LENGTH:
        raise RopeExtendError(f"{owner}: {field} must be between 1 and {MAX_LENGTH} tokens, got {length}")
    return length


def short_text(value: object) -> str:
    """A parameter for logs and legends: rounded numbers, and only the ends of a long list."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"({short_text(value[0])} .. {short_text(value[-1])})"
    return str(value)
