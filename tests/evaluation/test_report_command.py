"""`rope-extend report` on tiny models: one command, resumed, and one clear line for every mistake."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from test_report import BASIC
from test_verdicts import CONTROL, PLAIN, cropped, judged

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.evaluation import running, verdicts
from rope_extend.evaluation.evaluate import _control_command, _lead
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.past_training import Progress, difference
from rope_extend.evaluation.report_files import read_results
from rope_extend.evaluation.running import Measured
from rope_extend.evaluation.verdicts import decide
from rope_extend.training.recipe import Recipe

pytestmark = pytest.mark.usefixtures("private_cache")
MEASURE = running._measure
COMMAND = "report {model} --target-length 64 --lengths 16 --methods none,yarn --tasks none --documents 2"


def run(command: str, work: Path, out: Path) -> None:
    main(shlex.split(command.format(model=work / "model", data=work / "data", out=out)))


def fail(command: str, work: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        run(command, work, out)
    assert error.value.code == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    return shown


def test_from_a_model_to_a_verdict(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"{COMMAND} --data {{data}} --output {{out}}/report"
    with monkeypatch.context() as patch:
        patch.setattr(running, "_measure", interrupt_after(3))
        with pytest.raises(SystemExit) as stopped:
            run(command, work, tmp_path)
    assert stopped.value.code == 130
    assert "keeps what is finished; the same command with --resume continues" in capsys.readouterr().err
    assert "holds a measurement; give --resume to measure" in fail(command, work, tmp_path, capsys)
    run(f"{command} --resume", work, tmp_path)
    shown, text = capsys.readouterr().out, (tmp_path / "report" / "report.md").read_text()
    rows = read_results(tmp_path / "report")
    assert [row.label for row in rows] == ["none", "none, cropped to 32", "yarn"]
    assert [row.result.documents for row in rows] == [2, 2, 2]
    assert shown.startswith("Perplexity:\n\n|")
    assert "\n\nVerdict:\n\nNot decided on yarn.\n\nOver 2 documents, " in shown
    assert re.search(
        r"\n\nVerdict:\n\nNot decided .*\n\n.*\n\n\|.*\n.*\n\| yarn +\| \? .* documents.*\|.*\? not measured",
        text,
    )
    assert all(f"| {row.label} " in text for row in rows)
    assert {path.name for path in (tmp_path / "report").iterdir()} == {*BASIC, "cells.jsonl"}
    run(f"{command.replace('none,yarn', 'none')} --overwrite", work, tmp_path)
    assert len(read_results(tmp_path / "report")) == 2
    assert len((tmp_path / "report" / "cells.jsonl").read_text().splitlines()) == 1 + 4


def test_the_commands_of_a_report_run_as_printed(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal all of them, and in the report those about models in the working directory."""
    monkeypatch.setattr(verdicts, "MOST_COST", 0.0)  # so that no row meets the criteria
    for name in ("model", "data"):
        shutil.copytree(work / name, tmp_path / "mine" / name)
    monkeypatch.chdir(tmp_path / "mine")
    printed = []
    for number, model in enumerate((tmp_path / "mine" / "model", Path("model"))):
        command = COMMAND.format(model=model).replace("yarn", "ntk")
        main(shlex.split(f"{command} --trained-length 32 --data data --output out{number}"))
        for text in (capsys.readouterr().out, Path(f"out{number}/report.md").read_text()):
            printed += re.findall(r"```\n(rope-extend .*)\n```", text)
    options = "--target-length 64 --trained-length 32 --data path/to/other/documents --output recipe-64.yaml"
    names = (tmp_path / "mine" / "model", "path/to/model", "model", "model")
    assert printed == [f"rope-extend advise {name} --train {options}" for name in names]
    main(shlex.split(printed[0])[1:])
    said = capsys.readouterr().out
    assert "written: recipe-64.yaml" in said
    assert re.search("verdict +train. The target is 2 times", said)  # not to measure first, once more
    assert Recipe.from_yaml("recipe-64.yaml").target_length == 64
    assert str(tmp_path) not in Path("out1/report.html").read_text()
    for number, shortened in enumerate((True, False)):
        text = Path(f"out{number}/report.md").read_text()
        assert ("# Write paths in full" in text) == shortened
        assert "Documents:\n\n- The first that are long enough, by path: a.txt, b.txt." in text
    # A directory called `model` has the name of the one above it, and the settings are a file for a command.
    text = Path("out1/report.md").read_text()
    assert text.startswith("# mine: perplexity and retrieval by length\n")
    name, settings = re.search(r"```\n# (rope-extend report (.*\.yaml))\n", text).groups()
    Path(settings).write_text(text[text.index(name) : text.rindex("```")].partition("\n")[2])
    main([*shlex.split(name)[1:], "--plan"])
    assert "perplexity: 3 rows" in capsys.readouterr().out


