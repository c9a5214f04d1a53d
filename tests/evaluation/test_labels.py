"""Rows of different adapters and runs have different labels."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_comparison import FIRST, retrieved
from test_report import row

from rope_extend.encodings import RopeShape, encoding, method_named
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.labels import adapter_labels, distinct_names, method_labels
from rope_extend.evaluation.report_files import read_runs

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
    assert distinct_names(["/a/x/1", "/b/x/1", "/b/y/1"]) == ["a/x/1", "b/x/1", "b/y/1"]
    assert distinct_names(["/x", "/a/x"]) == ["x", "a/x"]
    assert distinct_names(["/a/x", "/a/x/", "/a/x/results.jsonl"]) == ["x", "x", "x"]
    assert distinct_names(["/a/x/results.jsonl", "/a/x/older.jsonl"]) == ["x", "older.jsonl"]


def test_rows_of_saved_encodings_are_not_called_by_paths_outside_the_working_directory() -> None:
    here, methods = Path.cwd(), ["none", "/a/found", "/b/found", "/c/jane/yarn", "~/other", "found/x"]
    labels = ["none", "found (a/found)", "found (b/found)", "saved yarn", "other", "found/x"]
    assert [*method_labels([*methods, f"{here}/y"]).values()] == [*labels, "y"]
    assert [*method_labels(["yarn", "/c/yarn"]).values()] == ["yarn", "saved yarn"]
    with pytest.raises(RopeExtendError, match="give each method once"):
        method_labels(["a/found", f"{here}/a/found"])


def test_runs_in_directories_of_the_same_name_have_different_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And texts or prompts that differ are pointed out."""
    rows = {"a": row("none", "none", 2.0), "b": row("none", "none", 2.5)}
    rows |= {"c": row("none", "none", 2.0, data="f" * 16)}
    rows |= {name: retrieved("none", FIRST, data=name[0]) for name in ("x", "x2", "y")}
    for name, one in rows.items():
        (tmp_path / name / "out").mkdir(parents=True)
        (tmp_path / name / "out" / "results.jsonl").write_text(json.dumps(one.to_dict()))
    paths = [tmp_path / "a" / "out", tmp_path / "b" / "out" / "results.jsonl"]
    assert [one.label for one in read_runs(paths)] == ["none (a/out)", "none (b/out)"]
    assert [one.label for one in read_runs(paths[:1])] == ["none"]
    read_runs([tmp_path / "x" / "out", tmp_path / "x2" / "out"])
    assert not caplog.text
    read_runs([*paths, tmp_path / "c" / "out"])
    assert "measured on different texts" in caplog.text
