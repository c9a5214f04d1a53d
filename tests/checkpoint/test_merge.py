"""A merge equals peft's own merge in float32, rounded once; it appears whole or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TARGET, TRAINED, llama
from integrity import contents, logits, tensors_of, tuned
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tolerances import assert_same_but_rounding
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rope_extend as rx
from rope_extend.checkpoint.record import read_record, write_record


def adapted(
    base: PreTrainedModel, where: Path, *, dtype: torch.dtype = torch.float32, **lora: Any
) -> PeftModel:
    """Save a base model to `base/` and a float32 adapter of it to `adapter/`; returns the live model."""
    base.to(dtype).save_pretrained(where / "base")
    model = AutoModelForCausalLM.from_pretrained(where / "base", dtype=torch.float32)
    rx.extend(model, TARGET)
    torch.manual_seed(1)
    lora.setdefault("target_modules", ["q_proj", "down_proj"])
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 2, "init_lora_weights": False, **lora})
    peft = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad and "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    rx.save(peft, where / "adapter")
    return peft


def test_the_product_is_lora_s_formula(tmp_path: Path) -> None:
    """W + alpha/r B A in float64, computed from the two files without peft."""
    adapted(llama(), tmp_path, target_modules=["q_proj"], lora_alpha=6, r=3)
    rx.merge(tmp_path / "adapter", tmp_path / "merged")
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, found = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "merged")
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn.q_proj"
        a, b = (lora[f"base_model.model.{path}.lora_{part}.weight"].double() for part in "AB")
        expected = base[f"{path}.weight"].double() + 2.0 * b @ a
        torch.testing.assert_close(found[f"{path}.weight"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("stored", "targets", "tied"),
    [
        ("one", ["embed_tokens"], False),  # peft's merge would change both, and the adapter changes one
        ("one", ["lm_head"], False),
        ("two", ["q_proj"], False),  # transformers loads two untied, so the adapter was trained on two
        ("two", ["lm_head", "embed_tokens"], False),
        ("one, twice", ["q_proj", "down_proj"], True),
    ],
    ids=str,
)
def test_embeddings_of_a_config_that_ties_them_are_tied_as_in_training(
    tmp_path: Path, stored: str, targets: list[str], tied: bool
) -> None:
    base = llama(tie_word_embeddings=stored != "two")
    base.config.tie_word_embeddings = True
    live = adapted(base, tmp_path, target_modules=targets)
    found = tensors_of(tmp_path / "base")
    assert ("lm_head.weight" in found) == (stored == "two")
    if stored == "one, twice":
        twice = {**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()}
        save_file(twice, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    rx.merge(tmp_path / "adapter", tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert stock.config.tie_word_embeddings == tied
    assert (stock.lm_head.weight is stock.model.embed_tokens.weight) == tied
    assert_same_but_rounding(logits(stock), logits(live))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32], ids=str)
def test_a_cast_is_one_rounding_of_the_float32_merge(tmp_path: Path, to: torch.dtype) -> None:
    live = adapted(llama(), tmp_path, dtype=torch.float16, modules_to_save=["norm"])
    rx.merge(tmp_path / "adapter", tmp_path / "merged", dtype=to)
    oracle = live.merge_and_unload().state_dict()
    found = tensors_of(tmp_path / "merged")
    assert all(torch.equal(tensor, oracle[name].to(to)) for name, tensor in found.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == to


def test_shards_of_the_base_and_of_the_result(tmp_path: Path) -> None:
    adapted(llama(), tmp_path)
    rx.merge(tmp_path / "adapter", tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(
        tmp_path / "sharded", max_shard_size="20KB"
    )
    rx.merge(
        tmp_path / "adapter", tmp_path / "two", base_model=str(tmp_path / "sharded"), max_shard_size=12_000
    )
    assert max(path.stat().st_size for path in (tmp_path / "two").glob("model-*.safetensors")) < 14_000
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    rx.load(tmp_path / "two")  # every digest agrees


@pytest.fixture
def adapter(work: Path, tmp_path: Path) -> Path:
    """An adapter on the tiny model with a tokenizer."""
    return rx.save(tuned(work / "model"), tmp_path / "adapter")


def test_the_directory_has_all_that_a_loader_needs(adapter: Path, tmp_path: Path) -> None:
    rx.merge(adapter, tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "rope_extend.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    tokenizer = json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == TARGET
    config = AutoConfig.from_pretrained(tmp_path / "merged")
    assert (config.max_position_embeddings, config.architectures) == (TARGET, ["LlamaForCausalLM"])


def test_a_published_generation_config_that_transformers_finds_invalid_is_kept(tmp_path: Path) -> None:
    """Vicuna samples with a temperature, but does not say `do_sample`."""
    adapted(llama(), tmp_path, target_modules=["q_proj"])
    published = {"temperature": 0.9, "top_p": 0.6, "max_length": TRAINED}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(published))
    saved = [rx.merge(tmp_path / "adapter", tmp_path / "merged")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with rx.extend(model, TARGET):
        saved.append(rx.save(model, tmp_path / "full"))
    for directory in saved:
        data = json.loads((directory / "generation_config.json").read_text())
        assert {key: data[key] for key in published} == {**published, "max_length": TARGET}
    # Once the patch is removed, transformers recognises its own values again.
    model.save_pretrained(tmp_path / "plain")
    model.generation_config.top_p = 0.5
    with pytest.raises(ValueError, match="do_sample"):
        model.save_pretrained(tmp_path / "edited")


def with_companions(adapter: Path, where: Path) -> Path:
    """Copy the base model of an adapter, with a SentencePiece file and notices; returns its directory."""
    base = Path(shutil.copytree(str(read_record(adapter).base_model), where))
    for name in ("tokenizer.model", "LICENSE", "NOTICE.txt"):
        (base / name).write_bytes(name.encode())
    write_record(adapter, replace(read_record(adapter), base_model=str(base)))
    return base


def test_the_sentencepiece_file_and_the_notices_are_kept(
    adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers writes `tokenizer.json` alone; llama.cpp's converter needs `tokenizer.model`."""
    base, kept = with_companions(adapter, tmp_path / "base"), ("tokenizer.model", "LICENSE", "NOTICE.txt")
    merged = rx.merge(adapter, tmp_path / "merged")
    assert [(merged / name).read_bytes() for name in kept] == [name.encode() for name in kept]
    # A tokenizer of the adapter with the same tokens needs the file too, and one with other tokens must not
    # get it.
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(adapter)
    assert (rx.merge(adapter, tmp_path / "same") / "tokenizer.model").exists()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(adapter)
    assert not (rx.merge(adapter, tmp_path / "other") / "tokenizer.model").exists()
    assert "the adapter's tokenizer has other tokens" in caplog.text
    # A license in the output stays, and a link to another place is not followed.
    (merged / "LICENSE").write_text("mine")
    (base / "NOTICE.txt").unlink()
    (base / "NOTICE.txt").symlink_to(tmp_path / "private.txt")
    (tmp_path / "private.txt").write_text("private")
    (merged / "NOTICE.txt").unlink()
    rx.merge(adapter, merged, overwrite=True)
    assert (merged / "LICENSE").read_text() == "mine"
    assert not (merged / "NOTICE.txt").exists()


