"""How models are loaded: what is refused before weights are loaded, and models spread over devices."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from covering import few
from test_perplexity import measure, texts, tiny
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

import rope_extend as rx
from rope_extend.cli.main import main
from rope_extend.config import add_flags, from_arguments
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.identity import model_identity
from rope_extend.models.load_options import LoadOptions, input_device, is_quantized
from rope_extend.models.loading import pretrained
from rope_extend.units import memory_size

DISK = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
    "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


def parse(text: str) -> LoadOptions:
    """The options of an `evaluate` command."""
    parser = argparse.ArgumentParser()
    add_flags(parser, EvaluationConfig)
    arguments = parser.parse_args([*shlex.split(text), "--model", "m", "--data", "d"])
    return LoadOptions.of(from_arguments(EvaluationConfig, arguments))


def test_options() -> None:
    assert parse("") == LoadOptions()
    assert parse("--device cpu --dtype float16 --attn eager --limit-memory 1.5GiB") == LoadOptions(
        device="cpu", dtype=torch.float16, attention="eager", limit_memory=3 * 2**29
    )
    assert parse("--device-map auto").device_map == "auto"


def test_sizes() -> None:
    for text, size in (("20gb", 20 * 10**9), ("20GiB", 20 * 2**30), ("512M", 512 * 10**6)):
        assert memory_size(text) == size
    for text in ("", "GB", "-1GB", "20XB", "1e9", "24"):
        with pytest.raises(RopeExtendError, match="such as"):
            memory_size(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "device_map": "auto"}, "not both"),
        ({"device_map": "nearly"}, "one of auto, balanced"),
        ({"attention": "flash"}, "one of sdpa, flash_attention_2"),
        ({"quantize": "2bit"}, "one of 4bit, 8bit"),
        ({"device": "gpu"}, "no device is called 'gpu'"),
        ({"device": "cuda:99"}, "no device 'cuda:99'"),
        (
            {"device": "cpu", "attention": "flex_attention"},
            "flex_attention needs a GPU, but the device is cpu; use sdpa",
        ),
        ({"device": "cpu", "attention": "flash_attention_2"}, "flash_attention_2 needs a GPU"),
    ],
)
def test_impossible_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RopeExtendError, match=message):
        LoadOptions(**options)


def test_each_process_has_its_own_gpu_and_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert LoadOptions().torch_device == torch.device("cuda:1")
    assert LoadOptions(device="cuda:0").torch_device == torch.device("cuda:0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RopeExtendError, match="works in one process only"):
        LoadOptions(device_map="auto")


def test_weights_go_to_the_gpu_of_the_process_at_once(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not first to host memory, which eight processes share."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    given = LoadOptions("cuda:3", dtype=torch.bfloat16).arguments(str(work / "model"))
    assert given["device_map"] == {"": torch.device("cuda:3")}


def test_kernels_that_are_not_installed_are_reported_before_weights_are_loaded(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((work / "model" / "config.json").read_bytes())  # no weights
    assert LoadOptions(attention="eager").empty(str(tmp_path)).config._attn_implementation == "eager"
    assert importlib.util.find_spec("flash_attn") is None, "choose another attention for this test"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    how = LoadOptions(dtype=torch.bfloat16, attention="flash_attention_2")
    with pytest.raises(RopeExtendError, match="can be built with attention flash_attention_2"):
        how.empty(str(tmp_path))


def test_soft_capped_attention_is_never_computed_without_its_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers 5.17 loads Gemma 2 with sdpa, which leaves the cap out."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(
        **small, num_key_value_heads=1, head_dim=16, vocab_size=64, attn_logit_softcapping=0.05
    )
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    tokens = torch.arange(48)[None]
    for model in (LoadOptions().load(str(tmp_path)), LoadOptions().empty(str(tmp_path))):
        assert model.config._attn_implementation == "eager"
    with pytest.raises(RopeExtendError, match="which sdpa cannot; use "):
        LoadOptions(attention="sdpa").load(str(tmp_path))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    ours: Any = LoadOptions(dtype=torch.float32).load(str(tmp_path))
    torch.testing.assert_close(ours(tokens).logits, stock(tokens).logits, rtol=0, atol=0)
    with rx.extend(stock, 16_384):
        assert "leaves the cap out" not in caplog.text
    stock.config._attn_implementation = "sdpa"
    with rx.extend(stock, 16_384):
        assert "leaves the cap out" in caplog.text


def test_quantising_without_bitsandbytes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RopeExtendError, match="needs bitsandbytes: pip install bitsandbytes"):
        LoadOptions(quantize="4bit")


def test_a_checkpoint_is_not_quantised_twice(work: Path, tmp_path: Path) -> None:
    config = json.loads((work / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = LoadOptions()
    assert is_quantized(how._config(str(tmp_path)))
    assert how._dtype(how._config(str(tmp_path))) == "auto"
    object.__setattr__(how, "quantize", "4bit")  # as if bitsandbytes were installed
    with pytest.raises(RopeExtendError, match="already quantised"):
        how.load(str(tmp_path))


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_quantised_model_is_patched_and_measured(kind: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    tiny(hidden=64, intermediate=128).save_pretrained(tmp_path)  # blocks of 64 weights share a scale
    model, plain = (LoadOptions(device="cpu", quantize=kind).load(str(tmp_path)) for _ in range(2))
    layer = {"4bit": bitsandbytes.nn.Linear4bit, "8bit": bitsandbytes.nn.Linear8bitLt}[kind]
    assert type(model.model.layers[0].mlp.up_proj) is layer
    plain = plain.dequantize()
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    documents = texts(64, 64)
    with rx.extend(model, 64, "yarn"), rx.extend(plain, 64, "yarn"):
        ours, theirs = (measure(one, documents, [32, 64]).ppl[64] for one in (model, plain))
    # On a CPU, products are in bfloat16 with 4 bits; with 8 bits, inputs of a layer are rounded too.
    assert ours == pytest.approx(theirs, rel=0.02 if kind == "4bit" else 0.05)


@pytest.mark.parametrize("how", few([DISK, {"": "cpu"}, "auto"], 3), ids=["cpu and disk", "cpu", "auto"])
@pytest.mark.parametrize("method", [None, "yarn", "dynamic_ntk"])
def test_a_model_with_layers_elsewhere_gives_the_same_numbers(
    how: Any, method: str | None, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LoadOptions(device="cpu").load(str(work / "model"))
    model = LoadOptions(device_map=how).load(str(work / "model"))
    documents = texts(100, 120, vocabulary=200)
    if how is DISK:
        assert model.model.layers[0].mlp.up_proj.weight.is_meta
    results = []
    for one in (plain, model):
        patch = None if method is None else rx.extend(one, 128, method)
        results.append([measure(one, documents, [50, 100], **more) for more in ({}, {"chunk": 30})])
        if patch is not None:
            patch.remove()
    for expected, found in zip(*results, strict=True):
        assert found.ppl == expected.ppl


def test_a_model_offloaded_by_hooks_gives_the_same_numbers() -> None:
    model, documents = tiny(), texts(100)
    expected = {}
    for method in ("yarn", "xpos"):
        with rx.extend(model, 128, method):
            expected[method] = measure(model, documents, [100], chunk=30).ppl
    identity = model_identity(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert input_device(model) == torch.device("cpu")
    for method, ppl in expected.items():
        with rx.extend(model, 128, method):
            assert measure(model, documents, [100], chunk=30).ppl == ppl
    assert model_identity(model) == identity  # computed from the weights, on any device


def test_layers_that_do_not_fit_in_memory_go_to_disk(work: Path) -> None:
    """With a device map, the memory limit is for weights; without a GPU, for weights in host memory."""
    if torch.cuda.is_available():
        pytest.skip("the limit is the GPU's")
    size = sum(p.nbytes for p in LoadOptions().load(str(work / "model")).parameters())
    how = LoadOptions(device_map="auto", limit_memory=size // 2)
    model = how.load(str(work / "model"))
    assert "disk" in model.hf_device_map.values()
    expected = AutoModelForCausalLM.from_pretrained(work / "model")
    ids = texts(40, vocabulary=200)[0].input_ids[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("command", ["search", "finetune", "evaluate", "advise"])
def test_an_adapter_in_place_of_a_model_is_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Its directory may hold a tokenizer, as those of this package do."""
    adapter = tmp_path / "run"
    AutoTokenizer.from_pretrained(work / "model").save_pretrained(adapter)
    (adapter / "adapter_config.json").write_text("{}")
    data, target, out = ["--data", str(work / "data")], ["--target-length", "64"], str(tmp_path / "out")
    options = {
        "search": [str(adapter), *data, *target, "--output", out],
        "finetune": ["--model", str(adapter), *data, *target, "--output", out],
        "evaluate": [str(adapter), *data, "--output", out],
        "advise": [str(adapter), *target],
    }
    with pytest.raises(SystemExit):
        main([command, *options[command]])
    said = capsys.readouterr().err
    assert f"holds an adapter, not a whole model. Merge it first: rope-extend merge {adapter}" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("auto", "removed", "said"),
    [
        (AutoConfig, "config.json", "has no config.json"),
        (AutoModelForCausalLM, "config.json", "has no config.json"),
        (AutoTokenizer, "tokenizer*", "has no tokenizer: copy tokenizer.json"),
        (AutoConfig, None, "foobar` but Transformers does not recognize"),
    ],
)
def test_a_directory_without_what_is_loaded(
    auto: Any, removed: str | None, said: str, work: Path, tmp_path: Path
) -> None:
    shutil.copytree(work / "model", tmp_path / "model")
    if removed:
        for file in (tmp_path / "model").glob(removed):
            file.unlink()
    else:
        (tmp_path / "model" / "config.json").write_text('{"model_type": "foobar"}')
    with pytest.raises(RopeExtendError, match=said):
        pretrained(auto, str(tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_an_adapter_on_a_model_with_layers_elsewhere(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "adapter"
    rx.finetune(rx.Recipe(
        model=str(work / "model"), data=str(work / "data"), output_dir=str(adapter), target_length=64,
        method="linear", steps=2, gradient_accumulation=1, learning_rate=1e-2, warmup_steps=0, lora_rank=4,
    ))  # fmt: skip
    documents, found = texts(64, vocabulary=200), []
    spread = dict.fromkeys(DISK, "cpu")
    for how in (LoadOptions(device="cpu"), LoadOptions(device_map=spread)):
        tuned = rx.load_adapter(how.load(str(work / "model")), adapter)
        found.append(measure(tuned.eval(), documents, [64], chunk=20).ppl[64])
    assert found[0] == found[1]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    base = LoadOptions(device_map=DISK).load(str(work / "model"))
    with pytest.raises(RopeExtendError, match=r"layers on disk.*merge the adapter first"):
        rx.load_adapter(base, adapter)
    assert rx.current_patch(base) is None
    assert not list((tmp_path / "here").iterdir())  # where peft would have written the base's weights
