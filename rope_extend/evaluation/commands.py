"""The commands that made a report, and the same settings as a YAML file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from rope_extend.config import field_hints
from rope_extend.evaluation.evaluation_config import ModelConfig
from rope_extend.report.tables import Code, public_name

_PATHS = ("model", "adapters", "data", "output")
"""Fields that may hold paths."""


def how_it_was_made(command: str, config: ModelConfig) -> list[Code]:
    """The last parts of a report: how to make it again, by a command line and by a YAML file.

    Args:
        command: the command of `rope-extend`.
        config: its settings.
    """
    values = changed_values(config)
    for name in _PATHS:
        if name in values:
            value = values[name]
            values[name] = [*map(public_path, value)] if isinstance(value, list) else public_path(value)
    file = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip("\n")
    by_file = any(isinstance(value, dict) for value in values.values())  # no flag takes a mapping
    words = ["settings.yaml"] if by_file else command_words(config)
    return [
        commands_part([[command, *words]]),
        Code("The same settings as a file", f"# rope-extend {command} settings.yaml\n{file}"),
    ]


def commands_part(commands: Sequence[Sequence[str]]) -> Code:
    """The part of a report that shows commands, each as a line to copy.

    Paths are as seen from the working directory. Of a path outside it, only the last part is shown, because
    reports are published, and a comment says so.

    Args:
        commands: the words of each, without `rope-extend`.
    """
    lines, notes = [], []
    for words in commands:
        public = [public_path(word) for word in words]
        lines.append(shlex.join(["rope-extend", *public]))
        notes += [
            f"# {shown} stands for a path in another directory: put yours"
            for word, shown in zip(words, public, strict=True)
            if shown != word and not Path(word).is_relative_to(Path.cwd())
        ]
    heading = f"The command{'s' if len(commands) > 1 else ''} that made this report"
    return Code(heading, "\n".join([*dict.fromkeys(notes), *lines]))


def public_path(name: str) -> str:
    """A path for a text that people publish; any other text stays as it is."""
    path = Path(name)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return public_name(name)


def command_words(config: ModelConfig) -> list[str]:
    """The arguments of the command line with these settings: the model, the adapters and the flags."""
    values = changed_values(config)
    given = [str(values.pop("model")), *values.pop("adapters", ())]
    for name, value in values.items():
        kind, _ = field_hints(type(config))[name]
        flag = type(config).flag_name(name)
        if isinstance(value, bool):
            given.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, list) and kind.repeated:
            given += [word for each in value for word in (flag, str(each))]
        elif isinstance(value, list):
            given += [flag, ",".join(map(str, value)) or "none"]
        else:
            given += [flag, f"{value:.12g}s" if name == "budget" else str(value)]
    return given


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
