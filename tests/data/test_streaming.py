"""A stream gives the same blocks as loading everything, resumes at its position, and keeps little."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from covering import few
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rope_extend import RopeExtendError
from rope_extend.data.blocks import cut_blocks
from rope_extend.data.documents import load_documents
from rope_extend.data.packing import packed_blocks
from rope_extend.data.sources import read_texts
from rope_extend.data.streaming import Cursor, Stream
from rope_extend.training import loop
from rope_extend.training.finetune import FinetuneInterrupted, Recipe, finetune


def by_byte() -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = by_byte()
TEXTS = [
    ("lorem ipsum dolor sit amet " * 9)[start : start + size]
    for start, size in enumerate((40, 0, 7, 1, 95, 60, 33))
]


def stream_of(texts: list[str], length: int, tokenizer: Any = TOKENIZER, **options: Any) -> Stream:
    def read() -> Iterator[tuple[str, str]]:
        return ((f"#{number}", text) for number, text in enumerate(texts))

    return Stream(read, tokenizer, length, name="texts", **options)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def store(directory: Path, kind: str, texts: list[str]) -> Path:
    path = directory / f"texts.{kind}"
    if kind == "directory":
        path.mkdir()
        for number, text in enumerate(texts):
            (path / f"{number:03}.txt").write_text(text)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["directory", "jsonl", "parquet"])
@pytest.mark.parametrize("packing", ["none", "restart"])
def test_it_gives_the_blocks_that_loading_all_gives_epoch_after_epoch(
    tmp_path: Path, kind: str, packing: str
) -> None:
    path = store(tmp_path, kind, TEXTS)
    loaded = load_documents(path, TOKENIZER, cache_dir=tmp_path / "cache", min_tokens=2)
    made = cut_blocks(loaded, 16) if packing == "none" else packed_blocks(loaded, 16, restarts=True)
    stream = Stream(
        lambda: read_texts(path, "text", "train", None, streaming=True),
        TOKENIZER,
        16,
        name="s",
        packing=packing,
    )
    for position in range(3 * len(made)):
        assert same(stream[position], made[position % len(made)]), position
    cursor = stream.cursor(3 * len(made))
    assert (cursor.epoch, cursor.document, cursor.offset) == (3, 0, 0)


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    length=st.integers(2, 30),
    packing=st.sampled_from(["none", "restart", "continue"]),
    position=st.integers(0, 40),
)
def test_it_resumes_at_any_position(sizes: list[int], length: int, packing: str, position: int) -> None:
    texts = [chr(97 + number) * size for number, size in enumerate(sizes)]
    enough = max(sizes) >= length if packing == "none" else sum(size for size in sizes if size > 1) >= length
    whole = stream_of(texts, length, packing=packing, step=100)
    if not enough:
        with pytest.raises(RopeExtendError, match=r"the stream 'texts' has (no document of|fewer than)"):
            whole[0]
        return
    expected = [whole[p] for p in range(position + 6)]
    later = stream_of(texts, length, packing=packing)
    later.restore(position, Cursor(**json.loads(json.dumps(whole.cursor(position).__dict__))))
    for p in range(position, position + 6):
        assert same(later[p], expected[p])
        assert later.cursor(p) == whole.cursor(p)


def test_a_stream_of_other_work_is_not_resumed() -> None:
    cursor = stream_of(TEXTS, 16).cursor(2)
    assert {field.name for field in fields(Cursor)} == {
        "digest", "tokenizer",  # identities, each with a refusal below
        "epoch", "document", "offset",  # progress
    }  # fmt: skip
    stream_of(TEXTS, 16).restore(2, cursor)
    stream_of(TEXTS, 16).restore(2, replace(cursor, tokenizer=""))  # of an early checkpoint
    other = by_byte()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(RopeExtendError, match="cannot resume: the tokenizer of the stream 'texts'"):
        stream_of(TEXTS, 16, tokenizer=other).restore(2, cursor)
    changed = stream_of([text.replace("lorem", "LOREM") for text in TEXTS], 16)
    changed.restore(2, cursor)
    with pytest.raises(RopeExtendError, match=r"cannot resume: the first .* have\schanged"):
        changed[2]


def test_the_order_does_not_depend_on_the_number_of_processes() -> None:
    whole = stream_of(TEXTS, 16, step=12)
    expected = [whole[p] for p in range(24)]
    for processes in (1, 2, 3):
        readers = [stream_of(TEXTS, 16, step=12) for _ in range(processes)]
        for step in range(2):
            for p in range(12 * step, 12 * step + 12):
                assert same(readers[p % processes][p], expected[p])


def test_it_reads_no_further_than_needed_and_drops_old_blocks() -> None:
    read: list[int] = []

    def texts() -> Iterator[tuple[str, str]]:
        for number in range(10_000):
            read.append(number)
            yield str(number), f"{number:>16}"

    stream = Stream(texts, TOKENIZER, 16, name="long", step=4)
    stream[0]
    assert len(read) == 1
    for position in range(1000):
        stream[position]
    assert len(read) < 1000 + 130
    assert len(stream._kept) == 8
    with pytest.raises(IndexError, match="block 991 was dropped; the first one kept is 992"):
        stream[991]


def test_a_resumed_stream_does_not_tokenise_earlier_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encode = PreTrainedTokenizerFast.__call__

    def call(self: Any, texts: list[str], **options: Any) -> Any:
        seen.extend(texts)
        return encode(self, texts, **options)

    texts = [chr(97 + number % 26) * 16 for number in range(300)]
    cursor = stream_of(texts, 16).cursor(250)
    assert cursor.document == 250
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", call)
    stream = stream_of(texts, 16)
    stream.restore(250, cursor)
    stream[250]
    assert seen == [texts[250]]


@pytest.mark.parametrize("harm", ["changed", "here", "gone", "moved"])
def test_changed_text_before_the_position_is_noticed(harm: str) -> None:
    texts = [chr(97 + number) * 16 for number in range(20)]
    cursor = stream_of(texts, 16).cursor(12)
    other = {
        "changed": ["z" * 16, *texts[1:]],
        "here": [*texts[:12], texts[12].upper(), *texts[13:]],
        "gone": texts[:9],
        "moved": texts[1:],
    }[harm]
    stream = stream_of(other, 16)
    stream.restore(12, cursor)
    with pytest.raises(RopeExtendError, match="cannot resume: the first 13 documents of the stream 'texts'"):
        stream[12]


def test_share_beyond_where_positions_restart_is_that_of_the_first_step() -> None:
    texts = ["a" * 10, "b" * 30, "c" * 24, "d" * 64]
    assert stream_of(texts, 64, packing="restart", step=2).share_beyond(16) == (14 + 8 + 48) / 128
    assert stream_of(texts, 64, packing="continue").share_beyond(16) == 48 / 64
    assert stream_of(texts, 64).share_beyond(16) == 48 / 64


def test_a_hub_dataset_is_streamed_rather_than_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def hub(path: str, name: str | None, **options: Any) -> Any:
        asked.update(path=path, name=name, **options)
        return datasets.Dataset.from_dict({"book": ["abc", None, "de"], "n": [1, 2, 3]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", hub)
    texts = list(read_texts("owner/books:long", "book", "test", None, streaming=True))
    assert texts == [("owner/books:long#0", "abc"), ("owner/books:long#1", ""), ("owner/books:long#2", "de")]
    assert (asked["path"], asked["name"], asked["split"], asked["streaming"]) == (
        "owner/books",
        "long",
        "test",
        True,
    )


@pytest.fixture
def recipe(work: Path, tmp_path: Path, private_cache: None) -> Recipe:
    texts = [(work / "data" / f"{name}.txt").read_text()[start:] for name in "abc" for start in (0, 400, 900)]
    return Recipe(
        model=str(work / "model"), data=str(store(tmp_path, "jsonl", texts)), streaming=True,
        output_dir=str(tmp_path / "run"), target_length=128, steps=6, gradient_accumulation=2,
        learning_rate=1e-2, lora_rank=4, lora_dropout=0.2, save_every=2, gradient_checkpointing=False,
    )  # fmt: skip


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe.output_dir) / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("packing", few(("none", "restart"), 2))
def test_a_run_resumes_bit_for_bit_and_records_its_position(
    recipe: Recipe, tmp_path: Path, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = replace(recipe, packing=packing, steps=30)  # reads the source several times
    with caplog.at_level(logging.INFO):
        finetune(recipe)
    assert "data: Stream(blocks of 128 tokens from " in caplog.text
    assert "was read to its end and starts again" in caplog.text
    state = json.loads((Path(recipe.output_dir) / "checkpoints" / "step-30" / "state.json").read_text())
    assert state["stream"]["epoch"] >= 1
    other = replace(recipe, output_dir=str(tmp_path / "other"))
    for steps in (3, 13):
        finetune(replace(other, steps=steps), resume=steps > 3)
    finetune(other, resume=True)
    ours, theirs = weights(recipe), weights(other)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_for_bit(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune(recipe)
    whole = weights(recipe)
    recipe = replace(recipe, output_dir=str(tmp_path / "interrupted"))
    original: Callable[..., Any] = loop.TrainingRun._batch

    def batch(run: Any, forward: int) -> Any:
        if run.state.step == 2 and forward == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, forward)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingRun, "_batch", batch)
        with pytest.raises(FinetuneInterrupted):
            finetune(recipe)
    finetune(recipe, resume=True)
    assert all(torch.equal(value, whole[name]) for name, value in weights(recipe).items())


@pytest.mark.slow
def test_another_source_is_not_resumed_and_later_text_may_come(recipe: Recipe) -> None:
    finetune(replace(recipe, steps=3))
    path = Path(recipe.data if isinstance(recipe.data, str) else recipe.data[0])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], *lines[1:]]))
    with pytest.raises(RopeExtendError, match=r"cannot resume: the first .* documents of the stream"):
        finetune(recipe, resume=True)
    path.write_text("\n".join([*lines, json.dumps({"text": "more"})]))
    assert finetune(recipe, resume=True).steps == 6
    with pytest.raises(RopeExtendError, match="streaming was True and is False"):
        finetune(replace(recipe, streaming=False), resume=True)


def test_tokens_of_a_stream_are_not_kept(recipe: Recipe, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    monkeypatch.setattr("rope_extend.data.token_cache.save_file", lambda *given: written.append(given))
    finetune(replace(recipe, steps=2))
    assert not written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_length": 2**20, "block_length": 2**19}, "the stream .* has no document of 524,288 tokens"),
        ({"text_column": "body"}, "the column 'body' does not exist"),
        ({"data": "nowhere/*.txt"}, "nothing to read"),
    ],
)
def test_mistakes_are_refused_before_the_weights_are_loaded(
    recipe: Recipe, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    with pytest.raises(RopeExtendError, match=message):
        finetune(replace(recipe, **changes))
    assert not Path(recipe.output_dir).exists()


@pytest.mark.parametrize(
    ("name", "value"), [("data_weights", (1, 2)), ("curriculum", [[32, 2]]), ("max_documents", 3)]
)
def test_what_a_stream_cannot_do_is_refused_by_name(recipe: Recipe, name: str, value: Any) -> None:
    with pytest.raises(RopeExtendError, match=f"streaming and {name} cannot be combined"):
        replace(recipe, data=("a", "b"), **{name: value})
