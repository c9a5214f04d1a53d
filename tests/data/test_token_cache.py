"""Tokens are cached by content: nothing outdated or damaged is read, and nothing is tokenised twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer

from rope_extend.data.documents import Document, fingerprint
from rope_extend.data.token_cache import cache_key, tokenizer_content

Load = Callable[..., list[Document]]


def write(path: Path, text: str, time: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time, time))


def test_a_text_is_known_by_its_content_and_not_by_name_or_time(
    load: Load, tmp_path: Path, encoded: list[str]
) -> None:
    one, other = tmp_path / "one" / "a.txt", tmp_path / "two" / "b.jsonl"
    write(one, "some text", 1_000)
    first = fingerprint(load(one))
    write(other, json.dumps({"text": "some text"}), 2_000)
    assert fingerprint(load(other)) == first
    assert encoded == ["some text"]
    write(one, "same size", 1_000)  # as after a checkout or an archive that sets times
    assert fingerprint(load(one)) != first
    assert encoded == ["some text", "same size"]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    """In the first of the ids, which are the end of the last array."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"\n") + 1] ^= 1
    path.write_bytes(content)


def shorten_the_ids(path: Path) -> None:
    """In the shape that stands before them: whoever reads fewer bytes does not compare the checksum."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"(4501,)") + 1] = ord("1")
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut_short, flip_a_bit, shorten_the_ids, empty])
def test_a_damaged_cache_is_noticed_and_written_again(
    load: Load, tmp_path: Path, encoded: list[str], harm: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    text = 500 * "some text"
    write(tmp_path / "a.txt", text, 1)
    first = fingerprint(load(tmp_path / "a.txt"))
    (file,) = (tmp_path / ".cache").rglob("*.npz")
    whole = file.read_bytes()
    harm(file)
    encoded.clear()
    assert fingerprint(load(tmp_path / "a.txt")) == first
    assert encoded == [text]
    assert "is written again" in caplog.text
    assert file.read_bytes() == whole
    assert fingerprint(load(tmp_path / "a.txt")) == first
    assert encoded == [text]  # once


def test_without_a_writable_cache_there_is_a_warning(
    load: Load, tmp_path: Path, encoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".cache").write_text("a file where the directory should be")
    write(tmp_path / "a.txt", "some text", 1)
    assert fingerprint(load(tmp_path / "a.txt")) == fingerprint(load(tmp_path / "a.txt"))
    assert encoded == ["some text"] * 2
    assert "cannot write the token cache" in caplog.text


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_keys_differ_where_texts_or_their_division_do(one: list[str], other: list[str]) -> None:
    assert (cache_key(one, "t") == cache_key(other, "t")) == (one == other)
    assert cache_key(one, "t") != cache_key(one, "u")


def test_a_slow_tokenizer_is_known_by_how_it_splits_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was begun online resumes offline and in another window."""

    def content(directory: Path, **options: Any) -> str:
        loaded = AutoTokenizer.from_pretrained(directory, **options)
        assert not loaded.is_fast
        return tokenizer_content(loaded)

    saved = ByT5Tokenizer(extra_ids=2)
    saved.save_pretrained(tmp_path / "first")
    expected = content(tmp_path / "first")
    for offline in (False, True):
        monkeypatch.setattr("transformers.tokenization_utils_base.is_offline_mode", lambda now=offline: now)
        assert content(tmp_path / "first") == expected
    assert content(tmp_path / "first", model_max_length=64) == expected
    for chat_template in ("one", {"default": "one", "tool_use": "another"}):
        saved.chat_template = chat_template
        saved.save_pretrained(tmp_path / "chat")
        assert content(tmp_path / "chat") == expected
    assert content(tmp_path / "first", unk_token="<other>") != expected
    assert content(tmp_path / "first", split_special_tokens=True) != expected
    saved.add_tokens("word")
    saved.save_pretrained(tmp_path / "word")
    assert content(tmp_path / "word") != expected
