"""The recipes of the package: they load, they are found by name, and their figures are those of the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from known_models import write_config

import rope_extend as rx
from rope_extend.advice.shipped import find_recipe, shipped_names, shipped_path, shipped_recipes
from rope_extend.cli.main import main
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import plan

MODELS = {
    "gemma2_2b_16k_yarn": "gemma2-2b", "gemma3_1b_64k_yarn": "gemma3-1b", "gemma_2b_32k_yarn": "gemma-2b",
    "gemma_7b_32k_yarn": "gemma-7b", "llama3_8b_128k_yarn": "llama3-8b", "llama3_8b_32k_yarn": "llama3-8b",
    "llama_7b_32k_linear": "llama2-7b", "llama_7b_32k_yarn": "llama2-7b",
    "mistral_7b_128k_yarn": "mistral-7b-v0.3", "phi2_3b_16k_yarn": "phi-2", "phi4_14b_64k_yarn": "phi4",
    "qwen2.5_3b_128k_yarn": "qwen25-3b", "qwen2.5_math_7b_32k_yarn": "qwen25-math-7b",
    "qwen3_1.7b_128k_yarn": "qwen3-1.7b-base", "smollm2_1.7b_32k_yarn": "smollm2-1.7b",
    "tinyllama_1b_32k_yarn": "tinyllama-1b",
}  # fmt: skip
"""The config of each recipe's model."""
SIZES = (24, 48, 80)


def test_every_recipe_has_a_model_and_its_memory() -> None:
    assert shipped_names() == sorted(MODELS)
    names = [recipe.name for recipe in shipped_recipes()]
    assert names.index("qwen3_1.7b_128k_yarn") < names.index("qwen2.5_3b_128k_yarn")
    for recipe in shipped_recipes():
        assert tuple(recipe.memory) == SIZES, recipe.name
        loaded = Recipe.from_yaml(shipped_path(recipe.name))
        assert loaded.output_dir == f"runs/{recipe.name}"
        assert loaded.trackers == (), "its package is optional"


SOME = {"tinyllama_1b_32k_yarn", "phi2_3b_16k_yarn", "llama3_8b_32k_yarn", "gemma_7b_32k_yarn"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SOME else pytest.mark.full) for n in MODELS]
)
def test_the_memory_of_recipes(name: str, tmp_path: Path) -> None:
    """The comments of a recipe are what the plan says; each names the memory and what to add."""
    model = write_config(tmp_path, MODELS[name])
    recipe = Recipe.from_yaml(shipped_path(name), {"model": str(model)})
    memory = {shipped.name: shipped.memory for shipped in shipped_recipes()}[name]
    for size in SIZES:
        estimate = plan(recipe, limit_memory=size * 10**9, elsewhere=True)
        said = memory[size]
        if "too long" in said:
            assert not estimate.fits
            assert f"up to {estimate.longest_block:,} tokens" in said
            continue
        quantized = "--quantize 4bit" in said
        step = (estimate.in_four_bits() if quantized else estimate).chosen
        assert quantized != estimate.fits
        assert step.quantized or not quantized
        assert estimate.budget.fits(step)
        shown = re.match(r"([\d.]+) GB", said)
        assert shown is not None
        assert step.total / 1e9 == pytest.approx(float(shown[1]), abs=0.051, rel=0.01)
        assert str(step.memory_options) in said


def test_a_file_comes_before_a_recipe_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("llama_7b_32k_yarn") == str(shipped_path("llama_7b_32k_yarn"))
    (tmp_path / "llama_7b_32k_yarn").write_text("model: mine")
    assert find_recipe("llama_7b_32k_yarn") == "llama_7b_32k_yarn"
    assert find_recipe("nonsense.yaml") == "nonsense.yaml"
    assert find_recipe("meta-llama/Meta-Llama-3-8B") == "meta-llama/Meta-Llama-3-8B"
    with pytest.raises(rx.RopeExtendError, match="Did you mean 'phi2_3b_16k_yarn'"):
        find_recipe("phi2_3b_16k_yran")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["recipe", "model", "window", "24", "GB", "48", "GB", "80", "GB"]
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[1 : len(MODELS) + 1]}
    assert [*rows] == [recipe.name for recipe in shipped_recipes()]
    assert rows["llama3_8b_32k_yarn"].endswith(
        " meta-llama/Meta-Llama-3-8B 8k to 32k 19.6 GB 32.8 GB 32.8 GB"
    )
    assert rows["gemma2_2b_16k_yarn"].endswith(" 8k to 16k too long 39.0 GB 39.0 GB")
    assert "4 bit" in rows["phi4_14b_64k_yarn"]
    main(["recipes", "phi2_3b_16k_yarn"])
    assert capsys.readouterr().out == shipped_path("phi2_3b_16k_yarn").read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as error:
        main(["recipes", "phi"])
    assert error.value.code == 2
    assert "no recipe is named 'phi'" in capsys.readouterr().err
