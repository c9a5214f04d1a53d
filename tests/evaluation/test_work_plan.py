"""The plan of an evaluation counts everything that runs, and a budget leaves out controls first."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rope_extend.evaluation.finished_documents import FinishedDocuments
from rope_extend.evaluation.work_plan import (
    Costs,
    Extent,
    Finished,
    asked_for,
    decided_extent,
    default_trials,
    read_extent,
    whole_extent,
    write_extent,
)
from scaled_models import counted_tokens, scaled_copy

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import evaluate as module
from rope_extend.evaluation import finished_rows, work_plan
from rope_extend.evaluation.candidates import Candidates
from rope_extend.evaluation.clock import Clock
from rope_extend.evaluation.evaluate import evaluate, plan_work
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.perplexity_report import read_results
from rope_extend.units import format_duration

COSTS = Costs(
    documents=(10, 10, 10), cropped_rows=1, cropped_document=8, prompt_rows=3, prompt=2,
    prompt_lengths=(8192,),
)  # fmt: skip
WHOLE = Extent(documents=4, cropped=True, trials=4)


def test_everything_is_counted_once() -> None:
    assert COSTS.seconds(WHOLE) == 3 * 4 * 10 + 1 * 4 * 8 + 3 * 20 * 2
    assert COSTS.seconds(WHOLE) == sum(seconds for _, seconds in COSTS.pieces(WHOLE))
    text = COSTS.text(WHOLE)
    assert text.splitlines() == [
        "perplexity: 3 rows, 4 documents each, about 2 min",
        "control, cropped context: 1 row, 4 documents each, about 32 s",
        "control, passkeys at 8k: 3 rows, 20 prompts each, about 2 min",
        "in all about 5 min",
    ]
    assert len(COSTS.text(Extent(1, False, 0)).splitlines()) == 2


@pytest.mark.parametrize(
    ("budget", "extent", "missing"),
    [
        (272, WHOLE, []),
        (271, Extent(4, True, 3), ["1 of 4 passkeys at 8k, at each depth"]),
        (152, Extent(4, True, 0), ["the passkeys at 8k"]),
        (151, Extent(4, False, 0), ["the passkeys at 8k", "the control with a cropped context"]),
        (
            65,
            Extent(2, False, 0),
            ["the passkeys at 8k", "the control with a cropped context", "2 of 4 documents"],
        ),
    ],
)
def test_a_budget_leaves_out_controls_first(budget: float, extent: Extent, missing: list[str]) -> None:
    assert COSTS.within(WHOLE, budget) == (extent, missing)
    assert COSTS.seconds(extent) <= budget


def test_a_budget_leaves_out_samples_before_controls() -> None:
    """A sample of each row, and of the cropped one, takes four seconds."""
    costs, whole = replace(COSTS, sample=1.0, prompt_lengths=(8192, 32_768)), replace(WHOLE, samples=3)
    assert costs.seconds(whole) == 272 + 4 * 3 == sum(seconds for _, seconds in costs.pieces(whole))
    for budget, extent, missing in (
        (284, whole, []),
        (280, replace(WHOLE, samples=2), ["1 of 3 samples of text of each row"]),
        (272, WHOLE, ["the samples of text"]),
        (152, Extent(4, True, 0), ["the samples of text", "the passkeys at 8k and 32k"]),
    ):
        assert costs.within(whole, budget) == (extent, missing)
    with pytest.raises(RopeExtendError, match=r"without samples of text, take about 30 s"):
        costs.within(whole, 29)


def test_a_budget_that_is_too_short_is_refused() -> None:
    with pytest.raises(RopeExtendError, match="budget of 29 s is too short: 3 rows on one document"):
        COSTS.within(WHOLE, 29)


def test_what_is_finished_costs_nothing_and_is_never_left_out() -> None:
    """Nine of twelve documents of three rows, one with a cropped context, and the passkeys of one row."""
    least = Extent(documents=3, cropped=True, trials=1)
    done = Finished(
        documents=(3, 3, 3), cropped=1, answered=(4 * 10.0, 0, 0), cropped_answered=5.0, least=least
    )
    costs = replace(COSTS, cropped_prompt=1, cropped_prompt_lengths=(4096,), finished=done)
    rest = 3 * 10 + 3 * 8 + 2 * 40 + 15
    assert costs.seconds(WHOLE) == rest == sum(seconds for _, seconds in costs.pieces(WHOLE))
    assert costs.text(WHOLE).splitlines() == [
        "perplexity: 3 rows, 4 documents each, 9 of 12 finished, about 30 s",
        "control, cropped context: 1 row, 4 documents each, 1 of 4 finished, about 24 s",
        "control, passkeys at 8k: 3 rows, 20 prompts each, about 1 min",
        "control, passkeys at 4k: 1 row, 20 prompts each, about 15 s",
        "in all about 2 min",
    ]
    assert costs.within(WHOLE, rest)[0] == WHOLE
    # One passkey of each depth is begun, the third document, and the control: nothing smaller than that.
    smallest = costs.within(WHOLE, 2 * 8 + 2 * 10)[0]
    assert smallest == least
    with pytest.raises(
        RopeExtendError, match=r"35 s is too short to complete what .*: 3 rows on the 3 documents that were"
    ):
        costs.within(WHOLE, 35)


def test_what_was_decided_grows_by_what_is_finished(work: Path, tmp_path: Path) -> None:
    """Begun with a budget, continued without it, and resumed with it again."""
    config = EvaluationConfig(model=str(work / "model"), methods=("none",), lengths=(64,), budget=9)
    candidates = Candidates.of(config)
    write_extent(tmp_path, Extent(2, False, 0, 1), asked_for(config, candidates, WHOLE))
    costs = replace(COSTS, finished=Finished(least=Extent(3, True, 1)))
    assert decided_extent(config, candidates, costs, WHOLE, tmp_path) == Extent(3, True, 1, 1)
    without = replace(config, budget=None)
    assert decided_extent(without, candidates, costs, WHOLE, tmp_path) == WHOLE
    assert decided_extent(replace(config, budget=152), candidates, COSTS, WHOLE, None) == Extent(4, True, 0)


def test_an_extent_is_kept_for_the_same_question(work: Path, tmp_path: Path) -> None:
    def asked(**settings: Any) -> dict[str, Any]:
        common = {"model": str(work / "model"), "methods": ("none", "yarn"), "lengths": (16, 64), "budget": 9}
        config = EvaluationConfig(**{**common, **settings})
        candidates = Candidates.of(config)
        return asked_for(config, candidates, whole_extent(config, candidates, 5))

    assert read_extent(tmp_path, asked()) is None
    write_extent(tmp_path, Extent(2, True, 1), asked())
    assert read_extent(tmp_path, asked()) == Extent(2, True, 1)
    for changed in (
        {"budget": 10}, {"cropped": False}, {"retrieval": 0}, {"samples": 1}, {"retrieval_lengths": (64,)},
        {"methods": ("none",)}, {"methods": ("none", "ntk")},
    ):  # fmt: skip
        assert read_extent(tmp_path, asked(**changed)) is None
    (tmp_path / "extent.json").write_text('{"documents": 2, "cropped": true, "trials": 1}')
    with pytest.raises(RopeExtendError, match="does not say what was left out"):
        read_extent(tmp_path, asked())


@pytest.mark.parametrize(
    "settings",
    [
        {"methods": ("none",)}, {"methods": ("as-is",)}, {"methods": ("yarn",), "cropped": False},
        {"methods": ("yarn",), "protocol": "sliding", "stride": 64},
    ],
    ids=str,
)  # fmt: skip
def test_passkeys_that_were_asked_for_need_no_comparison(settings: dict[str, Any], work: Path) -> None:
    for retrieval, lengths, said in (
        ("auto", None, ""),
        (3, None, "passkeys at 32: 1 row, 15 prompts each"),
        (3, (64,), "passkeys at 32 and 64: 1 row, 30 prompts each"),
    ):
        config = EvaluationConfig(
            model=str(work / "model"),
            lengths=(64,),
            retrieval=retrieval,
            retrieval_lengths=lengths,
            **settings,
        )
        assert whole_extent(config, Candidates.of(config), 2).trials == (3 if said else 0)
        plan, text = plan_work(config)
        assert plan is not None
        assert said in text
        assert ("passkeys" in text) == bool(said)


@pytest.mark.parametrize(
    ("documents", "tokens", "trained", "trials"),
    [
        (1, 512, 256, 4),  # cheap whatever the documents have
        (16, 65_536, 8192, 4),
        (4, 16_384, 8192, 1),
        (1, 16_384, 8192, 1),
        (8, 16_384, 8192, 3),
    ],
)
def test_default_passkeys_cost_no_more_than_the_documents(
    documents: int, tokens: int, trained: int, trials: int
) -> None:
    assert default_trials(documents, tokens, trained) == trials
    if trials > 1 and 20 * trained > 65_536:
        assert trials * 5 * trained <= documents * tokens


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[Clock]:
    """The clocks of the evaluations of a test."""
    made: list[Clock] = []

    class Kept(Clock):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.calls: Counter[str] = Counter()
            made.append(self)

        def finished_one(self, kind: str, seconds: float) -> None:
            self.calls[kind] += 1
            super().finished_one(kind, seconds)

    monkeypatch.setattr(module, "Clock", Kept)
    return made


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(
    "settings",
    [
        {"methods": ["none", "yarn"], "samples": 5},
        {"methods": ["yarn", "dynamic_ntk"]},
        {"methods": ["yarn"], "cropped": False},
        {"methods": ["none"], "lengths": [16]},
        {"methods": ["none", "yarn"], "protocol": "sliding", "stride": 16, "max_tokens": 99},
        {"methods": ["none", "yarn"], "protocol": "disjoint-second-half", "max_tokens": 99},
        {"methods": ["none"], "adapters": True, "samples": 1},
    ],
    ids=str,
)
def test_the_plan_counts_what_runs(
    settings: dict[str, Any], clocks: list[Any], work: Path, plain_adapters: list[str]
) -> None:
    """Also of adapters of plain RoPE, of which one has a row with a cropped context."""
    common: dict[str, Any] = {"lengths": [16, 64], "max_documents": 2, "data": work / "data"}
    if "adapters" in settings:
        common["adapters"], settings = plain_adapters, {**settings}
        del settings["adapters"]
    evaluate(EvaluationConfig(model=str(work / "model"), **{**common, **settings}), progress=False)
    clock = clocks[-1]
    planned = Counter(kind for kind, _ in clock.work)
    del planned["prompts"], planned["cropped prompts"]  # the task does not fit a window of 32 tokens
    assert clock.calls == planned
    assert planned


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(
    ("rope_type", "settings", "passes"),
    [
        ("dynamic", {"methods": ["as-is"], "cropped": False}, (3,)),
        ("dynamic", {"methods": ["none", "as-is", "yarn"]}, (1, 3, 1)),
        ("dynamic", {"methods": ["as-is"], "protocol": "cropped", "window": 16}, (1,)),
        ("dynamic", {"methods": ["as-is", "none"], "protocol": "sliding", "stride": 16}, (4, 4)),
        ("longrope", {"methods": ["as-is", "none"]}, (2, 1)),
        ("yarn", {"methods": ["as-is", "none", "dynamic_ntk(per=row)"]}, (1, 1, 3)),
    ],
    ids=str,
)
def test_a_pass_for_each_table_is_counted(
    rope_type: str, settings: dict[str, Any], passes: tuple[int, ...], clocks: list[Any], work: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Stock tables that depend on the length need a pass for each group of lengths with equal tables."""
    monkeypatch.setattr(work_plan, "seconds_of_window", lambda _, tokens: float(tokens))
    model, counts = scaled_copy(work / "model", tmp_path, rope_type), counted_tokens(monkeypatch)
    common: dict[str, Any] = {"lengths": [16, 32, 64, 128], "max_documents": 2, "max_tokens": 160}
    config = EvaluationConfig(
        model=str(model), data=str(work / "data"), output=str(tmp_path / "report"), retrieval=0,
        **{**common, **settings},
    )  # fmt: skip
    _, planned = plan_work(config)
    rows = evaluate(config, progress=False)
    assert tuple(row.result.passes for row in rows if not row.label.endswith("cropped to 32")) == passes
    assert sum(seconds for _, seconds in clocks[-1].work) == sum(counts) > 0
    if config.protocol == "prefix":  # others depend on the length of the documents
        assert f"in all about {format_duration(sum(counts))}" in planned


