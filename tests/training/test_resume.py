"""A run that stops resumes exactly, from what is intact, and never as another run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from covering import few
from runs import AtStep, assert_same, files_below, metrics, saved, settings, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rope_extend import RopeExtendError
from rope_extend.journal import only_writer
from rope_extend.models.checkpoint_directory import LEARNED_FILE
from rope_extend.training import resume as resume_module
from rope_extend.training.finetune import FinetuneInterrupted, Recipe, finetune
from rope_extend.training.resume import (
    CHECKPOINTS,
    VERSION,
    RunState,
    check_continues,
    enter_directory,
    read_state,
)
from rope_extend.training.sharding import Sharding


@pytest.mark.parametrize(
    "how", [{}, {"resume": True}, {"overwrite": True}], ids=["new", "resume", "overwrite"]
)
def test_a_second_process_in_the_directory_of_a_run_is_refused(how: dict[str, bool], recipe: Recipe) -> None:
    """Before it removes or changes a file of the run that is going on."""
    directory = Path(recipe.output_dir)
    if how:
        finetune(replace(recipe, steps=2, save_every=1))
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with only_writer(directory, "run"), pytest.raises(RopeExtendError, match="another run is writing to"):
        finetune(replace(recipe, steps=2, save_every=1), **how)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    assert directory.exists() == bool(how)


def test_a_run_interrupted_by_a_signal_ends_bit_for_bit_the_same(
    recipe: Recipe, tmp_path: Path, at_step: AtStep, work: Path
) -> None:
    learns = {"method": "t5_bias", "lora_targets": "attention", "train_norm_embed": False}
    recipe = replace(recipe, **learns, eval_data=str(work / "data" / "a.txt"), eval_every=3)
    finetune(recipe)
    whole = [weights(recipe.output_dir), load_file(Path(recipe.output_dir, LEARNED_FILE))]
    expected = metrics(recipe.output_dir)

    recipe = replace(recipe, output_dir=str(tmp_path / "interrupted"))
    before = signal.getsignal(signal.SIGINT)
    at_step(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(FinetuneInterrupted) as stopped:
        finetune(recipe)
    assert stopped.value.code == 128 + signal.SIGINT
    assert stopped.value.checkpoint.name == "checkpoint-5"
    assert signal.getsignal(signal.SIGINT) is before
    assert not Path(recipe.output_dir, "adapter_model.safetensors").exists()

    torch.manual_seed(999)  # what the process did in between does not matter
    np.random.seed(999)
    computed = at_step(0, lambda: None)
    finetune(recipe, resume=True)
    assert computed == [6, 7, 8]
    assert_same(weights(recipe.output_dir), whole[0])
    assert_same(load_file(Path(recipe.output_dir, LEARNED_FILE)), whole[1])
    timeless = [
        [{k: v for k, v in line.items() if not re.search("second|memory", k)} for line in lines]
        for lines in (expected, metrics(recipe.output_dir))
    ]
    assert timeless[0] == timeless[1]


def test_a_run_resumes_only_with_a_recipe_of_the_same_steps(recipe: Recipe) -> None:
    state = RunState(3, recipe=json.loads(json.dumps(recipe.to_dict())))

    def resumed(**changes: Any) -> None:
        check_continues(state, RunState(recipe=replace(recipe, **changes).to_dict()))

    resumed(steps=9, save_every=1, dtype="float32")
    message = r"learning_rate \(0\.01 there, 0\.001 here\), seed \(0 there, 1 here\)\. .*only"
    with pytest.raises(RopeExtendError, match=message):
        resumed(learning_rate=1e-3, seed=1)
    with pytest.raises(RopeExtendError, match="3 steps are done, and not 2; raise steps"):
        resumed(steps=2)
    other_version = replace(state, recipe={**state.recipe, "rslora": True})
    with pytest.raises(RopeExtendError, match=r"in rslora \(True there"):
        check_continues(other_version, state)


def test_newer_checkpoints_stay_until_the_first_new_one_is_saved(
    recipe: Recipe, tmp_path: Path, finished: Path, at_step: AtStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are damaged."""
    shutil.copytree(finished, recipe.output_dir)
    checkpoints = Path(recipe.output_dir, "checkpoints")
    cut_short(checkpoints / "checkpoint-8" / "optimizer.pt")
    before = files_below(checkpoints)
    recipe = replace(recipe, save_every=1, keep_checkpoints=1)

    with monkeypatch.context() as patch:
        fail = Mock(side_effect=OSError("the weights cannot be read"))
        patch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
        with pytest.raises(RopeExtendError, match="the weights cannot be read"):
            finetune(recipe, resume=True)
    assert files_below(checkpoints) == before

    at_step(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(FinetuneInterrupted):
        finetune(recipe, resume=True)
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-7"]
    assert_same(weights(finetune(recipe, resume=True).output_dir), weights(finished))


def test_a_finished_run_reports_the_perplexity_of_its_own_step(recipe: Recipe, work: Path) -> None:
    """Which its checkpoint holds, so it is not measured again."""
    recipe = replace(recipe, save_every=3, steps=6, eval_data=str(work / "data"))
    path = Path(finetune(recipe).output_dir)
    written = (path / "metrics.jsonl").read_bytes()
    result = finetune(recipe, resume=True)
    assert (path / "metrics.jsonl").read_bytes() == written
    lines = metrics(path)
    assert {str(length): value for length, value in result.perplexity.items()} == lines[-1]["perplexity"]
    assert result.loss == lines[-2]["loss"]
    assert lines[-1]["perplexity"] != lines[0]["perplexity"]


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_taken_for_damaged(
    recipe: Recipe, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, recipe.output_dir)
    before = files_below(recipe.output_dir)
    sha256 = resume_module.sha256

    def stale(path: Path) -> str:
        if path.parent == saved(recipe, 8):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return sha256(path)

    monkeypatch.setattr(resume_module, "sha256", stale)
    with pytest.raises(
        RopeExtendError, match=r"cannot read the checkpoint .*checkpoint-8.*may be intact: try again"
    ):
        finetune(replace(recipe, steps=9), resume=True)
    assert files_below(recipe.output_dir) == before


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "name"),
    few(
        product(
            (cut_short, flip_a_bit, Path.unlink),
            ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "state.json", "manifest.json"),
        ),
        4,
    ),
)
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_is_used(
    recipe: Recipe, finished: Path, harm: Callable[[Path], None], name: str, at_step: AtStep,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Also if only the checkpoints were copied, to a new directory."""
    shutil.copytree(finished / CHECKPOINTS, Path(recipe.output_dir, CHECKPOINTS))
    harm(saved(recipe, 8) / name)
    computed = at_step(0, lambda: None)
    finetune(recipe, resume=True)
    assert "checkpoint-8 is damaged" in caplog.text
    assert "resuming from checkpoint-6 instead" in caplog.text
    assert computed == [7, 8]
    assert_same(weights(recipe.output_dir), weights(finished))
    assert Recipe.from_yaml(Path(recipe.output_dir, "recipe.yaml")) == recipe


def test_without_an_intact_checkpoint_nothing_is_resumed(recipe: Recipe, finished: Path) -> None:
    shutil.copytree(finished, recipe.output_dir)
    for checkpoint in Path(recipe.output_dir, "checkpoints").iterdir():
        cut_short(checkpoint / "optimizer.pt")
    with pytest.raises(
        RopeExtendError, match=r"nothing to resume.*checkpoint-8.*optimizer\.pt has.*checkpoint-6"
    ):
        finetune(replace(recipe, steps=9), resume=True)
    (saved(recipe, 8) / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(RopeExtendError, match=r"manifest\.json is not a manifest"):
        finetune(replace(recipe, steps=9), resume=True)


@pytest.mark.parametrize(("step", "file"), [(1, "adapter_model.safetensors"), (5, "optimizer.pt")])
def test_a_full_disk_is_one_clear_error_and_loses_no_checkpoint(
    recipe: Recipe, tmp_path: Path, step: int, file: str, at_step: AtStep
) -> None:
    """A real failing write: a limit on the file size of the process. Python ignores the signal of it."""
    resource = pytest.importorskip("resource")
    recipe = replace(recipe, save_every=1, steps=5, keep_checkpoints=9)
    finetune(recipe)
    whole = weights(recipe.output_dir)
    most = (saved(recipe, 5) / file).stat().st_size - 1
    other = replace(recipe, output_dir=str(tmp_path / "full"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_step(step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1])))
    try:
        with pytest.raises(RopeExtendError) as refused:
            finetune(other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(refused.value)
    assert said.startswith(f"cannot write the checkpoint {other.output_dir}/checkpoints/checkpoint-{step}:")
    assert "Earlier checkpoints are intact; make room on the disk" in said
    names = sorted(path.name for path in Path(other.output_dir, "checkpoints").iterdir())
    assert names == [f"checkpoint-{number}" for number in range(1, step)]
    at_step(0, lambda: None)
    finetune(other, resume=True)
    assert_same(weights(other.output_dir), whole)


def test_an_output_directory_with_a_run_is_refused_and_left_alone(
    recipe: Recipe, finished: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that is queued again always passes `resume`: killed before a checkpoint, it starts at step 0."""
    shutil.copytree(finished, recipe.output_dir)
    files = files_below(recipe.output_dir)
    with pytest.raises(
        RopeExtendError, match=r"already holds a run .*\(recipe\.yaml\); resume=True continues it, overwrite="
    ):
        finetune(recipe)
    assert files == files_below(recipe.output_dir)
    with pytest.raises(RopeExtendError, match="contradict"):
        finetune(recipe, resume=True, overwrite=True)
    notes = Path(recipe.output_dir, "notes.txt")
    notes.write_text("mine")
    finetune(replace(recipe, steps=1), overwrite=True)
    assert [line["step"] for line in metrics(recipe.output_dir)] == [1]
    assert notes.read_text() == "mine"
    enter_directory(Path(recipe.output_dir), replace(recipe, seed=1), fresh=True)  # and killed
    Path(recipe.output_dir, "metrics.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    finetune(recipe, resume=True)
    assert [line["step"] for line in metrics(recipe.output_dir)] == list(range(1, 9))
    assert f"there is no checkpoint in {recipe.output_dir} to resume from; the run" in caplog.text
    assert_same(weights(recipe.output_dir), weights(finished))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_weights_without_steps_are_not_trained_over(recipe: Recipe, name: str) -> None:
    """Another model, or the adapter of a run whose checkpoints were deleted to save space."""
    directory = Path(recipe.output_dir)
    directory.mkdir(parents=True)
    (directory / name).write_text("weeks of work")
    with pytest.raises(RopeExtendError, match=f"already holds .*{name}.*overwrite=True"):
        finetune(recipe)
    with pytest.raises(RopeExtendError, match=f"nothing to resume: .* holds {name}, .*overwrite=True"):
        finetune(recipe, resume=True)
    assert (directory / name).read_text() == "weeks of work"


@pytest.fixture
def two_steps(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    """A run of two steps, with a model and a text of its own."""
    for name in ("model", "data"):
        shutil.copytree(work / name, tmp_path / name)
    run = Recipe(**settings(tmp_path) | {"output_dir": str(tmp_path / "run"), "save_every": 1, "steps": 3})
    finetune(replace(run, steps=2))
    return run


def one_bit(recipe: Recipe) -> None:
    file = Path(recipe.model) / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[0, 0] ^= 1
    save_file(stored, file, {"format": "pt"})


def config(name: str, value: Any) -> Any:
    def change(recipe: Recipe) -> None:
        file = Path(recipe.model) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))

    return change


def other_text(recipe: Recipe) -> None:
    shutil.copy(Path(str(recipe.data)) / "a.txt", Path(str(recipe.data)) / "b.txt")


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "weights": (one_bit, {}, r"of the run in weights \('\w+' there, '\w+' here\)"),
    "config": (config("rms_norm_eps", 1e-3), {}, r"of the run in config \("),
    "shape": (config("max_position_embeddings", 64), {}, r"of the run in encoding \(.*shape \("),
    "dtype": (None, {"dtype": "bfloat16"}, r"dtype \('torch.float32' there, 'torch.bfloat16' here\)"),
    "text": (other_text, {}, "of the run in documents"),
    "settings": (None, {"lora_rank": 2}, r"lora_rank \(4 there, 2 here\)"),
}
"""By name, what changes on disk, in the recipe, and the error."""


