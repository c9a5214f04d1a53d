"""Documents from every kind of source, tokenised once; blocks of one document each; lengths as text."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from cases import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend.data.blocks import cut_blocks
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.data.documents import Document, fingerprint, in_common, load_documents
from rope_extend.data.packing import ended
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.perplexity import _document
from rope_extend.evaluation.prompts import encode
from rope_extend.training.recipe import Recipe
from rope_extend.training.training_data import load_data
from rope_extend.units import format_length, parse_length

BOS, EOS = 256, 257
Load = Callable[..., list[Document]]


def lengths(documents: list[Document]) -> dict[str, int]:
    return {document.name: len(document) - 1 for document in documents}  # without the BOS


def write_library(directory: Path) -> Path:
    (directory / "sub" / "deeper").mkdir(parents=True)
    (directory / ".git").mkdir()
    (directory / "a[1].txt").write_text("one\r\ntwo\n\n" * 10, newline="")  # a bracket is no pattern here
    (directory / "sub" / "__init__.py").write_text("x = 1\n" * 5)
    (directory / "sub" / "deeper" / "stray.md").write_text("café" + "e" * 396, encoding="utf-8")
    (directory / "empty.txt").write_text("")
    (directory / ".git" / "hidden.txt").write_text("no" * 50)
    (directory / "picture.png").write_bytes(b"\x89PNG")
    rows = [{"text": "q" * n, "id": n} for n in (7, 0, 9)]
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list([{"text": "p" * 5, "n": 1}]).to_parquet(directory / "rows.parquet")
    return directory


@pytest.fixture
def of_a_chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that adds BOS and EOS, with a template that writes both, as Llama 3's writes BOS."""
    chat = copy.deepcopy(tokenizer)
    chat.add_special_tokens({"eos_token": "</s>"})
    chat.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    chat.chat_template = (
        "{{ bos_token }}{% for turn in messages %}{{ turn.content }}{% endfor %}{{ eos_token }}"
    )
    return chat


def test_a_chat_has_one_bos_and_one_eos(
    of_a_chat: PreTrainedTokenizerFast, load: Load, tmp_path: Path
) -> None:
    """The tokens are those that transformers gives the chat itself."""
    turns = [{"role": "user", "content": "hello"}]
    expected = of_a_chat.apply_chat_template(turns, return_dict=False)
    text = of_a_chat.apply_chat_template(turns, tokenize=False)
    for name, content in (("chat", text), ("plain", "hello"), ("two", f"<s>{text}</s>")):
        (tmp_path / f"{name}.txt").write_text(content)
    found = {path.name: path.input_ids.tolist() for path in load_documents(tmp_path, of_a_chat)}
    assert found["chat.txt"] == found["plain.txt"] == expected
    assert found["two.txt"] == [BOS, BOS, BOS, *expected[1:-1], EOS, EOS, EOS]  # as somebody wrote them
    assert _document(text, 0, of_a_chat).input_ids.tolist() == expected
    assert encode(of_a_chat, text, False) == expected[:-1]  # the answer follows


