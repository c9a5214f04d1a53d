"""docs/walkthrough.md: its commands are those of its script, and what is calculated is calculated again."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from commands import Commands
from write_walkthrough import FILES, PAGE, STEPS, page, run, shown

from rope_extend.cli.main import parse

TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", TEXT, re.MULTILINE)[1:]


def test_the_page_is_what_the_script_writes() -> None:
    assert [command for command, _ in BLOCKS] == [step.command for step in STEPS]
    (wheel,) = set(re.findall(r"rope_extend-\S+\.whl", TEXT))
    assert page(wheel, [output for _, output in BLOCKS]) == TEXT, "run python scripts/write_walkthrough.py"


def test_its_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "model").mkdir()
    lines = [line for step in STEPS for line in re.findall(r"rope-extend ([^&]*)", step.command)]
    assert len(lines) == 11
    for line in lines:
        words = shlex.split(line.replace("$MODEL", "model"))
        for word in words:
            if word in ("runs/yarn", "merged"):
                (tmp_path / word).mkdir(parents=True, exist_ok=True)
            if word in ("recipe.yaml", "long.py"):
                (tmp_path / word).touch()
        assert parse(words)


def test_progress_and_long_paths_are_not_shown(tmp_path: Path) -> None:
    text = f"  0%|  | 0/4\r 50%|# | 2/4\nsaved in {tmp_path}/runs\n/a/lib/site-packages/x y\n"
    assert shown(text, tmp_path) == "saved in runs\n.../site-packages/x y\n"


@pytest.mark.slow
def test_what_is_calculated_is_what_the_page_says(tmp_path: Path, commands: Commands) -> None:
    steps = [step.command for step in STEPS if step.repeatable]
    (light,) = (step for step in STEPS if "recipes copy" in step.command)
    outputs = dict(zip([light.command], run((light,), tmp_path, Path(sys.executable).parent), strict=True))
    for command in steps:
        name, *words = shlex.split(command)
        assert name == "rope-extend"
        if command not in outputs:
            printed = commands.run(*words, where=tmp_path, environment={"COLUMNS": "100"})
            outputs[command] = shown(printed, tmp_path)
    said = dict(BLOCKS)
    assert outputs == {command: said[command] for command in steps}, "run python scripts/write_walkthrough.py"
