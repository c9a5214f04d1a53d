"""The command that prints a shell's completion script: completion.

The script holds all commands, flags and choices, so completing starts no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from rope_extend.method_names import method_names

SHELLS = ("bash", "zsh", "fish")
_METHODS = ("--method", "--methods")


@dataclass(frozen=True)
class Words:
    """What can follow a command.

    Attributes:
        summary: the command's first line of help.
        flags: its flags, with their help.
        choices: the values of flags that have a list of them.
        first: the words that can be its first argument.
    """

    summary: str
    flags: Mapping[str, str]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: tuple[str, ...] = ()


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
    first: tuple[str, ...] = ()
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        flags |= {name: (action.help or "").replace("%%", "%") for name in names}
        if isinstance(action, argparse._SubParsersAction):
            first = tuple(action.choices)
            for below in action.choices.values():
                found = words_of(below)
                flags, choices = {**found.flags, **flags}, {**found.choices, **choices}
        elif action.choices is not None and not names:
            first = first or tuple(map(str, action.choices))
        elif action.choices is not None:
            choices |= dict.fromkeys(names, tuple(map(str, action.choices)))
        choices |= {name: method_names() for name in names if name in _METHODS}
    return Words(summary, flags, choices, first)


def bash_script(commands: Mapping[str, Words]) -> str:
    """The script for bash. Paths are completed where no word is known."""
    cases = []
    for name, words in commands.items():
        values = [
            f"      {flag}) words={_quoted(_joined(given))} ;;" for flag, given in words.choices.items()
        ]
        first = f"      {name}) words={_quoted(_joined(words.first))} ;;" if words.first else None
        lines = [*values, *([first] if first else [])]
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
            '  local flags="" words=""',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f"    words={_quoted(_joined([*commands, '--help', '--version']))}",
            "  fi",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  case "$current" in',
            '    -*) words="$flags $([ "$COMP_CWORD" -eq 1 ] && printf %s "$words")" ;;',
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
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
        for flag, text in words.flags.items():
            given = words.choices.get(flag)
            values = f" -x -a {_quoted(_joined(given))}" if given else ""
            lines.append(f"{only} -l {flag[2:]}{values} -d {_quoted(' '.join(text.split()))}")
    return "\n".join(lines) + "\n"


def _joined(words: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    return " ".join(words)


def _quoted(text: str) -> str:
    """A text in single quotes, as bash, zsh and fish read it."""
    return "'" + text.replace("'", "'\\''") + "'"
