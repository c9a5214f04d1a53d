"""Adapters on the model of a GGUF file: where they are written, and the commands that lead on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import llama
from gguf_writer import converted

from rope_extend import RopeExtendError
from rope_extend.training.finetune import Recipe, finetune


def test_a_run_is_not_written_over_its_base_model(tmp_path: Path) -> None:
    """transformers would load the adapter with the file next to it, so neither could be used any more."""
    model = llama()
    (tmp_path / "files").mkdir()
    file = converted(model, tmp_path / "files" / "model.gguf")
    (tmp_path / "link.gguf").symlink_to(file)
    model.save_pretrained(tmp_path / "base")
    before = sorted(tmp_path.rglob("*"))
    for base, directory, says in (
        (file, "files", "files holds model.gguf, the base model"),
        (tmp_path / "files", "files", "files is the base model"),
        (tmp_path / "link.gguf", "files", "files holds link.gguf, the base model"),
        (tmp_path / "base", "base", "base is the base model"),
    ):
        recipe = Recipe(
            model=str(base), data="none.txt", target_length=64, output_dir=str(tmp_path / directory)
        )
        with pytest.raises(RopeExtendError, match=f"{says} of the adapter; choose another directory"):
            finetune(recipe)
    loaded = llama()
    loaded.name_or_path = str(file)
    with pytest.raises(RopeExtendError, match=r"holds model\.gguf"):
        finetune(replace(recipe, output_dir=str(file.parent)), model=loaded)
    assert sorted(tmp_path.rglob("*")) == before