@pytest.mark.slow
def test_a_run_of_other_work_is_not_resumed(
    two_steps: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {name: files_below(tmp_path / name) for name in ("model", "data")}
    run = files_below(Path(two_steps.output_dir))
    for change, changes, message in OTHERS.values():
        if change is not None:
            change(two_steps)
        with pytest.raises(RopeExtendError, match=rf"(?s)cannot resume: .*{message}"):
            finetune(replace(two_steps, keep_checkpoints=1, **changes), resume=True)
        assert files_below(Path(two_steps.output_dir)) == run  # nothing is removed
        for files in kept.values():
            for path, content in files.items():
                path.write_bytes(content)
    for sharding, message in (
        (Sharding(ranks=2), r"processes \(1 there, 2 here\)\. .*launch"),
        (Sharding(parts=2), r"parts of a sequence \(1 there, 2 here\).*same cp_size"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Sharding, "of", lambda *_, sharding=sharding: sharding)
            with pytest.raises(RopeExtendError, match=message):
                finetune(two_steps, resume=True)
    Path(two_steps.model).rename(tmp_path / "moved")
    moved = replace(two_steps, model=str(tmp_path / "moved"), dtype="float32")  # auto, by another name
    finetune(moved, resume=True)
    assert read_state(saved(two_steps, 3)).step == 3


def test_configs_are_compared_under_one_version_of_transformers() -> None:
    """A new version may have new defaults; it does not change a weight."""
    before = {"config": "a", "weights": "b", VERSION: "5.17.0"}
    state = RunState(recipe={"steps": 1}, identity=before)
    check_continues(state, replace(state, identity={**before, "config": "c", VERSION: "5.23.0"}))
    for changed in ({"config": "c"}, {"weights": "c", VERSION: "5.23.0"}):
        with pytest.raises(RopeExtendError, match=r"cannot resume: .* differs from that of the run in"):
            check_continues(state, replace(state, identity={**before, **changed}))