def test_documents_end_with_an_end_of_text_token_where_they_end(
    of_a_chat: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast, load: Load, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for name, content in (("a", "one"), ("b", "three"), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(content)
    ends = copy.deepcopy(of_a_chat)
    ends.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor

    documents = load_documents(tmp_path, ends)

    def lasts(how: PreTrainedTokenizerFast, **options: Any) -> list[tuple[int, bool]]:
        given = load_documents(tmp_path, how, **options)
        return [(len(each), each.input_ids[-1].item() == EOS) for each in ended(given, how, **options)]

    assert [len(document) for document in documents] == [4, 6]
    assert lasts(ends) == lasts(of_a_chat) == [(5, True), (7, True)]  # one, also if it was there
    assert lasts(tokenizer) == [(4, False), (6, False)]
    assert "no end-of-text token" in caplog.text
    recipe = {"model": str(MODEL_DIR), "data": str(tmp_path), "output_dir": "o", "target_length": 4}
    run = Recipe.from_dict({**recipe, "packing": "restart"})
    assert load_data(run, ends, (), 4).fingerprint == fingerprint(ended(documents, ends))
    model = tiny_llama(vocab_size=258)
    rx.extend(model, 64, "yarn")
    rx.chunked_loss(model)
    for how, count in ((ends, 3), (None, 2)):
        assert len(rx.blocks(documents, 4, packing=True, model=model, tokenizer=how)) == count


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(RopeExtendError, match="needs the tokenizer of the model, got None"):
        load_documents(tmp_path, None)


def test_a_directory_gives_every_text_in_it_in_order(load: Load, tmp_path: Path) -> None:
    library = write_library(tmp_path / "library")
    documents = load(library)
    assert lengths(documents) == {
        "a[1].txt": 90,  # line ends are read as \n, and kept
        "sub/__init__.py": 30,
        "sub/deeper/stray.md": 3 + 2 + 396,  # a token is a byte
        "rows.jsonl#0": 7,
        "rows.jsonl#2": 9,
        "rows.parquet#0": 5,
    }
    for document in documents:
        assert document.input_ids.dtype == torch.int64
        assert (document.input_ids == BOS).nonzero().tolist() == [[0]]


def test_files_globs_and_lists_of_them(load: Load, tmp_path: Path) -> None:
    library = write_library(tmp_path / "library")
    assert lengths(load(str(library / "**" / "*.py"))) == {str(library / "sub/__init__.py"): 30}
    assert list(lengths(load([library / "rows.jsonl", library / "sub"]))) == [
        "__init__.py",
        "deeper/stray.md",
        "rows.jsonl#0",
        "rows.jsonl#2",
    ]
    (library / "only.json").write_text(json.dumps([{"body": "abc"}]))
    assert lengths(load(library / "only.json", text_column="body")) == {"only.json#0": 3}


def test_limits(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(150):
        (tmp_path / f"{i:03}.txt").write_text("x" * i)
    with caplog.at_level(logging.INFO):
        documents = load(tmp_path, min_tokens=101, max_tokens=20)
    assert len(documents) == 50
    assert {len(document) for document in documents} == {20}
    assert "100 of 150 documents" in caplog.text
    # Documents 0 to 69 are too short, so the tenth that is not is number 79: read on until it is found.
    assert list(lengths(load(tmp_path, min_tokens=71, max_documents=10))) == [
        f"{i:03}.txt" for i in range(70, 80)
    ]


def test_no_more_is_tokenised_than_asked_for(load: Load, tmp_path: Path, encoded: list[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "abc"}) for _ in range(500)))
    assert len(load(tmp_path, max_documents=3)) == len(encoded) == 3
    assert len(load(tmp_path, max_documents=10, min_tokens=4)) == 10
    assert len(encoded) == 3 + 10


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.txt", {}, "no file matches"),
        ("x" * 5000 + ".txt", {}, "no file can be called"),
        ("~nobody-of-this-name/a.txt", {}, "no file matches"),
        ("pictures", {}, r"holds no file that ends in .*\.txt"),
        ([], {}, "the list of sources is empty"),
        (["library", "missing.txt"], {}, "missing.txt"),
        ("library/empty.txt", {}, r"is empty \(1 read\)"),
        ("library", {"min_tokens": 1000}, r"'sub/deeper/stray.md', has 402. Give longer texts, or shorter"),
        ("library", {"max_documents": 0}, "max_documents must be at least 1"),
        ("libary", {}, r"no file matches 'libary' \(relative to .* hub dataset as 'owner/name'"),
        ("library/boks", {}, "no file matches 'library/boks'"),
        (
            "demo:eval",
            {},
            "'demo:eval' is no text of the package; there are demo:finetuning, demo:evaluation",
        ),
    ],
)
def test_mistakes_are_explained(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: object, options: dict, message: str
) -> None:
    write_library(tmp_path / "library")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RopeExtendError, match=message):
        load(source, **options)


