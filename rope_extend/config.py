"""Settings from YAML, flags or Python: frozen dataclasses whose fields are documented and checked.

A field of a `Config` is written as `Annotated[type, kind, text]`. The `Kind` says which values the field
takes, and the text is its line in `--help`. YAML, flags, checks and help all follow from this one line.

The module imports neither torch nor transformers, so that `--help` answers quickly.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml

from rope_extend.checks import Checked, Kind, field_hints, integer, or_word, require
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.method_names import encoding_file, method_names
from rope_extend.units import parse_duration, parse_length

AUTO = "auto"
"""The value of a setting that the program chooses."""


def items(value: Any) -> list[Any]:
    """A list that is not empty; text is split at commas and spaces, and a single item is a list of one.

    Those in brackets do not count, as in `yarn(beta_fast=32,beta_slow=1)`.
    """
    if isinstance(value, str):
        return re.split(r"(?:\s*,\s*|\s++(?!\())(?![^(]*\))", value.strip())
    result = list(value) if isinstance(value, list | tuple) else [value]
    require(bool(result))
    return result


def method_items(text: str) -> list[str]:
    """As `items`, of methods: the path of a saved encoding may have spaces."""
    pieces = [piece.strip() for piece in re.split(r",(?![^(]*\))", text)]
    return [each for piece in pieces for each in ([piece] if _is_saved(piece) else items(piece))]


def _is_saved(name: str) -> bool:
    try:
        return encoding_file(name) is not None
    except RopeExtendError:
        return False


def method_item(word: str) -> None:
    """Refuse a word that cannot be one of several methods; ValueError if it is none."""
    require(word in (*method_names(), "as-is") or "(" in word or _is_saved(word))


def or_auto(kind: Kind) -> Kind:
    """The values of `kind`, and `auto`."""
    return or_word(kind, AUTO)


def _read_text(text: str) -> Any:
    """A value of the command line, read as YAML; ValueError if it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError from error


def list_of(kind: Kind, expected: str) -> Kind:
    """Tuples of values of `kind`; in text, commas or spaces separate them, and each is read as YAML."""

    def one(item: Any) -> Any:
        return kind.parse(_read_text(item) if isinstance(item, str) else item)

    return Kind(expected, lambda value: tuple(map(one, items(value))), item=one)


def _text(value: Any) -> str:
    require(isinstance(value, str | PathLike) and bool(str(value).strip()))
    return str(value)


def _path(value: Any) -> str:
    return expand_home(_text(value))


def _lengths(value: Any) -> tuple[int, ...]:
    return tuple(sorted({parse_length(item) for item in items(value)}))


def _sources(value: Any) -> str | tuple[str, ...]:
    return _text(value) if isinstance(value, str | PathLike) else tuple(map(_text, items(value)))


