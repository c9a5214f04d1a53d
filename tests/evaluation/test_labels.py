"""Rows of different adapters and runs have different labels."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_report import TRAINED, row
from test_saved_runs import FIRST, retrieved

from rope_extend.encodings import RopeShape, encoding, method_named
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import adapter_labels, method_labels
from rope_extend.evaluation.labels import distinct_names
from rope_extend.evaluation.perplexity_report import read_runs, write_report
from rope_extend.evaluation.retrieval_report import read_retrievals, write_retrieval

YARN = SimpleNamespace(encoding=encoding("yarn", factor=2.0), target_length=64)
PLAIN = SimpleNamespace(encoding=encoding("none"), target_length=256)


def test_adapters_with_directories_of_the_same_name_have_different_labels() -> None:
    labels = adapter_labels({"seed0/yarn": YARN, "seed1/yarn": YARN, "seed1/none": PLAIN})
    assert [*labels.values()] == [
        "yarn + LoRA (seed0/yarn)",
        "yarn + LoRA (seed1/yarn)",
        "none + LoRA at 256",
    ]
    assert [*adapter_labels({"seed0/yarn": YARN, "b/other": YARN}).values()] == [
        "yarn + LoRA (yarn)",
        "yarn + LoRA (other)",
    ]
    assert [*adapter_labels({"seed0/yarn": YARN}).values()] == ["yarn + LoRA"]
    for name in ("short_original(yarn)", "logn(resonance(ntk))", "p_rope", "near_far(dynamic_yarn)"):
        made = method_named(name).for_target(RopeShape(dim=8, theta=1e4, trained_length=32), 64)
        made_of = SimpleNamespace(encoding=made, target_length=64)
        assert [*adapter_labels({"a": made_of}).values()] == [f"{name} + LoRA"]


def test_the_same_adapter_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "yarn")
    for other in (f"{tmp_path}/yarn/", os.path.relpath(tmp_path / "yarn"), str(tmp_path / "link")):
        with pytest.raises(RopeExtendError, match="are the same directory; give each adapter once"):
            adapter_labels({str(tmp_path / "yarn"): YARN, other: YARN})


def test_names_have_as_many_parts_as_are_needed() -> None:
    assert distinct_names([]) == []
    assert distinct_names(["/a/x", "/b/y"]) == ["x", "y"]
    assert distinct_names(["/a/x/1", "/b/x/1", "/b/y/1"]) == ["a/x/1", "b/x/1", "y/1"]
    assert distinct_names(["/x", "/a/x"]) == ["x", "a/x"]
    assert distinct_names(["/a/x", "/a/x/", "/a/x/results.jsonl"]) == ["x", "x", "x"]
    assert distinct_names(["/a/x/results.jsonl", "/a/x/older.jsonl"]) == ["x", "older.jsonl"]


def test_rows_of_saved_encodings_are_not_called_by_paths_outside_the_working_directory() -> None:
    here, methods = Path.cwd(), ["none", "/a/found", "/b/found", "/c/jane/yarn", "~/other", "found/x"]
    labels = ["none", "a/found", "b/found", "jane/yarn", "other", "found/x"]
    assert [*method_labels([*methods, f"{here}/y"]).values()] == [*labels, "y"]
    assert [*method_labels(["../x", "../../x", "C:\\y\\x"]).values()] == ["x", "x-2", "y/x"]
    assert [*method_labels(["/yarn", "../yarn"]).values()] == ["yarn-2", "yarn-3"]  # yarn is a method
    with pytest.raises(RopeExtendError, match="give each method once"):
        method_labels(["a/found", f"{here}/a/found"])


def test_runs_in_directories_of_the_same_name_have_different_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, level in (("a", 2.0), ("b", 2.5)):
        write_report([row("none", "none", level)], tmp_path / name / "out", trained_length=TRAINED)
    paths = [tmp_path / "a" / "out", tmp_path / "b" / "out" / "results.jsonl"]
    assert [one.label for one in read_runs(paths)] == ["none (a/out)", "none (b/out)"]
    assert not caplog.text
    other = row("none", "none", 2.0, data="f" * 16)
    write_report([other], tmp_path / "c", trained_length=TRAINED)
    read_runs([*paths, tmp_path / "c"])
    assert "measured on different texts" in caplog.text


def test_runs_of_retrieval_on_different_prompts_are_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, data in (("a", "x"), ("b", "x"), ("c", "y")):
        write_retrieval([retrieved("none", FIRST, data=data)], tmp_path / name)
    assert [one.label for one in read_retrievals([tmp_path / "a", tmp_path / "b"])] == [
        "none (a)",
        "none (b)",
    ]
    assert not caplog.text
    read_retrievals([tmp_path / "a", tmp_path / "c"])
    assert "answered different prompts" in caplog.text