def test_the_base_model_of_an_adapter_is_not_overwritten(adapter: Path, tmp_path: Path) -> None:
    base = with_companions(adapter, tmp_path / "base")
    (tmp_path / "link").symlink_to(base)
    before = contents(base)
    for where in (base, tmp_path / "link"):
        for write in (
            lambda where: rx.merge(adapter, where, overwrite=True),
            lambda where: rx.export(adapter, where, overwrite=True, verify=False),
            lambda where: rx.save(rx.load(adapter), where, overwrite=True),
        ):
            with pytest.raises(rx.RopeExtendError, match=r"is the base model .*choose another directory"):
                write(where)
    assert contents(base) == before


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    adapted(llama(), tmp_path, target_modules=["q_proj"])
    base = tensors_of(tmp_path / "base")
    base["model.norm.weight"][0] = 1e6
    save_file(base, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        rx.RopeExtendError, match=r"model.norm.weight .*infinite in torch.float16.*another dtype"
    ):
        rx.merge(tmp_path / "adapter", tmp_path / "merged", dtype=torch.float16)
    assert not (tmp_path / "merged").exists()


def test_a_pickled_base_model_is_refused(adapter: Path, tmp_path: Path, work: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((work / "model" / "config.json").read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(rx.RopeExtendError, match=r"cannot load the model of .*safetensors"):
        rx.merge(adapter, tmp_path / "merged", base_model=str(pickled))
