"""The controls of the default report: cropped context, and the trained window before and after."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_perplexity import measure, naive_losses, texts, tiny
from test_report import result, row
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import against_cropped, differences, regressions
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.report_files import markdown_report, read_results
from rope_extend.evaluation.results import EvaluationRow

TRAINED = 32


def measured(label: str, method: str, model, **options) -> EvaluationRow:
    encoding = {"name": method} if method == "none" else {"name": method, "factor": 2.0}
    found = measure(model, texts(64, 64, 70, 65), [16, 32, 64], **options)
    return EvaluationRow(label, encoding, "m", None, found, TRAINED)


def evaluated(model: Path, **settings) -> list[EvaluationRow]:
    return evaluate(EvaluationConfig(model=model, **settings), progress=False)


def three_rows() -> list[EvaluationRow]:
    model = tiny()
    plain = measured("none", "none", model)
    cropped = measured("none, cropped to 32", "none", model, protocol="cropped", window=TRAINED)
    with rx.extend(model, 64, "linear"):
        return [plain, cropped, measured("linear", "linear", model)]


def test_the_window_is_compared_document_by_document() -> None:
    rows = three_rows()
    (found,) = regressions(rows)
    (change,) = found.differences
    assert (found.second.label, found.first.label, change.length) == ("linear", "none", TRAINED)
    model, documents = tiny(), texts(64, 64, 70, 65)
    before = [naive_losses(model, one.input_ids[:32]).sum().item() for one in documents]
    with rx.extend(model, 64, "linear"):
        after = [naive_losses(model, one.input_ids[:32]).sum().item() for one in documents]
    assert change.nats == pytest.approx((sum(after) - sum(before)) / (4 * 31), abs=1e-6)
    assert change.low <= change.nats <= change.high
    assert change.ratio == pytest.approx(rows[2].result.ppl[32] / rows[0].result.ppl[32])
    # The cropped row has the same loss there, and replaces the plain one.
    (again,) = regressions(rows[1:])
    assert again.first.label == "none, cropped to 32"
    assert again.longest.nats == pytest.approx(change.nats, abs=1e-6)


def test_a_longer_context_is_compared_with_a_cropped_one() -> None:
    rows = three_rows()
    found = against_cropped(rows)
    assert [(one.first.label, one.second.label) for one in found] == [
        ("none, cropped to 32", "none"), ("none, cropped to 32", "linear"),
    ]  # fmt: skip
    for gain, of in zip(found, (rows[0], rows[2]), strict=True):
        (change,) = gain.differences  # at 64; within the window nothing is cropped
        assert change.length == 64
        assert change.ratio == pytest.approx(of.result.ppl[64] / rows[1].result.ppl[64])
    assert against_cropped([rows[0], rows[2]]) == []
    assert against_cropped([rows[1]]) == []
    other = replace(rows[2], result=replace(rows[2].result, data="f" * 16))
    assert [one.second.label for one in against_cropped([*rows[:2], other])] == ["none"]


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(
    ("protocol", "options"), [("sliding", {"stride": 8}), ("last-k", {"last": 8}), ("disjoint", {})]
)
def test_a_protocol_with_the_same_targets_is_its_own_control(
    work: Path, protocol: str, options: dict[str, int]
) -> None:
    rows = evaluated(
        work / "model", data=work / "data", lengths=[16, 64, 128], methods=["yarn"], protocol=protocol,
        max_tokens=200, **options,
    )  # fmt: skip
    extended, control = (one.result for one in rows)
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    documents = rx.load_documents(work / "data", tokenizer, max_tokens=200)
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    alone = measure(model, documents, [TRAINED], protocol=protocol, **options)
    assert control.ppl == {64: pytest.approx(alone.ppl[TRAINED]), 128: pytest.approx(alone.ppl[TRAINED])}
    assert control.cropped
    assert control.window == TRAINED
    assert not extended.cropped
    assert (control.data, control.tokens[64]) == (extended.data, extended.tokens[64])
    (gain,) = against_cropped(rows)
    assert [one.length for one in gain.differences] == [64, 128]
    assert gain.differences[1].ratio == pytest.approx(extended.ppl[128] / alone.ppl[TRAINED])


@pytest.mark.parametrize(
    ("settings", "crops"),
    [
        ({"protocol": "sliding", "stride": 31}, True),
        ({"protocol": "sliding", "stride": 32}, False),
        ({"protocol": "last-k", "last": 32}, True),
        ({"protocol": "last-k", "last": 33}, False),
        ({"protocol": "disjoint"}, True),
        ({"protocol": "disjoint-second-half"}, False),
        ({}, True),
    ],
    ids=str,
)
def test_no_control_scores_other_targets(settings: dict[str, Any], crops: bool, work: Path) -> None:
    """Windows of 32 tokens, 32 apart, never score their first token; longer ones do. The report says so."""
    config = EvaluationConfig(model=str(work / "model"), methods=("none", "yarn"), lengths=(64,), **settings)
    assert Measurement(config, texts=False).crops == crops
    found = result(2.0, (64,), **settings)
    text = markdown_report([replace(row("none", "none", 2.0), result=found, trained_length=TRAINED)])
    assert ("No control with a cropped context" in text) != crops


def test_rows_with_other_targets_are_not_compared() -> None:
    rows = [measured("none", "none", tiny(), protocol="sliding", stride=16) for _ in range(2)]
    whole, fewer = rows[0].result, rows[1].result.repeated(32, [64])
    fewer = replace(fewer, document_terms={64: [terms - 1 for terms in fewer.document_terms[64]]})
    with pytest.raises(RopeExtendError, match="scored different targets of the same text at 64"):
        differences(fewer, whole, [64])
    control = replace(rows[1], label="none, cropped to 32", result=fewer)
    assert against_cropped([rows[0], control]) == []
    assert "divided by that of" not in markdown_report([rows[0], control])


@pytest.mark.usefixtures("private_cache")
def test_the_trained_window_is_measured_if_one_pass_gives_it(work: Path) -> None:
    common = {"data": work / "data", "lengths": [16, 64]}
    rows = evaluated(work / "model", methods=["none", "yarn"], **common)
    assert [sorted(one.result.ppl) for one in rows] == [[16, 32, 64]] * 3
    assert [one.result.passes for one in rows] == [1] * 3
    (only,) = evaluated(work / "model", data=work / "data", lengths=[16])
    assert sorted(only.result.ppl) == [16]  # the documents may end before the window does
    strided = evaluated(work / "model", methods=["none"], protocol="sliding", stride=8, max_tokens=99,
                        cropped=False, **common)  # fmt: skip
    assert sorted(strided[0].result.ppl) == [16, 64]


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_retrieval_within_the_window_is_in_the_default_report(work: Path, tmp_path: Path) -> None:
    """The bundled model finds its keys within its window; position interpolation loses them."""
    command = f"evaluate {MODEL_DIR} --data {work / 'data'} --lengths 512 --methods linear,dynamic_ntk"
    main(shlex.split(f"{command} --output {tmp_path / 'report'} --retrieval 2"))
    rows = read_results(tmp_path / "report")
    assert [one.label for one in rows] == ["linear", "dynamic_ntk", "none, cropped to 256"]
    by_label = {one.label: one.retrieval for one in rows}
    for one in by_label.values():
        assert one.lengths("passkey") == [256]
        assert one.depths("passkey") == [0, 0.25, 0.5, 0.75, 1]
        assert one.rate("passkey", 256).trials == 10
    assert by_label["none, cropped to 256"].cells == by_label["dynamic_ntk"].cells
    before, after = (by_label[name].rate("passkey", 256).mean for name in ("none, cropped to 256", "linear"))
    assert before >= 0.8
    assert after <= 0.5

    found = {pair.second.label: pair.changes[0].change for pair in regressions(rows)}
    assert found["linear"].change == pytest.approx(after - before)
    assert found["linear"].high < 0
    assert found["dynamic_ntk"].change == 0
    for text in ((tmp_path / "report" / name).read_text() for name in ("report.html", "report.md")):
        assert "within the trained window of 256, compared with none, cropped to 256" in text
        assert str(found["linear"]) in text


@pytest.mark.parametrize(
    ("settings", "trials"),
    [
        ({"methods": ["none", "as-is"]}, 0),  # nothing changed
        ({"methods": ["yarn"], "retrieval": 0}, 0),
        ({"methods": ["yarn"]}, 4),
        ({"methods": ["none"], "retrieval": 3}, 3),  # asked for by number
        ({"methods": ["none"], "retrieval_lengths": [512]}, 4),
    ],
    ids=str,
)
def test_passkeys_are_asked_if_there_is_something_to_compare(settings: dict[str, Any], trials: int) -> None:
    config = EvaluationConfig(model=str(MODEL_DIR), lengths=(512,), **settings)
    prompts = Measurement(config, texts=False).asked
    assert (prompts.options.trials if prompts.tasks else 0) == trials
    with pytest.raises(
        RopeExtendError, match="retrieval must be auto, or a whole number, at least 0; got -1"
    ):
        EvaluationConfig(model=str(MODEL_DIR), retrieval=-1)


@pytest.mark.usefixtures("private_cache")
def test_a_task_that_does_not_fit_the_old_window_is_left_out(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluated(work / "model", data=work / "data", lengths=[64], methods=["yarn"], max_documents=1)
    assert not any(one.retrieval for one in found)
    assert "passkey at 32 is not measured: the task passkey needs about" in caplog.text
    assert "Retrieval" not in markdown_report(found)
