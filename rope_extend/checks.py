"""The values that fields of dataclasses take: stated where a field is declared, checked when one is made.

`factor: Annotated[float, number(1, 65_536)]` is a field of an encoding. The settings in `config.py` add a
line of help. The module imports neither torch nor transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, get_type_hints

from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Kind:
    """The values that a field takes.

    Attributes:
        expected: the values in words, for errors.
        parse: returns the checked value, and raises ValueError or TypeError for any other.
        plain: whether text from the command line is the value itself; otherwise it is read as YAML.
        boolean: whether the field has the two flags `--name` and `--no-name`.
        choices: the names to choose from, for help; empty for values of other kinds.
        repeated: whether the flag may be given several times, for a list of its values.
        item: for a list that may be several words, such as `--lengths 4k 8k`: refuses a word that is none of
            its values, because a positional argument may follow.
    """

    expected: str
    parse: Callable[[Any], Any]
    plain: bool = False
    boolean: bool = False
    choices: tuple[str, ...] = ()
    repeated: bool = False
    item: Callable[[str], object] | None = None

    def __call__(self, owner: str, field: str, value: Any) -> Any:
        """The checked value of a field.

        Raises:
            RopeExtendError: it is none of the values.
        """
        try:
            return self.parse(value)
        except (ValueError, TypeError, OverflowError):
            raise RopeExtendError(
                f"{owner}: {field} must be {self.expected}; got {value!r:.200} ({type(value).__name__})"
            ) from None  # the error of `parse` says less


class Checked:
    """A frozen dataclass whose fields `Annotated[type, kind]` are checked when it is made.

    A field with the default None may be None.
    """

    def __post_init__(self) -> None:
        """Check each field by itself; subclasses add checks of several fields."""
        self.set_checked({name: getattr(self, name) for name in field_hints(type(self))})

    def set_checked(self, values: Mapping[str, Any]) -> None:
        """Set fields to checked values."""
        for name, value in checked(type(self), values).items():
            object.__setattr__(self, name, value)


def checked(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of some fields of a `Checked` dataclass, each checked by itself.

    Raises:
        RopeExtendError: a value is not one that its field takes.
    """
    owner, hints = getattr(cls, "label", getattr(cls, "name", cls.__name__)), field_hints(cls)
    may_be_none = {field.name for field in fields(cls) if field.default is None}
    return {
        name: value
        if name not in hints or (value is None and name in may_be_none)
        else hints[name][0](owner, name, value)
        for name, value in values.items()
    }


_HINTS: dict[Any, dict[str, tuple[Any, ...]]] = {}


def field_hints(cls: Any) -> dict[str, tuple[Any, ...]]:
    """What is stated of each field of a dataclass: its kind, and the text of help if it has one."""
    if cls not in _HINTS:
        hints = get_type_hints(cls, include_extras=True)
        stated = {field.name: getattr(hints[field.name], "__metadata__", ()) for field in fields(cls)}
        _HINTS[cls] = {name: each for name, each in stated.items() if each}
    return _HINTS[cls]


def require(ok: bool) -> None:
    """Refuse a value in a `Kind.parse`.

    Raises:
        ValueError: `ok` is false.
    """
    if not ok:
        raise ValueError


def such(expected: str, is_value: Callable[[Any], bool]) -> Kind:
    """The values that pass a test, unchanged; `expected` says in words which."""

    def parse(value: Any) -> Any:
        require(is_value(value))
        return value

    return Kind(expected, parse)


def integer(minimum: int, maximum: int | None = None, of: str = "") -> Kind:
    """Whole numbers `of` something within bounds, both included."""

    def parse(value: Any) -> int:
        require(isinstance(value, Integral) and not isinstance(value, bool))
        require(int(value) >= minimum and (maximum is None or int(value) <= maximum))
        return int(value)

    bound = f"at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
    return Kind(f"a whole number{of}, {bound}", parse)


def number(
    minimum: float, maximum: float = math.inf, *, above: bool = False, below: float = math.inf
) -> Kind:
    """Finite numbers from `minimum` (excluded if `above`) to `maximum`, or to below `below`.

    Booleans and text are refused: both come from configuration files by mistake. YAML 1.1 reads 2e-4 and
    1.5e4 as text, so text in this form is a number.
    """

    def parse(value: Any) -> float:
        if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
            value = float(value)
        require(isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value))
        require(minimum <= value <= maximum and value < below and not (above and value == minimum))
        return float(value)

    bound = f"{'above' if above else 'at least'} {minimum:g}"
    bound += f" and at most {maximum:g}" if maximum < math.inf else ""
    bound += f" and below {below:g}" if below < math.inf else ""
    return Kind(f"a finite number {bound}", parse)


def choice(*names: str) -> Kind:
    """One of some names."""

    def parse(value: Any) -> str:
        require(isinstance(value, str) and value in names)
        return str(value)

    return Kind("one of " + ", ".join(names), parse, plain=True, choices=names)


def or_word(kind: Kind, word: str | None) -> Kind:
    """The values of `kind`, and a word, or None (`null` in YAML)."""

    def parse(value: Any) -> Any:
        return value if isinstance(value, type(word)) and value == word else kind.parse(value)

    return replace(kind, expected=f"{word or 'null'}, or {kind.expected}", parse=parse)


def _flag(value: Any) -> bool:
    require(isinstance(value, bool))
    return bool(value)


FLAG = Kind("true or false", _flag, boolean=True)
