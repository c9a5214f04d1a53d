"""One runner of measurements: rows stay comparable, it is resumed at any point, and it keeps a budget."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import tiny_llama
from peft import LoraConfig, get_peft_model
from scaled_models import counted_tokens, scaled_copy
from test_report import result
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.peft_models import tuner_layers
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import evaluate as evaluate_module
from rope_extend.evaluation import running
from rope_extend.evaluation.candidates import Candidates
from rope_extend.evaluation.cells import CELLS, Cell, collect, finished_in
from rope_extend.evaluation.evaluation_config import EvaluationConfig, RetrievalConfig, StudyConfig
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.results import SAME_WEIGHTS, EvaluationRow, PerplexityResult
from rope_extend.evaluation.running import run
from rope_extend.journal import differences, only_writer, writes_to
from rope_extend.models.parameters import learned_parameters

pytestmark = pytest.mark.usefixtures("private_cache")

METHODS = ("none", "yarn", "rerope")


def settings_of(work: Path, **changes: Any) -> dict[str, Any]:
    common = {
        "model": str(work / "model"), "data": str(work / "data"), "lengths": (16, 64, 128),
        "methods": METHODS, "max_documents": 2, "retrieval": 0,
    }  # fmt: skip
    return {**common, **changes}


def config_of(work: Path, **changes: Any) -> EvaluationConfig:
    return EvaluationConfig(**settings_of(work, **changes))


def numbers(found: PerplexityResult) -> dict[str, Any]:
    """All values of a result except time and memory."""
    values = found.to_dict()
    return {name: values[name] for name in values if name not in ("seconds", "peak_memory_bytes")}


def count_measured(monkeypatch: pytest.MonkeyPatch, stop_at: int = 0) -> list[Cell]:
    """The cells that are measured from now on; the one with a number is interrupted."""
    cells: list[Cell] = []
    own = running._measure

    def measured(measurement: Any, candidate: Any, cell: Cell, bar: Any) -> Any:
        cells.append(cell)
        if len(cells) == stop_at:
            raise KeyboardInterrupt
        return own(measurement, candidate, cell, bar)

    monkeypatch.setattr(running, "_measure", measured)
    return cells


@pytest.fixture(scope="module")
def whole(work: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[EvaluationRow], Path]:
    """A finished evaluation."""
    directory = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        return rx.evaluate(config_of(work, output=str(directory)), progress=False), directory


def test_rows_are_those_of_the_library_itself(
    work: Path, whole: tuple[list[EvaluationRow], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Each row has the numbers of `rx.perplexity` on all documents in one call, bit for bit.

    How a checkpoint must be saved is not said, because none is.
    """
    rows, _ = whole
    assert [row.label for row in rows] == ["none", "none, cropped to 32", "yarn", "rerope"]
    one = Measurement(config_of(work))
    lm = one.candidates.load_options.load(one.candidates.name)
    plain_row, yarn_row, remapped = one.candidates.rows
    with one.candidates.prepared(lm, plain_row) as plainly:
        plain = rx.perplexity(plainly, one.documents, one.lengths, progress=False)
        cropped = rx.perplexity(
            plainly, one.documents, one.lengths, protocol="cropped", window=32, progress=False
        )
    with one.candidates.prepared(lm, yarn_row) as extended:
        yarn = rx.perplexity(extended, one.documents, one.lengths, progress=False)
    for ours, theirs in zip(rows, (plain, cropped, yarn), strict=False):
        assert numbers(replace(ours.result, data=theirs.data)) == numbers(theirs)
    with one.candidates.prepared(lm, remapped):
        assert "cannot represent" not in caplog.text
    rx.extend(lm, 64, "rerope")
    assert "cannot represent" in caplog.text


def test_other_protocols_are_merged_from_their_documents(work: Path) -> None:
    config = config_of(work, methods=["none"], lengths=(16, 64), protocol="sliding", stride=8, max_tokens=150)
    rows, one = rx.evaluate(config, progress=False), Measurement(config)
    lm = one.candidates.load_options.load(one.candidates.name)
    with one.candidates.prepared(lm, one.candidates.rows[0]) as plain:
        expected = rx.perplexity(plain, one.documents, [16, 64], protocol="sliding", stride=8, progress=False)
    found = rows[0].result
    assert (found.ppl, found.tokens, found.documents) == (expected.ppl, expected.tokens, 2)
    np.testing.assert_allclose(found.block_nll, expected.block_nll, rtol=1e-14)
    np.testing.assert_array_equal(found.block_terms, expected.block_terms)


