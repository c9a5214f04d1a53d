"""Whatever a run or a trainer resumes or reuses belongs to the same work; others are refused.

`READERS` lists every function of these rooms that reads a file. `STATE` lists what a checkpoint of a run
holds. A new one fails until it is listed here, with the artefact or the identity that it belongs to, or
with the reason why it needs none.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import files_below, settings
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.training.finetune import finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import CHECKPOINTS, VERSION, RunState, check_model, checkpoints, read_state
from rope_extend.training.sharding import Sharding

ROOT = Path(__file__).parents[2]

RUN = "training/test_artefacts.py::test_a_run_of_other_work_is_not_resumed"
TEXT = "training/test_metrics.py::test_perplexities_of_different_texts_are_not_compared"
DIGESTS = "checkpoint/test_hostile_files.py::test_"
BASE = "checkpoint/test_other_base_model.py::test_"
RESULTS = "evaluation/test_comparison.py::test_rows_that_cannot_be_compared_are_refused"

READERS: dict[str, dict[str, str | None]] = {
    "training": {
        "resume.damage": RUN,
        "resume.read_state": RUN,
        "metrics.read_metrics": TEXT,
        "metrics.Metrics._append": None,  # writes
        "metrics._not_a_link": None,  # the same
    },
    "data": {
        "token_cache.cached": "data/test_token_cache.py::test_keys_differ_where_texts_or",
        # A run knows its data by a fingerprint of all tokens.
        "bundled._held_out": None,
        "bundled.read_text": None,
        "token_cache._relevant": None,  # makes an identity
    },
    "checkpoint": {
        "manifest.read_json": DIGESTS,
        "opening.load_any": BASE,
        "verifying._reference": BASE,
        "card._recipe": None,  # shows the recipe next to the adapter
        "card.write_card": None,  # asks only whether the card is ours
        "staging.is_our_card": None,  # the same, by a digest in the card
        "publishing.private_fields": None,  # names fields
        "publishing.files_to_push": None,  # reads in the card which pictures it shows
        "stock_reader.main": None,  # the request of the process that started this one
        "verifying.verify": BASE,
        "verifying._stock_logits": None,  # the answer of the process that it started
    },
    "demo": {},
    "evaluation": {
        "report_files.read_results": RESULTS,
        "cells.finished_in": None,  # digests, for an estimate of the time
        "labels.model_name": None,  # what a model is called in texts
    },
}
"""By room and function, the test of refusals of the artefact that it reads."""

READING = {"open", "load", "load_file", "read_bytes", "read_text", "safe_open"}
"""Names of functions and methods that read a file, of any library."""

NOT_FILES = ("load_options.load",)
"""Calls of such names that read no artefact."""

STATE: dict[str, str | None] = {
    "data": RUN,
    "recipe": RUN,
    "model": RUN,
    "processes": "training/test_artefacts.py::test_a_run_resumes_only_with_as_many_processes",
    "parts": "training/test_artefacts.py::test_a_run_resumes_only_with_as_many_processes",
    # These are progress, and belong to the checkpoint.
    "step": None,
    "tokens": None,
    "seconds": None,
    "skipped": None,
    "skipped_in_a_row": None,
    "memory_options": None,  # a resumed run keeps them; a recipe that sets others is another recipe
}
"""By field of `RunState`, the test of refusals."""


def readers(room: Path) -> Iterator[str]:
    """The functions of a room that read files, such as `retrieval.TrialLog.read`."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            path = (*path, node.name)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in READING and not called.endswith(NOT_FILES):
                yield ".".join(path)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, path)

    for file in sorted(room.rglob("*.py")):
        yield from walk(ast.parse(file.read_text(encoding="utf-8")), (file.stem,))


@pytest.mark.parametrize("room", READERS)
def test_every_file_that_is_read_is_listed(room: str) -> None:
    found = set(readers(Path(rx.__file__).parent / room))
    assert found - READERS[room].keys() == set(), "list it in READERS, with the test that refuses another one"
    assert READERS[room].keys() - found == set(), "no such function reads a file any more"


