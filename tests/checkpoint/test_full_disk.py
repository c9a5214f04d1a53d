"""A save that fails or is interrupted leaves the old checkpoint or the new one, or names the old one."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import few
from integrity import (
    Fault,
    contents,
    each,
    extended,
    logits,
    watching,
    with_lora,
)
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.card import write_card
from rope_extend.checkpoint.export.write import export
from rope_extend.checkpoint.record import read_record, write_record


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A directory, in a process that is not root, so that permissions apply."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


@contextmanager
def privileged() -> Iterator[None]:
    """Become root again inside `unprivileged`."""
    effective = os.geteuid()
    os.seteuid(os.getuid())
    try:
        yield
    finally:
        os.seteuid(effective)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="this system has no permissions of this kind")
@each("full", "adapter")
def test_a_read_only_directory_is_refused(directory: Path) -> None:
    other = extended("linear")
    with unprivileged() as place:
        there, empty = place / "there", place / "empty"
        with privileged():
            shutil.copytree(directory, there)
            empty.mkdir()
            for path in (*there.iterdir(), there, empty):
                path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(there)
        for where in (there, empty, empty / "new"):
            with pytest.raises(RopeExtendError, match=r"cannot save to .*denied.* before is intact"):
                rx.save(other, where, overwrite=True)
        with pytest.raises(RopeExtendError, match=r"cannot write .*README.md: .*denied"):
            write_card(there)
        with pytest.raises(RopeExtendError, match=r"cannot write .*rope_extend.json: .*denied"):
            write_record(empty, read_record(there))
        assert contents(there) == before
        assert list(empty.iterdir()) == []
        with privileged():
            there.chmod(0o755)
            empty.chmod(0o755)


def writes(kind: str, checkpoints: Path) -> Callable[[Path], Any]:
    """A function that replaces the checkpoint in a directory."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    if kind == "full":
        model = extended("linear")
        return lambda target: rx.save(model, target, tokenizer, overwrite=True, max_shard_size="50KB")
    if kind == "adapter":
        adapted = with_lora(extended("linear", AutoModelForCausalLM.from_pretrained(checkpoints / "base")))
        return lambda target: rx.save(adapted, target, overwrite=True)
    if kind == "merge":
        return lambda target: rx.merge(checkpoints / "adapter", target, overwrite=True)
    return lambda target: export(checkpoints / "sharded", target, verify=False, overwrite=True)


@pytest.mark.parametrize(
    ("kind", "there"), few(product(("full", "adapter", "merge", "export"), (True, False)), 8, 2)
)
def test_a_disk_that_is_full_at_any_step_leaves_all_as_it_was(
    checkpoints: Path, tmp_path: Path, kind: str, there: bool
) -> None:
    write, target = writes(kind, checkpoints), tmp_path / "a" / "target"
    if there:
        shutil.copytree(checkpoints / "full", target)
        (target / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    failures = 0
    for number in range(1, 1000):
        fault = Fault(target, number, OSError(errno.ENOSPC, "No space left on device"))
        error: RopeExtendError | None = None
        with watching(fault):
            try:
                write(target)
            except RopeExtendError as raised:
                error = raised
        if fault.count < number:
            break
        if error is not None:
            failures += 1
            assert "No space left on device" in str(error)
            assert "\n" not in str(error)
            assert contents(tmp_path) == before, number
            assert (tmp_path / "a").exists() == there, number
            continue
        # The write succeeded: the failed step was optional, such as the card, or a link that became a copy.
        rx.load(target)
        shutil.rmtree(target if there else tmp_path / "a")
        if there:
            shutil.copytree(checkpoints / "full", target)
            (target / "notes.txt").write_text("mine")
    assert error is None
    assert failures > 10
    rx.load(target)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(kind, limit) for kind in ("full", "adapter", "merge") for limit in (0, 500, 1500)]
    + [("full", 10_000), ("merge", 10_000)],
)
def test_a_file_that_does_not_fit_on_the_disk_leaves_all_as_it_was(
    checkpoints: Path, tmp_path: Path, kind: str, limit: int
) -> None:
    """The operating system itself refuses to write more, in Python and in native code."""
    write, target = writes(kind, checkpoints), tmp_path / "target"
    shutil.copytree(checkpoints / "full", target)
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            RopeExtendError, match=r"File too large.*What was there before is intact"
        ) as error:
            write(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", few(["full", "adapter", "export"], 3, 1))
def test_an_interruption_at_any_step_leaves_the_old_or_the_new(
    checkpoints: Path, tmp_path: Path, kind: str
) -> None:
    write, target = writes(kind, checkpoints), tmp_path / "target"
    shutil.copytree(checkpoints / "full", target)
    (target / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    number, done, new = 0, False, 0
    while not done:
        number += 1
        try:
            with watching(Fault(target, number, KeyboardInterrupt(), clearing=True)):
                write(target)
            done = True
        except KeyboardInterrupt:
            if contents(tmp_path) != before:  # the save was complete and was cleaning up
                new += 1
                rx.load(target)
                assert (target / "notes.txt").read_text() == "mine"
                shutil.rmtree(target)
                shutil.copytree(checkpoints / "full", target)
                (target / "notes.txt").write_text("mine")
    assert number > 10
    assert new < number / 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system kills otherwise")
def test_a_save_that_is_killed_leaves_the_old_or_the_new_or_says_where_the_old_is(
    checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints / "full", tmp_path / "old")
    old, expected = contents(tmp_path / "old"), logits(rx.load(checkpoints / "full"))
    model = extended("linear")
    script = Path(__file__).with_name("killed_saves.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, script, str(tmp_path)], env=environment, check=True)
    outcomes = {"old": 0, "new": 0, "error": 0}
    for target in tmp_path.glob("killed-*"):
        try:
            found = logits(rx.load(target))
            outcome = "old" if torch.equal(found, expected) else "new"
            assert outcome == "old" or torch.equal(found, logits(model))
        except RopeExtendError as error:
            outcome = "error"
            (backup,) = target.glob(".replaced-*")
            assert str(backup) in str(error)  # noqa: PT017
            there = {**contents(target), **contents(backup)}
            assert old.items() <= there.items()
        outcomes[outcome] += 1
        rx.save(model, target, overwrite=True)
        assert torch.equal(logits(rx.load(target)), logits(model))
        assert not list(target.glob(".unfinished-*"))
    assert outcomes["old"] > 10
    assert outcomes["error"] > 3
    assert outcomes["new"] >= 1


@each("adapter")
def test_files_of_others_are_replaced_only_when_asked(
    directory: Path, checkpoints: Path, tmp_path: Path
) -> None:
    """A tokenizer alone is not a checkpoint, but it belongs to somebody."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("mine")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(
        RopeExtendError, match=r"already holds tokenizer.json; choose another .*overwrite=True"
    ):
        rx.save(extended(), target, tokenizer)
    assert contents(target) == {"tokenizer.json": b"mine"}
    rx.save(extended(), target)
    rx.save(extended(), target, tokenizer, overwrite=True)
    assert (target / "tokenizer.json").read_text() != "mine"
