"""What a report says to do: its verdict, and the settings of the command."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import llama
from test_report import row

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import METHODS, StudyConfig
from rope_extend.evaluation.results import Cell as Trials
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult
from rope_extend.study import decision

pytestmark = pytest.mark.usefixtures("private_cache")


def judged(label: str, level: float, found: float | None, **changes: Any) -> EvaluationRow:
    """A row with five documents, and passkeys if `found` is their share."""
    nll = {n: [(level + 0.01 * k) * (n - 1) for k in range(5)] for n in (32, 64)}
    terms = {n: [n - 1] * 5 for n in (32, 64)}
    one = row(label, label, level, lengths=(32, 64), document_nll=nll, document_terms=terms)
    cells = () if found is None else (Trials("passkey", 64, 0.5, (found,), "x"),)
    return replace(one, retrieval=RetrievalResult(cells), **changes)


PLAIN = judged("none", 1.0, None)
CONTROL = replace(PLAIN, label="none, cropped", result=replace(PLAIN.result, protocol="cropped", window=32))
RUN = replace(judged("none", 1.1, None), label="LoRA", adapter="runs/control", target_length=32)
NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "missing", "said"),
    [
        ([judged("yarn", 0.9, 1.0)], [], "Use yarn. It meets all three criteria at 64."),
        ([judged("yarn", 0.9, 0.0)], [], "No row meets all three criteria at 64. The nearest is yarn"),
        ([judged("yarn", 1.1, 1.0)], [], "No row meets all three criteria at 64. The nearest is yarn"),
        ([judged("yarn", 0.9, None)], [], "Not decided yet: no row meets all three criteria at 64, and not "
         "all were measured. The nearest is yarn"),
        # A row that failed is not called undecided; of the open ones, the nearest is named.
        ([judged("ntk", 0.9, 0.0), judged("yarn", 0.99, None), judged("rerope", 0.95, None)], [],
         "Not decided yet: no row meets all three criteria at 64, and not all were measured. The nearest is "
         "rerope"),
        # What is not finite is never the nearest.
        ([judged("ntk", NAN, 1.0), judged("yarn", 0.9, 0.0)], [],
         "No row meets all three criteria at 64. The nearest is yarn"),
        ([judged("yarn", NAN, 0.0)], [], "No row has a finite perplexity at 64: check the weights, and the"),
        # While rows are missing.
        ([judged("yarn", NAN, 0.0)], ["ntk"], "Not decided yet: not wholly measured are ntk."),
        ([judged("yarn", 1.1, 1.0)], ["rerope", "string"],
         "Not decided yet: not wholly measured are rerope, string. The nearest is yarn"),
        ([judged("yarn", 0.9, 1.0)], ["yarn"], "Not decided yet: not wholly measured are yarn."),
        ([judged("yarn", 0.9, 1.0), judged("ntk", 0.95, 1.0)], ["yarn"], "Use ntk."),
        ([PLAIN, RUN], [], "No row can be judged: all are controls"),
    ],
)  # fmt: skip
def test_the_verdict(rows: Sequence[EvaluationRow], missing: list[str], said: str, work: Path) -> None:
    verdict = decision([CONTROL, *rows], StudyConfig(model=str(work / "model"), target_length=64), missing)
    assert " ".join(verdict.notes).startswith(said)
    trains = any("rope-extend advise" in item for item in verdict.notes)
    assert trains == said.startswith("No row meets")


def test_a_model_that_claims_the_window_is_measured_as_it_is(tmp_path: Path) -> None:
    """Its config says that nothing is to be done, and the measurements may say otherwise."""
    scaled = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    llama(rope_parameters=scaled, max_position_embeddings=128).save_pretrained(tmp_path)
    config = StudyConfig(model=str(tmp_path), target_length=64)
    rows = [CONTROL, judged("ntk", 1.1, 1.0)]
    assert "as-is" in decision(rows, config).notes[-1]  # which is to be measured
    good = judged("as-is", 0.9, 1.0, encoding=None, rope_parameters=scaled)
    assert decision([*rows, good], config).notes[0] == "Use as-is. It meets all three criteria at 64."


def test_the_next_command_has_the_same_window_and_no_folder_of_the_author(work: Path, tmp_path: Path) -> None:
    model = tmp_path / "my model"
    shutil.copytree(work / "model", model)
    config = StudyConfig(model=str(model), target_length=64, trained_length=32)
    text = decision([CONTROL, judged("yarn", 1.1, 1.0)], config).markdown()
    assert "rope-extend advise 'my model' --target-length 64 --trained-length 32 --gpu GPU" in text
    assert str(tmp_path) not in text


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
