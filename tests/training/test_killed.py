"""A run that is killed at any moment, also while it saves, resumes and ends bit for bit the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from covering import OPTIONS
from runs import metrics

from rope_extend.training.finetune import Recipe

# Everything that changes the disk, and every batch, is an event; a process is killed at one of them. Each is
# a fork of one that has loaded what a run needs and has not computed anything, which costs no start.
_SCRIPT = """
import json, os, shutil, signal, sys, traceback
from dataclasses import replace
from pathlib import Path

import datasets, matplotlib.pyplot, peft, torch
from transformers.models.llama import modeling_llama
from rope_extend.training import trainer
from rope_extend.training.finetune import Recipe, finetune

torch.set_num_threads(1)
base, jobs, said = Recipe.from_yaml(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
events = []


def happens(name, kill_at):
    events.append(name)
    if kill_at == [name, events.count(name)]:
        os.kill(os.getpid(), signal.SIGKILL)


def watch(owner, name, kill_at, file_at=None):
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        kind = name
        if name == "replace":
            kind += " " + Path(args[1]).suffix
        elif name == "rmtree" and "checkpoint-" in str(args[0]):
            kind += " of a checkpoint"
        happens("before " + kind, kill_at)
        result = original(*args, **kwargs)
        if file_at is not None:  # as if the process had written half
            content = Path(args[file_at]).read_bytes()
            Path(args[file_at]).write_bytes(content[: len(content) // 2])
            happens("in the middle of " + kind, kill_at)
            Path(args[file_at]).write_bytes(content)
        happens("after " + kind, kill_at)
        return result

    setattr(owner, name, watched)


def child(recipe, kill_at, log=None):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        watch(trainer.RopeTrainer, "training_step", kill_at)
        watch(peft.peft_model, "safe_save_file", kill_at, 1)
        watch(torch, "save", kill_at, 1)
        for owner, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree"), (Path, "write_text")):
            watch(owner, name, kill_at)
        finetune(recipe, resume=True)  # also if nothing is there yet, as a job that is queued again
        if log is not None:
            log.write_bytes(json.dumps(events).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


report = []
for name, kills in jobs:
    recipe = replace(base, output_dir=str(said.parent / name))
    codes = [child(recipe, kill_at) for kill_at in kills]
    codes.append(child(recipe, None, said.parent / (name + ".events")))
    report.append((name, codes))
said.write_text(json.dumps(report))
"""


Kills = list[tuple[str, int]]
"""The events at which a run is killed, one after the other: name, and its number under that name."""


def run(recipe: Recipe, tmp_path: Path, work: Path, kills: list[Kills]) -> None:
    """For each list of events, a run that is killed at these and then finishes, in a directory `0`, `1`, …"""
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    jobs = [(str(number), one) for number, one in enumerate(kills)]
    arguments = [str(tmp_path / "recipe.yaml"), json.dumps(jobs), str(tmp_path / "report.json")]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONHASHSEED"] = "0"  # peft writes sets
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        env=environment, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for (_, codes), one in zip(json.loads((tmp_path / "report.json").read_text()), kills, strict=True):
        assert codes == [-9] * len(one) + [0], (one, codes, done.stderr[-3000:])


TIMED = ("state.json", "trainer_state.json", "manifest.json")
"""Files of a checkpoint that hold times, or their digests."""


def outcome(directory: Path) -> dict[str, Any]:
    """All files of a run, without those that contain times."""
    saved = directory / "checkpoints"
    return {
        "adapter": (directory / "adapter_model.safetensors").read_bytes(),
        "metrics": [
            {k: v for k, v in line.items() if "second" not in k and k != "peak_memory_bytes"}
            for line in metrics(directory)
        ],
        "names": sorted(path.name for path in (*saved.iterdir(), *directory.glob("*metrics*"))),
        "files": {
            (path.parent.name, path.name): path.read_bytes()
            for path in saved.rglob("*")
            if path.is_file() and path.name not in TIMED
        },
    }


CHAINS: list[Kills] = [
    [("after training_step", 4)],  # in step 2
    [("in the middle of save", 2), ("before fsync", 4), ("before replace ", 1)],  # again and again
    [("before rmtree", 2)],
]


@pytest.mark.slow
def test_a_killed_run_ends_bit_for_bit_the_same(recipe: Recipe, tmp_path: Path, work: Path) -> None:
    """Killed several times; and without `--full`, at one event of each kind.

    It is the first, one in the middle or the last of its kind.
    """
    recipe = replace(recipe, steps=3, warmup_steps=2, save_every=1, positions="pose", block_length=64)
    run(recipe, tmp_path, work, [[]])
    expected = outcome(tmp_path / "0")
    assert {"adapter_model.safetensors", "optimizer.pt"} <= {name for _, name in expected["files"]}
    events = json.loads((tmp_path / "0.events").read_bytes())
    kinds = Counter(event for event in events if not event.endswith(".npz"))  # tokens, which are cached
    assert len(kinds) >= 24
    chosen = [(kind, 1 + index % 3 * (count - 1) // 2) for index, (kind, count) in enumerate(kinds.items())]
    if OPTIONS.full:
        chosen = [(kind, number) for kind, count in kinds.items() for number in range(1, count + 1)]
    (tmp_path / "killed").mkdir()
    kills = CHAINS + [[kill] for kill in chosen]
    run(recipe, tmp_path / "killed", work, kills)
    for number, one in enumerate(kills):
        assert outcome(tmp_path / "killed" / str(number)) == expected, one
