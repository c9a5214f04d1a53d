"""What `--json` prints is JSON and nothing else, with the numbers of the text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rope_extend.cli.arguments import flag_table
from rope_extend.cli.main import COMMANDS, command_parser, main
from rope_extend.units import format_bytes

pytestmark = pytest.mark.usefixtures("private_cache")
WITHOUT = {
    "demo", "generate", "lm-eval", "retrieve", "plot", "convert", "merge", "push", "card", "completion",
    "search", "report", "export",
}  # fmt: skip
"""Commands that run, write files or print a text: there is nothing to give another program."""


def values(command: str, capsys: pytest.CaptureFixture[str]) -> Any:
    main([*shlex.split(command), "--json"])
    return json.loads(capsys.readouterr().out)


def test_every_command_that_answers_has_it() -> None:
    with_json = {name for name in COMMANDS if "--json" in flag_table(command_parser(name)).values()}
    assert set(COMMANDS) - with_json == WITHOUT


def test_plans(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = f"finetune --model {work / 'model'} --target-length 128 --plan --limit-memory 1GB"
    plan = values(training, capsys)
    assert (plan["length"], plan["available"], plan["longest_block"]) == (128, 10**9, None)
    assert [step["chosen"] for step in plan["steps"]].count(True) == 1
    for step in plan["steps"]:
        assert step["total"] == step["weights"] + step["trained"] + step["peak"]
        assert step["fits"] == (step["total"] <= 10**9)
    main(shlex.split(training))
    assert format_bytes(plan["steps"][0]["total"]) in capsys.readouterr().out
    evaluation = values(f"evaluate {work / 'model'} --data {work / 'data'} --lengths 16,64 --plan", capsys)
    assert {16, 64} <= {length["length"] for length in evaluation["lengths"]}
    assert all(length["fits"] and length["seconds"] > 0 for length in evaluation["lengths"])
    assert evaluation["work"]
