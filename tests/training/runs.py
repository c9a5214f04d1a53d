"""A small run, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from rope_extend.training.finetune import Recipe

TARGET = 128
Action = Callable[[], None]
AtStep = Callable[[int, Action], list[int]]


def settings(work: Path) -> dict[str, Any]:
    return {
        "model": str(work / "model"), "data": str(work / "data"), "target_length": TARGET, "steps": 8,
        "gradient_accumulation": 2, "learning_rate": 1e-2, "warmup_steps": 3, "lora_rank": 4,
        "lora_dropout": 0.2, "save_every": 3, "gradient_checkpointing": False,
    }  # fmt: skip


def described(**changes: Any) -> Recipe:
    """A recipe of files that are not there."""
    return Recipe(**{"model": "m", "data": "d", "output_dir": "o", "target_length": TARGET, **changes})


def saved(recipe: Recipe, step: int) -> Path:
    """A checkpoint of a run."""
    return Path(recipe.output_dir, "checkpoints", f"checkpoint-{step}")


def weights(directory: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "adapter_model.safetensors")


def metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of a run."""
    return [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(recipe.model)


def files_below(directory: str | Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}
