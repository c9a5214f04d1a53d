"""A study is measured cell by cell, and gives what one evaluation of all rows gives."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import llama, tiny_llama
from peft import LoraConfig, get_peft_model
from rope_extend.study.cells import (
    BIN,
    Cell,
    CellStore,
    StudyRow,
    binned,
    perplexity_values,
    row_of_cell,
    unbinned,
)
from rope_extend.study.collecting import Collected, collect, merged
from rope_extend.study.run_study import Share, Study
from scaled_models import counted_tokens, scaled_copy
from test_report_and_plots import result, row

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.clock import Clock
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.results import Cell as Trials
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.models.parameters import learned_parameters
from rope_extend.study import run_study
from rope_extend.study.deciding import decision
from rope_extend.study.reporting import comparison, holds_cells, not_measured
from rope_extend.study.study_config import METHODS, StudyConfig
from rope_extend.units import format_duration, parse_duration

pytestmark = pytest.mark.usefixtures("private_cache")


def study(work: Path, **settings: Any) -> Study:
    common = {
        "model": str(work / "model"), "data": str(work / "data"), "target_length": 128, "tasks": [],
        "methods": ["none", "yarn", "rerope"], "lengths": [16, 64], "max_documents": 2,
    }  # fmt: skip
    return Study(StudyConfig(**{**common, **settings}))


def collected(one: Study, directory: Path) -> Collected:
    return comparison(one, one.run(directory), directory).collected


@pytest.fixture(scope="module")
def measured(work: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    """A finished study."""
    directory = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
        one = study(work)
        one.run(directory)
    return one, directory


def test_it_equals_an_evaluation(measured: tuple[Study, Path], work: Path) -> None:
    one, directory = measured
    found = collected(one, directory)
    expected = evaluate(
        EvaluationConfig(
            model=str(work / "model"), data=str(work / "data"), methods=("none", "yarn", "rerope"),
            lengths=(16, 64, 128), max_documents=2, retrieval=0,
        ),
        progress=False,
    )  # fmt: skip
    assert [each.label for each in found.rows] == [each.label for each in expected]
    assert [each.label for each in expected][1] == "none, cropped to 32"
    for ours, theirs in zip(found.rows, expected, strict=True):
        assert ours.encoding == theirs.encoding
        assert ours.result.document_nll == theirs.result.document_nll
        assert ours.result.document_terms == theirs.result.document_terms
        assert ours.result.ppl == pytest.approx(theirs.result.ppl, rel=1e-15)
        assert ours.result.window == theirs.result.window
        # Positions are kept in ranges of 128, and rounded.
        assert ours.result.within(128) == pytest.approx(theirs.result.within(128), rel=1e-4)
    assert not found.partial


def test_training_in_the_old_window_is_measured_with_a_cropped_context_too(
    work: Path, tmp_path: Path, plain_adapters: list[str]
) -> None:
    """It shows what training gives without a longer context. An evaluation has the same rows."""
    settings: dict[str, Any] = {"methods": ["none"], "adapters": plain_adapters, "max_documents": 1}
    found = collected(study(work, **settings), tmp_path)
    assert [each.label for each in found.rows] == [
        "none", "none, cropped to 32", "none + LoRA at 32", "none + LoRA at 32, cropped to 32",
        "none + LoRA at 64",
    ]  # fmt: skip
    common = {"model": str(work / "model"), "data": str(work / "data"), "lengths": (16, 64, 128)}
    expected = evaluate(EvaluationConfig(**common, **settings, retrieval=0), progress=False)
    assert [each.label for each in found.rows] == [each.label for each in expected]
    for ours, theirs in zip(found.rows, expected, strict=True):
        assert ours.adapter == theirs.adapter
        assert ours.result.document_nll == theirs.result.document_nll
        assert ours.result.window == theirs.result.window
    # A control that is missing keeps no verdict open.
    one, store = study(work, **settings), CellStore(tmp_path)
    cells = one.cells(tiny_llama())
    controls = [cell for cell in cells if cell.row.adapter == plain_adapters[0]]
    assert len(controls) == 2
    for cell in controls:
        (store.folder / cell.file).unlink()
    found = comparison(one, cells, tmp_path)
    assert found.missing is not None
    assert found.missing.items == [
        "none + LoRA at 32: 1 documents",
        "none + LoRA at 32, cropped to 32: 1 documents",
    ]
    assert "wholly measured (" not in found.verdict.items[0]


def test_a_finished_study_loads_nothing_again(
    measured: tuple[Study, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, directory = measured
    monkeypatch.setattr(Study, "_measure", lambda *_: pytest.fail("a finished cell was measured again"))
    assert len(one.run(directory)) == 8


@pytest.mark.slow
def test_an_interrupted_study_resumes(
    measured: tuple[Study, Path], work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, directory = measured
    whole, calls, measure = collected(one, directory), [], Study._measure

    def interrupted(self: Study, candidate: Any, cell: Cell) -> dict[str, Any]:
        calls.append(cell)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return measure(self, candidate, cell)

    monkeypatch.setattr(Study, "_measure", interrupted)
    again = study(work)
    with pytest.raises(KeyboardInterrupt):
        again.run(tmp_path)
    # Four rows on the first document, and one on the second: the rows can be compared on the first.
    monkeypatch.setattr(Study, "_measure", lambda *_: pytest.fail("measured"))
    store = CellStore(tmp_path)
    cells = [json.loads(path.read_text()) for path in store.folder.iterdir()]
    part = collect(cells, [each.label for each in again.rows])
    assert len(part.rows) == 4
    assert part.documents == [part.documents[0]]
    monkeypatch.setattr(Study, "_measure", measure)
    assert [each.to_dict() | {"result": None} for each in collected(again, tmp_path).rows] == [
        each.to_dict() | {"result": None} for each in whole.rows
    ]
    for ours, theirs in zip(collected(again, tmp_path).rows, whole.rows, strict=True):
        assert ours.result.document_nll == theirs.result.document_nll


def test_a_cell_is_found_under_any_label(tmp_path: Path) -> None:
    store, identity = CellStore(tmp_path), {"kind": "perplexity", "weights": "w"}
    first = StudyRow("none + LoRA at 32", adapter="runs/a")
    store.write(Cell("perplexity", first, 0, 0, 1.0, identity), {"label": first.label, "adapter": "runs/a"})
    again = Cell("perplexity", StudyRow("none + LoRA at 32 (a)", adapter="a"), 0, 0, 1.0, identity)
    found = store.read(again)
    assert found is not None
    assert (found["label"], found["adapter"]) == ("none + LoRA at 32 (a)", "a")
    assert not store.has(replace(again, identity={**identity, "weights": "v"}))
    assert not store.has(replace(again, kind="retrieval"))
    (tmp_path / "cells" / f"perplexity-mine-{again.digest}.txt").write_text("{}")
    store.write(again, {"label": "later"})
    assert [path.name for path in store.paths(again)] == [again.file]


def test_equal_documents_are_measured_once(
    work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal in the tokens that would be measured: the rest of a file does not count."""
    text = next((work / "data").glob("*")).read_text()
    for name, more in (("a", ""), ("b", " and more"), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(text + more if name != "c" else text[::-1])
    one = study(work, data=str(tmp_path), max_documents=3)
    assert [Path(document.name).stem for document in one.documents] == ["a", "c"]
    assert "b.txt is left out: its tokens are those of" in caplog.text
    assert "perplexity: 4 rows, 2 documents each" in one.work_text()


def test_only_our_files_are_removed(tmp_path: Path) -> None:
    store, row = CellStore(tmp_path), StudyRow("none, cropped to 8k", method="none", crop=8192)
    cells = [Cell(kind, row, 0, 0, 1.0, {"kind": kind}) for kind in ("perplexity", "retrieval")]
    theirs = ["experiment.csv", "mine.json", "perplexity-notes.json", "deep/x", ".mine.partial"]
    (store.folder / "deep").mkdir(parents=True)
    for name in theirs:
        (store.folder / name).write_text("precious")
    assert not holds_cells(tmp_path)
    for cell in cells:
        store.write(cell, {})
    (store.folder / f".{cells[0].file[:40]}.0123abcd.partial").touch()  # a process was killed
    assert store.files == sorted(cell.file for cell in cells)
    assert holds_cells(tmp_path)
    store.remove()
    left = {str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.is_file()}
    assert left == {*theirs}


def test_a_damaged_cell_is_measured_again(measured: tuple[Study, Path], work: Path, tmp_path: Path) -> None:
    one, directory = measured
    whole = collected(one, directory)
    again = study(work, methods=["none"], cropped=False)
    again.run(tmp_path)
    file = next((tmp_path / "cells").iterdir())
    file.write_text(file.read_text()[:40])
    (row_again,) = collected(again, tmp_path).rows
    assert row_again.result.document_nll == whole.rows[0].result.document_nll


@pytest.mark.parametrize(
    "change", [{"lengths": [16, 32]}, {"methods": ["yarn(beta_fast=16)"]}, {"dtype": "bfloat16"}, "weights"]
)
def test_cells_of_another_measurement_are_not_used(
    change: Any, measured: tuple[Study, Path], work: Path
) -> None:
    one, directory = measured
    store = CellStore(directory)
    other = study(work, cropped=False, **(change if isinstance(change, dict) else {}))
    lm = other.candidates.load_options.load(other.candidates.name)
    same = [store.has(cell) for cell in one.cells(one.candidates.load_options.load(one.candidates.name))]
    assert all(same)
    if change == "weights":
        with torch.no_grad():
            lm.model.norm.weight[0] += 2**-20
    assert not any(store.has(cell) for cell in other.cells(lm))


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
    saved(adapter)
    settings = {"methods": ["none"], "adapters": [str(adapter)], "cropped": False, "max_documents": 1}
    one = study(work, **settings)
    files = {one.cells(torch.nn.Identity())[-1].file}
    saved(adapter)
    files |= {one.cells(torch.nn.Identity())[-1].file}
    assert len(files) == 1
    saved(adapter, alpha=64)  # only adapter_config.json
    files |= {one.cells(torch.nn.Identity())[-1].file}
    saved(adapter, learned=0.5)  # only encoding.safetensors
    files |= {one.cells(torch.nn.Identity())[-1].file}
    assert len(files) == 3
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(RopeExtendError, match=r"holds no adapter_model\.safetensors"):
        study(work, **settings)


def test_an_answer_depends_on_the_tokenizer() -> None:
    settings: dict[str, Any] = {"methods": ["none"], "depths": 1, "trials": 1, "cropped": False}
    one = Study(StudyConfig(model=str(MODEL_DIR), target_length=512, **settings))
    (first,) = one.cells(torch.nn.Identity())
    one.tokenizer.add_tokens(["another"])  # the prompt's text and its length stay
    (second,) = one.cells(torch.nn.Identity())
    assert first.file != second.file


def test_shares_measure_every_cell_once(work: Path, tmp_path: Path) -> None:
    one = study(work, methods=["none"])
    one.run(tmp_path, share=Share(0, 3))
    first = {*(tmp_path / "cells").iterdir()}
    assert len(first) == 2
    one.run(tmp_path, share=Share(1, 3))
    one.run(tmp_path, share=Share(2, 3))
    assert len({*(tmp_path / "cells").iterdir()}) == 4
    assert len(collected(one, tmp_path).rows) == 2


def test_a_budget_leaves_the_rest(work: Path, tmp_path: Path) -> None:
    one = study(work, budget=1e-9, methods=["none"])
    found = comparison(one, one.run(tmp_path), tmp_path)
    assert found.missing is not None
    assert found.missing.items == ["none: 2 documents", "none, cropped to 32: 2 documents"]
    assert "No row can be judged yet" in found.markdown()


@pytest.mark.parametrize(
    ("rope_type", "methods", "passes"),
    [
        ("dynamic", ["as-is", "none", "yarn"], {"as-is": [32, 64, 128], "none": [128], "yarn": [128]}),
        ("longrope", ["none", "as-is"], {"none": [128], "as-is": [32, 128]}),
        ("yarn", ["as-is"], {"as-is": [128]}),
    ],
)
def test_a_pass_for_each_table_is_counted(
    rope_type: str, methods: list[str], passes: dict[str, list[int]], work: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Stock tables that depend on the length need a pass for each group of lengths with equal tables."""
    monkeypatch.setattr(run_study, "seconds_of_window", lambda _, tokens: float(tokens))
    model, counts = scaled_copy(work / "model", tmp_path, rope_type), counted_tokens(monkeypatch)
    one = study(work, model=str(model), methods=methods)
    assert one.plan is not None
    assert {row.label: each for row, each in one.passes.items()} == passes
    assert {length for each in passes.values() for length in each} <= {
        plan.length for plan in one.plan.lengths
    }
    cells = one.run(tmp_path / "study")
    assert sum(cell.work for cell in cells) == sum(counts) > 0
    estimate = f"in all, about {format_duration(sum(counts))}"
    assert one.work_text().splitlines()[-1] == estimate
    without_texts = study(work, model=str(model), methods=methods, data=None)
    assert without_texts.work_text().splitlines()[-1] == estimate


@pytest.mark.slow
@pytest.mark.slow
def test_the_plan_has_the_order_of_the_cells(work: Path) -> None:
    """Also of tasks without a depth, whose trials have other numbers."""
    settings = {"target_length": 2048, "tasks": ["common_words", "passkey"], "depths": 2, "trials": 2}
    one = study(work, data=None, methods=["none", "yarn"], task_lengths=[1024, 2048], **settings)
    cells = one.cells(tiny_llama())
    assert {cell.round for cell in cells} == {0, 1, 2, 3}
    planned = one._planned()
    texts = 2 * 3  # documents, which are planned without data, of three rows
    assert len(planned) == len(cells) + texts
    assert [(cell.round, cell.row.label, cell.kind, cell.work) for cell in cells] == [
        each for each in planned if each[2] == "retrieval"
    ]


def test_adapters_are_rows(work: Path, tmp_path: Path) -> None:
    from rope_extend.training.finetune import finetune
    from rope_extend.training.recipe import Recipe

    adapter = str(tmp_path / "linear")
    tuned = finetune(
        Recipe(
            model=str(work / "model"), data=str(work / "data"), output_dir=adapter, target_length=128,
            method="linear", steps=1, gradient_accumulation=1, lora_rank=2,
        )
    )  # fmt: skip
    tuned.patch.remove()
    one = study(work, methods=["none"], adapters=[adapter], max_documents=2)
    found = collected(one, tmp_path / "study")
    assert [each.label for each in found.rows] == ["none", "none, cropped to 32", "linear + LoRA"]
    assert found.rows[2].adapter == adapter
    # The plain rows of the second document come after the adapter of the first: it left nothing behind.
    plain = collected(study(work, methods=["none"]), tmp_path / "plain")
    assert found.rows[0].result.document_nll == plain.rows[0].result.document_nll


@pytest.mark.slow
def test_passkeys_of_the_bundled_model(work: Path, tmp_path: Path) -> None:
    """Each prompt is a cell; together they equal `retrieve`."""
    from rope_extend.evaluation.evaluation_config import RetrievalConfig
    from rope_extend.evaluation.retrieve import retrieve

    settings: dict[str, Any] = {"model": str(MODEL_DIR), "tasks": ["passkey"], "depths": 2, "trials": 2}
    one = Study(StudyConfig(**settings, target_length=512, methods=["none", "rerope"]))
    found = comparison(one, one.run(tmp_path), tmp_path).collected
    expected = retrieve(
        RetrievalConfig(**settings, lengths=(512,), methods=("none", "rerope")), progress=False
    )
    theirs = {each.label: each for each in expected}
    assert {each.label for each in found.retrieval} == {"none", "none, cropped to 256", "rerope"}
    for ours in found.retrieval:
        for depth in (0, 1):
            assert ours.rate("passkey", 512, depth) == theirs[ours.label].rate("passkey", 512, depth)


def test_positions_are_kept_in_ranges() -> None:
    nll = np.arange(4 * BIN - 1.0)
    means = binned(result(1.0, (4 * BIN,), nll_by_position=nll))
    assert means == [np.mean(nll[: BIN - 1]), *(np.mean(nll[n * BIN - 1 :][:BIN]) for n in (1, 2, 3))]
    again = unbinned(means, 4 * BIN)
    assert len(again) == 4 * BIN - 1
    assert (again[BIN - 2], again[BIN - 1]) == (means[0], means[1])
    short = binned(result(1.0, (5,), nll_by_position=np.array([1.0, 2, 3, np.nan])))
    assert short == [None]


@pytest.mark.parametrize("length", [200, 256, 512, 1024, 1280, 3072, 8192, 12_288, 24_576, 32_768])
def test_ranges_of_a_report_are_exact(length: int) -> None:
    """Those of a cell are those of the evaluation itself, also the first few positions."""
    nll = np.random.default_rng(0).uniform(0, 9, length - 1)
    one = EvaluationRow("none", {"name": "none"}, "m", None, result(1.0, (length,), nll_by_position=nll), 32)
    read = row_of_cell(json.loads(json.dumps(perplexity_values(one, "a.txt"))))
    for ours, theirs in zip(read.result.buckets(), one.result.buckets(), strict=True):
        assert (ours.start, ours.stop) == (theirs.start, theirs.stop)
        # Means are kept to 1e-5 nats.
        assert math.log(ours.ppl) == pytest.approx(math.log(theirs.ppl), abs=1e-5)
    old = perplexity_values(one, "a.txt")
    del old["result"]["bin"]
    old["result"]["nll_by_position"] = binned(one.result)
    assert len(row_of_cell(old).result.nll_by_position) == length - 1


def part_of(one: PerplexityResult, sums: float, data: str) -> PerplexityResult:
    lengths = {n: [sums * n] for n in one.ppl}
    terms = {n: [n - 1] for n in one.ppl}
    tokens = {n: n - 1 for n in one.ppl}
    return replace(one, documents=1, document_nll=lengths, document_terms=terms, tokens=tokens, data=data)


def values(label: str, document: str, sums: float) -> dict[str, Any]:
    one = EvaluationRow(label, {"name": label}, "m", None, part_of(result(1.0), sums, document), 32)
    lines = one.to_dict()
    lines["result"]["nll_by_position"] = binned(one.result)
    return {"kind": "perplexity", "document": document, **lines}


def test_rows_are_compared_on_the_documents_that_fill_the_table() -> None:
    cells = [values(label, document, 1.0) for document in "ab" for label in ("none", "ntk", "yarn")]
    labels = ["none", "ntk", "yarn", "later"]
    assert len(collect(cells, labels).rows) == 3
    without = collect(cells[:-1], labels)  # two rows on two documents, or three on one
    assert ([each.label for each in without.rows], without.documents) == (["none", "ntk"], ["a", "b"])
    assert without.partial == {"yarn": 1, "later": 0}
    early = collect(cells[:4], labels)
    assert ([each.label for each in early.rows], early.documents) == (["none", "ntk", "yarn"], ["a"])
    nothing = collect([], labels)
    assert (nothing.rows, nothing.documents) == ([], [])


@pytest.mark.parametrize("added", ["0", "z"])
def test_a_document_of_few_rows_empties_no_table(added: str) -> None:
    """Whatever its name is, and wherever it is among the cells."""
    cells = [values(label, document, 1.0) for document in "ab" for label in ("none", "ntk", "yarn", "linear")]
    few = [values("none", added, 1.0)]
    found = collect(
        sorted([*cells, *few], key=lambda one: one["document"]), ["none", "ntk", "yarn", "linear"]
    )
    assert ([each.label for each in found.rows], found.documents) == (
        ["none", "ntk", "yarn", "linear"], ["a", "b"],
    )  # fmt: skip
    assert found.partial == {}


def test_documents_of_one_file_name_are_two() -> None:
    first, second = (
        {**values("none", data, sums), "document": "text.txt"} for data, sums in (("a", 1.0), ("b", 2.0))
    )
    found = collect([first, second], ["none"])
    assert found.documents == ["text.txt", "text.txt"]
    assert found.rows[0].result.documents == 2
    assert found.rows[0].result.document_nll == {n: [n, 2.0 * n] for n in found.rows[0].result.ppl}


def test_documents_are_weighted_by_tokens() -> None:
    rows = [
        EvaluationRow("x", None, "m", None, part_of(result(1.0), sums, name), 32)
        for sums, name in ((1.0, "a"), (2.0, "b"))
    ]
    both = merged(rows).result
    for length in both.ppl:
        assert both.ppl[length] == pytest.approx(np.exp(3.0 * length / (2 * (length - 1))))
        assert both.tokens[length] == 2 * (length - 1)
    assert merged(rows[:1]).result.data == "a"
    assert both.data not in ("a", "b")
    assert both.interval(max(both.ppl)) is not None


def prompt(label: str, trial: int, depth: float, score: float) -> dict[str, Any]:
    cells = (Trials("passkey", 512, depth, 100, (score,), f"{trial}{depth}"),)
    return {"kind": "retrieval", "trial": trial, **RetrievalResult(label, cells).to_dict()}


def test_a_trial_counts_if_it_has_every_depth() -> None:
    cells = [prompt("none", trial, depth, depth) for trial in (1, 0) for depth in (0.0, 1.0)]
    cells += [prompt("yarn", 0, 1.0, 1.0), prompt("yarn", 1, 0.0, 1.0), prompt("yarn", 1, 1.0, 1.0)]
    first, second = collect(cells, ["none", "yarn"]).retrieval
    assert [cell.scores for cell in first.cells] == [(0.0, 0.0), (1.0, 1.0)]
    assert [cell.scores for cell in second.cells] == [(1.0,), (1.0,)]
    assert first.against(second, "passkey", 512) is None  # not the same prompts


def test_time_to_go_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rope_extend.evaluation.clock.time.perf_counter", lambda: now[0])
    clock = Clock([("a", 1.0), ("a", 2.0), ("b", 1.0)], budget=20)
    assert clock.to_go == 4
    clock.finished(0, 3.0)
    assert clock.to_go == pytest.approx(9)  # all others are three times as slow too
    clock.finished(1, 10.0)
    assert clock.to_go == pytest.approx(4)
    clock.finished(2, 1.0)
    assert str(clock) == "done"
    now[0] = 18.5
    assert Clock([("a", 2.0)], budget=None).has_time(0)
    late = Clock([("a", 2.0), ("a", 1.0)], budget=1.5)
    assert (late.has_time(0), late.has_time(1)) == (False, True)
    assert Clock([("a", 500.0)], budget=1, in_seconds=False).has_time(0)  # nothing is known yet


def judged(label: str, level: float, found: float | None) -> EvaluationRow:
    one = row(label, label, level, lengths=(32, 64))
    nll = {n: [level * (n - 1), (level + 0.01) * (n - 1)] for n in (32, 64)}
    terms = {n: [n - 1, n - 1] for n in (32, 64)}
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
        "max_documents": 1, "tasks": "none",
    }  # fmt: skip
    one = Study(StudyConfig(**common))
    assert [row.label for row in one.rows] == ["none"]
    found = comparison(one, one.run(tmp_path), tmp_path)
    assert found.verdict.items == ["The model was trained on 32 tokens, so it needs no extension."]
    with pytest.raises(RopeExtendError, match="yarn has nothing to extend"):
        Study(StudyConfig(**common, methods=["yarn"]))


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


def test_what_is_missing_is_counted() -> None:
    assert not_measured([]) is None
    cells = [Cell(kind, StudyRow("yarn"), 0, 0, 1.0, {}) for kind in ("perplexity", "retrieval", "retrieval")]
    found = not_measured(cells)
    assert found is not None
    assert found.items == ["yarn: 1 documents", "yarn: 2 prompts"]
