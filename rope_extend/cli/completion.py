"""The command that prints a shell's completion script: completion.

The script holds all commands, flags and choices, so completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rope_extend.advice.gpus import gpu_words
from rope_extend.advice.shipped import find_recipe, shipped_names
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.advise import gpu
from rope_extend.cli.arguments import export_target, methods, one_method
from rope_extend.cli.recipes import recipe_name
from rope_extend.method_names import method_names

SHELLS = ("bash", "zsh", "fish")
_TYPES: Mapping[object, Callable[[], Sequence[str]]] = {
    methods: method_names, one_method: method_names, recipe_name: shipped_names, find_recipe: shipped_names,
    export_target: lambda: TARGETS, gpu: gpu_words,
}  # fmt: skip
"""The values of arguments of a type."""
_FLAGS = {"--method": one_method, "--methods": methods}
"""The types of flags of recipes and evaluations, which are parsed later."""


@dataclass(frozen=True)
class Words:
    """What can follow a command.

    Attributes:
        summary: the command's first line of help.
        flags: its flags, with their help.
        choices: the values of flags that have a list of them.
        lists: the flags of `choices` that take several values, with commas between them.
        first: the words that can be its first argument.
        after: the words that can follow one of `first`.
    """

    summary: str
    flags: Mapping[str, str]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lists: frozenset[str] = frozenset()
    first: tuple[str, ...] = ()
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that completes")


def completion_script(shell: str, commands: Mapping[str, Words]) -> str:
    """The script for a shell of `SHELLS`; `commands` are by name."""
    if shell == "fish":
        return fish_script(commands)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + bash_script(commands)


def words_of(parser: argparse.ArgumentParser, summary: str = "") -> Words:
    """What can follow a command, from its parser and the parsers below it."""
    flags: dict[str, str] = {}
    choices: dict[str, tuple[str, ...]] = {}
    lists: set[str] = set()
    first: tuple[str, ...] = ()
    after: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        flags |= {name: (action.help or "").replace("%%", "%") for name in names}
        known = _known_words(action)
        if isinstance(action, argparse._SubParsersAction):
            first = tuple(action.choices)
            for below in action.choices.values():
                found = words_of(below)
                flags, choices = {**found.flags, **flags}, {**found.choices, **choices}
                lists |= found.lists
        elif names:
            choices |= dict.fromkeys(names, known) if known else {}
            lists |= set(names) if _type_of(action) is methods else set()
        elif known and first:
            after = {word: known for word in first if word != "list"}  # `recipes list` takes no name
        elif known:
            first = known
    return Words(summary, flags, choices, frozenset(lists), first, after)


def _known_words(action: argparse.Action) -> tuple[str, ...]:
    """The values that an argument can have; empty if any text can be one."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    known = _TYPES.get(_type_of(action))
    return tuple(known()) if known else ()


def _type_of(action: argparse.Action) -> object:
    """What parses an argument."""
    return next((_FLAGS[name] for name in action.option_strings if name in _FLAGS), action.type)


def bash_script(commands: Mapping[str, Words]) -> str:
    """The script for bash. Paths are completed where no word is known."""
    cases = []
    for name, words in commands.items():
        known = {**words.choices, **words.after, **({name: words.first} if words.first else {})}
        lines = [
            f"      {word}) words={_quoted(_joined(given))}{' several=1' if word in words.lists else ''} ;;"
            for word, given in known.items()
        ]
        cases += [
            f"  {name})",
            f"    flags={_quoted(_joined(words.flags))}",
            *(['    case "$previous" in', *lines, "    esac"] if lines else []),
            "    ;;",
        ]
    return "\n".join(
        [
            "_rope_extend() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            '  local flags="" words="" several="" before=""',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f"    words={_quoted(_joined([*commands, '--help', '--version']))}",
            "  fi",
            '  if [ "$previous" = "=" ]; then  # bash splits --flag=value into three words',
            '    previous="${COMP_WORDS[COMP_CWORD-2]}"',
            '  elif [ "$current" = "=" ]; then',
            '    current=""',
            '  elif [[ "$current" == --*=* ]]; then  # zsh does not split it',
            '    previous="${current%%=*}" before="${current%%=*}="',
            "  fi",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  case "$current" in',
            "    --*=*) ;;",
            '    -*) words="$flags $([ "$COMP_CWORD" -eq 1 ] && printf %s "$words")" ;;',
            "  esac",
            '  if [ -n "$several" ] && [[ "$current" == *,* ]]; then  # complete the last of several values',
            '    before="${current%,*},"',
            "  fi",
            '  COMPREPLY=($(compgen -P "$before" -W "$words" -- "${current#"$before"}"))',
            "}",
            "complete -o default -F _rope_extend rope-extend",
            "",
        ]
    )


def fish_script(commands: Mapping[str, Words]) -> str:
    """The script for fish, which shows what each command and flag is for."""
    lines = []
    for name, words in commands.items():
        lines.append(
            f"complete -c rope-extend -n __fish_use_subcommand -a {name} -d {_quoted(words.summary)}"
        )
        only = f"complete -c rope-extend -n {_quoted(f'__fish_seen_subcommand_from {name}')}"
        if words.first:
            lines.append(f"{only} -a {_quoted(_joined(words.first))}")
        for word, given in words.after.items():
            seen = f"__fish_seen_subcommand_from {name}; and __fish_seen_subcommand_from {word}"
            lines.append(f"complete -c rope-extend -n {_quoted(seen)} -a {_quoted(_joined(given))}")
        for flag, text in words.flags.items():
            values = _fish_values(words.choices.get(flag, ()), several=flag in words.lists)
            lines.append(f"{only} -l {flag[2:]}{values} -d {_quoted(' '.join(text.split()))}")
    return "\n".join(lines) + "\n"


def _fish_values(known: tuple[str, ...], *, several: bool) -> str:
    """The part of a line for fish that offers the values of a flag."""
    if not known:
        return ""
    if several:
        return f" -x -a {_quoted(f'(__fish_append , {_joined(known)})')}"
    return f" -x -a {_quoted(_joined(known))}"


def _joined(words: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    return " ".join(words)


def _quoted(text: str) -> str:
    """A text in single quotes, as bash, zsh and fish read it."""
    return "'" + text.replace("'", "'\\''") + "'"
