"""Arguments of commands whose settings are a `Config`: a checkpoint or a YAML file first, then flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, TypeVar

from rope_extend.config import Config, add_flags, field_hints
from rope_extend.errors import RopeExtendError

ConfigT = TypeVar("ConfigT", bound=Config)


def add_model_or_config(parser: argparse.ArgumentParser, cls: type[Config]) -> None:
    """Add the first argument: a checkpoint, or a YAML file."""
    parser.add_argument(
        "model_or_config",
        nargs="?",
        metavar="MODEL_OR_CONFIG",
        help=f"directory or hub id of the checkpoint, or a YAML file with the settings of the {cls.label}",
    )


def add_fields(parser: argparse.ArgumentParser, cls: type[Config], load_fields: Collection[str]) -> None:
    """Add a flag for each field; those of `load_fields`, which say how the model is loaded, come last."""
    add_flags(parser, cls, skip=load_fields)
    others = field_hints(cls).keys() - set(load_fields)
    add_flags(parser, cls, title="loading the model", skip=others)


def config_of(cls: type[ConfigT], first: str | None, values: dict[str, Any]) -> ConfigT:
    """The settings of a command line: the YAML file, if any, with its values replaced by the arguments.

    Args:
        cls: the class of the settings.
        first: the argument of `add_model_or_config`.
        values: the fields that other arguments set.

    Raises:
        RopeExtendError: two models are given, or the settings are wrong.
    """
    if first is not None and first.endswith((".yaml", ".yml")):
        return cls.from_yaml(first, values)
    if first is None:
        return cls.from_dict(values)
    if "model" in values:
        raise RopeExtendError(
            f"two models are given: {first} by position, and by --model {values['model']}; name one"
        )
    return cls.from_dict({**values, "model": first})
