"""Two rows are compared on the same tokens and prompts, whatever runs they are of."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_perplexity import measure, texts, tiny
from test_report import row
from test_verdicts import judged

from rope_extend.cli.main import main
from rope_extend.encodings import RopeShape, encoding, method_named
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import compare, pairs
from rope_extend.evaluation.labels import adapter_labels, distinct_names, method_labels, model_name
from rope_extend.evaluation.report_files import write_report
from rope_extend.evaluation.report_parts import comparison_parts
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult, Scores
from rope_extend.evaluation.statistics import paired_rates
from rope_extend.report.page import markdown

FIRST, SECOND = (1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0)


def retrieved(
    label: str, *scores: tuple[float, ...], task: str = "passkey", data: str = "a"
) -> EvaluationRow:
    cells = [Scores(task, 100 * (n + 1), 0.5, some, f"{data}{n}") for n, some in enumerate(scores)]
    return EvaluationRow(label, model="m", trained_length=100, retrieval=RetrievalResult(tuple(cells)))


def measured(
    label: str, model: Any, lengths: Any = (16, 64), documents: Any = None, **how: Any
) -> EvaluationRow:
    result = measure(model, documents or texts(64, 64, 70, 65), list(lengths), **how)
    return EvaluationRow(label, None, "m", None, result, 32)


def test_rates_are_compared_prompt_by_prompt() -> None:
    first, second = retrieved("one", FIRST, SECOND), retrieved("two", SECOND, SECOND)
    found = compare(first, second)
    assert [(one.task, one.length) for one in found.changes] == [("passkey", 100), ("passkey", 200)]
    assert found.changes[0].change == paired_rates(FIRST, SECOND)
    assert found.changes[0].change.change == -0.5
    table = markdown(comparison_parts([found]))
    assert re.search(r"two +\| passkey +\| +100 \| 75% .* 25% .* -50 ", table)
    # Depths are sorted, in whatever order they were measured.
    cells = [replace(first.retrieval.cells[0], depth=depth, data=str(depth)) for depth in (0.0, 1.0)]
    forth, back = (replace(first, retrieval=RetrievalResult(tuple(some))) for some in (cells, cells[::-1]))
    assert compare(forth, back).changes[0].change.change == 0


def test_losses_are_compared_at_the_lengths_that_both_rows_have() -> None:
    found = compare(judged("none", 1.0), judged("linear", 0.9))
    assert [(one.length, one.ratio) for one in found.differences] == [
        (length, pytest.approx(math.exp(-0.1))) for length in (32, 64)
    ]
    assert "-0.1000" in markdown(comparison_parts([found]))
    # Each from the pass of that length: with tables that depend on the length, that is not the longest pass.
    dynamic = compare(judged("none", 1.0), judged("dynamic_ntk", 0.9, short=1.1)).differences
    assert [one.ratio for one in dynamic] == [pytest.approx(math.exp(0.1)), pytest.approx(math.exp(-0.1))]
    model = tiny()
    assert [one.length for one in compare(measured("a", model), measured("b", model, [64])).differences] == [
        64
    ]


def test_rows_that_cannot_be_compared_are_refused() -> None:
    model = tiny()
    first, prompts = measured("a", model), retrieved("a", FIRST)
    without = RetrievalResult(tuple(replace(cell, data=None) for cell in prompts.retrieval.cells))
    for one, second, message in (
        (first, measured("b", model, documents=texts(64, 64)), "on different texts"),
        (first, measured("b", model, [32]), "on different texts"),
        (
            first,
            replace(first, label="b", result=replace(first.result, protocol="sliding", stride=8)),
            r"by different protocols \(prefix and sliding stride=8\)",
        ),
        (first, row("b", None, 1.0, lengths=(32, 128), data=first.result.data), "have no length"),
        (first, prompts, "have no length, and no prompts, in common"),
        (prompts, retrieved("b", FIRST, data="b"), "no prompts, in common"),
        (prompts, retrieved("b", FIRST, task="needle"), "no prompts, in common"),
        (prompts, replace(prompts, retrieval=without), "no prompts, in common"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            compare(one, second)


def test_a_control_is_the_first_row_of_a_comparison_on_its_targets() -> None:
    """As `advise` asks of two runs, whichever the user names first."""
    model = tiny()
    row, control = measured("a", model), measured("c", model, protocol="cropped", window=8)
    for found in (compare(row, control), compare(control, row)):
        assert (found.first, found.second) == (control, row)
        assert found.differences == row.result.against(control.result) != []
        (table,) = comparison_parts([found])
        assert table.heading == "Perplexity beyond 8, divided by that of c"


def test_rows_of_runs_are_paired_by_label() -> None:
    a, b, c = (retrieved(label, FIRST) for label in "abc")
    assert [(one.label, other.label) for one, other in pairs([a, b], [b, c], names=("one", "two"))] == [
        ("b (one)", "b (two)")
    ]
    ((one, other),) = pairs([a], [c], names=("one", "two"))
    assert (one.label, other.label) == ("a", "c")
    ((one, other),) = pairs([a, b], [a, b], names=("one", "one"), rows=["a", "b"])
    assert (one.label, other.label) == ("a", "b")
    for first, second, names, rows, message in (
        ([a, b], [c, c], ("one", "two"), [], "nothing to compare: one has 'a', 'b', two has 'c'"),
        ([a, b], [a, b], ("one", "one"), [], "nothing to compare"),
        ([a, b], [a, b], ("one", "two"), ["d"], "no row 'd'; choose one of 'a', 'b'"),
        ([a, b], [a, b], ("one", "two"), ["a", "b", "b"], "one row or two"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            pairs(first, second, names=names, rows=rows)


def test_saved_runs_are_compared_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a run of `evaluate`, which has passkeys, with one of `retrieve`."""
    scored = row("none", "none", 2.0, lengths=(32, 64))
    write_report([replace(scored, retrieval=retrieved("none", FIRST).retrieval)], tmp_path / "evaluation")
    write_report([retrieved("none", SECOND)], tmp_path / "retrieval")
    first, second = tmp_path / "evaluation", tmp_path / "retrieval" / "results.jsonl"
    main(shlex.split(f"compare {first} {second} --output {tmp_path / 'c.md'}"))
    assert "Retrieval of none (retrieval), compared with none (evaluation):" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(shlex.split(f"compare {first} {second} --output {tmp_path / 'c.md'}"))
    assert "--overwrite" in capsys.readouterr().err
    write_report([scored, replace(scored, label="yarn")], tmp_path / "two")
    main(shlex.split(f"compare {first} {tmp_path / 'two'} --output {tmp_path / 'c.md'} --overwrite"))
    text = (tmp_path / "c.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert re.search(r"\| none \(two\) .* 1\.0000 \| +\+0\.0000 \| \+0\.0000 … \+0\.0000 \|", text)
    main(shlex.split(f"compare {tmp_path / 'two'} {tmp_path / 'two'} --row none --row yarn --json"))
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["first"], found["second"], found["differences"][0]["nats"]) == ("none", "yarn", 0.0)
    main(shlex.split(f"compare {tmp_path / 'two'} {tmp_path / 'two'} --row none --row yarn"))
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert text.startswith("Perplexity of yarn, compared with none:\n\n| | length | none | yarn | ratio | ")
    assert "mean loss yarn minus none" in text
    with pytest.raises(SystemExit):
        main(shlex.split(f"compare {first} {tmp_path / 'nowhere'}"))
    assert "no results at" in capsys.readouterr().err


