"""The commands that made a report, and the same settings as a YAML file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import yaml

from rope_extend.config import field_hints, items
from rope_extend.evaluation.evaluation_config import ModelConfig
from rope_extend.evaluation.labels import from_here, public_names
from rope_extend.report.tables import Code, is_private

_PATHS = ("model", "adapters", "methods", "data", "output")
"""Fields that may hold paths."""


def how_it_was_made(command: str, config: ModelConfig) -> list[Code]:
    """The last parts of a report: how to make it again, by a command line and by a YAML file.

    Args:
        command: the command of `rope-extend`.
        config: its settings.
    """
    values = changed_values(config)
    shown = public_names(text for name in _PATHS for text in _texts(values.get(name)))
    for name in _PATHS:
        if name in values:
            value = values[name]
            values[name] = [shown[each] for each in value] if isinstance(value, list) else shown.get(value)
    notes = _notes(shown)
    file = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip("\n")
    line = [f"rope-extend {command} settings.yaml"]
    if _fit_flags(values):
        line = [*notes, shlex.join(["rope-extend", command, *_words(type(config), values)])]
    return [
        Code(_heading(1), "\n".join(line)),
        Code(
            "The same settings as a file", "\n".join([f"# rope-extend {command} settings.yaml", *notes, file])
        ),
    ]


def commands_part(commands: Sequence[Sequence[str]]) -> Code:
    """The part of a report that shows commands, each as a line to copy.

    Paths are as seen from the working directory. Of a path outside it, only the end is shown, because reports
    are published, and a comment says so.

    Args:
        commands: the words of each, without `rope-extend`.
    """
    shown = public_names(text for words in commands for word in words for text in _in_word(word))
    lines = [
        shlex.join(["rope-extend", *(",".join(shown[text] for text in _in_word(word)) for word in words)])
        for words in commands
    ]
    return Code(_heading(len(commands)), "\n".join([*_notes(shown), *lines]))


def _heading(count: int) -> str:
    return f"The command{'' if count == 1 else 's'} that made this report"


def _in_word(word: str) -> list[str]:
    """The paths and names in a word of a command; a list of methods has several, with commas between them."""
    found = items(word)
    return found if ",".join(found) == word and any(map(is_private, found)) else [word]


def _notes(shown: Mapping[str, str]) -> list[str]:
    """Comments on the paths that are not shown as they were given, and cannot be used as they are shown."""
    return [
        f"# {' '.join(text.split())} stands for a path in another directory: put yours"
        for name, text in shown.items()
        if text != from_here(name)
    ]


def _texts(value: Any) -> Iterator[str]:
    """The texts of a setting."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from value


def _fit_flags(values: Mapping[str, Any]) -> bool:
    """Whether flags can say these settings: they take no mapping, and no empty list of methods."""
    methods = values.get("methods")
    if methods is not None and (not methods or items(",".join(methods)) != methods):
        return False
    return not any(isinstance(value, dict) for value in values.values())


def command_words(config: ModelConfig) -> list[str]:
    """The arguments of the command line with these settings: the model, the adapters and the flags."""
    return _words(type(config), changed_values(config))


def _words(cls: type[ModelConfig], values: Mapping[str, Any]) -> list[str]:
    """The arguments of the command line with some settings, as `changed_values` has them."""
    first = [str(values["model"]), *values.get("adapters", ())]
    given: list[str] = []
    for name, value in values.items():
        kind, _ = field_hints(cls)[name]
        flag = cls.flag_name(name)
        if name in ("model", "adapters"):
            continue
        if isinstance(value, bool):
            given.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list) and kind.repeated:
            given += [word for each in value for word in _flag(flag, str(each))]
        elif isinstance(value, list):
            given += _flag(flag, ",".join(map(str, value)) or "none")
        elif value is None:
            given += [flag, "null"]
        else:
            given += _flag(flag, f"{value:.12g}s" if name == "budget" else str(value))
    if any(word.startswith("-") for word in first):
        return [*given, "--", *first]
    return [*first, *given]


def _flag(flag: str, value: str) -> list[str]:
    """A flag and its value; a value that looks like a flag is joined to it."""
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def changed_values(config: ModelConfig) -> dict[str, Any]:
    """The settings that differ from their defaults, as YAML has them."""
    computed, values = config.computed_defaults(), config.to_dict()
    changed = {}
    for item in fields(config):
        kind, _ = field_hints(type(config))[item.name]
        default = computed.get(item.name) if item.default is None else item.default
        if item.default is not MISSING:
            default = None if default is None else kind.parse(default)
        if item.default is MISSING or getattr(config, item.name) != default:
            changed[item.name] = values[item.name]
    return changed