def test_everything_in_a_checkpoint_of_a_run_is_listed() -> None:
    assert {field.name for field in fields(RunState)} == STATE.keys()


def listed() -> Iterator[str]:
    for tests in (*READERS.values(), STATE):
        yield from (test for test in tests.values() if test is not None)


@pytest.mark.parametrize("test", sorted(set(listed())))
def test_the_tests_that_are_named_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}", (ROOT / "tests" / file).read_text(), re.MULTILINE)


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    """A run of two steps, with a model and a text of its own."""
    shutil.copytree(work / "model", tmp_path / "model")
    shutil.copytree(work / "data", tmp_path / "data")
    changes = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data"), "save_every": 1}
    run = Recipe(**{**settings(work), **changes}, output_dir=str(tmp_path / "run"))
    finetune(replace(run, steps=2))
    return replace(run, steps=3)


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
    "encoding": (None, {"method": "linear"}, r"method \('yarn' there, 'linear' here\)"),
    "settings": (None, {"lora_rank": 2}, r"lora_rank \(4 there, 2 here\)"),
}
"""By name, what changes on disk, in the recipe, and the error."""


@pytest.mark.slow
def test_a_run_of_other_work_is_not_resumed(recipe: Recipe, tmp_path: Path) -> None:
    kept = {name: files_below(tmp_path / name) for name in ("model", "data")}
    run = files_below(Path(recipe.output_dir))
    for change, changes, message in OTHERS.values():
        if change is not None:
            change(recipe)
        with pytest.raises(RopeExtendError, match=rf"(?s)cannot resume: .*{message}"):
            finetune(replace(recipe, keep_checkpoints=1, **changes), resume=True)
        assert files_below(Path(recipe.output_dir)) == run  # nothing is removed, and the recipe stays
        for files in kept.values():
            for path, content in files.items():
                path.write_bytes(content)
    finetune(replace(recipe, dtype="float32"), resume=True)  # the same dtype by another name
    assert read_state(checkpoints(Path(recipe.output_dir) / CHECKPOINTS)[-1]).step == 3


@pytest.mark.slow
def test_a_run_resumes_with_a_model_that_moved_or_is_in_memory(recipe: Recipe, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    Path(recipe.model).rename(moved)
    finetune(replace(recipe, model=str(moved)), resume=True)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(moved))  # its config names no architecture
    model.load_state_dict(load_file(moved / "model.safetensors"), strict=False)
    finetune(replace(recipe, model=str(moved), steps=4), model=model, resume=True)
    assert read_state(checkpoints(Path(recipe.output_dir) / CHECKPOINTS)[-1]).step == 4


def test_configs_are_compared_under_one_version_of_transformers() -> None:
    """A new version may have new defaults; it does not change a weight."""
    before = {"config": "a", "weights": "b", VERSION: "5.17.0"}
    state = RunState(1, 1, 1.0, "", 1, {}, model=before)
    check_model(state, {**before, "config": "c", VERSION: "5.23.0"})
    for changed in ({"config": "c"}, {"weights": "c", VERSION: "5.23.0"}):
        with pytest.raises(RopeExtendError, match="cannot resume: the model differs from that of the run"):
            check_model(state, {**before, **changed})


@pytest.mark.slow
def test_a_run_resumes_only_with_as_many_processes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharding, "of", lambda *_: Sharding(ranks=2))
    with pytest.raises(RopeExtendError, match=r"processes \(1 there, 2 here\)\. .*launch"):
        finetune(recipe, resume=True)
    monkeypatch.setattr(Sharding, "of", lambda *_: Sharding(parts=2))
    with pytest.raises(RopeExtendError, match=r"parts of a sequence \(1 there, 2 here\).*same cp_size"):
        finetune(recipe, resume=True)