def test_the_control_of_an_adapter_trains_on_as_many_tokens(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = "--steps 1 --warmup-steps 0 --gradient-accumulation 3 --output 'my run'"
    run(f"finetune {{model}} --data {{data}} --target-length 64 {short}", work, tmp_path)
    assert "1 steps, 192 tokens" in capsys.readouterr().out
    model = str(work / "model")
    tuned = replace(judged("run", 0.9, 1.0, "my run", short=1.0, target_length=64), model=model)
    config = EvaluationConfig(model=model, adapters=("my run",))
    for directory in ("my run", "elsewhere"):
        rows = [PLAIN, CONTROL, replace(tuned, adapter=directory)]
        section, *_, code = _lead(config, Measured(rows, []), decide(rows), str)
        assert section.lead.startswith("Not decided on run: ")
        if directory == "my run":
            main(shlex.split(code.text)[1:])
            assert "1 steps, 192 tokens" in capsys.readouterr().out
    blanks = "--data ... --steps ... --learning-rate ... --lora-targets ... --output elsewhere-control"
    words = f"--method none --target-length 32 --trained-length 32 --block-length 32 {blanks}"
    assert code.text == f"rope-extend finetune {model} {words}"
    assert code.heading.endswith("In place of ..., what its training had")
    alone = [PLAIN, CONTROL, tuned]
    (said,) = _lead(config, Measured(alone, []), decide(alone), str)[-1].notes
    assert said == "Give the control of run to this command too: my run-control"
    rows.append(cropped(1.0, "my run-control"))
    rows[2] = tuned
    assert len(_lead(config, Measured(rows, []), decide(rows), str)) == 2  # the verdict, and the training
    rows[2] = replace(tuned, result=judged("run", 1.1, short=1.1).result)
    longer = _lead(config, Measured(rows, []), decide(rows), str)[-1]
    for line in longer.text.splitlines():
        main(shlex.split(line)[1:])
        assert "2 steps, 384 tokens" in capsys.readouterr().out
    rows[2] = tuned
    fell = "".join(f'{{"loss": {loss}}}\n' for loss in [3] * 12 + [1.9, 2.1] * 3 + [1.4, 1.6] * 3)
    for name, lines in (("my run-control", '{"tokens": 576}\n'), ("my run", fell)):
        with Path(f"{name}/metrics.jsonl").open("a") as metrics:
            metrics.write(lines)
    _, notes = _lead(config, Measured(rows, []), decide(rows), str)
    assert notes.notes == [
        "run was trained on 384 tokens; its loss was 2.000 in the third quarter of the steps, then 1.500, "
        "so it still fell.",
        "Its control was trained on 576 tokens: train the shorter longer.",
    ]
    Path("my run-control/metrics.jsonl").write_text('{"tokens": 384}')
    assert not difference("my run", "my run-control")
    for losses, fell in (([3.0, 3.01] * 20, False), ([2.0, 4.0] * 20, None)):
        assert Progress(losses=losses).ending.fell is fell
    assert Progress(losses=[3.0] * 19).ending is None
    recipe = Path("my run-control/recipe.yaml")
    before = recipe.read_text()
    recipe.write_text(f"{before}\nlearning_rate: 0.5\n")
    why = difference("my run", "my run-control")
    recipe.write_text(before)
    assert why == "its control was trained with another learning_rate"
    for some in (rows, [*rows[:2], replace(tuned, result=judged("run", 1.2).result), rows[3]]):
        (found,) = decide(some, doubts={"run": why}).verdicts  # neither a success nor a failure
        assert (found.gain.met, found.cost.met, found.success) == (None, None, None)
        assert found.gain.words.endswith(f"; but {why}")
    # Two processes train on twice as many tokens as the recipe says, and so does the control.
    commands = [_control_command(tuned, str)]
    with Path("my run/metrics.jsonl").open("a") as metrics:
        metrics.write('{"tokens": 768}\n')
    commands.append(_control_command(tuned, str))
    one, two = (int(re.findall(r"--gradient-accumulation (\d+)", command)[0]) for command in commands)
    assert two == 2 * one
    for damaged in ('{"tokens": null}', '{"tokens": 1, "loss": null}', "[1]", "{"):  # no report is lost
        Path("my run/metrics.jsonl").write_text(f"{damaged}\n")
        assert len(_lead(config, Measured(rows, []), decide(rows), str)) == 1
    # What a row was trained on shows no gain: the same files, a part of them, or links to them.
    whole, links = str(work / "data"), tmp_path / "links"
    links.mkdir()
    (links / "another.txt").symlink_to(work / "data" / "a.txt")
    Path("by a script").mkdir()
    Path("by a script/settings.json").write_text(json.dumps({"data": [whole]}))
    for data in (whole, f"{whole}/a.txt", str(work), str(links), f"{whole}-of-others", "demo:evaluation"):
        trained = "others" not in data and "demo" not in data
        for adapter in ("my run", "my run/checkpoints/checkpoint-1", "by a script/checkpoint-50"):
            assert bool(rx.reason_for_doubt(adapter, None, ("no/such", data))) == trained
    assert not rx.reason_for_doubt("elsewhere", None, whole)
    known = rx.reason_for_doubt("by a script", None, whole)
    assert rx.reason_for_doubt("elsewhere", "by a script", whole) == known.replace("it", "its control", 1)
    Path("my run/recipe.yaml").write_text("{data: user/texts, split: 'test[:10%]'}")
    for data, split in product(("user/texts", ("user/texts:default",), "user/others"), ("test", "train")):
        assert bool(rx.reason_for_doubt("my run", None, data, split)) == (
            data != "user/others" and split == "test"
        )
    for damaged in ("{data: true}", "{data: [null, 5]}", "{data: 2024-01-01, split: [1]}", "{", "[]"):
        Path("my run/recipe.yaml").write_text(damaged)
        assert not rx.reason_for_doubt("my run", None, whole)
    # Nor does what was resumed with more steps, and stopped.
    for name, text in (("recipe.yaml", "steps: 9"), ("metrics.jsonl", '{"step": 4, "tokens": 384}')):
        Path("by a script", name).write_text(text)
    older = "stopped at step 4 of 9, and what is measured is older: finish it with --resume"
    assert rx.reason_for_doubt("by a script", None, None) == f"the training of its adapter {older}"
    assert rx.reason_for_doubt("elsewhere", "by a script", None) == f"the training of its control {older}"
    stopped = [PLAIN, CONTROL, replace(tuned, adapter="by a script")]
    (said,) = _lead(config, Measured(stopped, []), decide(stopped, (), {"run": known}), str)[-1].notes
    assert said == f"The training of run {older}."
    decision = decide(rows, (), {"run": known})
    assert decision.section.lead == f"Not decided on run. I{known[1:]}."
    assert "but it was trained on these texts" in decision.verdicts[0].gain.words
    # Then no training is advised, with a control or without, nor if the row is worse than it.
    for some in (rows, [PLAIN, CONTROL, tuned], [PLAIN, CONTROL, judged("run", 1.2, 1.0, "my run")]):
        decision = decide(some, (), {"run": known})
        assert known.partition(": ")[2] in decision.section.lead
        assert len(_lead(config, Measured(some, []), decision, str)) == 1
    fair = replace(judged("fair", 0.95, short=1.0), adapter="elsewhere", target_length=64)
    lead = decide([*rows, fair], (), {"run": known}).section.lead
    assert lead.startswith("Not decided on fair")  # not on the lower perplexity of what it was trained on
    broken = replace(judged("run", math.nan), adapter="my run")
    lead = decide([PLAIN, CONTROL, judged("yarn", 0.9), broken], (), {"run": known}).section.lead
    assert "run: ." not in lead


def interrupt_after(count: int) -> Any:
    """Measures some cells, and is then interrupted."""
    measure, calls = MEASURE, []

    def measured(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > count:
            raise KeyboardInterrupt
        return measure(*arguments)

    return measured


def test_nothing_is_called_written_that_is_not(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the machine is slower than it was a moment ago, a budget can end before the first measurement."""
    monkeypatch.setattr(running, "_seconds", lambda *_: math.inf)
    run(f"{COMMAND} --data {{data}} --output {{out}}/report --budget 1h", work, tmp_path)
    shown = capsys.readouterr().out
    assert "Not measured yet:\n\n- none: 2 documents\n" in shown
    assert shown.endswith("no report is written: nothing is measured yet\n")
    assert "written: " not in shown.replace("is written: ", "")
    assert not (tmp_path / "report").exists()


def test_a_resumed_plan_counts_what_is_missing(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    plain_adapters: list[str], other_control: str,
) -> None:  # fmt: skip
    """Also after another adapter has changed the label of the first one: no cell is measured again."""
    monkeypatch.setattr(Measurement, "_seconds", lambda self, tokens: 1.0)
    command = COMMAND.replace("{model}", f"{{model}} '{plain_adapters[0]}'").replace("none,yarn", "none")
    more = command.replace("{model}", f"{{model}} {other_control}")
    rest = " --data {data} --output {out}/report --resume"
    with monkeypatch.context() as patch:
        patch.setattr(running, "_measure", interrupt_after(5))
        with pytest.raises(SystemExit):
            run(command + rest, work, tmp_path)
    capsys.readouterr()
    # Each row takes a second on a document, and seventeen if its context is cropped.
    run(f"{command}{rest} --plan", work, tmp_path)
    lines = ["perplexity: 3 rows, 3 documents in all, at least 35 s", "in all, at least 35 s"]
    assert capsys.readouterr().out.splitlines()[-2:] == lines
    monkeypatch.setattr(running, "_measure", interrupt_after(7))
    run(more + rest, work, tmp_path)
    labels = [f"none + LoRA at 32 ({name})" for name in ("another", "plain at 32")]
    rows = read_results(tmp_path / "report")
    assert [row.label for row in rows if not row.cropped] == ["none", *labels]
    assert "No row can be judged" in capsys.readouterr().out
    run(f"{command}{rest} --plan", work, tmp_path)
    assert capsys.readouterr().out.endswith("nothing is missing: everything is measured\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report {model} --data {data} --output {out}/x", "missing target_length"),
        ("report {model} --target-length 64 --output {out}/x", "report needs --data and --output"),
        ("report {model} --target-length 64 --plan --resume", "--plan --resume needs --data and --output"),
        ("report {model} --target-length 64 --data {data} --output {out}/x", "the task passkey needs about"),
        ("report {model} {out} --target-length 64 --data {data} --output {out}/x", "no rope_extend.json"),
    ],
)
def test_mistakes_are_one_clear_line(
    command: str, message: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(command, work, tmp_path, capsys)
    assert not (tmp_path / "x").exists()
