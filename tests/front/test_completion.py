"""Completion scripts know every command and flag, and bash completes with them."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from rope_extend.advice.shipped import shipped_names
from rope_extend.cli.completion import SHELLS, words_of
from rope_extend.cli.main import COMMANDS, command_parser, main
from rope_extend.method_names import method_names


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    import contextlib
    import io

    found = {}
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(["completion", shell])
        found[shell] = out.getvalue()
    return found


def test_every_flag_of_every_command_is_known() -> None:
    for name in COMMANDS:
        parser = command_parser(name)
        expected = {flag for flag in parser.flags() if flag.startswith("--")}
        assert set(words_of(parser).flags) == expected, name


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rope-extend eva", ["evaluate"]),
        ("rope-extend --v", ["--version"]),
        ("rope-extend finetune --target", ["--target-length"]),
        ("rope-extend finetune --method dynamic_y", ["dynamic_yarn"]),
        ("rope-extend generate m --quantize ", ["4bit", "8bit"]),
        ("rope-extend recipes co", ["copy"]),
        ("rope-extend recipes copy qwen3", [name for name in shipped_names() if name.startswith("qwen3")]),
        ("rope-extend recipes show llama3_8b_32k", ["llama3_8b_32k_yarn"]),
        ("rope-extend recipes list llama3", []),
        ("rope-extend finetune llama3_8b_32k", ["llama3_8b_32k_yarn"]),
        ("rope-extend evaluate m --methods self", ["self_extend"]),
        ("rope-extend evaluate m --methods none,dynamic_y", ["none,dynamic_yarn"]),
        ("rope-extend evaluate m --methods = self", ["self_extend"]),  # one word, which bash splits
        ("rope-extend evaluate m --methods = none,dynamic_y", ["none,dynamic_yarn"]),
        ("rope-extend generate m --quantize =", ["4bit", "8bit"]),
        ("rope-extend evaluate m --methods=self", ["--methods=self_extend"]),  # as zsh has it
        ("rope-extend evaluate m --methods=none,dynamic_y", ["--methods=none,dynamic_yarn"]),
        ("rope-extend evaluate m --output=d", []),
        ("rope-extend demo --methods none,self", ["none,self_extend"]),
        ("rope-extend generate m --method none,self", []),
        ("rope-extend plot heat", ["heat-map"]),
        ("rope-extend plot perplexity --over", ["--overwrite"]),
        ("rope-extend advise x --engine v", ["vllm"]),
        ("rope-extend export x --to s", ["sglang"]),
        ("rope-extend advise x --gpu rtx-4", ["rtx-4090"]),
        ("rope-extend info ./some", []),  # bash completes the path
    ],
)
def test_bash_completes(line: str, expected: list[str], scripts: dict[str, str]) -> None:
    words = line.split(" ")
    code = (
        f"{scripts['bash']}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))})\n"
        f'COMP_CWORD={len(words) - 1}\n_rope_extend\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(["bash", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == expected
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(scripts: dict[str, str]) -> None:
    """Seen with fish 3.6.0. It also completes file names, as words that no flag comes before."""
    expected = {
        "rope-extend eva": "evaluate",
        "rope-extend finetune --target": "--target-length",
        "rope-extend evaluate m --methods none,dynamic_y": "none,dynamic_yarn",
        "rope-extend finetune --method=dynamic_y": "--method=dynamic_yarn",
        "rope-extend recipes co": "copy",
        "rope-extend recipes show llama3_8b_32k": "llama3_8b_32k_yarn",
        "rope-extend generate m --quantize 8": "8bit",
        "rope-extend advise x --engine v": "vllm",
    }
    code = "\n".join([scripts["fish"], *(f"complete -C '{line}'; echo ==" for line in expected)])
    done = subprocess.run(["fish", "--no-config"], input=code, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    answers = done.stdout.split("==\n")
    for (line, word), answer in zip(expected.items(), answers, strict=False):
        assert word in [found.partition("\t")[0] for found in answer.splitlines()], line


def test_every_offered_value_is_accepted() -> None:
    for name in COMMANDS:
        parser = command_parser(name)
        offered = words_of(parser).choices
        for action in parser._actions:
            for flag in action.option_strings:
                for word in offered.get(flag, ()):
                    parser._get_value(action, word)


def test_the_other_shells_have_the_same_words(scripts: dict[str, str]) -> None:
    assert scripts["zsh"].endswith(scripts["bash"])
    fish = [shlex.split(line) for line in scripts["fish"].splitlines()]
    commands = [words[words.index("-a") + 1] for words in fish if "__fish_use_subcommand" in words]
    assert commands == list(COMMANDS)
    flags = {words[words.index("-l") + 1] for words in fish if "-l" in words}
    assert {"target-length", "overwrite", "engine"} <= flags
    methods = next(words for words in fish if "-l" in words and words[words.index("-l") + 1] == "method")
    assert methods[methods.index("-a") + 1].split() == list(method_names())
    several = next(words for words in fish if "-l" in words and words[words.index("-l") + 1] == "methods")
    assert several[several.index("-a") + 1] == f"(__fish_append , {' '.join(method_names())})"
    shown = next(words for words in fish if any("from show" in word for word in words))
    assert shown[shown.index("-a") + 1].split() == shipped_names()