YARN = SimpleNamespace(encoding=encoding("yarn", factor=2.0), target_length=64)
PLAIN = SimpleNamespace(encoding=encoding("none"), target_length=256)


def test_adapters_with_directories_of_the_same_name_have_different_labels() -> None:
    labels = adapter_labels({"seed0/yarn": YARN, "seed1/yarn": YARN, "seed1/none": PLAIN})
    assert [*labels.values()] == [
        "yarn + LoRA (seed0/yarn)",
        "yarn + LoRA (seed1/yarn)",
        "none + LoRA at 256",
    ]
    assert [*adapter_labels({"seed0/yarn": YARN}).values()] == ["yarn + LoRA"]
    made = method_named("logn(resonance(ntk))").for_target(RopeShape(8, 1e4, 32), 64)
    composed = SimpleNamespace(encoding=made, target_length=64)
    assert [*adapter_labels({"a": composed}).values()] == ["logn(resonance(ntk)) + LoRA"]


def test_the_same_adapter_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "yarn")
    for other in (f"{tmp_path}/yarn/", os.path.relpath(tmp_path / "yarn"), str(tmp_path / "link")):
        with pytest.raises(RopeExtendError, match="are the same directory; give each adapter once"):
            adapter_labels({str(tmp_path / "yarn"): YARN, other: YARN})


def test_names_have_as_many_parts_as_are_needed() -> None:
    assert distinct_names(["/a/x", "/b/y"]) == ["x", "y"]
    assert distinct_names(["/a/x/1", "/b/x/1", "/b/y/1"]) == ["a/x/1", "b/x/1", "b/y/1"]
    assert distinct_names(["/x", "/a/x"]) == ["x", "a/x"]
    assert distinct_names(["/a/x", "/a/x/", "/a/x/results.jsonl"]) == ["x", "x", "x"]
    assert distinct_names(["/a/x/results.jsonl", "/a/x/older.jsonl"]) == ["x", "older.jsonl"]


def test_a_model_is_called_by_its_name(tmp_path: Path) -> None:
    """And not `model`, `final` or a hash, nor by a path of the author."""
    digest = "0123456789abcdef" * 2
    for path, stored, name in (
        ("Llama-2-7b", "o/other", "Llama-2-7b"),
        ("SmolLM2/model", None, "SmolLM2"),
        ("yarn/final", str(tmp_path / "base"), "yarn"),
        ("yarn/checkpoint-40", "o/name", "o/name"),
        (f"models--o--name/snapshots/{digest}", None, "o/name"),
        (f"{digest}/model", None, "model"),
    ):
        (tmp_path / path).mkdir(parents=True)
        if stored:
            (tmp_path / path / "config.json").write_text(json.dumps({"_name_or_path": stored}))
        assert model_name(str(tmp_path / path)) == name
    (tmp_path / "SmolLM2" / "model" / "config.json").write_text("[")
    assert model_name(str(tmp_path / "SmolLM2" / "model")) == "SmolLM2"
    assert model_name("owner/name") == "owner/name"


def test_a_model_in_a_home_directory_is_not_called_by_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user" / "model").mkdir(parents=True)
    (tmp_path / "home").symlink_to("user")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert model_name(str(tmp_path / "home" / "model")) == "model"
    # A user of a container may have none.
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert model_name(str(tmp_path / "user" / "model")) == "user"


def test_rows_of_saved_encodings_are_not_called_by_paths_outside_the_working_directory() -> None:
    here, methods = Path.cwd(), ["none", "/a/found", "/b/found", "~/other", "found/x"]
    labels = ["none", "found (a/found)", "found (b/found)", "other", "found/x"]
    assert [*method_labels([*methods, f"{here}/y"]).values()] == [*labels, "y"]
    assert len({*method_labels(["none", "/c/none"]).values()}) == 2
    with pytest.raises(RopeExtendError, match="give each method once"):
        method_labels(["a/found", f"{here}/a/found"])
