"""What a report says to do: its verdict, and the settings of the command."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import llama
from test_report import row

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import Cell as Trials
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult
from rope_extend.study.deciding import decision
from rope_extend.study.reporting import compare_methods
from rope_extend.study.study_config import METHODS, StudyConfig
from rope_extend.units import parse_duration

pytestmark = pytest.mark.usefixtures("private_cache")


def judged(label: str, level: float, found: float | None) -> EvaluationRow:
    one = row(label, label, level, lengths=(32, 64))
    nll = {n: [(level + 0.01 * k) * (n - 1) for k in range(5)] for n in (32, 64)}
    terms = {n: [n - 1] * 5 for n in (32, 64)}
    measured = replace(one.result, document_nll=nll, document_terms=terms)
    cells = () if found is None else (Trials("passkey", 64, 0.5, 30, (found,), "x"),)
    return replace(
        one, result=measured, trained_length=32, retrieval=RetrievalResult(label, cells) if cells else None
    )


def cropped() -> EvaluationRow:
    """The control."""
    plain = judged("none", 1.0, None)
    return replace(plain, label="none, cropped", result=replace(plain.result, protocol="cropped", window=32))


@pytest.mark.parametrize(
    ("level", "found", "said"),
    [
        (0.9, 1.0, "Use yarn. It meets all three criteria at 64."),
        (0.9, 0.0, "No row meets all three criteria at 64. The nearest is yarn."),
        (1.1, 1.0, "No row meets all three criteria at 64. The nearest is yarn."),
        (0.9, None, "Not decided yet"),
    ],
)
def test_the_verdict(level: float, found: float | None, said: str, work: Path) -> None:
    rows = [cropped(), judged("yarn", level, found)]
    verdict = decision(rows, StudyConfig(model=str(work / "model"), target_length=64))
    assert verdict.items[0].startswith(said)
    trains = any("rope-extend advise" in item for item in verdict.items)
    assert trains == said.startswith("No row meets")


def test_a_row_that_fails_is_not_called_undecided(work: Path) -> None:
    config = StudyConfig(model=str(work / "model"), target_length=64)
    rows = [cropped(), judged("yarn", 1.1, 1.0), judged("rerope", 0.9, None)]
    assert decision(rows, config).items[0] == (
        "Not decided yet: no row meets all three criteria at 64, and not all of them can be judged for "
        "rerope."
    )
    # The nearest of those that are open; another one is nearer, but has failed.
    rows = [cropped(), judged("ntk", 0.9, 0.0), judged("yarn", 0.99, None), judged("rerope", 0.95, None)]
    assert (
        decision(rows, config)
        .items[0]
        .endswith("not all of them can be judged for 2 rows. The nearest of these is rerope.")
    )


def test_without_a_verdict_the_reason_is_said(work: Path) -> None:
    config = StudyConfig(model=str(work / "model"), target_length=64)
    run = replace(judged("none", 1.1, None), label="LoRA", adapter="runs/control", target_length=32)
    for rows, changes, missing, said in (
        (
            [cropped(), judged("none", 1.0, None), run],
            {},
            [],
            "There is nothing to judge, because all rows are",
        ),
        ([judged("yarn", 0.9, 1.0)], {"cropped": False}, [], "each is compared with a cropped context, and"),
        ([judged("yarn", 0.9, 1.0)], {}, [], "yet: the control with a cropped context is not measured."),
        ([cropped()], {}, ["yarn", "ntk"], "No row can be judged yet: not measured are yarn, ntk."),
    ):
        (item,) = decision(rows, replace(config, **changes), missing).items
        assert said in item


def test_a_row_that_is_not_finite_is_never_the_nearest(work: Path) -> None:
    config = StudyConfig(model=str(work / "model"), target_length=64)
    broken = judged("ntk", float("nan"), 1.0)
    for rows in ([broken, judged("yarn", 0.9, 0.0)], [judged("yarn", 0.9, 0.0), broken]):
        first = decision([cropped(), *rows], config).items[0]
        assert first == "No row meets all three criteria at 64. The nearest is yarn."


def test_no_verdict_while_rows_are_missing(work: Path) -> None:
    config = StudyConfig(model=str(work / "model"), target_length=64)
    first, *rest = decision([cropped(), judged("yarn", 1.1, 1.0)], config, ["rerope", "string"]).items
    assert first.startswith("Not decided yet: 2 rows are not wholly measured (rerope, string).")
    assert not any("advise" in item for item in rest)
    found = decision([cropped(), judged("yarn", 0.9, 1.0)], config, ["rerope"])
    assert found.items[0].startswith("Use yarn.")
    # A row with a task that is not measured may yet fail.
    found = decision([cropped(), judged("yarn", 0.9, 1.0)], config, ["yarn"])
    assert found.items == ["Not decided yet: 1 row is not wholly measured (yarn)."]
    found = decision([cropped(), judged("yarn", 0.9, 1.0), judged("ntk", 0.95, 1.0)], config, ["yarn"])
    assert found.items[0].startswith("Use ntk.")


def test_without_a_finite_perplexity_there_is_no_advice(work: Path) -> None:
    config = StudyConfig(model=str(work / "model"), target_length=64)
    found = decision([cropped(), judged("yarn", float("nan"), 0.0)], config)
    assert found.items == ["No row has a finite perplexity at 64: check the weights, and the dtype."]


def test_a_model_that_claims_the_window_is_measured_as_it_is(tmp_path: Path) -> None:
    """Its config says that nothing is to be done, and the measurements may say otherwise."""
    scaled = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    llama(rope_parameters=scaled, max_position_embeddings=128).save_pretrained(tmp_path)
    config = StudyConfig(model=str(tmp_path), target_length=64)
    rows = [cropped(), judged("ntk", 1.1, 1.0)]
    *_, reason, advice = decision(rows, config).items
    assert reason.startswith("The model reads 128 tokens as it is")
    assert advice == "Add as-is to the methods to measure it."
    own = replace(judged("as-is", 1.2, 1.0), encoding=None, rope_parameters=scaled)
    assert decision([*rows, own], config).items[-1] == (
        "By its config, the model reads 64 tokens as it is; as-is does not show it."
    )
    good = replace(judged("as-is", 0.9, 1.0), encoding=None, rope_parameters=scaled)
    assert decision([*rows, good], config).items[0] == "Use as-is. It meets all three criteria at 64."


def test_the_verdict_names_no_folder_of_the_author(work: Path, tmp_path: Path) -> None:
    model = tmp_path / "my model"
    shutil.copytree(work / "model", model)
    verdict = decision([cropped(), judged("yarn", 1.1, 1.0)], StudyConfig(model=str(model), target_length=64))
    assert "rope-extend advise 'my model' --target-length 64" in verdict.markdown()
    assert str(tmp_path) not in verdict.markdown()


def test_the_advice_counts_from_the_same_window(work: Path) -> None:
    """Without --trained-length, `advise` would refuse a config that states no window."""
    config = StudyConfig(model=str(work / "model"), target_length=64, trained_length=32)
    verdict = decision([cropped(), judged("yarn", 1.1, 1.0)], config)
    assert "--target-length 64 --trained-length 32 --gpu GPU" in verdict.markdown()


def test_a_model_that_reads_the_window_needs_nothing() -> None:
    rows = [judged("none", 1.0, None)]
    verdict = decision(rows, StudyConfig(model="m", target_length=32))
    assert "needs no extension" in verdict.items[0]


def test_a_report_within_the_window_answers(work: Path, tmp_path: Path) -> None:
    """The default methods would have nothing to extend; a method that is named is refused, as elsewhere."""
    common = {
        "model": str(work / "model"), "data": str(work / "data"), "target_length": 32, "lengths": [16],
        "max_documents": 1, "tasks": "none", "output": str(tmp_path / "report"),
    }  # fmt: skip
    found = compare_methods(StudyConfig(**common))
    assert [row.label for row in found.collected.rows] == ["none"]
    assert found.verdict.items == ["The model was trained on 32 tokens, so it needs no extension."]
    with pytest.raises(RopeExtendError, match="yarn has nothing to extend"):
        compare_methods(StudyConfig(**common, methods=["yarn"]), overwrite=True)


def test_settings() -> None:
    config = StudyConfig(model="m", target_length="16k")
    assert config.lengths == (2048, 4096, 8192, 16_384)
    assert (config.task_lengths, config.methods) == ((16_384,), METHODS)
    assert StudyConfig(model="m", target_length="16k", adapters=["a"]).methods == ("none",)
    assert StudyConfig(model="m", target_length=64, lengths=[16]).lengths == (16, 64)
    assert StudyConfig.from_dict(config.to_dict()) == config
    assert StudyConfig(model="m", target_length=64, tasks="none").tasks == ()
    for wrong, message in (
        ({}, "missing target_length"),
        ({"target_length": 64, "lengths": [128]}, "lengths must be at most target_length"),
        ({"target_length": 64, "task_lengths": [128]}, "task_lengths must be at most target_length"),
        ({"target_length": 64, "tasks": ["passkeys"]}, "tasks must be a list of"),
        ({"target_length": 64, "budget": "soon"}, "budget must be a duration"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            StudyConfig(model="m", **wrong)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30min", 1800), ("2h", 7200), ("1.5 h", 5400), ("90s", 90), (12, 12), (0.5, 0.5)]
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "0s", "-1h", "1d", "h", True, float("inf"), None])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(RopeExtendError, match="not a duration"):
        parse_duration(text)
