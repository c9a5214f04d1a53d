"""GGUF files of others: whatever the metadata says, a file is refused by name, or the model is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import llama
from gguf_writer import add_tokens, converted
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_metadata import gguf_metadata
from rope_extend.models.loading import empty_model, pretrained

NAN, INF = float("nan"), float("inf")
EPSILON, FACTOR = "attention.layer_norm_rms_epsilon", "rope.scaling.factor"
REFUSED: dict[str, list[Any]] = {
    "block_count": [0, 3, 2**31 - 1, "2"],
    "context_length": [0, "64", 1.5],
    EPSILON: [NAN, INF, 0.0, -1.0, 2.0],
    "rope.freq_base": [NAN, INF, 0.0, -1.0, 1.0],
    "rope.dimension_count": [0, 2**20],
    "embedding_length": [0, 2**31 - 1, [32]],
    "feed_forward_length": [2**31 - 1],
    "attention.head_count": [0, 2**31 - 1, "x"],
    "attention.head_count_kv": [2**31 - 1, [2, 2**31 - 1]],
    "expert_count": [2**31 - 1],
    FACTOR: [NAN, INF, 0.5, 1e30],
    "rope.scaling.attn_factor": [NAN, INF],
    "rope.scaling.type": [7, "y a r n"],
    "+split.count": ["2"],
    "+general.architecture": ["l l", "a" * 100],
    "+tokenizer.ggml.bos_token_id": ["1", 1.5],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in REFUSED for value in REFUSED[key]], ids=str
)
def test_a_value_that_no_model_has_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    """Before a model is made: a file with 2³¹ layers would take its memory."""
    path = converted(llama(), tmp_path / "tiny.gguf", **{key: value})
    with pytest.raises(RopeExtendError, match=rf"tiny\.gguf: [\w.]*{key.removeprefix('+')} must be "):
        empty_model(str(path))


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF])
def test_divisors_that_no_table_has_are_refused(value: float, tmp_path: Path) -> None:
    keys = {"rope.scaling.original_context_length": 16}
    tables = {"rope_freqs.weight": [1.0] * 7 + [value]}
    with pytest.raises(RopeExtendError, match=r"rope_freqs\.weight must be a finite number above 0"):
        empty_model(str(converted(llama(), tmp_path / "tiny.gguf", tables=tables, **keys)))
    tables = {"rope_freqs.weight": [1.0] * 7}
    with pytest.raises(RopeExtendError, match=r"rotates 8 pairs of channels, and rope_freqs\.weight"):
        empty_model(str(converted(llama(), tmp_path / "short.gguf", tables=tables, **keys)))


def lists(tokens: list[str], **others: list[Any]) -> Callable[[Any, int], None]:
    def write(writer: Any, _count: int) -> None:
        writer.add_tokenizer_model("llama")
        for name, values in {"tokens": tokens, **others}.items():
            writer.add_array(f"tokenizer.ggml.{name}", values)

    return write


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lists(["a", "b"], token_type=[1]), "2 tokens and 1 token_type"),
        (lists(["a", "b", "a"], token_type=[1, 1, 1]), "the token 'a' twice"),
        (lists(["a", "b"], scores=[0.0, NAN]), r"tokenizer\.ggml\.scores must be a finite number"),
        (lists(["a", "b" * 2000]), r"tokenizer\.ggml\.tokens must be a text of at most 1024"),
        (lists(["a", "b"], merges=[1, 2]), r"tokenizer\.ggml\.merges must be a text"),
    ],
)
def test_lists_that_are_no_tokenizer_are_refused(
    tokenizer: Callable[[Any, int], None], message: str, tmp_path: Path
) -> None:
    path = converted(llama(), tmp_path / "words.gguf", tokenizer=tokenizer)
    with pytest.raises(RopeExtendError, match=message):
        pretrained(AutoTokenizer, str(path))


NUMBERS = st.integers(0, 70) | st.integers(0, 2**32 - 1) | st.floats(width=32)
VALUES = NUMBERS | st.sampled_from(["yarn", "linear", "none", "longrope", ""]) | st.lists(NUMBERS, max_size=3)
KEYS = (
    *(key for key in REFUSED if key[0] != "+"), "rope.scaling.original_context_length",
    "attention.key_length", "rope.scale_linear", "vocab_size", "+general.type",
    "+tokenizer.ggml.eos_token_id",
)  # fmt: skip


@settings(max_examples=40)
@given(keys=st.dictionaries(st.sampled_from(KEYS), VALUES.filter(lambda value: value != []), max_size=4))
def test_any_metadata_gives_an_error_or_a_model(keys: dict[str, Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    try:
        converted(llama(), path, tokenizer=add_tokens, **keys)
    except (TypeError, ValueError):  # a list of several types: no such file can be written
        return
    try:
        model = pretrained(AutoModelForCausalLM, str(path), dtype=torch.float32).eval()
    except RopeExtendError:
        return
    assert model.config.num_hidden_layers == 2
    assert model.config.rms_norm_eps == pytest.approx(keys.get(EPSILON, llama().config.rms_norm_eps))
    with torch.no_grad():
        assert model(torch.arange(3, 40)[None]).logits.isfinite().all()


@settings(max_examples=60)
@given(changes=st.lists(st.tuples(st.integers(4, 2500), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_to_the_header_gives_an_error_or_metadata(
    changes: list[tuple[int, int]], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "tiny.gguf"
    data = bytearray(converted(llama(), path).read_bytes())
    for at, value in changes:
        data[at] = value
    path.write_bytes(data)
    try:
        metadata = gguf_metadata(path)
    except RopeExtendError:
        return
    assert metadata.of_architecture("block_count", 1) <= metadata.blocks
