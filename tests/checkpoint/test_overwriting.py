"""What a new checkpoint replaces in a directory, and what it leaves."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from integrity import contents, extended
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.card import write_card
from rope_extend.checkpoint.staging import staged
from rope_extend.journal import only_writer, writes_to

SHARD = "model-00001-of-00002.safetensors"


def files(directory: Path, *names: str, text: str = "old") -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def publish(target: Path, *names: str, overwrite: bool = True) -> None:
    """Write a checkpoint of files with the given names, which hold `new`."""
    with staged(target, overwrite=overwrite) as staging:
        files(staging, *names, text="new")


def texts(directory: Path) -> dict[str, str]:
    return {name: value.decode() for name, value in contents(directory).items()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_saves_into_one_directory_do_not_mix(tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "model"
    with staged(target, overwrite=overwrite) as staging:
        files(staging, "config.json", "model.safetensors", text="new")
        with ProcessPoolExecutor(1, get_context("fork")) as other:
            refused = other.submit(publish, target, "config.json", overwrite=overwrite)
            with pytest.raises(RopeExtendError, match="another save is writing to"):
                refused.result()
    assert texts(target) == {"config.json": "new", "model.safetensors": "new"}
    with only_writer(target, "run"):  # a run saves into its own directory
        assert writes_to(target)


def test_files_that_only_look_like_weights_stay(tmp_path: Path) -> None:
    ours = ("config.json", "model.safetensors", SHARD, "model.safetensors.index.json", "pytorch_model.bin")
    mine = (
        "model_best_backup.safetensors", "model.fp16.safetensors", "model-old.safetensors",
        "adapter_model_v1.safetensors", "pytorch_model.bin.bak", "model.safetensors.txt",
    )  # fmt: skip
    files(tmp_path, *mine)
    publish(tmp_path, "config.json", overwrite=False)  # they are no checkpoint
    files(tmp_path, *ours)
    publish(tmp_path, "config.json", "model.safetensors")
    new = dict.fromkeys(("config.json", "model.safetensors"), "new")
    assert texts(tmp_path) == dict.fromkeys(mine, "old") | new


def test_a_new_tokenizer_replaces_all_files_of_the_old_one(tmp_path: Path) -> None:
    directory = tmp_path / "full"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    for template in ("OLD", {"default": "OLD", "rag": "OLD RAG"}):
        tokenizer.chat_template = template
        rx.save(extended(), directory, tokenizer, overwrite=True)
        assert all(path.is_file() for path in directory.iterdir())
        rx.save(extended(), directory, overwrite=True)  # without a tokenizer, the old one stays
        assert AutoTokenizer.from_pretrained(directory).chat_template == template
    (directory / "chat_template.jinja").write_text("OLDER")
    rx.save(extended(), directory, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), True)
    assert AutoTokenizer.from_pretrained(directory).chat_template is None


@pytest.mark.parametrize("whose", ["ours", "edited", "a link"])
def test_the_card_of_the_former_checkpoint_goes_with_it_unless_somebody_edited_it(
    tmp_path: Path, whose: str
) -> None:
    directory = rx.save(extended(), tmp_path / "full")
    card = write_card(directory)
    assert card is not None
    if whose == "edited":
        card.write_text(card.read_text() + "mine")
    elif whose == "a link":
        card.rename(tmp_path / "elsewhere.md")
        card.symlink_to(tmp_path / "elsewhere.md")
    before = contents(directory)[card.name]
    rx.save(extended("linear"), directory, overwrite=True)
    assert contents(directory).get(card.name) == (None if whose == "ours" else before)


def test_a_tokenizer_alone_belongs_to_somebody(tmp_path: Path) -> None:
    files(tmp_path, "tokenizer.json")
    with pytest.raises(RopeExtendError, match=r"holds tokenizer.json; choose another .*overwrite=True"):
        publish(tmp_path, "config.json", "tokenizer.json", overwrite=False)
    assert texts(tmp_path) == {"tokenizer.json": "old"}


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    files(tmp_path, "config.json/mine.txt", "rope_extend.json")
    before = texts(tmp_path)
    with pytest.raises(RopeExtendError, match=r"config.json in it is a directory; move it away"):
        publish(tmp_path, "config.json", "rope_extend.json")
    assert texts(tmp_path) == before


def test_the_files_of_a_killed_save_are_named(tmp_path: Path) -> None:
    """Both have shards, of other names: what the error says gives the old checkpoint again."""
    old = rx.save(extended(), tmp_path / "saved", max_shard_size="50KB")
    new = rx.save(extended("linear"), tmp_path / "new", max_shard_size="30KB")
    before, backup = contents(old), old / ".replaced-1"
    backup.mkdir()
    for path in [path for path in old.iterdir() if path.is_file()]:
        path.rename(backup / path.name)
    moved = [new / "config.json", next(new.glob("model-00001-*"))]
    for path in moved:
        path.rename(old / path.name)
    remove = ", ".join(path.name for path in moved)
    with pytest.raises(RopeExtendError, match=rf"in {backup}. .*remove {remove} from {old} and move .* back"):
        rx.load(old)
    for path in moved:
        (old / path.name).unlink()
    for path in backup.iterdir():
        path.rename(old / path.name)
    assert contents(old) == before
    rx.load(old)
    files(backup, "config.json")
    rx.save(extended("linear"), old, overwrite=True)
    assert not backup.exists()


@pytest.mark.skipif(not hasattr(os, "O_DIRECTORY"), reason="this system cannot tell who uses a directory")
def test_a_second_writer_leaves_the_first_one_s_files(tmp_path: Path) -> None:
    files(tmp_path, ".unfinished-killed/model.safetensors")
    with staged(tmp_path, overwrite=True) as first:
        assert not (tmp_path / ".unfinished-killed").exists()
        files(first, "config.json", text="first")
        with staged(tmp_path, overwrite=True) as second:
            files(second, "config.json", text="second")
            assert texts(first) == {"config.json": "first"}
        assert texts(tmp_path)["config.json"] == "second"
    assert texts(tmp_path) == {"config.json": "first"}
