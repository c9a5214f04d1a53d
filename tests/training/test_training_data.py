"""Every kind of training data is equal in one process and in two; older checkpoints can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from cases import ALL_FAMILIES, TRAINED, tiny_model
from safetensors.torch import load_file
from several_processes import launch
from transformers import AutoTokenizer

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.training import resume
from rope_extend.training.finetune import Recipe, _check_model, finetune
from rope_extend.training.resume import RunState, read_state
from rope_extend.training.sharding import Sharding
from rope_extend.training.training_data import check_split, load_held_out, load_training_data, trained_on

_RUN = """
import sys
from rope_extend.training.finetune import Recipe, finetune
finetune(Recipe.from_yaml(sys.argv[1]))
"""

WAYS: dict[str, dict[str, Any]] = {
    "packing": {"packing": "restart"},
    "mixing": {"data_weights": (2, 1, 1)},
    "curriculum": {"curriculum": [[32, 1], [64, 1]]},
    "streaming": {"streaming": True},
    "streaming and packing": {"streaming": True, "packing": "continue"},
    "shifted sparse": {"shifted_sparse": 32},
    "all that goes together": {
        "packing": "restart", "data_weights": (2, 1, 1), "curriculum": [[32, 1], [64, 1]],
    },
}  # fmt: skip


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    data = tuple(str(work / "data" / f"{name}.txt") for name in "abc")
    return Recipe(
        model=str(work / "model"), data=data, output_dir=str(tmp_path / "run"), target_length=128, steps=3,
        gradient_accumulation=2, learning_rate=1e-2, lora_rank=4, save_every=1, gradient_checkpointing=False,
    )  # fmt: skip


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe.output_dir) / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_read_the_same_as_one_in_twice_the_passes(
    recipe: Recipe, tmp_path: Path, way: str
) -> None:
    recipe = replace(recipe, **WAYS[way])
    finetune(recipe)
    other = replace(recipe, gradient_accumulation=1, output_dir=str(tmp_path / "two"))
    (tmp_path / "two.yaml").write_text(other.to_yaml())
    launch(_RUN, str(tmp_path / "two.yaml"), where=tmp_path, environment={"ACCELERATE_USE_CPU": "true"})
    ours, theirs = weights(recipe), weights(other)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-4)
    states = [read_state(Path(r.output_dir, "checkpoints", "step-3")) for r in (recipe, other)]
    assert states[0].stream == states[1].stream


class Gpus:
    """Generators of GPUs, in place of those of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in range(count)]
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.states[device.index])
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state


