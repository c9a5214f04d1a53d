"""Names, links and options that lead out of a checkpoint's directory; see also `test_hostile_files.py`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import llama
from integrity import each, extended, flip, in_hub_cache, logits, weights_of
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.checkpoint.exporting import export


@each()
def test_links_inside_the_directory_are_followed(directory: Path) -> None:
    expected = logits(rx.load(directory))
    (directory / "blobs").mkdir()
    for path in [path for path in directory.iterdir() if path.is_file()]:
        path.rename(directory / "blobs" / path.name)
        path.symlink_to(Path("blobs") / path.name)
    assert torch.equal(logits(rx.load(directory)), expected)
    output = export(directory, directory.parent / "output", verify=False)
    assert_same_but_rounding(logits(rx.load(output)), expected)


@pytest.mark.slow
@each()
def test_a_checkpoint_in_the_hub_s_cache_is_read_by_path_and_by_name(
    directory: Path, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = in_hub_cache(directory, cache, "org/name")
    expected = logits(rx.load(directory))
    for name in (snapshot, "org/name"):
        assert torch.equal(logits(rx.load(name)), expected)
    if directory.name == "adapter":
        base = AutoModelForCausalLM.from_pretrained(checkpoints / "base")
        assert torch.equal(logits(rx.load_adapter(base, "org/name")), expected)
        rx.merge("org/name", tmp_path / "merged")
    export("org/name", tmp_path / "output", verify=False)
    # A link from the snapshot to any other place is not followed.
    path = snapshot / weights_of(directory).name
    path.unlink()
    path.symlink_to(weights_of(directory))
    with pytest.raises(RopeExtendError, match="outside the checkpoint"):
        rx.load("org/name")


def test_a_name_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    for name in ("org/nothing", tmp_path / "nothing", "", "a\0b", "\ud800", "x" * 5000, "../.."):
        for read in (
            rx.load,
            lambda name: rx.load_adapter(llama(), name),
            lambda name: rx.merge(name, tmp_path),
        ):
            with pytest.raises(RopeExtendError):
                read(name)
    assert list(tmp_path.iterdir()) == []


def test_a_guarded_checkpoint_is_checked_by_the_auto_class_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = extended("xpos")
    directory = rx.save(model, tmp_path / "full")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(directory)), logits(model))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    in_hub_cache(directory, tmp_path / "cache", "org/name")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("org/name")), logits(model))
    with pytest.raises(RopeExtendError, match="variant='fp16' selects other weights"):
        AutoModelForCausalLM.from_pretrained(directory, variant="fp16")
    flip(weights_of(directory))
    with pytest.raises(RopeExtendError, match="is not what was saved"):
        AutoModelForCausalLM.from_pretrained(directory)


@each("full", "sharded")
@pytest.mark.parametrize("option", [{"subfolder": "other"}, {"variant": "fp16"}, {"gguf_file": "x.gguf"}])
def test_an_option_that_selects_other_weights_is_refused(directory: Path, option: dict[str, str]) -> None:
    """The record, its digests and its encoding are of the directory itself."""
    shutil.copytree(directory, directory / "other")
    with pytest.raises(RopeExtendError, match=rf"{next(iter(option))}='.*' selects other weights"):
        rx.load(directory, **option)
    rx.load(directory, subfolder="")


def test_options_for_the_hub_apply_to_the_record_too(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private checkpoint, in another cache, is found by the options that transformers takes."""
    calls: list[dict[str, Any]] = []

    def snapshot(_: str, **options: Any) -> str:
        calls.append(options)
        return str(checkpoints / "full")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr(
        "huggingface_hub.get_hf_file_metadata", lambda _, **options: calls.append({"asked": options["token"]})
    )
    options: dict[str, Any] = {"token": "hf_x", "cache_dir": str(tmp_path), "revision": "v2"}
    rx.load("owner/private", **options)
    assert calls.pop(0) == {"asked": "hf_x"}
    assert options.items() <= calls.pop(0).items()
    rx.load("owner/private", local_files_only=True)
    (call,) = calls  # and no question to the hub
    assert call["local_files_only"] is True
