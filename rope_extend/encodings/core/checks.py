"""The values that the fields of encodings take, and their checks.

A field states its values where it is declared: `factor: Annotated[float, number(1, MAX_FACTOR)]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import cache, partial
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
        kind: Any = type(self)
        for field, value in checked(kind, {field: getattr(self, field) for field in _checks(kind)}).items():
            object.__setattr__(self, field, value)


def checked(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of some fields of a `Checked` dataclass, each checked by itself.

    Raises:
        RopeExtendError: a value is not one that its field takes.
    """
    owner, stated = getattr(cls, "name", cls.__name__), _checks(cls)
    return {
        name: value
        if name not in stated or (value is None and stated[name][0].default is None)
        else stated[name][1](owner, name, value)
        for name, value in values.items()
    }


@cache
def _checks(cls: Any) -> dict[str, tuple[Field[Any], Check]]:
    """The fields of a dataclass that state their values, by name, with their checks."""
    hints = get_type_hints(cls, include_extras=True)
    stated = [(field, getattr(hints[field.name], "__metadata__", ())) for field in fields(cls)]
    return {field.name: (field, checks[0]) for field, checks in stated if checks}


def number(minimum: float, maximum: float = math.inf, *, above: bool = False) -> Check:
    """Finite numbers within bounds; `above=True` excludes `minimum` itself."""
    return partial(check_number, minimum=minimum, maximum=maximum, above=above)


def whole(minimum: int, maximum: int, of: str = "", also: str | None = None) -> Check:
    """Whole numbers `of` something within bounds, both included, or `also` a word."""

    def check(owner: str, field: str, value: Any) -> Any:
        if also is not None and value == also:
            return value
        if isinstance(value, bool) or not isinstance(value, Integral) or not minimum <= int(value) <= maximum:
            range_ = f"{minimum} to {maximum}" + ("" if also is None else f", or {also!r}")
            raise RopeExtendError(f"{owner}: {field} must be a whole number{of} from {range_}, got {value!r}")
        return int(value)

    return check


check_length: Callable[[str, str, object], int] = whole(1, MAX_LENGTH, " of tokens")
"""Lengths of texts and windows."""


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
    kind = f" ({type(value).__name__})"
    if isinstance(value, Real) and not isinstance(value, bool):
        number, kind = _as_float(value), ""
        low = number > minimum if above else number >= minimum
        if math.isfinite(number) and low and number <= maximum:
            return number
    bound = f"{'above' if above else 'at least'} {minimum:g}"
    if maximum != math.inf:
        bound += f" and at most {maximum:g}"
    raise RopeExtendError(f"{owner}: {field} must be a finite number {bound}, got {value!r}{kind}")


def _as_float(value: Real) -> float:
    """A number as a float; infinite if it is too large for one, as whole numbers in JSON may be."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def short_text(value: object) -> str:
    """A parameter for logs and legends: rounded numbers, and only the ends of a long list."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"({short_text(value[0])} .. {short_text(value[-1])})"
    return str(value)