@pytest.mark.parametrize(
    ("data", "eval_data", "expected"),
    [
        ("books", "books", 3),
        ("./books", "books", 3),
        ("books/*.txt", "books/a.txt", 1),
        ("books", ("books/c.txt", "other/a.txt"), 1),
        ("books/a.txt", ("books/b.txt", "link.txt"), 1),
        (("books/a.txt", "books/short.txt"), ("books/b.txt", "books/short.txt"), 0),
        ("books/a.txt", "books/b.txt", 0),
    ],
)
def test_documents_of_a_stream_are_known_by_their_files(
    recipe: Recipe, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    data: Any, eval_data: Any, expected: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shutil.copytree(work / "data", "books")
    Path("books/short.txt").write_text("short")
    Path("other").mkdir()
    shutil.copy("books/b.txt", "other/a.txt")
    Path("link.txt").symlink_to("books/a.txt")
    run = replace(recipe, data=data, eval_data=eval_data, streaming=True)
    assert counted(run, (64,)) == expected


def counted(run: Recipe, lengths: tuple[int, ...]) -> int:
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    training, held_out = load_training_data(run, tokenizer), load_held_out(run, tokenizer, lengths)
    return trained_on(run, held_out, training, tokenizer, lengths)


def test_the_splits_of_a_streamed_dataset_are_different_texts(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"train": "one two three " * 200, "test": "four five six " * 200}

    def load_dataset(_: str, *__: Any, split: str, streaming: bool = False, **___: Any) -> Any:
        dataset = datasets.Dataset.from_dict({"text": [rows[split]]})
        return dataset.to_iterable_dataset() if streaming else dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    run = replace(recipe, data="org/books", eval_data="org/books", split="train", streaming=True)
    assert counted(replace(run, eval_split="test"), (64,)) == 0


@pytest.mark.parametrize(
    ("splits", "changes", "expected"),
    [
        (("train", "validation", "test"), {}, "validation"),
        (("train", "test"), {}, "test"),
        (("train", "dev", "test"), {}, "dev"),
        (("train", "test", "val"), {}, "val"),
        (("train", "validation", "test"), {"split": "train+validation"}, "test"),
        (("train", "test"), {"split": "train[:50%]"}, "test"),
        (("train",), {"data": "org/others"}, "train"),
        (("train", "test"), {"eval_split": "train[90%:]", "split": "train[:90%]"}, "train[90%:]"),
        (("train",), {}, None),
        (("train",), {"split": "train[:50%]"}, None),
        (("train",), {"eval_data": "org/books:en", "streaming": True}, None),
        (("train", "test"), {"split": "all"}, None),
        (("train", "easy", "hard"), {}, None),
    ],
)
def test_a_run_is_evaluated_on_a_split_that_it_does_not_train_on(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch,
    splits: tuple[str, ...], changes: dict[str, Any], expected: str | None,
) -> None:  # fmt: skip
    read: list[str] = []

    def load_dataset(*_: Any, split: str, **__: Any) -> Any:
        read.append(split)
        return datasets.Dataset.from_dict({"text": ["one two three " * 200]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: list(splits))
    run = replace(recipe, **{"data": "org/books", "eval_data": "org/books", **changes})
    assert Recipe.from_dict(run.to_dict()) == run
    check_split(run)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    if expected is None:
        message = rf"has the splits {', '.join(splits)}.* Set eval_split, or give other documents"
        with pytest.raises(RopeExtendError, match=message):
            load_held_out(run, tokenizer, (64,))
    else:
        load_held_out(run, tokenizer, (64,))
        assert read == [expected]


def test_splits_that_cannot_be_listed_are_one_error(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any) -> Any:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(datasets, "get_dataset_split_names", offline)
    run = replace(recipe, eval_data="org/books")
    with pytest.raises(RopeExtendError, match=r"cannot read 'org/books'.*cannot be reached"):
        load_held_out(run, None, (64,))


def test_a_checkpoint_has_the_generator_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saw eight GPUs and used one resumes where there is one."""
    Gpus(monkeypatch, 8)
    saved = resume._random_state(torch.device("cuda", 5))
    gpus = Gpus(monkeypatch, 1)
    resume._restore_random_state(saved, torch.device("cuda", 0))
    assert gpus.states[0].item() == 5
    resume._restore_random_state(saved, torch.device("cpu"))
    of_a_cpu = resume._random_state(torch.device("cpu"))
    resume._restore_random_state(of_a_cpu, torch.device("cuda", 0))
    assert gpus.states[0].item() == 5


@pytest.mark.parametrize(("saved", "index", "restored"), [(8, 0, 0), (8, 5, 5), (1, 3, 0), (0, 0, 9)])
def test_older_checkpoints_have_the_generators_of_all_gpus(
    monkeypatch: pytest.MonkeyPatch, saved: int, index: int, restored: int
) -> None:
    gpus = Gpus(monkeypatch, 6)
    gpus.states[index] = torch.tensor([9], dtype=torch.uint8)
    older = resume._random_state(torch.device("cpu"))
    older["cuda"] = [torch.tensor([number], dtype=torch.uint8) for number in range(saved)]
    resume._restore_random_state(older, torch.device("cuda", index))
    assert gpus.states[index].item() == restored


@pytest.mark.slow
def test_a_checkpoint_without_these_fields_resumes_bit_for_bit(recipe: Recipe, tmp_path: Path) -> None:
    """Its recipe and its state lack the fields, and the memory options have their old name."""
    finetune(recipe)
    old = replace(recipe, output_dir=str(tmp_path / "old"))
    finetune(replace(old, steps=2))
    new = {"packing", "curriculum", "data_weights", "shifted_sparse", "streaming"}
    assert new <= {field.name for field in fields(Recipe)}
    assert "stream" in {field.name for field in fields(RunState)}
    for checkpoint in (tmp_path / "old" / "checkpoints").iterdir():
        file = checkpoint / "state.json"
        state = json.loads(file.read_text())
        del state["stream"]
        state[resume._OLD_OPTIONS] = state.pop("memory_options")
        state["recipe"] = {name: value for name, value in state["recipe"].items() if name not in new}
        file.write_text(json.dumps(state, indent=2))
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"]["state.json"] = {
            "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }  # fmt: skip
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    finetune(old, resume=True)
    ours, theirs = weights(recipe), weights(old)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    ("positions", "family", "kind", "size"),
    [
        ("pose", "gemma3_text", "sliding_attention", "sliding_window"),
        ("cream", "mistral", "sliding_attention", "sliding_window"),
        ("random", "llama4_text", "chunked_attention", "attention_chunk_size"),
    ],
)
def test_sampled_positions_are_refused_in_windows(
    work: Path, tmp_path: Path, positions: str, family: str, kind: str, size: str
) -> None:
    """A window counts tokens: two neighbours in a block may be hundreds of positions apart."""
    recipe = Recipe(
        model="given", data=str(work / "data"), output_dir=str(tmp_path / "run"), target_length=128,
        positions=positions, block_length=32, dtype="float32",
    )  # fmt: skip
    case = next(case for case in ALL_FAMILIES if case.model_type == family)
    model = tiny_model(replace(case, config={**case.config, size: TRAINED}))
    message = rf"positions {positions} cannot be combined with {family}.*type {kind} attend to 32 tokens"
    with pytest.raises(RopeExtendError, match=message):
        finetune(recipe, model=model)
    assert rx.current_patch(model) is None
    wide = tiny_model(replace(case, config={**case.config, size: 128}))
    if family != "llama4_text":  # its other layers count tokens too
        _check_model(recipe, wide, torch.float32, Sharding())
