"""`make gpu`: every section runs, is resumed, and is recorded, shown without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import run_sections
from gpu.gpu_record import GpuRecord, machine
from gpu.steps import Figure, Setting, Step

ROOT = Path(__file__).parents[2]

BARE = """
import runpy, sys
for name in ("datasets", "matplotlib", "pandas", "pyarrow", "PIL", "tensorboard", "pytest", "hypothesis"):
    sys.modules[name] = None  # as if it were not installed
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
sys.path[:] = [path for path in sys.path if "__editable__" not in path]
sys.argv = ["gpu", "--dry", "--output", sys.argv[1]]
runpy.run_path("benchmarks/gpu", run_name="__main__")
"""
"""Runs the command with the needed packages only, and with this package not installed."""


@pytest.mark.slow
def test_few_packages_and_no_installation_are_enough(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(
        step["error"] is None for step in json.loads((tmp_path / "gpu.json").read_text())["steps"].values()
    )


def test_every_section_runs(tmp_path: Path) -> None:
    assert run_sections.main(["--dry", "--output", str(tmp_path)]) == 0
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    sections = {name: run_sections._module(name) for name in run_sections.SECTIONS}
    assert list(steps) == [f"{name}/{step.name}" for name, each in sections.items() for step in each.STEPS]
    assert all(step["error"] is None and step["figures"] for step in steps.values())
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("## ") == len(sections)
    assert "device CPU" in text
    judged = [figure for step in steps.values() for figure in step["figures"] if figure["passed"] is not None]
    assert len(judged) > 20


def test_without_cuda_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_sections.main(["--output", str(tmp_path)]) == run_sections.WRONG_USE
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert "finds no CUDA device" in err
    assert "DRY=1" in err
    monkeypatch.setattr(
        run_sections.importlib.util, "find_spec", lambda name: None if name == "peft" else name
    )
    assert run_sections.main(["--dry"]) == run_sections.WRONG_USE
    assert "lacks peft;" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_small_card_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 10**9, 24 * 10**9))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    assert run_sections.main(["--section", "kernels"]) == run_sections.WRONG_USE
    assert "a GPU has 24 GB free, but 78 GB are needed" in capsys.readouterr().err


class Sections:
    """One section of two steps instead of the real ones; the second fails while `broken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.ran: list[str] = []
        self.broken = False
        self.arguments = ["--dry", "--section", "tests", "--output", str(directory)]
        self.file, self.page = directory / "gpu.json", directory / "gpu.md"
        module = SimpleNamespace(
            SUBJECT="Two steps.", STEPS=(Step("one", self.one, 400), Step("two", self.two, 400))
        )
        monkeypatch.setattr(run_sections, "_module", lambda name: module)

    def one(self, setting: Setting) -> Iterator[Figure]:
        self.ran.append("one")
        yield Figure("first", 1.5, "s", at_most=2.0)

    def two(self, setting: Setting) -> Iterator[Figure]:
        self.ran.append("two")
        yield Figure("second", 1.0)
        if self.broken:
            raise RuntimeError("no | luck\nat all")

    def run(self, *more: str) -> int:
        return run_sections.main([*self.arguments, *more])

    def steps(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())["steps"]


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sections:
    return Sections(monkeypatch, tmp_path)


def test_what_is_recorded_is_not_measured_again(sections: Sections) -> None:
    assert sections.run() == 0
    assert sections.run() == 0
    assert sections.ran == ["one", "two"]
    assert sections.run("--again") == 0
    assert sections.ran == ["one", "two"] * 2


def test_a_failed_step_is_recorded_and_runs_again(sections: Sections) -> None:
    sections.broken = True
    assert sections.run() == run_sections.FAILED
    assert sections.steps()["tests/two"]["error"] == "RuntimeError: no | luck at all"
    assert "**These steps failed: tests/two.**" in sections.page.read_text()
    assert "failed: RuntimeError: no / luck at all" in sections.page.read_text()
    sections.broken = False
    assert sections.run() == 0
    assert sections.ran == ["one", "two", "two"]
    assert sections.steps()["tests/two"]["error"] is None
    assert "failed" not in sections.page.read_text().split("## tests")[1]


def test_a_step_that_is_killed_is_not_taken_for_a_whole_one(
    sections: Sections, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KillError(BaseException):
        pass

    def killed(setting: Setting) -> Iterator[Figure]:
        yield Figure("half", 1.0)
        raise KillError

    module = SimpleNamespace(SUBJECT="", STEPS=(Step("one", killed, 1),))
    monkeypatch.setattr(run_sections, "_module", lambda name: module)
    with pytest.raises(KillError):
        sections.run()
    step = sections.steps()["tests/one"]
    assert [figure["name"] for figure in step["figures"]] == ["half"]
    assert step["error"] == run_sections.INTERRUPTED
    assert not GpuRecord(sections.file).is_done("tests/one")


def test_a_missed_target_fails_the_section(sections: Sections, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        SUBJECT="", STEPS=(Step("one", lambda setting: iter([Figure("slow", 3.0, at_most=2.0)]), 1),)
    )
    monkeypatch.setattr(run_sections, "_module", lambda name: module)
    assert sections.run() == run_sections.FAILED
    assert "**0 of 1 targets are met.**" in sections.page.read_text()
    assert "**fail**" in sections.page.read_text()


def test_a_step_without_time_left_waits_for_the_next_start(
    sections: Sections, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At full size; here on the CPU, with 400 seconds said of each step."""
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(run_sections.time, "perf_counter", lambda: float(next(clock)))
    record = GpuRecord(sections.file)
    full = Setting("cpu", False, None, *[0] * 9)  # type: ignore[arg-type]
    assert run_sections._section("tests", full, record, sections.page, False) == run_sections.UNFINISHED
    assert sections.ran == ["one"]
    assert "run make gpu SECTION=tests once more" in capsys.readouterr().out
    assert run_sections._section("tests", full, record, sections.page, False) == 0
    assert sections.ran == ["one", "two"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 2, "machine": {}, "steps": {}}'])
def test_another_file_is_not_written_to(
    content: str, sections: Sections, capsys: pytest.CaptureFixture[str]
) -> None:
    sections.file.write_text(content)
    assert sections.run() == run_sections.WRONG_USE
    assert capsys.readouterr().err.startswith("make gpu: gpu.json ")
    assert sections.file.read_text() == content
    assert not sections.ran


def test_figures_of_two_machines_are_not_mixed(
    sections: Sections, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sections.run() == 0
    content = json.loads(sections.file.read_text())
    assert content["machine"] == machine("cpu")
    content["machine"]["torch"] = "1.0"
    sections.file.write_text(json.dumps(content))
    assert sections.run("--again") == run_sections.WRONG_USE
    assert f"torch 1.0, now {torch.__version__}" in capsys.readouterr().err
    assert json.loads(sections.file.read_text()) == content


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (Figure("a", 1.0), None),
        (Figure("a", None, at_most=1.0), None),
        (Figure("a", 1.0, at_most=1.0), True),
        (Figure("a", 1.1, at_most=1.0), False),
        (Figure("a", 0.9, at_most=1.0, at_least=0.95), False),
        (Figure("a", float("nan"), at_most=1.0), False),
        (Figure("a", 0.0, at_most=0), True),
    ],
)
def test_targets(figure: Figure, expected: bool | None) -> None:
    assert figure.passed is expected


def test_the_page_is_that_of_the_record(tmp_path: Path) -> None:
    """Without a record it says in its first line that nothing was measured, and so does the README."""
    record = GpuRecord(ROOT / "gpu.json")
    run_sections.write_page(record, tmp_path / "gpu.md")
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert text == (tmp_path / "gpu.md").read_text(encoding="utf-8")
    if not record.steps:
        assert text.splitlines()[2].startswith("**No figure on this page has been measured")
        assert "Nothing has run on a GPU yet" in " ".join((ROOT / "README.md").read_text().split())
