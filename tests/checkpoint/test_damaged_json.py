"""A record, config or index that is damaged or incomplete is refused, and left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import llama
from integrity import INDEX, RECORD, each, each_with, extended, refused, rewritten, with_lora
from transformers import AutoModelForCausalLM

import rope_extend as rx


def test_a_base_model_without_theta_is_refused(tmp_path: Path) -> None:
    """transformers silently fills in 10,000, but this model was pretrained with another base."""
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    llama(**theta).save_pretrained(tmp_path / "base")
    adapted = with_lora(extended(model=AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    adapter = rx.save(adapted, tmp_path / "adapter")
    rx.load(adapter)
    rewritten(
        tmp_path / "base" / "config.json", lambda data: data["rope_parameters"].pop("rope_theta") and None
    )
    for name in ("load", "merge", "export", "verify"):
        refused(adapter, r"rope_theta|theta=500000.0.*this one has", by=name)


@each_with("config.json", "adapter_config.json", RECORD, INDEX)
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"a": ' * 5000], ids=str)
def test_json_that_is_damaged_is_refused(directory: Path, name: str, text: bytes) -> None:
    (directory / name).write_bytes(text)
    refused(directory, name)


@each("full", "adapter")
@pytest.mark.parametrize("version", [0, 1, 3, 99, -1, "2", 2.0, None, True, [2], {}], ids=repr)
def test_an_unknown_schema_is_refused(directory: Path, version: Any) -> None:
    rewritten(directory / RECORD, lambda data: {**data, "schema_version": version})
    refused(directory, r"schema_version is .* reads 2; a newer one may have written it")


@each("full", "adapter")
@pytest.mark.parametrize(
    "change", [{"target_length": 64}, {"encoding": {"name": "linear", "factor": 8.0}}], ids=str
)
def test_a_record_that_disagrees_with_the_config_next_to_it_is_refused(
    directory: Path, change: dict[str, Any]
) -> None:
    rewritten(directory / RECORD, lambda data: {**data, **change})
    refused(
        directory,
        rf"does not agree with .* {next(iter(change))} .*One of the two is not what was saved",
        by="load",
    )
