"""Runs, resumed, replaced and interrupted anywhere, in a directory that also holds files of other people.

Hypothesis chooses the steps. After each, no foreign file has changed, a report is whole or not there, and
what was finished is used by the next run. Measurements and pictures are imitated, and every file is real.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from covering import OPTIONS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rope_extend.evaluation.finished_documents import FinishedDocuments
from test_report_and_plots import result

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import evaluate as evaluate_module
from rope_extend.evaluation import retrieve as retrieve_module
from rope_extend.evaluation.evaluation_config import EvaluationConfig, RetrievalConfig
from rope_extend.evaluation.output_directory import FILES
from rope_extend.evaluation.perplexity_report import read_results
from rope_extend.evaluation.prompts import Prompt
from rope_extend.evaluation.protocols import Window
from rope_extend.evaluation.results import Cell, EvaluationRow, RetrievalResult, Subject, file_name
from rope_extend.evaluation.retrieval import Trial, TrialLog
from rope_extend.evaluation.retrieval_report import read_retrieval
from rope_extend.files import replacing

PARTS = 2
"""Documents or trials of each row."""

FOREIGN_FILES = (
    "notes.txt",
    "losses/mine.csv",
    "losses/mine.npz",
    "unfinished/notes.txt",
    "unfinished/none/00000.npz",
    "heat_map_mine.png",
)
FOREIGN_LINKS = ("link.txt", "losses/link.npz", ".results.jsonl.partial", ".table.md.partial")
"""Links to a file elsewhere: also under names that an earlier version wrote to."""

ROWS = st.sampled_from([("none",), ("none", "yarn"), ("yarn",)])


class Faults:
    """Interrupts at one of the points that a run passes: at a measurement, or around a change on disk."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for name in ("replace", "unlink", "rmdir"):
            patches.setattr(os, name, self._around(getattr(os, name)))

    def pass_point(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise KeyboardInterrupt

    def _around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> None:
            if kwargs:  # the removal of a temporary directory
                return change(*args, **kwargs)
            self.pass_point()
            change(*args)
            self.pass_point()
            return None

        return changed

    @contextmanager
    def at(self, point: int | None) -> Iterator[None]:
        self.left = point
        try:
            yield
        finally:
            self.left = None


def contents(directory: Path) -> dict[str, Any]:
    """Every file and link below a directory, and what it holds or points to."""
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def draw(rows: Any, _: Any, path: Path, **__: Any) -> Path:
    """Imitates every function that draws a picture."""
    with replacing(path) as partial:
        partial.write_bytes(b"a picture")
    return path


class Runs(RuleBasedStateMachine):
    """What both kinds of runs have in common. Each version of the model gives other results."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.output = self.root / "output"
        self.patches = pytest.MonkeyPatch()
        self.faults = Faults(self.patches)
        self.measured = 0
        self.interrupted_before = False
        for name in ("curves.plot_perplexity", "curves.plot_loss_by_position"):
            self.patches.setattr(f"rope_extend.plots.{name}", draw)
        for name in ("retrieval_maps.plot_accuracy", "retrieval_maps.plot_heat_map"):
            self.patches.setattr(f"rope_extend.plots.{name}", draw)

    def teardown(self) -> None:
        self.patches.undo()
        shutil.rmtree(self.root)

    @initialize(
        files=st.sets(st.sampled_from(FOREIGN_FILES), max_size=3),
        links=st.sets(st.sampled_from(FOREIGN_LINKS), max_size=2),
    )
    def other_people_have_files(self, files: set[str], links: set[str]) -> None:
        (self.root / "elsewhere.txt").write_text("untouched")
        for name in (*files, *links):
            path = self.output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in links:
                path.symlink_to(self.root / "elsewhere.txt")
            else:
                path.write_text("of somebody else")
        self.foreign = contents(self.root)

    @invariant()
    def no_foreign_file_has_changed(self) -> None:
        now = contents(self.root)
        assert {name: now.get(name) for name in getattr(self, "foreign", {})} == getattr(self, "foreign", {})

    @invariant()
    def no_temporary_file_is_left(self) -> None:
        left = [path for path in self.root.rglob("*.partial") if not path.is_symlink()]
        assert not left

    @invariant()
    def a_report_is_whole(self) -> None:
        if (self.output / "results.jsonl").exists():
            self.check_report()

    @rule(
        how=st.sampled_from(["", "resume", "overwrite"]),
        rows=ROWS,
        version=st.sampled_from([1, 1, 2]),
        more=st.booleans(),
        fault=st.none() | st.integers(0, 40),
    )
    def run(self, how: str, rows: tuple[str, ...], version: int, more: bool, fault: int | None) -> None:
        flags = {how: True} if how else {}
        expected = self.refuses(how, rows, version)
        before, kept, self.measured = contents(self.root), self.finished(rows), 0
        if expected:
            with pytest.raises(RopeExtendError):
                self.start(rows, version, more, **flags)
            after = contents(self.root)
            assert {name: after.get(name) for name in before} == before
            return
        try:
            with self.faults.at(fault):
                self.start(rows, version, more, **flags)
        except KeyboardInterrupt:
            self.interrupted_before = True
            return
        assert self.measured == len(rows) * PARTS - (kept if how == "resume" else 0)
        self.check_finished(rows, version, more)

    def refuses(self, how: str, rows: tuple[str, ...], version: int) -> str:
        """Why the run will be refused; empty if it will not."""
        raise NotImplementedError

    def finished(self, rows: tuple[str, ...]) -> int:
        """Number of parts of these rows that are finished on disk."""
        raise NotImplementedError

    def start(self, rows: tuple[str, ...], version: int, more: bool, **flags: bool) -> None:
        raise NotImplementedError

    def check_report(self) -> None:
        """The report can be read, and has every file that it names."""
        raise NotImplementedError

    def check_finished(self, rows: tuple[str, ...], version: int, more: bool) -> None:
        """The report is that of the run which has just ended, and nothing else of the run is left."""
        raise NotImplementedError


class Evaluations(Runs):
    """Runs of `evaluate`; `more` keeps the losses by token."""

    windows: ClassVar = [[Window(0, 8, 1, 8)]]

    def start(self, rows: tuple[str, ...], version: int, more: bool, **flags: bool) -> None:
        self.patches.setattr(evaluate_module, "_Evaluation", self.evaluation)
        config = EvaluationConfig(
            model="model", methods=rows, data=str(version), save_losses=more, output=str(self.output)
        )
        evaluate_module.evaluate(config, **flags)

    def evaluation(
        self, config: Any, options: object, finished: Path, progress: bool, *, resume: bool
    ) -> SimpleNamespace:
        """Imitates an evaluation without a budget."""
        return SimpleNamespace(
            rows=lambda: self.measure(config, finished), left_out=[], warn_of_other_rows=lambda: None
        )

    def measure(self, config: Any, finished: Path) -> Iterator[EvaluationRow]:
        """Imitates the measurement of the rows: each document has one loss."""
        assert config.methods is not None
        for label in config.methods:
            kept = FinishedDocuments(finished / file_name(label), {"version": config.data})
            losses = []
            for number in range(PARTS):
                stored = kept.read(number, self.windows)
                if stored is None:
                    self.faults.pass_point()
                    self.measured += 1
                    stored = [np.full(7, float(config.data), np.float32)], 0.1
                    kept.write(number, *stored)
                losses += stored[0]
            level = float(np.mean(losses))
            changes = {"losses": {8: losses}} if config.save_losses else {}
            yield EvaluationRow.of(Subject(label, trained_length=8), result(level, (8,), **changes))

    def interrupted(self) -> bool:
        return any(self.output.glob("unfinished/*/measurement.json"))

    def refuses(self, how: str, rows: tuple[str, ...], version: int) -> str:
        holds = [name for name in FILES if os.path.lexists(self.output / name)]
        if how == "overwrite":
            return ""
        if self.interrupted() if how == "" else (holds and not self.interrupted()):
            return "an interrupted run, or nothing to resume"
        if how == "" and holds:
            return f"the directory holds {holds}"
        for label in rows:
            file = self.output / "unfinished" / file_name(label) / "measurement.json"
            if file.exists() and json.loads(file.read_text())["version"] != str(version):
                return f"{label} is of another version"
        return ""

    def finished(self, rows: tuple[str, ...]) -> int:
        return sum(len([*self.output.glob(f"unfinished/{file_name(label)}/*.npz")]) for label in rows)

    def check_report(self) -> None:
        assert read_results(self.output)
        assert all((self.output / name).stat().st_size for name in FILES)
        for line in (self.output / "results.jsonl").read_text().splitlines():
            if losses := json.loads(line)["losses"]:
                with np.load(self.output / losses) as arrays:
                    assert set(arrays.files) == {"losses_8", "offsets_8"}

    def check_finished(self, rows: tuple[str, ...], version: int, more: bool) -> None:
        found = read_results(self.output)
        assert [row.label for row in found] == [*rows]
        assert [row.result.ppl[8] for row in found] == [result(float(version), (8,)).ppl[8]] * len(rows)
        lines = [json.loads(line) for line in (self.output / "results.jsonl").read_text().splitlines()]
        assert [bool(line["losses"]) for line in lines] == [more] * len(rows)
        assert not self.interrupted()
        ours = contents(self.root).keys() - self.foreign.keys()
        assert not [path for path in ours if path.startswith("output/unfinished/")]
        kept = {path for path in ours if path.startswith("output/losses/")}
        named = {f"output/{line['losses']}" for line in lines if line["losses"]}
        assert kept >= named
        assert kept == named or self.interrupted_before  # between a new report and the end of the earlier one


class Retrievals(Runs):
    """Runs of `retrieve`; `more` adds nothing."""

    def start(self, rows: tuple[str, ...], version: int, more: bool, **flags: bool) -> None:
        run = SimpleNamespace(
            settings=lambda: {"version": version},
            prompts=[
                Prompt("passkey", 8, 0.5, trial, "text", ("1",), 6, 3, chat=False) for trial in range(PARTS)
            ],
            results=lambda log: self.measure(rows, version, log),
        )
        self.patches.setattr(retrieve_module, "_RetrievalRun", lambda *_: run)
        config = RetrievalConfig(model="model", methods=rows, output=str(self.output))
        retrieve_module.retrieve(config, **flags)

    def measure(self, rows: tuple[str, ...], version: int, log: Path) -> Iterator[RetrievalResult]:
        """Imitates the answers of the rows: all trials are solved by one version, and none by the other."""
        identities = {("passkey", 8, 0.5, trial): {"version": version} for trial in range(PARTS)}
        for label in rows:
            trials = TrialLog(log, label)
            known = trials.read(identities)
            for key in identities:
                if key not in known:
                    self.faults.pass_point()
                    self.measured += 1
                    known[key] = Trial(*key, 3, ("1",), "1", version % 2)
                    trials.append([known[key]], identities)
            scores = tuple(known[key].score for key in identities)
            cells = (Cell("passkey", 8, 0.5, 3, scores, "fingerprint"),)
            yield RetrievalResult(label, cells, trained_length=8)

    def refuses(self, how: str, rows: tuple[str, ...], version: int) -> str:
        names = ("settings.json", "prompts.jsonl", "trials.jsonl", "results.jsonl", "table.md", "report.html")
        holds = [name for name in names if (self.output / name).exists()]
        holds += [path.name for path in self.output.glob("*.png")]
        if how == "overwrite" or not holds:
            return ""
        if how == "" or "settings.json" not in holds:
            return f"the directory holds {holds}"
        stored = json.loads((self.output / "settings.json").read_text())
        return "" if stored == {"version": version} else "another version"

    def finished(self, rows: tuple[str, ...]) -> int:
        file = self.output / "trials.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return sum(json.loads(line)["label"] in rows for line in lines)

    def check_report(self) -> None:
        for found in read_retrieval(self.output):
            assert (self.output / f"heat_map_passkey_{found.label}.png").stat().st_size
        for name in ("accuracy_passkey.png", "table.md", "report.html"):
            assert (self.output / name).stat().st_size

    def check_finished(self, rows: tuple[str, ...], version: int, more: bool) -> None:
        found = read_retrieval(self.output)
        assert [row.label for row in found] == [*rows]
        assert all(row.cells[0].scores == (version % 2,) * PARTS for row in found)
        pictures = {path.name for path in self.output.glob("*.png")} - {"heat_map_mine.png"}
        ours = {"accuracy_passkey.png", *(f"heat_map_passkey_{label}.png" for label in rows)}
        assert pictures >= ours
        assert (
            pictures == ours or self.interrupted_before
        )  # between a new report and the end of the earlier one


@pytest.mark.parametrize("machine", [Evaluations, Retrievals])
def test_runs_leave_whole_files_and_those_of_other_people(machine: type[Runs]) -> None:
    examples = 300 if OPTIONS.full else 6
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=20 if OPTIONS.full else 8)
    )


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Evaluations, Retrievals])
def test_many_runs_leave_whole_files_and_those_of_other_people(machine: type[Runs]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=12))
