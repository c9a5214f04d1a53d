"""Quiet, offline, and one thread per test process: the parallel runs share the cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import pytest
import torch
from cases import KEY_ENCODINGS, KEY_FAMILIES, AlternativeCase, EncodingCase, FamilyCase, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

torch.set_num_threads(1)
disable_progress_bar()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the matrix's default run short: each method in some families, some methods in each family.

    The rest of it is marked slow, and so are the checks that need it.
    """
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        family, case = parameters.get("family"), parameters.get("case")
        pair = isinstance(family, FamilyCase) and isinstance(case, EncodingCase | AlternativeCase)
        if pair and family.model_type not in KEY_FAMILIES and str(case) not in KEY_ENCODINGS:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Commands that a test runs in this process choose how much is logged: not in the tests after it."""
    logger = logging.getLogger("rope_extend")
    before = logger.level
    yield
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


@pytest.fixture
def private_cache(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tokenised texts out of the user's own cache."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(work / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", work / "cache")