@pytest.mark.usefixtures("private_cache")
def test_what_is_finished_costs_what_its_row_costs(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row needs three passes, of which one document is missing, and the second row one pass."""
    monkeypatch.setattr(work_plan, "seconds_of_window", lambda _, tokens: float(tokens))
    config = EvaluationConfig(
        model=str(scaled_copy(work / "model", tmp_path, "dynamic")), data=str(work / "data"), retrieval=0,
        methods=("as-is", "none"), lengths=(32, 64, 128), max_documents=3, output=str(tmp_path / "report"),
        cropped=False,
    )  # fmt: skip
    write = FinishedDocuments.write

    def interrupted(self: FinishedDocuments, number: int, *values: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt
        write(self, number, *values)

    with monkeypatch.context() as patch:
        patch.setattr(FinishedDocuments, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(config, progress=False)
    counts = counted_tokens(monkeypatch)
    _, planned = plan_work(config, resume=True)
    evaluate(config, resume=True, progress=False)
    assert sum(counts) == 32 + 64 + 128 + 3 * 128
    assert f"2 of 6 finished, about {format_duration(sum(counts))}" in planned


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_passkeys_are_counted_too(clocks: list[Any], work: Path) -> None:
    config = EvaluationConfig(
        model=str(MODEL_DIR), methods=("yarn", "linear"), lengths=(512,), data=str(work / "data"),
        retrieval=1, max_documents=2,
    )  # fmt: skip
    evaluate(config, progress=False)
    assert clocks[-1].calls == Counter(kind for kind, _ in clocks[-1].work)
    assert clocks[-1].calls["prompts"] == 2
    assert clocks[-1].calls["cropped prompts"] == 1
    assert str(clocks[-1]) == "done"


@pytest.mark.usefixtures("private_cache")
def test_a_budget_is_kept_when_an_evaluation_resumes(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another estimate must not change what is measured."""
    costs = [Costs((10, 10), 1, 10, 2, 1, (32,))]
    monkeypatch.setattr(module, "evaluation_costs", lambda *_: costs[-1])
    config = EvaluationConfig(
        model=str(work / "model"), data=str(work / "data"), methods=("none", "yarn"), lengths=(16, 64),
        output=str(tmp_path / "report"), budget="45s", retrieval=1,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_report", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate(config, progress=False)
    costs.append(Costs((1, 1), 1, 1, 2, 1, (32,)))  # now everything would fit
    rows = evaluate(config, resume=True, progress=False)
    assert [row.label for row in rows] == ["none", "yarn"]
    assert [row.result.documents for row in rows] == [2, 2]
    table = (tmp_path / "report" / "table.md").read_text()
    assert table.startswith("Left out, because of the budget:\n\n- the passkeys at 32\n")
    assert "- 1 of 3 documents" in table
    assert "Left out, because of the budget" in (tmp_path / "report" / "report.html").read_text()
    assert not (tmp_path / "report" / "unfinished").exists()
    whole = evaluate(config, overwrite=True, progress=False)
    assert [row.label for row in whole] == ["none", "none, cropped to 32", "yarn"]
    assert len(read_results(tmp_path / "report")) == 3


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of losses that a test writes. A window is estimated to take a second."""
    files: list[Path] = []
    write = FinishedDocuments.write

    def counted(self: FinishedDocuments, number: int, *values: Any) -> None:
        files.append(self.directory / f"{number:05d}.npz")
        write(self, number, *values)

    monkeypatch.setattr(FinishedDocuments, "write", counted)
    monkeypatch.setattr(work_plan, "seconds_of_window", lambda *_: 1.0)
    return files


RunUntil = Callable[[str, int], None]


@pytest.fixture
def run_until(written: list[Path], monkeypatch: pytest.MonkeyPatch) -> RunUntil:
    """Runs a command, with Ctrl-C when more than this number of files of losses would be written."""
    write = FinishedDocuments.write

    def run(command: str, count: int) -> None:
        def interrupted(self: FinishedDocuments, *values: Any) -> None:
            if len(written) == count:
                raise KeyboardInterrupt
            write(self, *values)

        with monkeypatch.context() as patch:
            patch.setattr(FinishedDocuments, "write", interrupted)
            with pytest.raises(SystemExit):
                main(shlex.split(command))

    return run


@pytest.mark.usefixtures("private_cache")
def test_a_budget_never_leaves_out_what_is_finished(
    work: Path, tmp_path: Path, written: list[Path], run_until: RunUntil, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rows on three documents, of which one document of one row is missing: a window of one second."""
    command = f"evaluate {work / 'model'} --data {work / 'data'} --methods none,yarn --lengths 16,64"
    command += f" --documents 3 --output {tmp_path}"
    run_until(command, 8)
    main(shlex.split(f"{command} --resume --plan"))
    plan = capsys.readouterr().out
    assert "perplexity: 2 rows, 3 documents each, 5 of 6 finished, about 1 s\n" in plan
    assert "cropped context: 1 row, 3 documents each, 3 of 3 finished, about 0 s\n" in plan
    with pytest.raises(SystemExit):
        main(shlex.split(f"{command} --retrieval 0 --resume --budget 0.5s"))
    assert "too short to complete what is finished already" in capsys.readouterr().err
    assert len(list(tmp_path.glob("unfinished/*/*.npz"))) == 8
    main(shlex.split(f"{command} --retrieval 0 --resume --budget 1s"))
    assert len(written) == 9
    rows = read_results(tmp_path)
    assert [(row.label, row.result.documents) for row in rows] == [
        ("none", 3), ("none, cropped to 32", 3), ("yarn", 3),
    ]  # fmt: skip
    assert "Left out" not in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("private_cache")
def test_joined_documents_that_a_budget_left_out_stay_out(
    work: Path, tmp_path: Path, written: list[Path], run_until: RunUntil, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three documents, as one text; the second row is interrupted. A window is one second."""
    command = (
        f"evaluate {work / 'model'} --data {work / 'data'} --methods none,yarn --lengths 32,64 --budget 13s"
    )
    command += f" --protocol all-overlapping --stride 32 --max-tokens 128 --retrieval 0 --output {tmp_path}"
    run_until(command, 1)
    capsys.readouterr()
    main(shlex.split(f"{command} --resume --plan"))
    assert "perplexity: 2 rows, 2 documents each, 2 of 4 finished" in capsys.readouterr().out
    main(shlex.split(f"{command} --resume"))
    assert len(written) == 2
    assert [(row.label, row.result.documents) for row in read_results(tmp_path)] == [("none", 2), ("yarn", 2)]
    assert "- 1 of 3 documents" in (tmp_path / "table.md").read_text()


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize("earlier", [False, True])
def test_a_row_is_found_whatever_its_label_is(
    earlier: bool, work: Path, tmp_path: Path, written: list[Path], plain_adapters: list[str],
    other_control: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A second adapter changes the label of the first one. Earlier versions named folders by labels."""
    settings: dict[str, Any] = {
        "model": str(work / "model"), "data": str(work / "data"), "methods": ("none",), "lengths": (16, 64),
        "max_documents": 2, "output": str(tmp_path), "retrieval": 0,
    }  # fmt: skip
    first, again = [plain_adapters[0]], [plain_adapters[0], *([] if earlier else [other_control])]
    with monkeypatch.context() as patch:
        if earlier:
            patch.setattr(finished_rows, "_adapter_name", lambda adapter: "none + LoRA at 32")
        patch.setattr(module, "write_report", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate(EvaluationConfig(**settings, adapters=first), progress=False)
    assert len(list(tmp_path.glob("unfinished/none-LoRA-at-32-*"))) == (2 if earlier else 0)
    before = len(written)
    rows = evaluate(EvaluationConfig(**settings, adapters=again), resume=True, progress=False)
    labels = ["none", "none, cropped to 32", "none + LoRA at 32", "none + LoRA at 32, cropped to 32"]
    if not earlier:
        labels[2:] = [
            f"none + LoRA at 32 ({name}){crop}"
            for name in ("plain at 32", "another")
            for crop in ("", ", cropped to 32")
        ]
    assert [row.label for row in rows] == labels
    assert len(written) - before == (0 if earlier else 4)  # two documents of each row of the second adapter


@pytest.mark.usefixtures("private_cache")
def test_a_resumed_evaluation_has_its_own_settings(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another budget, and documents without a control: the extent of the interrupted one does not count."""
    monkeypatch.setattr(module, "evaluation_costs", lambda *_: Costs((10, 10), 1, 10, 2, 1, (32,)))
    settings: dict[str, Any] = {
        "model": str(work / "model"), "data": str(work / "data"), "methods": ("none", "yarn"),
        "lengths": (16, 64), "output": str(tmp_path / "report"),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_report", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate(EvaluationConfig(**settings, budget="45s"), progress=False)
    rows = evaluate(EvaluationConfig(**settings, budget="1h"), resume=True, progress=False)
    assert [row.label for row in rows] == ["none", "none, cropped to 32", "yarn"]
    assert [row.result.documents for row in rows] == [3, 3, 3]
    assert "Left out" not in (tmp_path / "report" / "table.md").read_text()


@pytest.mark.usefixtures("private_cache")
def test_lines_show_progress_without_a_terminal(
    work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    caplog.set_level(logging.INFO, "rope_extend")
    config = EvaluationConfig(
        model=str(work / "model"), data=str(work / "data"), methods=("none", "yarn"), lengths=(16, 64)
    )
    evaluate(config)
    assert "in all about" in caplog.text
    lines = [each.message for each in caplog.records if ": document " in each.message]
    assert len(lines) == 9
    assert lines[0].startswith("none: document 1 of 3, ")
    assert all(line.endswith("to go") for line in lines[:-1])
    caplog.clear()
    evaluate(config, progress=False)
    assert ": document " not in caplog.text


@pytest.mark.usefixtures("private_cache")
def test_the_plan_of_the_command_line(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(work / "model"), "--methods", "none,yarn", "--lengths", "16,64"]
    main([*command, "--documents", "3", "--plan"])
    shown = capsys.readouterr().out
    assert "perplexity: 2 rows, 3 documents each, about" in shown
    assert "control, cropped context: 1 row, 3 documents each, about" in shown
    assert "control, passkeys at 32: 2 rows, 20 prompts each, about" in shown
    # The control with a cropped context answers those within the trained window only.
    main([*command, "--methods", "yarn", "--retrieval-lengths", "64", "--plan"])
    shown = capsys.readouterr().out
    assert "control, passkeys at 32 and 64: 1 row, 40 prompts each, about" in shown
    assert "control, passkeys at 32: 1 row, 20 prompts each, about" in shown
    with pytest.raises(SystemExit):
        main([*command, "--plan", "--budget", "0.000001s"])
    assert "is too short" in capsys.readouterr().err
    plan, text = plan_work(rx.EvaluationConfig(model=str(work / "model"), methods=("none",), lengths=(16,)))
    assert plan is not None
    assert text.splitlines()[0].startswith("perplexity: 1 row, 16 documents each")
