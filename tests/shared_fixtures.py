"""Fixtures for tests of every subject."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import tiny_llama
from commands import Commands
from hypothesis import settings
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import rope_extend as rx
from rope_extend.patching import patch_model

disable_progress_bar()

# The same examples in every run, and few of them: `--full` searches for others.
settings.register_profile("default", max_examples=12, derandomize=True, deadline=None, database=None)
settings.register_profile("full", max_examples=200, deadline=None, print_blob=True)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands that a test runs in this process choose how much is logged: not in the tests after it."""
    logger = logging.getLogger("rope_extend")
    before = logger.level
    yield
    if logger.level != before:  # each change empties the caches of all loggers
        logger.setLevel(before)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model and its tokenizer in `model/` and texts in `data/`."""
    directory = tmp_path_factory.mktemp("work")
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 4)) for _ in range(40)]
    (directory / "data").mkdir()
    for name in "abc":
        text = " ".join(words[i] for i in rng.integers(0, len(words), 300))
        (directory / "data" / f"{name}.txt").write_text(text)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [" ".join(words)], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory / "model")
    tiny_llama().save_pretrained(directory / "model")
    return directory


@pytest.fixture(scope="session")
def plain_adapters(work: Path) -> list[str]:
    """LoRA adapters of the model in `work` with plain RoPE: within its window, and beyond."""
    return [_plain_adapter(work / f"plain at {target}", target, seed=target) for target in (32, 64)]


@pytest.fixture(scope="session")
def other_control(work: Path) -> str:
    """Another adapter of plain RoPE within the window of the model in `work`."""
    return _plain_adapter(work / "another", 32, seed=1)


def _plain_adapter(directory: Path, target: int, seed: int) -> str:
    lm = tiny_llama()
    patch_model(lm, rx.encoding("none"), target_length=target)
    torch.manual_seed(seed)
    tuned = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    rx.save(tuned, directory)
    return str(directory)


@pytest.fixture
def private_cache(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tokenised texts out of the user's own cache."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(work / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands in processes of their own, with a cache of tokenised texts that is not the user's."""
    where = tmp_path_factory.mktemp("commands")
    commands = Commands(where, {"HF_DATASETS_CACHE": str(where / "cache")})
    yield commands
    commands.close()
