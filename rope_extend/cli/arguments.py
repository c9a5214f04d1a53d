"""Types of command-line arguments: each turns text into a value, or explains what is wrong with the text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.config import items
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.method_names import check_method_name
from rope_extend.models.locating import check_path
from rope_extend.units import memory_size, parse_length

Value = TypeVar("Value")


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
