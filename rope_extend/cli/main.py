"""The `rope-extend` command: reads the arguments, runs one command, and prints a user's mistakes in one line.

Nothing here imports torch, and only the parser of the chosen command is built. So help and mistakes in the
arguments are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from rope_extend import __version__
from rope_extend.cli import advise, discover, draw, generate, measure, ship, train
from rope_extend.cli.arguments import flag_table, in_flags
from rope_extend.cli.completion import SHELLS, completion_script
from rope_extend.errors import RopeExtendError
from rope_extend.models.processes import is_main_process


class Command:
    """One command of the command line.

    Its name is that of the function, whose docstring is the help text. The function `NAME_arguments` of the
    same module adds the arguments to a parser.

    Args:
        run: runs the command.
        examples: command lines for the end of the help text, without `rope-extend`.
    """

    def __init__(self, run: Callable[[argparse.Namespace], None], *examples: str) -> None:
        self.run, self.name, self.examples = run, run.__name__, examples
        self.add_arguments: Callable[[argparse.ArgumentParser], None] = run.__globals__[
            f"{self.name}_arguments"
        ]

    @property
    def summary(self) -> str:
        """The first line of the help text."""
        return (inspect.getdoc(self.run) or "").splitlines()[0]


def completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that completes")


def completion(arguments: argparse.Namespace) -> None:
    """Print a completion script for bash, zsh, fish or tcsh: of commands, flags and their values.

    bash, in ~/.bashrc:  eval "$(rope-extend completion bash)"
    zsh, in ~/.zshrc:    eval "$(rope-extend completion zsh)"
    fish:                rope-extend completion fish > ~/.config/fish/completions/rope-extend.fish
    """
    parser = argparse.ArgumentParser("rope-extend")
    parser.add_argument("--version", action="version", version=__version__, help="print the version")
    below = parser.add_subparsers()
    for name, command in COMMANDS.items():
        command.add_arguments(below.add_parser(name, help=command.summary))
    print(completion_script(arguments.shell, parser))


_8B = "meta-llama/Meta-Llama-3-8B"
GROUPS = {
    "start here": (
        Command(discover.demo, "demo", "demo --methods none,yarn --output out"),
        Command(
            advise.advise,
            f"advise {_8B} --target-length 32k --gpu h100 --output recipe.yaml",
            f"advise {_8B} --target-length 32k --gpu 24GB --engine vllm",
        ),
        Command(
            advise.recipes, "recipes", "recipes show llama3_8b_32k_yarn",
            "recipes copy llama3_8b_32k_yarn --output recipe.yaml",
        ),
        Command(discover.info, f"info {_8B}", f"info {_8B} --target-length 32k --json"),
        Command(
            generate.generate,
            'generate runs/yarn --file book.txt --ask "Who is the captain?"',
            f'generate {_8B} --target-length 16k --file book.txt --ask "Who is the captain?"',
        ),
        Command(discover.doctor, "doctor", "doctor --json"),
        Command(completion, "completion bash", "completion fish"),
        Command(discover.methods, "methods", "methods --json"),
        Command(discover.families, "families"),
    ),
    "search": (
        Command(
            train.search,
            f"search {_8B} --target-length 32k --data books/ --output factors --plan",
            f"search {_8B} --target-length 32k --data books/ --output factors",
            f"finetune --model {_8B} --data books/ --target-length 32k --method factors --output-dir run",
        ),
    ),
    "train": (
        Command(
            train.finetune,
            f"finetune --model {_8B} --data books/ --target-length 32k --output-dir runs/yarn --plan",
            "finetune recipe.yaml --output-dir runs/yarn",
            "finetune recipe.yaml --output-dir runs/yarn --resume",
        ),
    ),
    "measure": (
        Command(
            measure.evaluate,
            f"evaluate {_8B} runs/yarn --data books/ --lengths 8k,16k,32k --output report",
            f"evaluate {_8B} --methods none,yarn,dynamic_ntk --data books/ --output report",
            f"evaluate {_8B} --methods yarn --lengths 32k --plan",
        ),
        Command(
            measure.retrieve,
            f"retrieve {_8B} runs/yarn --lengths 8k,32k --output passkeys",
            f"retrieve {_8B} --methods none,yarn --tasks passkey,needle --output needles",
        ),
        Command(
            measure.report,
            f"report {_8B} --target-length 32k --data books/ --output report",
            f"report {_8B} --target-length 32k --plan",
            f"report {_8B} runs/yarn --target-length 32k --data books/ --budget 2h --output report",
        ),
        Command(
            measure.compare, "compare report-a report-b",
            "compare report report --row none --row yarn --output difference",
        ),
        Command(
            draw.plot, "plot perplexity report --output ppl.svg",
            f"plot frequencies {_8B} --output frequencies.png",
        ),
    ),
    "ship": (
        Command(ship.convert, "convert model.gguf --output model --dtype bfloat16"),
        Command(ship.merge, "merge runs/yarn --output merged"),
        Command(ship.verify, "verify merged --reference runs/yarn"),
        Command(ship.push, "push merged owner/name --private"),
        Command(ship.card, "card merged --results report"),
        Command(ship.export, "export --support", "export runs/yarn --to vllm --output for-vllm"),
    ),
}  # fmt: skip
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
MOST_IN_USAGE = 16
"""Number of arguments above which the usage line does not list them."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one line and the command for help, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with 2."""
        _fail(f"{message}\nSee `{self.prog} --help`.", self.prog)

    def parse_in_any_order(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words whose flags may also stand between the positional arguments."""
        below = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if below or not {"-h", "--help", "--"}.isdisjoint(words):  # argparse mixes none of these
            return self.parse_args(words)
        return self.parse_intermixed_args(words)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 2 after a user's mistake and with 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = parse(words)
        _log_to_stderr()
        COMMANDS[words[0]].run(arguments)
    except RopeExtendError as error:
        _fail(in_flags(str(error), flag_table(command_parser(words[0]))))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `rope-extend methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    _check_flags(parser, rest)
    return parser.parse_in_any_order(rest)


def command_parser(name: str) -> Parser:
    """The parser of one command, with its arguments."""
    command = COMMANDS[name]
    parser = Parser(
        prog=f"rope-extend {name}",
        description=inspect.getdoc(command.run),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    if len(parser._actions) > MOST_IN_USAGE:  # all flags in one paragraph help nobody
        positional = [action for action in parser._actions if not action.option_strings]
        words = [(str(action.metavar or action.dest), action.nargs) for action in positional]
        names = " ".join(f"[{word}]" if nargs else word for word, nargs in words)
        parser.usage = f"{parser.prog} {names} [--flag VALUE ...]"
    examples = "examples:\n" + "\n".join(f"  rope-extend {line}" for line in command.examples)
    parser.epilog = f"{parser.epilog}\n\n{examples}" if parser.epilog else examples
    return parser


def _check_flags(parser: Parser, words: Sequence[str]) -> None:
    """Name the nearest flag for one that does not exist, before argparse misses what it should have set."""
    flags = set(flag_table(parser).values())
    for word in words:
        if word == "--":
            return
        flag = word.partition("=")[0]
        if not re.match(r"--\w", flag) or any(known.startswith(flag) for known in flags):
            continue
        near = difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)
        parser.error(f"no option is named {flag!r}.{f' Did you mean {near[0]!r}?' if near else ''}")


def _log_to_stderr() -> None:
    """Show the library's log, on the main process only.

    The handler is on our own logger: on the root logger it would print other libraries' messages twice.
    """
    logger = logging.getLogger("rope_extend")
    logger.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler(sys.stderr))
    # peft uses the old name of something that transformers has renamed. A user can do nothing about it.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)


def _help() -> str:
    lines = [
        "usage: rope-extend COMMAND ...",
        "",
        "Extend the context window of pretrained Llama-style models.",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {command.name:<12}{command.summary}" for command in commands)]
    lines += [
        "",
        "`rope-extend COMMAND --help` explains a command; `rope-extend --version` prints the version.",
    ]
    return "\n".join(lines)


def _fail(message: str, prog: str = "rope-extend") -> NoReturn:
    print(f"{prog}: error: {message}", file=sys.stderr)
    sys.exit(2)
