"""A model is what it was after each of its candidates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import logits, tokens
from cases import TARGET, tiny_llama
from peft import LoraConfig, PeftConfig, VeraConfig, get_peft_model
from scaled_models import scaled_copy
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend.checkpoint.info import info
from rope_extend.checkpoint.record import read_record
from rope_extend.cli.main import main
from rope_extend.errors import PatchError, RopeExtendError
from rope_extend.evaluation.candidates import Candidates
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.lora import lora_config


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_adapter_with_norms_and_embeddings_leaves_the_model_as_it_was(tied: bool, tmp_path: Path) -> None:
    model, adapter = tiny_llama(tie_word_embeddings=tied), str(tmp_path / "adapter")
    rx.extend(model, TARGET, "yarn")
    recipe = rx.Recipe(
        model="tiny", data="none", output_dir=adapter, target_length=TARGET, train_norm_embed=True,
        lora_rank=2,
    )  # fmt: skip
    tuned = get_peft_model(model, lora_config(model, recipe))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.1)
    rx.save(tuned, adapter)

    model, ids = tiny_llama(tie_word_embeddings=tied), tokens(1, 12)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = logits(model, ids)
    candidates = Candidates(
        "tiny", LoadOptions(), model, info(model), (TARGET,), {}, {adapter: read_record(adapter)}
    )
    with candidates.prepared(model, adapter=adapter) as tuned:
        assert not torch.allclose(logits(tuned, ids), expected)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert torch.equal(logits(model, ids), expected)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        *(
            (LoraConfig(r=2, target_modules=["q_proj"], **options), f"{named}.*\\(rope-extend merge\\)")
            for options, named in (
                ({"bias": "all"}, r'\(bias="all"\)'),
                ({"init_lora_weights": "pissa"}, r"\(pissa\)"),
                ({"init_lora_weights": "olora"}, r"\(olora\)"),
            )
        ),
        (
            VeraConfig(r=2, target_modules=["q_proj"], bias="all"),
            r"Merge it first \(merge_and_unload of peft, then rope",
        ),
    ],
)
def test_an_adapter_that_changes_the_model_itself_is_refused_with_a_merge_that_works(
    config: PeftConfig, advice: str, tmp_path: Path
) -> None:
    """Its row would change the rows that follow, because nothing restores the weights."""
    tiny_llama(attention_bias=True).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rx.extend(model, TARGET, "yarn")
    rx.save(get_peft_model(model, config), tmp_path / "adapter", base_model=str(tmp_path / "base"))
    settings = EvaluationConfig(model=str(tmp_path / "base"), adapters=(str(tmp_path / "adapter"),))
    with pytest.raises(RopeExtendError, match=f"own weights on loading .*{advice}"):
        Candidates.of(settings)
    if isinstance(config, VeraConfig):
        tuned, ids = rx.load(tmp_path / "adapter"), tokens(1, 12)
        expected = logits(tuned, ids)
        rx.save(tuned.merge_and_unload(), tmp_path / "merged")
        torch.testing.assert_close(logits(rx.load(tmp_path / "merged"), ids), expected)


@pytest.mark.usefixtures("private_cache")
@pytest.mark.parametrize(
    "command",
    [
        "evaluate MODEL --lengths 32,128 --plan",
        "evaluate MODEL --lengths 32,128 --data DATA --output OUTPUT",
        "report MODEL --target-length 128 --tasks none --plan",
        "report MODEL --target-length 128 --tasks none --data DATA --output OUTPUT",
        "retrieve MODEL --lengths 128 --output OUTPUT",
    ],
)
def test_a_method_that_changes_nothing_is_refused_before_any_weights(
    command: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The rows before it may take hours. An estimate refuses it too."""
    monkeypatch.setattr(LoadOptions, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    model, output = scaled_copy(work / "model", tmp_path, "yarn"), tmp_path / "report"
    places = {"MODEL": str(model), "DATA": str(work / "data"), "OUTPUT": str(output)}
    with pytest.raises(SystemExit):
        main([*(places.get(word, word) for word in command.split()), "--methods", "none,yarn"])
    assert f"yarn leaves the rotary tables of {model} unchanged; leave it out" in capsys.readouterr().err
    assert not output.exists()


def models(candidates: Candidates, lm: Any) -> Iterator[Any]:
    """The model under each method, and then with each adapter."""
    for method in candidates.encodings:
        with candidates.prepared(lm, method) as model:
            yield model
    for adapter in candidates.records:
        with candidates.prepared(lm, adapter=adapter) as model:
            yield model


def test_a_schedule_by_length_changes_a_model_that_has_its_longest_table(work: Path, tmp_path: Path) -> None:
    """Dynamic YaRN and YaRN have the same table at the target, and others below."""
    model = scaled_copy(work / "model", tmp_path, "yarn")
    config = EvaluationConfig(model=str(model), methods=("as-is", "dynamic_yarn"), lengths=(32, 128))
    candidates, ids = Candidates.of(config), tokens(1, 32)
    lm = candidates.load_options.load(candidates.name)
    own, dynamic = (logits(model, ids) for model in models(candidates, lm))
    assert not torch.allclose(own, dynamic, atol=1e-4)
    with pytest.raises(PatchError, match="use as-is"):
        Candidates.of(EvaluationConfig(model=str(model), methods=("yarn",), lengths=(128,)))
