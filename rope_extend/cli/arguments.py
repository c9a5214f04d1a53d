"""Types of arguments, which turn text into values or say what is wrong with it, and shared arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar

from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.config import Config, add_flags, field_hints, items
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.method_names import check_method_name
from rope_extend.models.locating import check_path
from rope_extend.units import memory_size, parse_length

Value = TypeVar("Value")
ConfigT = TypeVar("ConfigT", bound=Config)


def argument(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Let argparse report an error of the library as a mistake in this argument."""

    @wraps(parse)
    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except RopeExtendError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def path(text: str) -> str:
    """The path of a file or a directory, which need not exist."""
    return expand_home(text)


@argument
def length(text: str) -> int:
    """A number of tokens: `32k`, `4096`."""
    return parse_length(text)


@argument
def lengths(text: str) -> list[int]:
    """Numbers of tokens, separated by commas: `4k,32k`."""
    return [parse_length(part) for part in text.split(",")]


@argument
def size(text: str) -> int:
    """A number of bytes: `20GB`, `512MiB`."""
    return memory_size(text)


@argument
def methods(text: str) -> list[str]:
    """Names of methods, separated by commas outside brackets; `as-is` is the encoding that the model has."""
    found = [name for name in items(text) if name]
    for name in found:
        if name != "as-is":
            check_method_name(name)
    return found


@argument
def checkpoint(text: str) -> str:
    """A directory that exists, or a hub id."""
    name = expand_home(text)
    check_path(name)
    return name


@argument
def depths(text: str) -> int | list[float]:
    """A number of depths, `5`, or the depths themselves, from 0 to 1: `0,0.5,1`."""
    try:
        return int(text) if text.strip().isdecimal() else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise RopeExtendError(
            f"a number of depths, or depths from 0 to 1 such as 0,0.5,1: {text!r}"
        ) from error


@argument
def one_method(text: str) -> str:
    """The name of a method, or a composition such as `resonance(yarn)`."""
    check_method_name(text)
    return text


@argument
def export_target(text: str) -> str:
    """The name of an engine for which checkpoints are exported."""
    if text not in TARGETS:
        hint = ". Ollama loads the GGUF files of llama.cpp" if text.lower() == "ollama" else ""
        raise RopeExtendError(f"must be one of {', '.join(TARGETS)}, got {text!r}{hint}")
    return text


def add_output(parser: argparse.ArgumentParser, metavar: str, text: str, *, required: bool = False) -> None:
    """Add `--output`, a file or a directory, and `--overwrite`."""
    parser.add_argument("--output", type=path, required=required, metavar=metavar, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def add_existing(parser: argparse.ArgumentParser, work: str) -> None:
    """Add `--overwrite` and `--resume` of a command that keeps what is finished in its output directory."""
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help=f"replace {work} in the output directory")
    existing.add_argument("--resume", action="store_true", help=f"resume {work} in the output directory")


def add_trained_length(parser: argparse.ArgumentParser) -> None:
    """Add `--trained-length`."""
    parser.add_argument(
        "--trained-length", type=length, metavar="N", help="original context window, if config.json is wrong"
    )


def add_base_model(parser: argparse.ArgumentParser) -> None:
    """Add `--base-model`."""
    text = "base model of the adapter (default: the one in rope_extend.json)"
    parser.add_argument("--base-model", type=checkpoint, metavar="NAME", help=text)


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


def flag_table(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flags of a parser, and of those below it, by the library's name of the argument."""
    flags: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                flags |= flag_table(below)
        long = [option for option in action.option_strings if option.startswith("--")]
        flags |= {option[2:].replace("-", "_"): option for option in long}
        if long:
            flags[action.dest] = long[0]
    return flags


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """An error of the library in the words of the command line: `overwrite=True` becomes `--overwrite`.

    Args:
        message: what the library says.
        flags: `flag_table` of the command; other arguments stay as they are.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if value == "False":
            name, value = f"no_{name}", "True"
        if name not in flags or value == "None":
            return match[0]
        return flags[name] if value in ("", "True") else f"{flags[name]} {value.strip(chr(39))}"

    # Some errors name the flag as well, `overwrite=True (--overwrite)`. What is in the brackets of a call, as
    # in yarn(factor=8), stays as it is.
    argument = r"(?<![\w(.-])(?P<name>[a-z][a-z_]*)=(?P<value>'[^']*'|[\w.]*\w|)(?: \(--[a-z-]+\))?"
    parts = re.split(r"(\w\([^()]*\))", message)
    return "".join(part if index % 2 else re.sub(argument, flag, part) for index, part in enumerate(parts))