def _parameters(value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # beta_fast=32,beta_slow=1 on the command line
        pairs = (pair.split("=") for pair in value.split(","))
        value = {name.strip(): _read_text(text) for name, text in pairs}
    require(isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    return copy.deepcopy(dict(value))


TEXT = Kind("text", _text, plain=True)
PATH = Kind("a path", _path, plain=True)
MODEL = Kind("a path or a hub id", _path, plain=True)
COUNT = integer(0)
POSITIVE_COUNT = integer(1)
LENGTH = Kind("a number of tokens, such as 32768 or 32k", parse_length)
LENGTHS = Kind("a list of token counts, such as [4k, 8k]", _lengths, item=parse_length)
DURATION = Kind("a duration, such as 30min or 2h", parse_duration, plain=True)
SOURCES = Kind("a path, a glob, a hub id, or a list of these", _sources, plain=True)
PARAMETERS = Kind("a mapping of the method's parameters, such as {beta_fast: 32}", _parameters)


@dataclass(frozen=True)
class Config(Checked):
    """Base of all settings: a frozen dataclass whose fields are `Annotated[type, kind, text]`.

    A subclass sets `label`, and adds checks of its own by a `__post_init__` that first calls this one.

    Raises:
        RopeExtendError: a value of the wrong type or outside its range.
    """

    label: ClassVar[str] = "config"
    """What the settings are called in errors."""
    examples: ClassVar[str] = "configs/"
    """Where a user finds YAML files to start from."""
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Headings of help, each with its fields; the fields of no group come first, under `label`."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Flags whose name is not that of their field."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_early()
        computed = self.computed_defaults().items()
        self.set_checked({name: value for name, value in computed if getattr(self, name) is None})

    def check_early(self) -> None:
        """Check values that need no computed default. Computing the defaults may import torch.

        Raises:
            RopeExtendError: values that contradict each other.
        """

    def computed_defaults(self) -> Mapping[str, Any]:
        """Values of fields that were left out, or null, and that depend on other fields."""
        return {}

    @classmethod
    def default_text(cls, item: Field[Any]) -> str | None:
        """The default of a field for help; None if there is nothing to say."""
        return None if item.default is MISSING or item.default is None else str(item.default)

    @classmethod
    def flag_name(cls, name: str) -> str:
        """The flag of a field: `--target-length` for `target_length`."""
        return cls.flags.get(name) or "--" + name.replace("_", "-")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Make the settings from a mapping of field names to values, as YAML gives them.

        Raises:
            RopeExtendError: an unknown key (the message names the nearest field), a missing field, or a value
                that its field does not take.
        """
        if not isinstance(values, Mapping):
            raise RopeExtendError(
                f"{cls.label}: must be a mapping of field names to values; got {type(values).__name__}"
            )
        required = {
            item.name: item.default is MISSING and item.default_factory is MISSING for item in fields(cls)
        }
        if unknown := [key for key in values if key not in required]:
            near = difflib.get_close_matches(str(unknown[0]), required, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Leave it out. Known: {', '.join(required)}"
            raise RopeExtendError(f"{cls.label}: unknown key {', '.join(map(repr, unknown))}. {hint}")
        missing = [name for name in required if required[name] and name not in values]
        if missing:
            flags = ", ".join(map(cls.flag_name, missing))
            raise RopeExtendError(
                f"{cls.label}: missing {', '.join(missing)}; add to the YAML file, or give {flags}"
            )
        return cls(**values)

    @classmethod
    def from_yaml(
        cls,
        path: str | PathLike[str],
        overrides: Mapping[str, object] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> Self:
        """Make the settings from a YAML file; `overrides` replace its values, which replace `defaults`.

        Raises:
            RopeExtendError: no such file, invalid YAML, a repeated key, or what `from_dict` refuses.
        """
        file = Path(expand_home(path))
        try:
            with file.open(encoding="utf-8") as stream:  # errors name the file
                values = yaml.load(stream, Loader=_StrictLoader)
        except OSError as error:
            raise RopeExtendError(
                f"cannot read the {cls.label} {file}: {error.strerror}; for examples see {cls.examples}"
            ) from error
        # ValueError: not UTF-8, or a date such as 2020-13-45. RecursionError: a list in a list in a list.
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise RopeExtendError(f"{file} is not valid YAML: {error}") from error
        if not isinstance(values, Mapping):
            raise RopeExtendError(f"{file} must hold `key: value` lines; got {type(values).__name__}")
        try:
            return cls.from_dict({**(defaults or {}), **values, **(overrides or {})})
        except RopeExtendError as error:
            raise RopeExtendError(f"{file}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values of JSON and YAML; `from_dict` is the exact inverse."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def to_yaml(self) -> str:
        """All fields as YAML, in the order of the class."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


ConfigT = TypeVar("ConfigT", bound=Config)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def add_flags(parser: argparse.ArgumentParser, cls: type[Config]) -> None:
    """Add one `--flag` per field of `cls`, under the headings of `cls.groups`.

    Every flag defaults to None, which means that it was not given: the file or the field's default applies.
    """
    first = parser.add_argument_group(cls.label, "each flag replaces the value of the YAML file")
    headings = {name: heading for heading, names in cls.groups.items() for name in names}
    others = {heading: parser.add_argument_group(heading) for heading in cls.groups}
    for item in fields(cls):
        group = others[headings[item.name]] if item.name in headings else first
        kind, text = field_hints(cls)[item.name]
        default = cls.default_text(item)
        text = (text if default is None else f"{text} (default: {default})").replace("%", "%%")
        settings: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if not kind.boolean:
            names = "{" + ",".join(kind.choices) + "}" if kind.choices else item.name.split("_")[-1].upper()
            settings = {"action": "append" if kind.repeated else "store", "metavar": names}
        action = group.add_argument(
            cls.flag_name(item.name), dest=item.name, default=None, help=text, **settings
        )
        action.item = kind.item  # type: ignore[attr-defined]


def from_arguments(
    cls: type[ConfigT],
    arguments: argparse.Namespace,
    defaults: Mapping[str, object] | None = None,
    implied: Mapping[str, object] | None = None,
) -> ConfigT:
    """Make settings from parsed arguments: `arguments.config`, a YAML file or a model, and the flags.

    A flag replaces a value of `implied`, which replaces that of the file, which replaces that of `defaults`.

    Raises:
        RopeExtendError: two models are given, or as `Config.from_yaml`.
    """
    given = {name: getattr(arguments, name, None) for name in field_hints(cls)}
    flags = {name: _read(cls, name, value) for name, value in given.items() if value is not None}
    values = {**(implied or {}), **flags}
    first = getattr(arguments, "config", None)
    if first is None:
        return cls.from_dict({**(defaults or {}), **values})
    if first.endswith((".yaml", ".yml")) or (Path(first).is_file() and not first.endswith(".gguf")):
        return cls.from_yaml(first, values, defaults)
    if "model" in values:
        raise RopeExtendError(
            f"two models are given: {first} by position, and by --model {values['model']}; name one"
        )
    return cls.from_dict({**(defaults or {}), **values, "model": first})


def _read(cls: type[Config], name: str, value: object) -> object:
    kind, _ = field_hints(cls)[name]
    if kind.repeated and isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        # No text, as of a shell variable that is not set, would be null in YAML.
        require(value != "")
        read = _read_text(value) if isinstance(value, str) and not kind.plain else value
        kind.parse(read)
    except (ValueError, TypeError, OverflowError):
        raise RopeExtendError(f"{cls.flag_name(name)} must be {kind.expected}; got {value!r}") from None
    return read


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a repeated key is refused: YAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, refusing repeated keys."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)
