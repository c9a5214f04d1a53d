"""The `rope-extend` command: reads the arguments, runs one command, and prints a user's mistakes in one line.

Nothing here imports torch, and only the parser of the chosen command is built. So help and mistakes in the
arguments are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from rope_extend import __version__
from rope_extend.cli import advise, discover, measure, ship, train
from rope_extend.cli.arguments import (
    OTHERS,
    add_json,
    flag_table,
    hide_noise,
    in_flags,
    lengths,
    methods,
)
from rope_extend.config import method_item
from rope_extend.errors import RopeExtendError
from rope_extend.models.processes import is_main_process
from rope_extend.units import parse_length

MOST_IN_USAGE = 16
"""Number of arguments above which the usage line does not list them."""

USUAL_GROUPS = 3
"""Number of groups of arguments that `--help` explains: those of argparse, and the first one of a command."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line and the command for help, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with 2."""
        _fail(f"{message}\nSee `{self.prog} --help`.", self.prog)

    def parse_in_any_order(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words whose flags may also stand between the positional arguments."""
        items = {
            flag: item for each in self._actions for flag in each.option_strings if (item := _item(each))
        }
        words = _joined(words, items)
        if self.get_default(OTHERS) is not None:  # the words that this program does not know
            arguments, others = self.parse_known_args(words)
            return argparse.Namespace(**{**vars(arguments), OTHERS: others})
        if not {"-h", "--help", "--"}.isdisjoint(words):  # argparse mixes none of these
            return self.parse_args(words)
        return self.parse_intermixed_args(words)


def _item(action: argparse.Action) -> Callable[[str], object] | None:
    """What refuses a word that is no value of a list; None for an argument that is no list."""
    if action.type is methods:
        return method_item
    return parse_length if action.type is lengths else getattr(action, "item", None)


def _joined(words: Sequence[str], items: Mapping[str, Callable[[str], object]]) -> list[str]:
    """Words as argparse understands them: `--lengths 4k 8k` as `--lengths 4k,8k`, and `-4k` as a value."""
    found: list[str] = []
    item, filled = None, False
    for number, word in enumerate(words):
        if word == "--":
            return [*found, *words[number:]]
        if word.startswith("--"):
            flag, filled = word.partition("=")[0], "=" in word
            item = items.get(flag)
            found.append(word)
        elif re.match(r"-\d", word) and found and found[-1].startswith("--") and not filled:
            found[-1], filled = f"{found[-1]}={word}", True
        elif item and filled and _accepts(item, word.strip(",")):  # also of `--lengths 4k, 8k`
            found[-1] = f"{found[-1].rstrip(',')},{word.strip(',')}"
        else:
            item, filled = None if filled else item, True
            found.append(word)
    return found


def _accepts(item: Callable[[str], object], word: str) -> bool:
    try:
        item(word)
    except (RopeExtendError, ValueError, TypeError):
        return False
    return True


GROUPS: dict[str, tuple[Callable[[argparse.Namespace], None], ...]] = {
    "start here": (
        discover.demo, discover.info, advise.advise, advise.recipes, discover.generate,
        discover.methods, discover.families,
    ),
    "train": (train.finetune, train.search),
    "measure": (measure.evaluate, measure.retrieve, measure.report, measure.lm_eval, measure.compare),
    "ship": (ship.convert, ship.merge, ship.verify, ship.push, ship.card, ship.export),
}  # fmt: skip
"""The commands. A command has the name of its function, whose docstring is the help text.

The function `_NAME_arguments` of the same module adds the arguments to a parser. Without one, a command has
`--json` alone.
"""
COMMANDS = {run.__name__.replace("_", "-"): run for group in GROUPS.values() for run in group}
_8B = "meta-llama/Meta-Llama-3-8B"
EXAMPLES = f"""
demo
advise {_8B} --target-length 32k --gpu h100 --output recipe.yaml
advise {_8B} --target-length 32k --gpu 24GB --engine vllm
recipes
info {_8B}
generate runs/yarn --file book.txt --ask "Who is the captain?"
generate {_8B} --target-length 16k --file book.txt --ask "Who is the captain?"
methods
families
search {_8B} --target-length 32k --data books/ --output factors
finetune --model {_8B} --data books/ --target-length 32k --output runs/yarn --plan
finetune recipe.yaml --output runs/yarn
finetune recipe.yaml --output runs/yarn --resume
evaluate {_8B} runs/yarn --data books/ --lengths 8k,16k,32k --output report
evaluate {_8B} --methods none,yarn,dynamic_ntk --data books/ --output report
retrieve {_8B} --methods none,yarn --tasks passkey,needle --output needles
report {_8B} --target-length 32k --data books/ --output report
report {_8B} runs/yarn --target-length 32k --data books/ --budget 2h --output report
compare report-a report-b
lm-eval runs/yarn --tasks ruler --lengths 8k,32k --output_path ruler
lm-eval {_8B} --method yarn --lengths 32k --tasks niah_single_1 --limit 20
convert model.gguf --output model --dtype bfloat16
merge runs/yarn --output merged
verify merged --reference runs/yarn
push merged owner/name --private
card merged --results report
export runs/yarn --support
export runs/yarn --to vllm --output for-vllm
"""
"""Command lines for the end of each command's help, without `rope-extend`."""


def examples(name: str) -> list[str]:
    """The command lines that show a command, without `rope-extend`."""
    return [line for line in EXAMPLES.splitlines() if line.split()[:1] == [name]]


def summary(name: str) -> str:
    """The first line of a command's help."""
    return (inspect.getdoc(COMMANDS[name]) or "").splitlines()[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 2 after a user's mistake and with 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = parse(words)
        _log_to_stderr()
        COMMANDS[words[0]](arguments)
    except RopeExtendError as error:
        _fail(in_flags(str(error), flag_table(command_parser(words[0]))))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `rope-extend methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"the disk is full ({error}); free some space, and run the command again")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, without `rope-extend`; print and exit after a mistake, or for help."""
    if not words or words[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    name, rest = words[0], list(words[1:])
    if name == "--version":
        print(f"rope-extend {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        _fail(f"invalid choice of command: {name!r}.{hint} Commands: {', '.join(COMMANDS)}")
    parser = command_parser(name)
    if "--help-all" in rest:
        rest = ["--help"]
    elif not {"-h", "--help"}.isdisjoint(rest):
        _shorten_help(parser)
    if parser.get_default(OTHERS) is None:
        _check_flags(parser, rest)
    return parser.parse_in_any_order(rest)


def command_parser(name: str) -> Parser:
    """The parser of one command, with its arguments."""
    run, style = COMMANDS[name], argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"rope-extend {name}", description=inspect.getdoc(run), formatter_class=style)
    run.__globals__.get(f"_{run.__name__}_arguments", add_json)(parser)
    if len(parser._actions) > MOST_IN_USAGE:  # all flags in one paragraph help nobody
        positional = [action for action in parser._actions if not action.option_strings]
        words = [(str(action.metavar or action.dest), action.nargs) for action in positional]
        names = " ".join(f"[{word}]" if nargs else word for word, nargs in words)
        parser.usage = f"{parser.prog} {names} [--flag VALUE ...]"
    lines = "\n".join(["examples:", *(f"  rope-extend {line}" for line in examples(name))])
    parser.epilog = f"{parser.epilog}\n\n{lines}" if parser.epilog else lines
    return parser


def _shorten_help(parser: Parser) -> None:
    """Leave the groups of special flags out of help, and name them."""
    special = [str(group.title) for group in parser._action_groups[USUAL_GROUPS:]]
    if special:
        del parser._action_groups[USUAL_GROUPS:]
        parser.epilog = f"--help-all explains more flags: {', '.join(special)}\n\n{parser.epilog}"


def _check_flags(parser: Parser, words: Sequence[str]) -> None:
    """Name the nearest flag for one that does not exist, before argparse misses what it should have set."""
    flags = set(flag_table(parser).values())
    for flag in (word.partition("=")[0] for word in words if word[:2] == "--" != word):
        if any(known.startswith(flag) for known in flags):
            continue
        others = {name: {*flag_table(each).values(), *re.findall(r"--[\w-]+", each.epilog or "")}
                  for name in COMMANDS for each in [command_parser(name)]}  # fmt: skip
        near = difflib.get_close_matches(flag.replace("_", "-"), flags.union(*others.values()), n=1)
        if near:
            names = [
                name for name, known in others.items() if any(each.startswith(near[0]) for each in known)
            ]
            here = (
                f"Did you mean {near[0]!r}?" if near[0] in flags
                else f"{near[0]!r} is an option of {', '.join(names)}"
            )  # fmt: skip
            parser.error(f"no option is named {flag!r}. {here}")


def _log_to_stderr() -> None:
    """Show the library's log, on the main process only.

    The handler is on our own logger: on the root logger it would print other libraries' messages twice.
    """
    logger = logging.getLogger("rope_extend")
    logger.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stderr))
    hide_noise()


def _help() -> str:
    lines = [
        "usage: rope-extend COMMAND ...",
        "",
        "Extend the context window of pretrained Llama-style models.",
    ]
    for title, commands in GROUPS.items():
        lines += [
            "",
            f"{title}:",
            *(f"  {name:<12}{summary(name)}" for name, run in COMMANDS.items() if run in commands),
        ]
    last = "`COMMAND --help` explains a command, `--help-all` each flag; `--version` prints the version."
    return "\n".join([*lines, "", last])


def _fail(message: str, prog: str = "rope-extend") -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    sys.exit(2)
