"""Every command and every line of Python in the README is real."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rope_extend as rx
from rope_extend.cli import _parser
from rope_extend.families import REFUSED
from rope_extend.training.recipe import recipe_from_arguments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for language, text in CODE
    if language == "bash"
    for line in text.splitlines()
    if line.strip() and not line.lstrip().startswith("#")
]
OURS = [words[1:] for words in COMMANDS if words[0] == "rope-extend"]
NEEDS_MORE = ("path/to/long/documents",)


def runs_here(words: list[str]) -> bool:
    return not any(part in words for part in NEEDS_MORE)


def test_the_readme_names_what_there_is() -> None:
    for name in rx.encodings():
        assert f"`{name}`" in README, name
    supported = len(rx.supported_families())
    assert f"{supported} of the {supported + len(REFUSED)} families" in README
    assert len(OURS) >= 4
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in COMMANDS:
        if words[0] == "make":
            assert words[1] in targets


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_commands_parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = _parser().parse_args(words)
    if words[0] == "finetune":
        recipe_from_arguments(arguments)
    for word in words:
        if word.startswith(("configs/", "rope_extend/")):
            assert Path(word).exists(), word


@pytest.mark.parametrize("text", [text for language, text in CODE if language == "python"])
def test_python_compiles(text: str) -> None:
    compile(text, "README.md", "exec")


@pytest.mark.slow
def test_everything_runs_as_written(tmp_path: Path) -> None:
    """In a directory that looks like a clone, in the README's own order."""
    for name in ("rope_extend", "configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for words in filter(runs_here, OURS):
        subprocess.run([sys.executable, "-m", "rope_extend", *words], cwd=tmp_path, check=True)
    for text in [text for language, text in CODE if language == "python"]:
        subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True)
    assert (tmp_path / "runs" / "report" / "perplexity.png").exists()
    assert (tmp_path / "runs" / "extended" / "config.json").exists()
