"""The one atomic writer: a file or a directory is replaced whole, or stays as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import rope_extend as rx
from rope_extend import files
from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.files import (
    check_creatable,
    expand_home,
    publish_directory,
    replacing,
    replacing_files,
    write_text,
)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "x" * 300], ids=["nul", "path", "name"])
def test_a_name_that_no_file_can_have_is_one_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RopeExtendError, match=r"no file can be called .*; give another name"):
        expand_home(name)
    with pytest.raises(RopeExtendError, match="no file can be called"):
        rx.info(name)
    with pytest.raises(RopeExtendError, match="output_dir must be a path"):
        rx.Recipe(model="m", data="d", output_dir=name, target_length=64)
    for command in (["info", name], ["card", str(MODEL_DIR), "--results", name]):
        with pytest.raises(SystemExit):
            main(command)
        assert "no file can be called" in capsys.readouterr().err


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    """With the usual permissions; a link under its name is replaced, and not followed."""
    victim, path = tmp_path / "victim", tmp_path / "name.txt"
    victim.write_text("untouched")
    path.symlink_to(victim)
    write_text(path, "old")
    assert not path.is_symlink()
    write_text(path, "new ü", durable=True)
    with pytest.raises(ZeroDivisionError), replacing(path) as partial:
        partial.write_text(f"half {1 // 0}")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert victim.read_text() == "untouched"
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(victim.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [path, victim]


def test_a_link_under_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, partial = tmp_path / "victim", tmp_path / "known"
    victim.write_text("untouched")
    partial.symlink_to(victim)
    monkeypatch.setattr(files, "_temporary_name", lambda path: partial)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "name.txt", "new")
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "name.txt").exists()


def test_temporary_names_differ_and_fit_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 120)
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    for content in ("old", "new"):
        with replacing_files(directory, last="a.txt") as partial:
            (partial / "parts").mkdir()
            for name in ("a.txt", "b.txt", "parts/c.txt"):
                (partial / name).write_text(content)
        (directory / "parts" / "foreign.txt").write_text("untouched")
    with pytest.raises(ZeroDivisionError), replacing_files(directory, last="a.txt") as partial:
        (partial / "b.txt").write_text(f"half {1 // 0}")
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in found.items()} == {
        "a.txt": "new", "b.txt": "new", "parts/c.txt": "new", "parts/foreign.txt": "untouched",
    }  # fmt: skip
    assert len(list(directory.iterdir())) == 3


def test_the_last_file_is_renamed_after_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = []
    own = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (renamed.append(new.name), own(old, new)))
    with replacing_files(tmp_path, last="b.txt") as partial:
        for name in ("a.txt", "b.txt", "c.txt"):
            (partial / name).write_text(name)
    assert renamed == ["a.txt", "c.txt", "b.txt"]


def test_a_directory_that_cannot_be_made_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = sorted(tmp_path.rglob("*"))
    for name, message in (
        ("file", "file' is a file"), ("file/a/b", "file' is a file"), ("dangling", "is a link to nothing"),
        ("dangling/a", "is a link to nothing"),
    ):  # fmt: skip
        with pytest.raises(RopeExtendError, match=message):
            check_creatable(tmp_path / name)
    for name in ("", "new", "new/deep", "real", "link", "link/new"):
        check_creatable(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    if Path("/proc/self").exists():  # nobody can write there
        with pytest.raises(RopeExtendError, match=r"cannot write to '/proc/new': .* in '/proc'"):
            check_creatable(Path("/proc/new"))


@pytest.mark.parametrize("output", ["file/report", "dangling"])
@pytest.mark.parametrize("command", ["evaluate", "report", "retrieve"])
def test_commands_refuse_an_output_that_cannot_be_made_before_they_load_anything(
    output: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    load = "rope_extend.models.load_options.LoadOptions.load"
    monkeypatch.setattr(load, lambda *_, **__: pytest.fail("loaded"))
    target, model = str(tmp_path / output), str(MODEL_DIR)
    words = {
        "evaluate": [model, "--lengths", "256,512", "--data", "demo:evaluation"],
        "report": [model, "--target-length", "512", "--data", "demo:evaluation"],
        "retrieve": [model, "--lengths", "512"],
    }[command]
    with pytest.raises(SystemExit):
        main([command, *words, "--output", target])
    assert "rope-extend: error: cannot make the directory" in capsys.readouterr().err


def test_a_directory_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "partial" / "below").mkdir(parents=True)
    (tmp_path / "partial" / "below" / "file").write_text("a")
    calls: list[str] = []
    monkeypatch.setattr(files, "flush", lambda path: calls.append(path.name))
    monkeypatch.setattr(files.os, "replace", lambda old, new: calls.append(f"{old.name} -> {new.name}"))
    publish_directory(tmp_path / "partial", tmp_path / "final")
    assert sorted(calls[:3]) == ["below", "file", "partial"]
    assert calls[3:] == ["partial -> final", tmp_path.name]