def test_rows_advance_together(work: Path, whole: tuple[list[EvaluationRow], Path]) -> None:
    cells = Measurement(config_of(work)).cells()
    assert [cell.round for cell in cells] == [0] * 4 + [1] * 4
    assert [cell.row.label for cell in cells[:4]] == [cell.row.label for cell in cells[4:8]]
    assert finished_in(whole[1]) == {cell.digest for cell in cells}


@pytest.mark.parametrize("stop_at", [1, 2, 6, 8])
def test_an_interruption_loses_one_cell(
    stop_at: int, work: Path, tmp_path: Path, whole: tuple[list[EvaluationRow], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = config_of(work, output=str(tmp_path))
    with monkeypatch.context() as patch:
        assert count_measured(patch, stop_at) == []
        with pytest.raises(KeyboardInterrupt):
            rx.evaluate(config, progress=False)
    assert len(finished_in(tmp_path)) == stop_at - 1
    assert not (tmp_path / "results.jsonl").exists()
    if stop_at > 1:
        with (tmp_path / CELLS).open("a") as file:
            file.write('{"cell": "0123')  # cut short in the middle of a line
        with pytest.raises(RopeExtendError, match="holds a measurement; give resume=True"):
            rx.evaluate(config)
    measured = count_measured(monkeypatch)
    rows = rx.evaluate(config, resume=stop_at > 1, progress=False)
    assert len(measured) == 9 - stop_at
    assert [numbers(row.result) for row in rows] == [numbers(row.result) for row in whole[0]]


def test_a_finished_measurement_gets_more_rows_and_documents(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(work, output=str(tmp_path), methods=("none",), max_documents=1)
    rx.evaluate(config, progress=False)
    measured = count_measured(monkeypatch)
    rows = rx.evaluate(
        replace(config, methods=("none", "yarn"), max_documents=2), resume=True, progress=False
    )
    assert [(row.label, row.result.documents) for row in rows] == [
        ("none", 2), ("none, cropped to 32", 2), ("yarn", 2),
    ]  # fmt: skip
    assert len(measured) == 4
    measured.clear()
    assert not caplog.messages
    assert len(rx.evaluate(config, resume=True, progress=False)) == 2
    assert not measured
    assert f"4 cells in {tmp_path} are of other rows, texts (--documents 1), settings or" in caplog.text


def test_a_finished_retrieval_gets_more_prompts(tmp_path: Path) -> None:
    """Those that are answered stay as they are."""
    common = {"methods": ("none",), "lengths": (128,), "depths": 2, "cropped": False, "output": tmp_path}
    config = RetrievalConfig(str(MODEL_DIR), trials=1, tasks=("passkey",), **common)
    before = rx.retrieve(config, progress=False)[0].retrieval
    lines = (tmp_path / "cells.jsonl").read_text()
    after = rx.retrieve(replace(config, trials=3), resume=True, progress=False)[0].retrieval
    assert (tmp_path / "cells.jsonl").read_text().startswith(lines)
    assert [len(cell.scores) for cell in after.cells] == [3, 3]
    assert [cell.scores[:1] for cell in after.cells] == [cell.scores for cell in before.cells]


def test_the_three_commands_share_their_cells(work: Path, tmp_path: Path) -> None:
    """A report finds everything that an evaluation has measured on the same documents."""
    config = config_of(work, output=str(tmp_path / "out"))
    rows = rx.evaluate(config, progress=False)
    common = {name: getattr(config, name) for name in ("model", "data", "methods", "lengths", "output")}
    study = StudyConfig(**common, max_documents=2, target_length=128, tasks=[])
    assert Measurement(study).missing(tmp_path / "out") == []
    fewer = Measurement(replace(study, control_blocks=3)).missing(tmp_path / "out")
    assert {cell.row.label for cell in fewer} == {"none, cropped to 32"}
    found = rx.compare_methods(study, resume=True)
    assert [numbers(row.result) for row in found.rows] == [numbers(row.result) for row in rows]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, r"dtype \('torch.float32' there"),
        ({"lengths": (8, 128)}, r"lengths \(\[16, 32, 64, 128\] there, \[8, 32, 128\] here\)"),
        ({"protocol": "sliding", "stride": 8}, r"protocol \('prefix' there, 'sliding' here\)"),
        ({"methods": ("yarn(beta_fast=16)",), "cropped": False}, "its rows"),
        ({"trained_length": 16}, "differs in"),
        ("weights", "weights"),
        ("documents", "differs in data"),
    ],
)
def test_another_measurement_is_not_resumed(
    changes: Any, message: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    whole: tuple[list[EvaluationRow], Path],
) -> None:  # fmt: skip
    settings = settings_of(work, output=str(whole[1]))
    if changes == "weights":
        own = running.model_identity
        monkeypatch.setattr(running, "model_identity", lambda lm: {**own(lm), "weights": "other"})
    elif changes == "documents":
        text = next((work / "data").glob("*")).read_text()
        (tmp_path / "other.txt").write_text(text[::-1])
        settings["data"] = str(tmp_path)
    else:
        settings |= changes
    before = {path: path.read_bytes() for path in whole[1].rglob("*") if path.is_file()}
    with pytest.raises(RopeExtendError, match=message):
        rx.evaluate(EvaluationConfig(**settings), resume=True, progress=False)
    assert {path: path.read_bytes() for path in whole[1].rglob("*") if path.is_file()} == before


