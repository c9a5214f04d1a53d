"""A save that fails or is interrupted leaves the old checkpoint or the new one, or names the old one."""

from __future__ import annotations

import errno
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import few
from integrity import Fault, contents, extended, logits, tuned, watching
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.exporting import export


def writes(kind: str, checkpoints: Path) -> Callable[[Path], Any]:
    """A function that replaces the checkpoint in a directory."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    if kind == "full":
        model = extended("linear")
        return lambda target: rx.save(model, target, tokenizer, overwrite=True, max_shard_size="50KB")
    if kind == "adapter":
        adapted = tuned(checkpoints / "base", "linear")
        return lambda target: rx.save(adapted, target, overwrite=True)
    if kind == "merge":
        return lambda target: rx.merge(checkpoints / "adapter", target, overwrite=True)
    return lambda target: export(checkpoints / "sharded", target, verify=False, overwrite=True)


WRITES = product(("full", "adapter", "merge", "export"), (True, False), (False, True))


@pytest.mark.parametrize(("kind", "there", "stopped"), few(WRITES, 5, 1), ids=str)
def test_a_write_that_fails_at_any_step_leaves_the_old_or_the_new(
    checkpoints: Path, tmp_path: Path, kind: str, there: bool, stopped: bool
) -> None:
    """The disk is full, which leaves all as it was, or the user stops it, or the process is killed."""
    write, target = writes(kind, checkpoints), tmp_path / "a" / "target"
    killed = tmp_path / "killed" if (kind, there, stopped) == ("full", True, True) else None
    left: Counter[str] = Counter()

    def begin() -> None:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        if there:
            shutil.copytree(checkpoints / "full", target)
            (target / "notes.txt").write_text("mine")

    begin()
    before, failures = contents(tmp_path), 0
    for number in range(1, 1000):
        error = KeyboardInterrupt() if stopped else OSError(errno.ENOSPC, "No space left on device")
        fault, raised = Fault(target, number, error, clearing=stopped, killed=killed), ""
        with watching(fault):
            try:
                write(target)
            except (RopeExtendError, KeyboardInterrupt) as caught:
                raised = str(caught) or "stopped"
        if fault.count < number:
            break
        if killed:
            left[what_a_kill_leaves(killed, checkpoints / "full", write)] += 1
        failures += bool(raised)
        if raised and (not stopped or contents(tmp_path) == before):
            assert stopped or "No space left on device" in raised
            assert "\n" not in raised
            assert contents(tmp_path) == before, number
            assert (tmp_path / "a").exists() == there, number
            continue
        # The failed step was optional, such as the card, or the save was complete and was cleaning up.
        rx.load(target)
        assert not there or (target / "notes.txt").read_text() == "mine"
        begin()
    assert not raised
    assert failures > 10
    assert not killed or (left["old"] > 10 and left["error"] > 3 and left["new"] >= 1), left
    rx.load(target)


def what_a_kill_leaves(target: Path, full: Path, write: Callable[[Path], Any]) -> str:
    """The `old` checkpoint, the `new` one, or an `error` that says where the old one is."""
    for path in target.glob(".unfinished-*"):
        path.rename(target / ".unfinished-0-")  # of another process
    outcome, found = "error", None
    try:
        found = logits(rx.load(target))
    except RopeExtendError as error:
        (backup,) = target.glob(".replaced-*")
        assert str(backup) in str(error)  # noqa: PT017
        assert contents(full).items() <= {**contents(target), **contents(backup)}.items()
    write(target)
    new = logits(rx.load(target))
    if found is not None:
        outcome = "old" if torch.equal(found, logits(rx.load(full))) else "new"
        assert outcome == "old" or torch.equal(found, new)
    assert not list(target.glob(".unfinished-*"))
    shutil.rmtree(target)
    return outcome


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
