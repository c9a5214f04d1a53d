"""A checkpoint's directory may have any name that the file system allows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import few
from integrity import logits, tuned
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.card import write_card
from rope_extend.checkpoint.exporting import export

ODD = [
    "two words", " leading", "trailing ", "tab\there", "line\nbreak", "über-模型-🪢", "[a-z]*?", "{brace}",
    "'single'", '"double"', "back\\slash", "$HOME", "%41", "#hash", "-dash", "...", "~", "a" * 200, "c:d",
    "e\u0301",
]  # fmt: skip


@pytest.mark.parametrize("name", few(ODD, 7, 3))
def test_a_directory_may_have_any_name(checkpoints: Path, tmp_path: Path, name: str) -> None:
    where = tmp_path / name
    base = Path(shutil.copytree(checkpoints / "base", where / f"base {name}"))
    model = tuned(base)
    expected = logits(model)
    adapter = rx.save(model, where / name)
    assert torch.equal(logits(rx.load(adapter)), expected)
    assert torch.equal(logits(rx.load_adapter(AutoModelForCausalLM.from_pretrained(base), adapter)), expected)
    assert rx.info(str(adapter)).encoding == "yarn(factor=8)"
    merged = rx.merge(adapter, where / f"merged {name}")
    assert_same_but_rounding(logits(rx.load(merged)), expected)
    output = export(merged, where / f"out {name}", verify=False)
    assert_same_but_rounding(logits(AutoModelForCausalLM.from_pretrained(output)), expected)
    rx.save(model, adapter, overwrite=True)
    assert torch.equal(logits(rx.load(adapter)), expected)


def test_the_card_of_an_oddly_named_directory_has_lines_that_run(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = 'it\'s "odd"\n[x] $(y) 模型'
    shutil.copytree(checkpoints / "adapter", name)
    card = write_card(name)
    assert card is not None
    text = card.read_text(encoding="utf-8")
    python = text.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(compile(python, "card", "exec"), scope)
    assert torch.equal(logits(scope["model"]), logits(rx.load(checkpoints / "adapter")))
    bash = text.split("```bash\n")[1].split("```")[0]
    listed = subprocess.run(
        ["bash", "-c", f'rope-extend() {{ printf "%s|" "$@"; }}\n{bash}'],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    merged = f"{name}-merged"
    assert listed == "|".join(["merge", name, "--output", merged, "verify", merged, ""])