def test_a_resumed_row_has_the_window_that_is_asked_for_now(work: Path, tmp_path: Path) -> None:
    common = settings_of(work, output=str(tmp_path / "out"), methods=("as-is", "yarn"), lengths=(32, 64, 128))
    for trained in (64, 32):
        config = EvaluationConfig(**{**common, "trained_length": trained})
        rows = rx.evaluate(config, resume=trained == 32, progress=False)
        assert {row.trained_length for row in rows} == {trained}


def test_one_process_writes_to_a_directory(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(work, output=str(tmp_path), methods=("none",))
    with only_writer(tmp_path, "measurement"), pytest.raises(RopeExtendError, match="another measurement is"):
        rx.evaluate(config, progress=False)
    before = {}

    def slow(*settings: Any, **more: Any) -> Measurement:
        """Of two that begin in an empty directory, one has ended when the other gets the lock."""
        monkeypatch.undo()
        rx.evaluate(config, progress=False)
        before.update({path: path.read_bytes() for path in tmp_path.iterdir()})
        return Measurement(*settings, **more)

    monkeypatch.setattr(evaluate_module, "Measurement", slow)
    with pytest.raises(RopeExtendError, match="holds a measurement; give resume=True"):
        rx.evaluate(config, progress=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_report_is_written_while_no_other_process_may_and_a_full_disk_is_one_clear_error(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run could put its report under the cells of the first."""
    held = []

    def write(_: object, directory: Path, **__: object) -> None:
        held.append(writes_to(directory))
        Path("/dev/full").write_text("x")

    monkeypatch.setattr(evaluate_module, "write_report", write)
    with pytest.raises(RopeExtendError, match=r"No space left.*free space.*resume=True"):
        rx.evaluate(config_of(work, output=str(tmp_path), methods=("none",)), progress=False)
    assert held == [True]
    assert len(finished_in(tmp_path)) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.pop("cell"),
        lambda line: line.update(cell=[]),
        lambda line: line.update(kind="other"),
        lambda line: line.update(model=1),
        lambda line: line.update(encoding={}),
        lambda line: line.pop("result"),
        lambda line: line["result"].update(block_nll="AAAA"),
        lambda line: line["result"].pop("block_nll"),  # of an earlier version
        lambda line: line["result"].update(document_nll={"128": []}),
    ],
)
def test_a_damaged_cell_is_refused_before_others_are_measured(
    damage: Callable[[dict[str, Any]], Any], work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    whole: tuple[list[EvaluationRow], Path],
) -> None:  # fmt: skip
    first, *lines = (whole[1] / CELLS).read_text().splitlines()
    line = json.loads(lines[0])
    damage(line)
    measured = count_measured(monkeypatch)
    for name in (CELLS, "cells.1.jsonl"):  # that of a second process is taken over
        (tmp_path / name).write_text("\n".join([first, json.dumps(line), *lines[1:-1]]) + "\n")
        with pytest.raises(RopeExtendError, match=rf"line 2 of .*{name}' is damaged.*delete the line"):
            rx.evaluate(config_of(work, output=str(tmp_path)), resume=True, progress=False)
        (tmp_path / name).unlink()
    assert not measured


def saved(adapter: Path, *, alpha: int = 4, learned: float = 0.0) -> None:
    """An adapter of `fire` on the model in `work`, with the same LoRA matrices every time."""
    torch.manual_seed(0)
    lm = tiny_llama()
    rx.extend(lm, 128, "fire")
    tuned = get_peft_model(lm, LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"]))
    with torch.no_grad():
        for weight in learned_parameters(tuned).values():
            weight += learned
    rx.save(tuned, adapter, overwrite=True)


@pytest.mark.slow
def test_an_adapter_is_all_its_files(work: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    config = config_of(work, methods=("none",), adapters=[str(adapter)], cropped=False, max_documents=1)
    digests = []
    for how in ({}, {}, {"alpha": 64}, {"learned": 0.5}):  # again; adapter_config.json; encoding.safetensors
        saved(adapter, **how)
        digests.append(Measurement(config).cells()[-1].digest)
    assert digests[0] == digests[1]
    assert len({*digests}) == 3
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(RopeExtendError, match=r"holds no adapter_model\.safetensors"):
        Measurement(config)


def test_needles_are_hidden_in_the_documents(work: Path) -> None:
    config = RetrievalConfig(
        model=str(MODEL_DIR), tasks=("needle",), lengths=(512,), methods=("none",), depths=1, trials=1,
        data=str(work / "data"),
    )  # fmt: skip
    words = set(next((work / "data").glob("*")).read_text().split())
    *_, prompt = Measurement(config).prompts
    assert "grass" not in prompt.text  # of the published filler
    assert len(set(prompt.text.split()) & words) > 5


def test_an_answer_depends_on_the_tokenizer() -> None:
    config = RetrievalConfig(model=str(MODEL_DIR), lengths=(512,), methods=("none",), depths=1, trials=1)
    one = Measurement(config)
    first = one.cells()[0].digest
    one.tokenizer.add_tokens(["another"])  # the prompt's text and its length stay
    assert one.cells()[0].digest != first


def test_a_budget_stops_and_says_what_is_missing(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(work, output=str(tmp_path), budget=5.5)
    monkeypatch.setattr(Measurement, "_seconds", lambda self, tokens: 1.0)
    # The cropped row has seventeen windows of a second, the others one.
    with monkeypatch.context() as patch:
        patch.setattr(running, "_seconds", lambda work, done, begun: 9.0 if done >= 20 else 0.0)
        rows = rx.evaluate(config, progress=False)
    assert [row.result.documents for row in rows] == [1] * 4
    assert "Not measured yet" in (tmp_path / "report.md").read_text()
    rows = rx.evaluate(replace(config, budget=None), resume=True, progress=False)
    assert [row.result.documents for row in rows] == [2] * 4
    assert "Not measured yet" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("rope_type", "methods", "passes"),
    [
        ("dynamic", ["as-is", "none", "yarn"], {"as-is": [32, 64, 128], "none": [128], "yarn": [128]}),
        ("longrope", ["none", "as-is"], {SAME_WEIGHTS: [128], "as-is": [32, 128]}),
        ("yarn", ["as-is"], {"as-is": [128]}),
    ],
)
def test_the_plan_counts_what_is_processed(
    rope_type: str, methods: list[str], passes: dict[str, list[int]], work: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Stock tables that depend on the length need a pass for each group of lengths with equal tables.

    A document that begins with BOS gets two controls, and is not the one that was measured without.
    """
    model, counts = scaled_copy(work / "model", tmp_path, rope_type), counted_tokens(monkeypatch)
    config, bos, digests = config_of(work, model=str(model), methods=methods), -1, []
    for times, name in ((1, "config.json"), (2, "generation_config.json"), (2, "config.json")):
        changed = json.loads((model / name).read_text()) | {"bos_token_id": bos}
        (model / name).write_text(json.dumps(changed))
        one = Measurement(config)
        assert one.passes == passes
        counts.clear()
        run(one, None, progress=False)
        cells, bos = one.cells(), int(one.documents[0].input_ids[0])
        assert sum(cell.tokens for cell in cells) == sum(counts) > 0
        control = next(cell for cell in cells if cell.row.crop)
        assert control.tokens == times * (32 + 16 * 32)
        digests.append(control.digest)
    assert digests[0] != digests[1] == digests[2]


def values(label: str, document: str, sums: float) -> dict[str, Any]:
    """A finished cell of perplexity."""
    one = result(1.0)
    found = replace(
        one, documents=1, data=document, block_nll=one.block_nll[:1], block_terms=one.block_terms[:1],
        document_nll={n: [sums * n] for n in one.ppl}, document_terms={n: [n - 1] for n in one.ppl},
        tokens={n: n - 1 for n in one.ppl},
    )  # fmt: skip
    plain = json.loads(json.dumps(found.to_dict()))
    return {**about(label), "kind": "perplexity", "document": document, "result": plain}


def about(label: str) -> dict[str, Any]:
    """What every cell says of its row."""
    none = dict.fromkeys(("adapter", "trained_length", "rope_parameters", "target_length", "crop"))
    return {"label": label, "encoding": {"name": label}, "model": "m", **none}


def test_rows_are_compared_on_the_documents_that_all_have() -> None:
    cells = [values(label, document, 1.0) for document in "ab" for label in ("none", "ntk", "yarn")]
    labels = ["none", "ntk", "yarn", "later"]
    for some, shared, documents in ((cells, 3, 2), (cells[:-1], 3, 1), (cells[:4], 3, 1), (cells[:2], 2, 1)):
        rows = collect(some, labels)
        assert [each.label for each in rows] == labels[:shared]
        assert {each.result.documents for each in rows} == {documents}
    other = [each for each in cells if (each["label"], each["document"]) != ("ntk", "a")]
    assert [(each.label, each.result.documents) for each in collect(other, labels)] == [
        (label, 1) for label in labels[:3]
    ]
    # A new document, or a new row, takes nothing away that was measured before.
    begun = [values(label, document, 1.0) for document in "bcdefg" for label in labels[:3]]
    for new in (values("none", "a", 1.0), values("later", "b", 1.0)):
        found = collect([new, *begun], labels)
        assert [(each.label, each.result.documents) for each in found] == [(label, 6) for label in labels[:3]]
    assert len(collect([*begun, values("later", "z", 1.0)], labels)) == 3
    assert collect([], labels) == []


def test_documents_of_one_file_name_are_two_and_weighted_by_tokens() -> None:
    first, second = (
        {**values("none", data, sums), "document": "text.txt"} for data, sums in (("a", 1.0), ("b", 2.0))
    )
    (row,) = collect([first, second], ["none"])
    both = row.result
    assert both.document_nll == {n: [n, 2.0 * n] for n in both.ppl}
    for length in both.ppl:
        assert both.ppl[length] == pytest.approx(np.exp(3.0 * length / (2 * (length - 1))))
        assert both.tokens[length] == 2 * (length - 1)
    assert both.data not in ("a", "b")


def test_an_adapter_is_measured_up_to_its_window(
    work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "adapter")
    config = config_of(work, methods=("none",), adapters=(str(tmp_path / "adapter"),), lengths=None)
    assert Candidates.of(config).lengths == (32, 64, 128)
    assert Candidates.of(replace(config, adapters=())).lengths == (32, 64, 128, 256)
    assert "is measured up to" not in caplog.text
    Candidates.of(replace(config, lengths=(32, 160)))
    assert "has a window of 128, and is measured up to 160" in caplog.text
    (tmp_path / "adapter" / "adapter_config.json").unlink()  # as in a merged checkpoint
    with pytest.raises(RopeExtendError, match=r"holds no adapter .* give it as the model"):
        Candidates.of(config)


def test_an_adapter_of_another_base_is_refused_before_anything_is_lost(
    work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused when its turn came, after rows were measured, and after an old study was deleted."""
    saved(tmp_path / "adapter")
    lm = AutoModelForCausalLM.from_pretrained(work / "model")
    with torch.no_grad():
        lm.lm_head.weight *= 1000
    shutil.copytree(work / "model", tmp_path / "other")
    lm.save_pretrained(tmp_path / "other")
    config = config_of(work, methods=("none",), max_documents=1, output=str(tmp_path / "out"))
    rx.evaluate(config, progress=False)
    before = (tmp_path / "out" / CELLS).read_bytes()
    config = replace(config, model=str(tmp_path / "other"), adapters=(str(tmp_path / "adapter"),))
    with pytest.raises(RopeExtendError, match="has other weights"):
        rx.evaluate(config, overwrite=True, progress=False)
    assert (tmp_path / "out" / CELLS).read_bytes() == before
    assert "worse than a guess" not in caplog.text
    rx.evaluate(replace(config, adapters=(), output=None), progress=False)
    assert "worse than a guess" in caplog.text


@pytest.mark.parametrize("output", ["", "out"])
def test_a_report_is_never_among_its_own_texts(work: Path, tmp_path: Path, output: str) -> None:
    shutil.copytree(work / "data", tmp_path / "data")
    config = config_of(work, data=str(tmp_path / "data"), output=str(tmp_path / "data" / output))
    with pytest.raises(RopeExtendError, match=r"lies in the data .* choose an output directory outside"):
        rx.evaluate(config, progress=False)
    assert not (tmp_path / "data" / output / CELLS).exists()


def answered(label: str, trial: int, depths: tuple[float, ...]) -> dict[str, Any]:
    """A finished cell of retrieval."""
    trials = [
        {
            "task": "passkey", "length": 512, "depth": depth, "trial": trial, "score": depth,
            "prompt": f"{trial}{depth}",
        }
        for depth in depths
    ]  # fmt: skip
    cost = {"seconds": 1.0, "forward_tokens": 512, "peak_memory_bytes": 1}
    return {**about(label), "kind": "retrieval", "trials": trials, **cost}


def test_trials_of_several_cells_are_in_order() -> None:
    cells = [answered("none", trial, (depth,)) for trial in (1, 0) for depth in (0.0, 1.0)]
    cells += [answered("yarn", 0, (1.0,)), answered("yarn", 1, (0.0, 1.0))]
    first, second = (row.retrieval for row in collect(cells, ["none", "yarn"]))
    assert {cell.depth: cell.scores for cell in first.cells} == {0.0: (0.0, 0.0), 1.0: (1.0, 1.0)}
    assert {cell.depth: cell.scores for cell in second.cells} == {1.0: (1.0, 1.0), 0.0: (0.0,)}
    assert first.against(second, "passkey", 512) is None  # not the same prompts
    assert first.forward_tokens == 4 * 512


def test_an_adapter_that_acts_otherwise_is_another_model() -> None:
    lora = LoraConfig(task_type="CAUSAL_LM", lora_alpha=8, target_modules=["q_proj"])
    model = get_peft_model(tiny_llama(), lora)
    identity = model_identity(model)
    with model.disable_adapter():
        assert "adapters" in differences(identity, model_identity(model))
    assert model_identity(model) == identity
    for _, layer in tuner_layers(model):
        layer.scale_layer(2.0)
    assert differences(identity, model_identity(model)).startswith("adapters (")


def test_only_buffers_that_are_saved_are_part_of_a_model() -> None:
    model = tiny_llama()
    model.register_buffer("saved", torch.zeros(2, dtype=torch.bool))
    model.model.register_buffer("cached", torch.zeros(3), persistent=False)
    before = model_identity(model)
    model.model.cached += 1
    assert model_identity(model) == before
    model.saved[1] = True
    assert differences(before, model_identity(model)).startswith("weights (")
