"""What `--json` prints is JSON and nothing else, with the numbers of the text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import rope_extend as rx
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.arguments import flag_table
from rope_extend.cli.main import COMMANDS, command_parser, main
from rope_extend.units import format_bytes

pytestmark = pytest.mark.usefixtures("private_cache")
WITHOUT = {
    "demo", "generate", "plot", "convert", "merge", "push", "card", "completion", "search",
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
    evaluation = values(f"evaluate {work / 'model'} --lengths 16,64 --plan", capsys)
    assert {16, 64} <= {length["length"] for length in evaluation["lengths"]}
    assert all(length["fits"] and length["seconds"] > 0 for length in evaluation["lengths"])
    assert evaluation["work"]


def test_support(capsys: pytest.CaptureFixture[str]) -> None:
    rows = values("export --support", capsys)
    main(["export", "--support"])
    table = capsys.readouterr().out
    for name in dict.fromkeys(row["encoding"] for row in rows):
        (line,) = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
        verdicts = {row["target"]: row["verdict"] for row in rows if row["encoding"] == name}
        cells = [cell.rpartition(" (")[0].strip() for cell in line.split("|")[2:-1]]
        assert cells == [verdicts[target] for target in TARGETS]


@pytest.mark.slow
def test_comparisons(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = f"{work / 'model'} --methods none,yarn --data {work / 'data'}"
    main(shlex.split(f"evaluate {names} --lengths 16,64 --retrieval 0 --output {tmp_path}"))
    capsys.readouterr()
    (pair,) = values(f"compare {tmp_path} {tmp_path} --row none --row yarn", capsys)
    assert pair["first"].startswith("none")
    lengths = {change["length"]: change for change in pair["differences"]}
    first, _, second = (row.result.ppl for row in rx_rows(tmp_path))
    for length in (16, 64):
        assert lengths[length]["ratio"] == pytest.approx(second[length] / first[length], rel=1e-9)


def rx_rows(directory: Path) -> list[rx.EvaluationRow]:
    from rope_extend.evaluation.report_files import read_results

    return read_results(directory)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("finetune --model m --data d --output-dir o --target-length 64 --json", "--json belongs to --plan"),
        ("evaluate m --data d --output o --json", "--json belongs to --plan"),
        ("export m --output o --json", "--json belongs to --support"),
    ],
)
def test_it_is_refused_where_there_is_nothing_to_print(
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(command))
    assert message in capsys.readouterr().err
