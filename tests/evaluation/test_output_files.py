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
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from covering import OPTIONS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from test_report import BASIC, result

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import evaluate as evaluate_module
from rope_extend.evaluation import running
from rope_extend.evaluation.cells import CELLS, PERPLEXITY, Cell, Row
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.output_directory import FILES
from rope_extend.evaluation.report_files import read_results
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.files import replacing

PARTS = 2
"""Documents or trials of each row."""

FOREIGN_FILES = ("notes.txt", "losses/mine.npz", "cells-mine.jsonl", "heat_map_mine.png")
FOREIGN_LINKS = ("link.txt", "losses/link.npz", ".results.jsonl.partial", ".report.md.partial")
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


def draw(*arguments: Any, **__: Any) -> Path:
    """Imitates every function that draws a picture."""
    path: Path = arguments[-1]
    with replacing(path) as partial:
        partial.write_bytes(b"<svg/>")
    return path


class Runs(RuleBasedStateMachine):
    """Each version of the model gives other results; `more` asks for other cells."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.output = self.root / "output"
        self.patches = pytest.MonkeyPatch()
        self.faults = Faults(self.patches)
        self.measured = 0
        for name in ("curves.plot_perplexity", "curves.plot_loss_by_position"):
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
        expected = self.refuses(how, rows, version, more)
        before, kept, self.measured = contents(self.root), self.finished(rows, more), 0
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
            return
        assert self.measured == len(rows) * PARTS - (kept if how == "resume" else 0)
        found = read_results(self.output)
        assert [row.label for row in found] == [*rows]
        assert [row.result.ppl[8] for row in found] == [pytest.approx(np.exp(version))] * len(rows)

    def start(self, rows: tuple[str, ...], version: int, more: bool, **flags: bool) -> None:
        """A run in which everything but the runner is imitated: the model, and cells of a part of a row."""
        own = [Row(label, method=label) for label in rows]
        model = SimpleNamespace(torch_device=torch.device("cpu"), load=lambda *_, **__: None)
        cells = [
            Cell(PERPLEXITY, row, number, number, 1.0, 8, {"row": row.label, "number": number, "more": more})
            for number in range(PARTS)
            for row in own
        ]
        one = SimpleNamespace(
            rows=own, plan=None, trained=8, prompts=[], cells=lambda: cells, missing=lambda _: cells,
            work_text=lambda _: "",
            config=SimpleNamespace(budget=None, version=version, documents=True, split_window=1),
            names=[*map(str, range(PARTS))],
            candidates=SimpleNamespace(
                name="m", load_options=model, prepared=lambda *_: nullcontext(),
                check_adapters=lambda *_: None,
            ),
        )  # fmt: skip
        self.patches.setattr(running, "model_identity", lambda _: {"version": version})
        self.patches.setattr(running, "_measure", self.measure)
        self.patches.setattr(evaluate_module, "Measurement", lambda *_, **__: one)
        config = EvaluationConfig(model="model", methods=rows, output=str(self.output), data=str(version))
        evaluate_module.evaluate(config, **flags)

    def measure(self, measurement: Any, _: Any, cell: Cell, bar: Any) -> dict[str, Any]:
        """Imitates a measurement; the loss is the version."""
        self.faults.pass_point()
        self.measured += 1
        version = measurement.config.version
        sums = {"document_nll": {8: [7.0 * version]}, "document_terms": {8: [7]}, "tokens": {8: 7}}
        one = result(float(version), (8,), documents=1)
        blocks = {"block_nll": one.block_nll[:1], "block_terms": one.block_terms[:1]}
        found = replace(one, data=str(cell.number), **sums, **blocks)
        row = EvaluationRow(cell.row.label, model="m", trained_length=8).to_dict()
        return {**row, "document": "text", "result": found.to_dict()}

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the finished cells on disk, after the first."""
        file = self.output / CELLS
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def finished(self, rows: tuple[str, ...], more: bool) -> int:
        """Number of parts of these rows that are finished on disk."""
        ours = [line for line in self.lines()[1:] if line["label"] in rows]
        return len({line["cell"] for line in ours if line["identity"]["more"] == more})

    def refuses(self, how: str, rows: tuple[str, ...], version: int, more: bool) -> bool:
        """Whether the run will be refused."""
        lines = self.lines()
        holds = [name for name in FILES if os.path.lexists(self.output / name)]
        if how == "overwrite":
            return False
        if not lines or how == "":
            return bool(lines or holds)
        return lines[0]["identity"] != {"version": version} or (
            len(lines) > 1 and not self.finished(rows, more)
        )

    def check_report(self) -> None:
        """The report can be read, and has every file that it names."""
        assert read_results(self.output)
        assert all((self.output / name).stat().st_size for name in BASIC)


def test_runs_leave_whole_files_and_those_of_other_people() -> None:
    examples = 300 if OPTIONS.full else 6
    run_state_machine_as_test(
        Runs, settings=settings(max_examples=examples, stateful_step_count=20 if OPTIONS.full else 8)
    )
