"""Any order of saves, merges and exports, interrupted or not, over files and links of somebody else."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from cases import tiny_llama
from covering import OPTIONS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from integrity import Fault, contents, extended, tuned, watching
from transformers import AutoTokenizer

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.restoring import checked_record

OUTSIDE = "outside"
FOREIGN = ("notes.txt", "LICENSE", "README.md", "model_best.safetensors", "data/mine.bin")
LINKS = {
    "config.json": "file.json", "model.safetensors": "file.json", "rope_extend.json": "file.json",
    "tokenizer.json": "folder", "chat_template.jinja": "file.json",
    "NOTICE": "file.json", "other": "folder", "README.md": "missing",
}  # fmt: skip
"""Links in the directory, with what they lead to outside of it. The first five have names of a checkpoint."""
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"}
CARD = "README.md"
STAY = {"LICENSE", "NOTICE"}
"""Files of a merge that a later checkpoint leaves."""


@dataclass(frozen=True)
class Sources:
    """Everything that is written, by name, and the files that each leaves in an empty directory."""

    writers: dict[str, Callable[[Path, bool], Any]]
    files: dict[str, set[str]]


@pytest.fixture(scope="module")
def sources(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    where = tmp_path_factory.mktemp("sources")
    base = Path(shutil.copytree(work / "model", where / "base"))
    for name in ("tokenizer.model", "LICENSE", "NOTICE"):
        (base / name).write_text(name)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages }}"
    model = extended(model=tiny_llama(num_hidden_layers=1))
    adapter = rx.save(tuned(base), where / "adapter")
    full = rx.save(model, where / "full")
    writers: dict[str, Callable[[Path, bool], Any]] = {
        "full": lambda target, over: rx.save(model, target, overwrite=over),
        "with tokenizer": lambda target, over: rx.save(model, target, tokenizer, overwrite=over),
        "sharded": lambda target, over: rx.save(model, target, overwrite=over, max_shard_size="20KB"),
        "adapter": lambda target, over: rx.save(adapted_model, target, overwrite=over),
        "merge": lambda target, over: rx.merge(adapter, target, overwrite=over),
        "export": lambda target, over: export(full, target, overwrite=over, verify=False),
    }
    adapted_model = rx.load(adapter)
    files = {}
    for name, write in writers.items():
        write(where / "fresh" / name, False)
        files[name] = set(contents(where / "fresh" / name)) - STAY - {CARD}
    return Sources(writers, files)


class Machine(RuleBasedStateMachine):
    """One directory with files of a checkpoint and of somebody else."""

    sources: Sources

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp())
        self.target, outside = self.root / "target", self.root / OUTSIDE
        for path in (self.target, outside / "folder"):
            path.mkdir(parents=True)
        for name in ("file.json", "folder/mine.txt", "folder/rag.jinja"):
            (outside / name).write_text("mine")
        self.outside = contents(outside)
        self.foreign: dict[str, Any] = {}
        self.holds: str | None = None
        """The kind of the checkpoint in the directory."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(name=st.sampled_from(FOREIGN))
    def somebody_writes_a_file(self, name: str) -> None:
        path = self.target / name
        if os.path.lexists(path) or path.parent.is_symlink():
            return
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"mine: {name}")
        self.foreign[name] = path.read_bytes()

    @rule(name=st.sampled_from(sorted(LINKS)))
    def somebody_makes_a_link(self, name: str) -> None:
        path = self.target / name
        ours = name not in ("NOTICE", "other", CARD)
        if os.path.lexists(path) or (ours and self.holds):
            return
        path.symlink_to(self.root / OUTSIDE / LINKS[name])
        if not ours:
            self.foreign[name] = os.readlink(path)

    @rule(
        kind=st.sampled_from(["full", "with tokenizer", "sharded", "adapter", "merge", "export"]),
        overwrite=st.booleans(),
        step=st.none() | st.integers(1, 60),
        stopped=st.booleans(),
    )
    def we_write(self, kind: str, overwrite: bool, step: int | None, stopped: bool) -> None:
        """Write a checkpoint. At a step, the user stops it, or the disk is full."""
        before = contents(self.target)
        error = KeyboardInterrupt() if stopped else OSError(errno.ENOSPC, "No space left on device")
        raised: BaseException | None = None
        try:
            with watching(Fault(self.target, step or 10**6, error, clearing=stopped)):
                self.sources.writers[kind](self.target, overwrite)
        except (RopeExtendError, KeyboardInterrupt) as caught:
            raised = caught
        after = self.files()
        if raised is not None and after == before:
            return
        assert raised is None or isinstance(raised, KeyboardInterrupt), raised
        assert overwrite or not self.holds
        self.holds = kind
        new = self.sources.files[kind]
        assert new - set(self.foreign) <= set(after)
        rest = set(after) - new - set(self.foreign) - STAY - ({CARD} if kind == "merge" else set())
        assert rest <= (set() if new & TOKENIZER else TOKENIZER), rest

    @invariant()
    def files_of_others_are_unchanged(self) -> None:
        assert contents(self.root / OUTSIDE) == self.outside
        assert self.foreign.items() <= contents(self.target).items()

    @invariant()
    def the_checkpoint_is_whole(self) -> None:
        if self.holds:
            checked_record(self.target, check_files=True)
            adapter = (self.target / "adapter_config.json").exists()
            assert adapter == (self.holds == "adapter")

    def files(self) -> dict[str, Any]:
        """The files in the directory but those that a save keeps while it cleans up."""
        return {
            name: value
            for name, value in contents(self.target).items()
            if not name.startswith((".unfinished-", ".replaced-")) and not name.endswith(".partial")
        }


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(5, 10), pytest.param(150 if OPTIONS.full else 75, 20, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_a_directory_is_whole_and_files_of_others_stay(sources: Sources, examples: int, steps: int) -> None:
    Machine.sources = sources
    logging.getLogger("rope_extend").setLevel(logging.ERROR)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # to shrink a failure would take minutes
        ),
    )
