"""Stored checkpoints still compute the logits that they had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.exporting import export
from rope_extend.checkpoint.record import SCHEMA_VERSION
from rope_extend.checkpoint.saving import save
from rope_extend.models.checkpoint_directory import RECORD_NAME

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, list[float]] = json.loads((GOLDEN / "logits.json").read_text())
IDS = torch.arange(40).remainder(31)[None]
"""The same as in golden/make.py."""
TOLERANCE = 1e-5


@torch.no_grad()
def last(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits[0, -1]


def check(model: Any, name: str) -> None:
    torch.testing.assert_close(last(model), torch.tensor(EXPECTED[name]), rtol=0, atol=TOLERANCE)


@pytest.fixture(params=sorted(EXPECTED))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def base_of(name: str) -> dict[str, str]:
    return {"base_model": str(GOLDEN / "base")} if name.endswith("adapter") else {}


def test_it_reads_as_it_did_when_it_was_written(name: str) -> None:
    before = {path: path.read_bytes() for path in (GOLDEN / name).iterdir()}
    check(rx.load(GOLDEN / name, **base_of(name)), name)
    assert {path: path.read_bytes() for path in (GOLDEN / name).iterdir()} == before
    # The encoding matters: without it, or with another one, the logits differ.
    plain = last(AutoModelForCausalLM.from_pretrained(GOLDEN / "base"))
    assert (plain - torch.tensor(EXPECTED[name])).abs().max() > 5 * TOLERANCE


def test_a_record_of_a_newer_version_is_read_with_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stored records also lack a field: the base model's revision was added after them."""
    directory = Path(shutil.copytree(GOLDEN / name, tmp_path / "golden"))
    data = json.loads((directory / RECORD_NAME).read_text())
    assert "base_revision" not in data
    data |= {"added": {"later": 1}, "versions": {**data["versions"], "rope_extend": "99.0"}}
    (directory / RECORD_NAME).write_text(json.dumps(data))
    check(rx.load(directory, **base_of(name)), name)
    assert "rope_extend 99.0 wrote this record, and its fields ['added'] are ignored" in caplog.text


def test_it_is_merged_exported_and_saved_again(name: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / name, tmp_path / "golden"))
    if name.endswith("adapter"):
        directory = rx.merge(directory, tmp_path / "merged", **base_of(name))
    check(AutoModelForCausalLM.from_pretrained(export(directory, tmp_path / "out", verify=False)), name)
    again = save(rx.load(GOLDEN / name, **base_of(name)), tmp_path / "again")
    assert json.loads((again / RECORD_NAME).read_text())["schema_version"] == SCHEMA_VERSION
    check(rx.load(again, **base_of(name)), name)
