"""GGUF files of others: whatever the metadata says, a file is refused by name, or the model is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import llama
from gguf_writer import converted
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rope_extend.checkpoint.info import info
from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_metadata import gguf_metadata
from rope_extend.models.loading import empty_model, pretrained

NAN, INF = float("nan"), float("inf")
EPSILON, FACTOR = "attention.layer_norm_rms_epsilon", "rope.scaling.factor"
REFUSED: dict[str, list[Any]] = {
    "block_count": [0, 3, 2**31 - 1, "2"],
    EPSILON: [NAN, 0.0],
    "rope.freq_base": [NAN, INF, 0.0, 1.0],
    FACTOR: [NAN, INF, 0.5, 1e30],
    "rope.scaling.attn_factor": [NAN, INF],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key in REFUSED for value in REFUSED[key]], ids=str
)
def test_a_value_that_no_model_has_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    """Before a model is made: a file with 2³¹ layers would take its memory."""
    path = converted(llama(), tmp_path / "tiny.gguf", **{key: value})
    with pytest.raises(RopeExtendError, match=rf"tiny\.gguf: [\w.]*{key.removeprefix('+')} must be "):
        empty_model(str(path))


@pytest.mark.parametrize("value", [2, 2**31 - 2])
@pytest.mark.parametrize(
    "size",
    [
        "vocab_size",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count_kv",
        "attention.key_length",
    ],
)
def test_sizes_other_than_those_of_the_tensors_are_refused(size: str, value: int, tmp_path: Path) -> None:
    """Before anything is computed: a table for heads of 2³¹ channels takes a minute, and 8 GB."""
    path = converted(llama(), tmp_path / "tiny.gguf", **{size: value})
    with pytest.raises(RopeExtendError, match=r"tiny\.gguf.*Use the original checkpoint"):
        info(path)


@pytest.mark.parametrize("value", [0.0, NAN])
def test_divisors_that_no_table_has_are_refused(value: float, tmp_path: Path) -> None:
    keys = {"rope.scaling.original_context_length": 16}
    tables = {"rope_freqs.weight": [1.0] * 7 + [value]}
    with pytest.raises(RopeExtendError, match=r"rope_freqs\.weight must be a finite number above 0"):
        empty_model(str(converted(llama(), tmp_path / "tiny.gguf", tables=tables, **keys)))
    tables = {"rope_freqs.weight": [1.0] * 7}
    with pytest.raises(RopeExtendError, match=r"rotates 8 pairs of channels, and rope_freqs\.weight"):
        empty_model(str(converted(llama(), tmp_path / "short.gguf", tables=tables, **keys)))


@pytest.mark.parametrize(
    ("tokens", "types", "message"),
    [(["a", "b"], [1], "2 tokens and 1 token_type"), (["a", "b", "a"], [1, 1, 1], "the token 'a' twice")],
)
def test_lists_that_are_no_tokenizer_are_refused(
    tokens: list[str], types: list[int], message: str, tmp_path: Path
) -> None:
    def write(writer: Any, _count: int) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_array("tokenizer.ggml.tokens", tokens)
        writer.add_array("tokenizer.ggml.token_type", types)

    path = converted(llama(), tmp_path / "words.gguf", tokenizer=write)
    with pytest.raises(RopeExtendError, match=message):
        pretrained(AutoTokenizer, str(path))


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
