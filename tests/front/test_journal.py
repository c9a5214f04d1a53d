"""Records of finished work on disk: resumed, of one piece of work, written by one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rope_extend.errors import RopeExtendError
from rope_extend.journal import Journal, only_writer


def journal(path: Path, **identity: object) -> Journal:
    return Journal(path, identity, holds="trials")


def test_records_are_read_again_with_all_digits(tmp_path: Path) -> None:
    path = tmp_path / "work" / "trials.jsonl"
    with journal(path, seed=1) as first:
        assert not path.exists()
        first.append({"loss": 0.1 + 0.2})
        first.append({"names": ["a", "ä"]})
    with journal(path, seed=1) as second:
        assert second.records == [{"loss": 0.1 + 0.2}, {"names": ["a", "ä"]}] == first.records
        second.append({"loss": 2})
    assert len(path.read_text().splitlines()) == 4


def test_other_work_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with journal(path, seed=1) as first:
        first.append({"n": 1})
    with pytest.raises(RopeExtendError, match=r"seed \(1 there, 2 here\)"):
        journal(path, seed=2)
    before = path.read_bytes()
    for damaged in (b"[1]", b"[" * 100_000):
        path.write_bytes(before + damaged + b"\n")
        with pytest.raises(RopeExtendError, match=r"line 3 of .* is damaged"):
            journal(path, seed=1)
    path.write_bytes(b"\xff" + before)  # without the first line, the second would be taken for it
    with pytest.raises(RopeExtendError, match=r"line 1 of .* is damaged .*use another directory"):
        journal(path, seed=1)
    path.write_bytes(before)
    journal(path, seed=1).close()
    for foreign, seed in ((b'{"mine": 1}', 1), (before + b'{"n', 2)):  # without the end of a line
        path.write_bytes(foreign)
        with pytest.raises(RopeExtendError, match=r"holds (no|trials of other)"):
            journal(path, seed=seed)
        assert path.read_bytes() == foreign


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with only_writer(directory, "run"):
        with pytest.raises(RopeExtendError, match="another run"), only_writer(directory, "run"):
            pass
        (directory / "log").touch()
    with only_writer(directory, "run"):
        pass
    assert [path.name for path in directory.iterdir()] == ["log"]


def test_a_full_disk_loses_no_earlier_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trials.jsonl"
    write = os.write
    with journal(path) as first:
        first.append({"n": 1})

        def full(descriptor: int, content: bytes) -> int:
            monkeypatch.setattr(os, "write", fail)
            return write(descriptor, content[:4])

        def fail(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(RopeExtendError, match="No space left on device"):
            first.append({"n": 2})
        monkeypatch.setattr(os, "write", write)
        first.append({"n": 3})
    assert journal(path).records == [{"n": 1}, {"n": 3}]
