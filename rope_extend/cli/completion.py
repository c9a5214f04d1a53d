"""The command that prints a shell's completion script: completion.

The script holds all commands, flags and choices, so completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from rope_extend.advice.shipped import find_recipe, shipped_names
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.advise import gpu, recipe_name
from rope_extend.cli.arguments import export_target, methods, one_method
from rope_extend.memory.gpus import gpu_words
from rope_extend.method_names import method_names

SHELLS = ("bash", "zsh", "fish", "tcsh")
_WORDS: Mapping[object, Callable[[], Sequence[str]]] = {
    methods: method_names, one_method: method_names, "--method": method_names, "--methods": method_names,
    recipe_name: shipped_names, find_recipe: shipped_names, gpu: gpu_words,
    export_target: lambda: tuple(TARGETS),
}  # fmt: skip
"""The values of arguments, by their type or flag. The flags of a config have no type."""


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for a shell of `SHELLS`; file names complete where no value is known."""
    import shtab

    _add_words(parser, shtab.FILE)
    return str(shtab.complete(parser, shell))


def _add_words(parser: argparse.ArgumentParser, files: object) -> None:
    """Give the arguments of a parser, and of those below it, the values that they can have."""
    for action in parser._actions:
        known = (_WORDS[key]() for key in (*action.option_strings, action.type) if key in _WORDS)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _add_words(below, files)
        elif action.choices is None and action.nargs != 0:
            action.choices = next(known, None)
            if action.choices is None:
                action.complete = files  # type: ignore[attr-defined]
