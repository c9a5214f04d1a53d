"""How a report is made again: its settings as YAML, without the local paths of whoever made it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import yaml

from rope_extend.checks import field_hints
from rope_extend.evaluation.evaluation_config import ModelConfig
from rope_extend.evaluation.labels import from_here, public_names
from rope_extend.report.tables import Code

_PATHS = ("model", "adapters", "methods", "data", "output")
"""Fields that may hold paths."""


def how_it_was_made(config: ModelConfig) -> Code:
    """The last part of a report: the settings that made it, and the command that takes them.

    Paths are as seen from the working directory. Of a path outside it, only the end is shown, because reports
    are published, and a comment says so.
    """
    values = changed_values(config)
    given = {name: values[name] for name in _PATHS if values.get(name) is not None}
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    shown = public_names(text for texts in lists.values() for text in texts)
    for name, texts in lists.items():
        public = [shown[text] for text in texts]
        values[name] = public if isinstance(given[name], list) else public[0]
    notes = [
        f"# {' '.join(text.split())} stands for a path in another directory: put yours"
        for name, text in shown.items()
        if text != from_here(name)
    ]
    file = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip("\n")
    lines = [f"# rope-extend {config.command} settings.yaml", *notes, file]
    return Code("The settings that made this report", "\n".join(lines))


def command_words(config: ModelConfig) -> list[str]:
    """The arguments of the command line with these settings, for fields without mappings."""
    words = [config.model, *config.adapters]
    for name, value in changed_values(config).items():
        flag = config.flag_name(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif name not in ("model", "adapters"):
            words += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


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
