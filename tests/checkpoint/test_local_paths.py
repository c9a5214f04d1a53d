"""Local paths in what people publish: none in a full checkpoint, and said where an adapter needs them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import llama
from integrity import extended, logits, rewritten, tuned
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.publishing import warn_of_local_paths
from rope_extend.checkpoint.record import read_record, write_record
from rope_extend.data.bundled import MODEL_DIR


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """A directory whose name nobody should read, with a base model in it."""
    llama().save_pretrained(tmp_path / "clients" / "base")
    return tmp_path / "clients"


def fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The top-level field of each text in a JSON or YAML value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from fields(item, name or str(key))
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, name)
    elif isinstance(value, str):
        yield name, value


def named(directory: Path, secret: str = "clients") -> dict[str, set[str]]:
    """The files of a directory that hold a text, and the fields of each; without checkpoints of a run."""
    found: dict[str, set[str]] = {}
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and secret.encode() in path.read_bytes() and not name.startswith("checkpoints/"):
            data = yaml.safe_load(path.read_text())
            found[name] = {field for field, text in fields(data) if secret in text}
    return found


def said(text: str) -> dict[str, set[str]]:
    """The files and fields in the warning of a save."""
    found = re.findall(r"([\w.]+\.(?:json|yaml)) \(([\w, ]+)\)", text)
    return {name: set(listed.split(", ")) for name, listed in found}


def test_full_checkpoints_hold_no_local_path(
    clients: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rx.save(extended(model=AutoModelForCausalLM.from_pretrained(clients / "base")), tmp_path / "full")
    rx.save(tuned(clients / "base"), clients / "adapter")
    caplog.clear()
    rx.merge(clients / "adapter", tmp_path / "merged")
    export(clients / "adapter", tmp_path / "exported", verify=False)
    assert "local path" not in caplog.text
    for name in ("full", "merged", "exported"):
        assert named(tmp_path / name) == {}, name
        assert read_record(tmp_path / name).base_model == "base"
        rx.load(tmp_path / name)
        with pytest.raises(rx.RopeExtendError, match=r"'base'.*Give base_model= \(--base-model\) a hub id"):
            rx.base_model_of(tmp_path / name)  # the last part of its path is not enough to find it


def test_an_adapter_says_which_of_its_fields_hold_a_local_path(
    clients: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = rx.save(tuned(clients / "base"), tmp_path / "adapter")
    expected = {"adapter_config.json": {"base_model_name_or_path"}, "rope_extend.json": {"base_model"}}
    assert named(adapter) == expected
    assert said(caplog.text) == expected
    caplog.clear()
    # Both may be edited, and both loaders then follow them.
    monkeypatch.chdir(clients)
    write_record(adapter, replace(read_record(adapter), base_model="base"))
    rewritten(adapter / "adapter_config.json", lambda data: {**data, "base_model_name_or_path": "base"})
    assert named(adapter) == {}
    expected_logits = logits(tuned("base"))
    assert torch.equal(logits(rx.load(adapter)), expected_logits)
    AutoPeftModelForCausalLM.from_pretrained(adapter)


@pytest.mark.parametrize("relative", [False, True])
def test_a_name_that_is_given_replaces_the_local_path(
    clients: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    relative: bool,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    model = tuned("clients/base" if relative else clients / "base")
    adapter = rx.save(model, tmp_path / "adapter", base_model="owner/base")
    assert named(adapter) == {}
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/base"
    assert torch.equal(logits(rx.load(adapter, base_model=str(clients / "base"))), logits(model))
    assert said(caplog.text) == {}


@pytest.mark.usefixtures("private_cache")
def test_a_run_says_which_of_its_fields_hold_a_local_path(
    work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = work.name
    recipe = rx.Recipe(
        model=str(work / "model"), data=str(work / "data" / "a.txt"), output_dir=str(tmp_path / "run"),
        target_length=64, steps=1, lora_rank=2, eval_data=(str(work / "data" / "b.txt"),),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        rx.finetune(recipe)
    found = named(tmp_path / "run", secret)
    assert found == {
        "adapter_config.json": {"base_model_name_or_path"},
        "rope_extend.json": {"base_model"},
        "recipe.yaml": {"model", "data", "eval_data"},
    }
    found["recipe.yaml"].add("output_dir")
    assert said(caplog.text) == found
    assert "leave recipe.yaml out, which is not needed" in caplog.text


def test_the_bundled_model_is_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each adapter of the demonstration would warn otherwise."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(MODEL_DIR)}))
    warn_of_local_paths(tmp_path)
    assert not caplog.text
    for other in (tmp_path / "base", f"{MODEL_DIR.parents[1]}_clients/base"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(other)}))
        caplog.clear()
        warn_of_local_paths(tmp_path)
        assert "adapter_config.json (base_model_name_or_path)" in caplog.text
