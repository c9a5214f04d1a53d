"""A recipe is read strictly: from YAML, from flags, and back to what it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from runs import described

from rope_extend import RopeExtendError
from rope_extend.advice.shipped import FOLDER
from rope_extend.cli.main import parse as arguments_of
from rope_extend.cli.train import recipe_of
from rope_extend.data.choices import SAMPLED
from rope_extend.data.sampled_positions import SAMPLERS
from rope_extend.encodings import encoding_classes, encoding_names, method_named
from rope_extend.method_names import method_names
from rope_extend.training.recipe import Recipe

REQUIRED = {"model": "some/model", "data": "books/", "output_dir": "runs/one", "target_length": 32768}
CONFIGS = [
    path
    for path in sorted([*(Path(__file__).parents[2] / "configs").glob("*.yaml"), *FOLDER.glob("*.yaml")])
    if not path.name.startswith("pretrain_")  # a configuration of another script
]


@given(
    st.from_regex(r"[a-z][a-z0-9_./-]{0,12}", fullmatch=True), st.integers(2, 2**24), st.floats(1e-12, 1e6)
)
def test_round_trip_through_dict_and_yaml(word: str, length: int, rate: float) -> None:
    """Also of words that YAML reads otherwise, such as `no` and `1e5`."""
    for words in (word, "no", "1e5", (word, "null")):
        texts = {"data": words, "eval_data": words, "eval_lengths": [length, 4], "max_documents": length}
        numbers = {"target_length": length, "learning_rate": rate, "train_norm_embed": length % 2 == 0}
        recipe = described(model=word, lora_targets=words, **texts, **numbers)
        assert Recipe.from_dict(recipe.to_dict()) == recipe
        assert Recipe.from_dict(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("steps", "many", "a whole number, at least 1"),
        ("steps", True, "a whole number, at least 1"),
        ("steps", 0, "a whole number, at least 1"),
        ("learning_rate", float("nan"), "a finite number above 0"),
        ("lora_dropout", 1, "below 1"),
        ("train_norm_embed", 1, "true or false"),
        ("dtype", "float16", "auto, float32, bfloat16"),
        ("target_length", "32 kb", "such as 32768 or 32k"),
        ("model", "", "a path or a hub id"),
        ("data", [], "a path, a glob"),
        ("lora_targets", [], "attention, all-linear"),
        ("method_parameters", [1], "a mapping"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(field: str, value: object, expected: str) -> None:
    with pytest.raises(RopeExtendError, match=rf"recipe: {field} must be .*{expected}") as error:
        Recipe.from_dict({**REQUIRED, field: value})
    assert repr(value) in str(error.value)
    assert error.value.__suppress_context__  # Python would show a bare ValueError first


def test_missing_keys_are_all_named() -> None:
    with pytest.raises(RopeExtendError, match=r"missing data, output_dir; .* --data, --output"):
        Recipe.from_dict({"model": "m", "target_length": "32k"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rte": 1e-4}, r"unknown key 'learning_rte'\. Did you mean 'learning_rate'\?"),
        ({"betas": [0.9], "log_every": 1}, r"key 'betas', 'log_every'\. Leave it out\. Known: model,"),
        ({"method": "yran"}, "Did you mean 'yarn'"),
        ({"method_parameters": {"betafast": 3}}, "unknown parameter 'betafast'.*beta_fast"),
        ({"block_length": "64k"}, "block_length 65536 is greater than target_length 32768; raise"),
        ({"short_share": 0.5}, "short_share 0.5 needs mixed_windows"),
        ({"positions": "pose", "packing": "restart"}, "positions pose and packing restart cannot be"),
        ({"mixed_windows": True, "packing": "restart"}, "mixed_windows and packing restart cannot be"),
        ({"mixed_windows": True, "positions": "pose"}, "mixed_windows and positions pose cannot be combined"),
        ({"offload_checkpoints": True, "gradient_checkpointing": False}, "gradient_checkpointing is false"),
        ({"eval_every": 10}, "eval_every and eval_lengths need eval_data"),
        ({"positions": "pose"}, "block_length is 32768; set block_length to less than target_length"),
        ({"positions": "cream", "block_length": 2}, "3 tokens or more"),
        ({"positions": "posey"}, "consecutive, pose, cream, random"),
        ({"mlp_tiles": -1}, "mlp_tiles must be"),
        ({"quantize": "3bit"}, "quantize must be"),
    ],
)
def test_contradictions_are_refused(values: dict[str, object], message: str) -> None:
    """One row for each entry of the table in `Recipe.check_early`, and for each check after it."""
    with pytest.raises(RopeExtendError, match=message):
        Recipe.from_dict({**REQUIRED, **values})


def test_yaml_reads_what_people_write(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: m\ndata: [a.txt, b]\noutput_dir: o\ntarget_length: 32k\n"
        "learning_rate: 2e-5\neval_data: c\neval_lengths: [8k, 4k, 4096]\n"  # YAML 1.1 reads 2e-5 as text
    )
    recipe = Recipe.from_yaml(file, {"steps": 7, "trackers": "wandb,wandb,tensorboard"})
    assert recipe.trackers == ("wandb", "tensorboard")
    assert recipe.target_length == 32 * 1024
    assert recipe.learning_rate == 2e-5
    assert recipe.eval_lengths == (4096, 8192)
    assert recipe.data == ("a.txt", "b")
    assert recipe.steps == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nmodel: n\n", "the key 'model' is given twice"),
        ("model: [m\n", "not valid YAML"),
        ("model: " + "[" * 3000, "not valid YAML"),
        ("- model\n", "must hold `key: value` lines"),
        ("modle: m\n", "recipe.yaml: recipe: unknown key 'modle'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "recipe.yaml"
    with pytest.raises(RopeExtendError, match="cannot read the recipe"):
        Recipe.from_yaml(file)
    file.write_text(text)
    with pytest.raises(RopeExtendError, match=message):
        Recipe.from_yaml(file)


def parse(*arguments: str) -> Recipe:
    return recipe_of(arguments_of(["finetune", *arguments]))


def test_flags_replace_the_file_and_nothing_else(tmp_path: Path) -> None:
    sources = {"data": ["org/a", "org/b"], "eval_data": "held-out"}
    base = Recipe.from_dict({**REQUIRED, **sources, "steps": 5, "train_norm_embed": True})
    file = tmp_path / "recipe.yaml"
    file.write_text(base.to_yaml())
    assert parse(str(file)) == base
    recipe = parse(
        str(file), "--target-length", "64k", "--learning-rate", "1.0e-4", "--no-train-norm-embed",
        "--eval-lengths", "4k,64k", "--lora-targets", "q_proj,k_proj", "--method-parameters",
        "beta_fast=16,truncate=false",
    )  # fmt: skip
    assert recipe == Recipe.from_dict({
        **base.to_dict(), "target_length": 65536, "learning_rate": 1e-4, "train_norm_embed": False,
        "eval_lengths": [4096, 65536], "lora_targets": ["q_proj", "k_proj"],
        "method_parameters": {"beta_fast": 16, "truncate": False},
    })  # fmt: skip


def test_fields_left_open_are_the_methods_and_given_ones_stay() -> None:
    usual = Recipe.from_dict({**REQUIRED, "method": "yarn"})
    assert (usual.steps, usual.learning_rate, usual.lora_targets) == (400, 2e-4, "attention")
    assert not usual.train_norm_embed
    replaced = Recipe.from_dict({**REQUIRED, "method": "alibi", "lora_targets": None})
    assert (replaced.steps, replaced.learning_rate, replaced.lora_targets) == (2000, 2e-4, "all-linear")
    assert replaced.train_norm_embed
    own = {"steps": 10, "lora_targets": "attention", "train_norm_embed": False}
    given = Recipe.from_dict({**REQUIRED, "method": "alibi", **own}).to_dict()
    assert {name: given[name] for name in own} == own
    assert Recipe.from_dict({**REQUIRED, "method": "resonance(nope)"}).lora_targets == "all-linear"


@pytest.mark.parametrize("name", encoding_names())
def test_every_method_has_a_default_recipe_that_is_valid(name: str) -> None:
    recipe = Recipe.from_dict({**REQUIRED, "method": name})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    replaced = encoding_classes()[name].replaces_rotation
    assert method_named(name).replaces_rotation == replaced
    assert (recipe.lora_targets == "all-linear") == recipe.train_norm_embed == replaced


def test_light_modules_name_what_the_heavy_ones_have() -> None:
    assert set(SAMPLED) == set(SAMPLERS)
    assert set(method_names()) == set(encoding_names())


def test_each_flag_has_one_heading_in_help() -> None:
    grouped = [name for names in Recipe.groups.values() for name in names]
    assert len(grouped) == len(set(grouped))
    fields = {item.name for item in dataclasses.fields(Recipe)}
    assert fields - set(grouped) == {"model", "data", "output_dir", "target_length"}
    assert set(grouped) <= fields


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configs_are_valid_and_every_line_is_commented(path: Path) -> None:
    Recipe.from_yaml(path)
    for line in path.read_text().splitlines():
        assert not line.strip() or "#" in line, f"{path.name}: no comment on {line!r}"
