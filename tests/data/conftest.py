"""A tokenizer whose ids can be written down, and what loads documents with it; a short run on short texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rope_extend.data.documents import Document, load_documents
from rope_extend.training.recipe import Recipe

BOS = 256


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, after a BOS."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_byte = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    by_byte.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_byte.add_special_tokens(["<s>"])
    by_byte.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=by_byte, bos_token="<s>", pad_token="<s>", model_max_length=8
    )


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that was tokenised, not read from the cache."""
    seen: list[str] = []
    encode = PreTrainedTokenizerFast.__call__

    def call(self: Any, texts: list[str], **options: Any) -> Any:
        seen.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", call)
    return seen


@pytest.fixture
def load(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Document]]:
    """`load_documents` with a cache of its own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / ".cache")
    return lambda source, **options: load_documents(source, tokenizer, **options)


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    """A short run, of packed blocks, on texts of which only some fill a block."""
    texts = tmp_path / "texts"
    texts.mkdir()
    text = (work / "data" / "a.txt").read_text()
    for number, end in enumerate((40, 300, 900, 150, 700)):
        (texts / f"{number}.txt").write_text(text[:end])
    return Recipe(
        model=str(work / "model"), data=str(texts), output_dir=str(tmp_path / "run"), target_length=128,
        packing="restart", steps=4, gradient_accumulation=2, learning_rate=1e-2, warmup_steps=2, lora_rank=4,
        save_every=2,
    )  # fmt: skip