def test_the_fingerprint_names_the_tokens_and_their_division_into_documents() -> None:
    def of(*texts: list[int]) -> str:
        return fingerprint(Document("", torch.tensor(text)) for text in texts)

    assert of([1, 2], [3]) == of([1, 2], [3])
    assert len({of([1, 2], [3]), of([1], [2, 3]), of([3], [1, 2]), of([1, 2, 3]), of([1, 2])}) == 5


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6), length=st.integers(2, 25))
def test_blocks_come_from_one_document_each_and_use_nearly_all_text(sizes: list[int], length: int) -> None:
    # The id of each token is unique: document × 1000 + position.
    documents = [Document(str(i), torch.arange(size) + 1000 * i) for i, size in enumerate(sizes)]
    if max(sizes) < length:
        with pytest.raises(RopeExtendError, match=f"has {max(sizes)}"):
            cut_blocks(documents, length)
        return
    made = cut_blocks(documents, length)
    counts: dict[int, int] = {}
    for index in range(len(made)):
        ids = made[index]["input_ids"]
        assert ids.shape == (length,)
        assert torch.equal(made[index]["labels"], ids)
        name, start = made.origin(index)
        assert ids.tolist() == list(range(1000 * int(name) + start, 1000 * int(name) + start + length))
        for token in ids.tolist():
            counts[token] = counts.get(token, 0) + 1
    for i, size in enumerate(sizes):
        unused = sum(1000 * i + p not in counts for p in range(size))
        repeated = sum(counts.get(1000 * i + p, 0) > 1 for p in range(size))
        assert unused == size if size < length else 2 * unused < length
        assert 2 * repeated <= length
    assert max(counts.values()) <= 2
    assert repr(made).endswith(f", {sum(size < length for size in sizes)} documents too short)")


def test_blocks_refuse_what_cannot_work() -> None:
    documents = [Document("a", torch.arange(20)), Document("b", torch.arange(64))]
    for texts, length, message in (
        (documents, 65, r"'b', has 64\. Use a length of 64 or less"),
        (documents, 1, "at least 2 tokens"),
        ([], 16, "no documents"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            cut_blocks(texts, length)


@given(st.integers(1, 2**31))
def test_lengths_survive_being_written_and_read(tokens: int) -> None:
    assert parse_length(format_length(tokens)) == parse_length(tokens) == parse_length(str(tokens)) == tokens


def test_lengths_as_people_write_them() -> None:
    assert [format_length(n) for n in (256, 1000, 1024, 1536, 32768, 2**20, 3 * 2**19)] == [
        "256", "1000", "1k", "1536", "32k", "1M", "1536k",
    ]  # fmt: skip
    assert (parse_length("1.5k"), parse_length("0.5M"), parse_length("32_768")) == (1536, 2**19, 32768)
    assert parse_length(torch.tensor(7)) == 7


@pytest.mark.parametrize(
    "nonsense",
    ["", "k", "0", "0k", "-1", "-4k", "1.3k", "1e5", "32kb", "32 k b", "0x10", "٣", "1__0", "nan", "inf",
     0, -1, True, False, 4096.0, float("nan"), None, [4096], b"4k"],
)  # fmt: skip
def test_nonsense_is_no_length(nonsense: object) -> None:
    with pytest.raises(RopeExtendError, match="not a length in tokens"):
        parse_length(nonsense)


def test_copies_are_left_out_on_request(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Equal in the tokens that are kept. Other documents are read instead."""
    for name, text in {"a": "one two three", "b": "one two four", "c": "five six", "d": "seven"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    cut: dict[str, int] = {"max_tokens": 8, "max_documents": 2}
    assert [*lengths(load(tmp_path, **cut))] == ["a.txt", "b.txt"]
    assert [*lengths(load(tmp_path, **cut, distinct=True))] == ["a.txt", "c.txt"]
    assert caplog.messages == ["b.txt is left out: its tokens are those of a.txt"]


def test_the_same_text_is_found_however_long_it_is_cut() -> None:
    text, other = torch.arange(300), torch.arange(300).flip(0)
    header = torch.cat([text[:100], other])  # the same start, such as a license, and other text
    documents = [Document(str(number), ids) for number, ids in enumerate((text, other, header, text[:5]))]

    def common(*ids: torch.Tensor) -> int:
        return in_common(documents, [Document("other", each) for each in ids])

    assert common(text[:80]) == 2  # also the start of the third
    assert common(text[:150]) == 1
    assert common(torch.cat([text, other])) == 1
    assert common(other, other[:200]) == 1
    assert common(text[:5]) == 1
    assert common(text[:4], text[:6], text[5:], torch.arange(0)) == 0
    assert common(text, other, header, text[:5]) == 4
