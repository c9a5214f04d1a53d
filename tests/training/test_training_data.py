"""Every kind of training data is equal in one process and in two, and evaluated on other text."""

from __future__ import annotations

from dataclasses import replace
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
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.model_checks import check_recipe
from rope_extend.training.sharding import Sharding
from rope_extend.training.training_data import load_held_out

_RUN = """
import sys
from rope_extend.training.finetune import Recipe, finetune
finetune(Recipe.from_yaml(sys.argv[1]))
"""

WAYS: dict[str, dict[str, Any]] = {
    "packing": {"packing": "restart"},
    "mixing": {"data_weights": (2, 1, 1)},
    "all that goes together": {"packing": "restart", "data_weights": (2, 1, 1)},
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


class Gpus:
    """Generators of GPUs, in place of those of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in range(count)]
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.states[device.index])
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state


@pytest.mark.parametrize(("changes", "expected"), [({}, "validation"), ({"eval_split": "test"}, "test")])
def test_a_run_is_evaluated_on_another_split_of_a_hub_dataset(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: str
) -> None:
    """A split that the dataset does not have is one error, by the library that knows them."""
    read: list[str] = []

    def load_dataset(*_: Any, split: str, **__: Any) -> Any:
        read.append(split)
        if split == "validation":
            raise ValueError('Unknown split "validation". Should be one of ["train", "test"].')
        return datasets.Dataset.from_dict({"text": ["one two three " * 200]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    run = replace(recipe, eval_data="org/books", **changes)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    if expected == "validation":
        with pytest.raises(RopeExtendError, match=r"cannot read 'org/books'.*the name of one of its splits"):
            load_held_out(run, tokenizer, (64,))
    else:
        load_held_out(run, tokenizer, (64,))
    assert read == [expected]


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
        check_recipe(recipe, wide, torch.float32, Sharding())
