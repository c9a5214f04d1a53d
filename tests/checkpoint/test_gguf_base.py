"""Adapters on the model of a GGUF file: where they are written, and the commands that lead on from there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from cases import TARGET, TRAINED, llama
from gguf_writer import converted
from integrity import with_lora
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError, RopeShape
from rope_extend.advice.question import CurrentWindow, Question
from rope_extend.checkpoint.card import write_card
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.checkpoint.record import read_record
from rope_extend.cli.main import main
from rope_extend.models.loading import pretrained
from rope_extend.training.finetune import Recipe, finetune
from rope_extend.training.step_plan import plan

SHAPE = RopeShape(16, 10_000.0, TRAINED)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`model.gguf` and `run` (an adapter) in the working directory. All weights are exact in bfloat16."""
    monkeypatch.chdir(tmp_path)
    converted(llama().bfloat16().float(), Path("model.gguf"))
    model = pretrained(AutoModelForCausalLM, "model.gguf", dtype=torch.float32)
    rx.extend(model, TARGET, "yarn")
    return rx.save(with_lora(model), "run")


def test_a_card_says_how_to_merge_into_a_file(run: Path) -> None:
    write_card(run)
    text = (run / "README.md").read_text()
    assert "`rope-extend convert` makes of the base model" in text
    assert "base_model: " not in text


@pytest.mark.parametrize("engine", TARGETS)
@pytest.mark.parametrize("trained", [True, False])
def test_the_commands_that_serve_an_extension_run(run: Path, engine: str, trained: bool) -> None:
    """All but the converter and the server. Merging and exporting need the base model as a checkpoint."""
    window = CurrentWindow(TRAINED, "the config says so")
    asked = Question("model.gguf", "llama", window, TARGET, engine, SHAPE, None, False)
    ran = []
    for line in asked.serving("yarn", "run" if trained else None):
        if line.startswith("# in Python, with the model of converted: "):
            model = AutoModelForCausalLM.from_pretrained("converted")
            exec(line.partition(": ")[2], {"rx": rx, "model": model, "tokenizer": None})
        elif "convert_hf_to_gguf.py" in line:
            words = shlex.split(line)
            made = AutoModelForCausalLM.from_pretrained(words[2], dtype=torch.float32)
            converted(made, Path(words[words.index("--outfile") + 1]))
        elif line.startswith("rope-extend"):
            main([*shlex.split(line)[1:], *(["--no-verify"] if " export " in line else [])])
        ran.append(line.split()[1])
    assert ran[0] == "convert"
    assert ("merge" in ran) == (trained and engine == "llama.cpp")
    output = next(Path().glob(f"*-{engine.replace('.', '')}"))
    assert read_record(output).target_length == TARGET


def test_a_merge_says_how_to_get_a_base_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file itself, or its weights rounded to float16, are refused: both errors lead to a conversion."""
    monkeypatch.chdir(tmp_path)
    converted(llama(), Path("my model.gguf"))
    model = pretrained(AutoModelForCausalLM, "my model.gguf", dtype=torch.float32)
    rx.extend(model, TARGET, "yarn")
    rx.save(with_lora(model), "my run")
    rx.convert("my model.gguf", "rounded", dtype=torch.float16)
    advice = "rope-extend convert 'my model.gguf' --output DIRECTORY, and give it as --base-model"
    for base in ([], ["--base-model", "rounded"]):
        with pytest.raises(SystemExit):
            main(["merge", "my run", *base, "--output", "my merge"])
        assert advice in capsys.readouterr().err
    main(["convert", "my model.gguf", "--output", "DIRECTORY"])
    main(["merge", "my run", "--base-model", "DIRECTORY", "--output", "my merge"])
    assert "rope-extend verify 'my merge'" in capsys.readouterr().out


def test_weights_of_4_bits_are_not_planned_for(run: Path) -> None:
    """They would be refused when the file is loaded, so no advice may name them."""
    recipe = Recipe(model="model.gguf", data="none.txt", target_length=64, output_dir="out")
    estimate = plan(recipe, limit_memory=2**30)
    assert estimate.steps
    assert not any(step.quantized for step in estimate.steps)


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
    assert sorted(tmp_path.rglob("*")) == before
