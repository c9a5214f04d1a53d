"""The values that the fields of encodings take, and their checks.

A field states its values where it is declared: `factor: Annotated[float, number(1, MAX_FACTOR)]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, fields
from functools import cache
from numbers import Integral, Real
from typing import Any, get_type_hints

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

Check = Callable[[str, str, Any], Any]
"""From the name of an owner, the name of a field and a value to the checked value; or raises."""


class Checked:
    """A frozen dataclass whose fields are checked when it is made.

    A field with the default None may be None.
    """

    def __post_init__(self) -> None:
        """Check each field by itself; subclasses add checks of several fields."""
        owner = getattr(self, "name", type(self).__name__)
        kind: Any = type(self)
        for field, check in _checks(kind):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, check(owner, field.name, value))


@cache
def _checks(cls: Any) -> list[tuple[Field[Any], Check]]:
    """The fields of a dataclass that state their values, with their checks."""
    hints = get_type_hints(cls, include_extras=True)
    stated = [(field, getattr(hints[field.name], "__metadata__", ())) for field in fields(cls)]
    return [(field, check) for field, checks in stated for check in checks]


def number(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    """Finite numbers within bounds; `above=True` excludes `minimum` itself."""
    return lambda owner, field, value: check_number(
        owner, field, value, minimum=minimum, maximum=maximum, above=above
    )


def whole(minimum: int, maximum: int) -> Check:
    """Whole numbers within bounds, both included."""

    def check(owner: str, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not minimum <= int(value) <= maximum:
            raise RopeExtendError(
                f"{owner}: {field} must be a whole number from {minimum} to {maximum}, got {value!r}"
            )
        return int(value)

    return check


def choice(*names: str) -> Check:
    """One of some names."""

    def check(owner: str, field: str, value: Any) -> str:
        if value not in names:
            raise RopeExtendError(f"{owner}: {field} must be {' or '.join(map(repr, names))}, got {value!r}")
        return str(value)

    return check


def flag(owner: str, field: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RopeExtendError(f"{owner}: {field} must be true or false, got {value!r}")
    return value


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
