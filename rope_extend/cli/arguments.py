"""Types of arguments, which turn text into values or say what is wrong with it, and shared arguments."""

from __future__ import annotations

import argparse
import gc
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TypeVar

from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.config import Config, add_flags, method_items
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home
from rope_extend.method_names import check_method_name
from rope_extend.models.locating import check_path
from rope_extend.units import memory_size, parse_length, parse_lengths

Value = TypeVar("Value")
OTHERS = "others"
"""The argument that has the words for another program; a command with a default for it takes any words."""


def argument(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Let argparse report an error of the library as a mistake in this argument."""

    @wraps(parse)
    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except RopeExtendError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """The text as it was written, or as a path with the home directory, if the library takes it."""

    def parse(text: str) -> str:
        check(text)
        return expand_home(text)

    return argument(parse)


path = argument(expand_home)
"""The path of a file or a directory, which need not exist."""
length = argument(parse_length)
"""A number of tokens: `32k`, `4096`."""
lengths = argument(parse_lengths)
"""Several numbers of tokens: `4k,8k`."""
size = argument(memory_size)
"""A number of bytes: `20GB`, `512MiB`."""
checkpoint = checked(check_path)
"""A directory that exists, or a hub id."""
one_method = checked(check_method_name)
"""The name of a method, or a composition such as `resonance(yarn)`."""


@argument
def methods(text: str) -> list[str]:
    """Names of methods, separated by commas or spaces; `as-is` is the encoding that the model has."""
    found = [name for name in method_items(text) if name]
    for name in found:
        if name != "as-is":
            check_method_name(name)
    return found


@argument
def export_target(text: str) -> str:
    """The name of an engine for which checkpoints are exported."""
    if text not in TARGETS:
        hint = ". Ollama loads the GGUF files of llama.cpp" if text.lower() == "ollama" else ""
        raise RopeExtendError(f"must be one of {', '.join(TARGETS)}, got {text!r}{hint}")
    return text


@contextmanager
def without_library(name: str) -> Iterator[None]:
    """Inside the block, a library that is not loaded cannot be imported."""
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for that
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import torch and transformers for a command that reads only a config, in two thirds of the time.

    transformers would import scipy, for its losses of object detection. And Python would look for garbage
    again and again, although modules stay.
    """
    if "torch" in sys.modules:  # what is loaded costs no more
        yield
        return
    gc.disable()
    try:
        with without_library("scipy"):
            yield
    finally:
        gc.freeze()
        gc.enable()


def add_config_only(parser: argparse.ArgumentParser) -> None:
    """Add `model`, a checkpoint whose weights are not read, and `--trained-length`."""
    text = "directory or hub id of a checkpoint; only its config is read"
    parser.add_argument("model", type=checkpoint, help=text)
    add_trained_length(parser)


def add_json(parser: argparse.ArgumentParser, text: str = "print JSON") -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=text)


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
    text = "original context window, if config.json is wrong"
    parser.add_argument("--trained-length", type=length, metavar="N", help=text)


def add_base_model(parser: argparse.ArgumentParser) -> None:
    """Add `--base-model`."""
    text = "base model of the adapter (default: the one in rope_extend.json)"
    parser.add_argument("--base-model", type=checkpoint, metavar="NAME", help=text)


def add_settings(parser: argparse.ArgumentParser, cls: type[Config], work: str, plan: str) -> None:
    """Add what commands with many settings share: a checkpoint or YAML file, and a flag for each field.

    Args:
        parser: where they go.
        cls: the class of the settings.
        work: what `--resume` and `--overwrite` are about, such as `a search`.
        plan: what `--plan` prints; empty if there is no plan.
    """
    text = f"directory or hub id of the checkpoint, or a YAML file with the settings of the {cls.label}"
    parser.add_argument("config", nargs="?", metavar="MODEL_OR_CONFIG", help=text)
    if plan:
        parser.add_argument("--plan", action="store_true", help=f"print {plan}, and stop")
    add_existing(parser, work)
    add_flags(parser, cls)


def flag_table(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flags of a parser, by the library's name of the argument."""
    flags: dict[str, str] = {}
    for action in parser._actions:
        long = [option for option in action.option_strings if option.startswith("--")]
        flags |= {option[2:].replace("-", "_"): option for option in long}
        if long:
            flags[action.dest] = long[0]
    return flags


def hide_noise() -> None:
    """Hide what other libraries say and a user can do nothing about."""
    noise = (
        "Failed to load CPU gemm_4bit_forward",  # without a network, whenever peft is imported
        "This is a friendly reminder - the current text generation",  # plain RoPE is asked beyond its window
    )
    for name in ("bitsandbytes.backends.cpu.ops", "transformers.generation.stopping_criteria"):
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(noise))
    # peft uses an old name of transformers; `Trainer` pins memory also without a GPU.
    for text in (".*is_gradient_checkpointing.* is deprecated", "'pin_memory' argument is set as true"):
        warnings.filterwarnings("ignore", message=text)


def run_script(parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace], None]) -> None:
    """Run a script: a mistake is one sentence in the words of its flags, without a traceback."""
    hide_noise()
    try:
        main(parser.parse_args())
    except (RopeExtendError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {in_flags(str(error), flag_table(parser))}\n")


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
