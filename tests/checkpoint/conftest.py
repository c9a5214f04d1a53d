"""Checkpoints that the tests of damage share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import llama
from integrity import extended, tuned

import rope_extend as rx


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and its checkpoints `full`, `sharded`, `guarded` and `adapter`. Tests only read them.

    `guarded` is plugin-only.
    """
    directory = tmp_path_factory.mktemp("checkpoints")
    llama().save_pretrained(directory / "base")
    rx.save(extended(), directory / "full")
    rx.save(extended(), directory / "sharded", max_shard_size="20KB")
    rx.save(extended("xpos"), directory / "guarded")
    rx.save(tuned(directory / "base"), directory / "adapter")
    return directory


@pytest.fixture
def directory(checkpoints: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of one of them, which a test may damage."""
    return Path(shutil.copytree(checkpoints / request.param, tmp_path / request.param))
