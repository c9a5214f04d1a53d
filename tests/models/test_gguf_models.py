"""GGUF files where a model is named: weights, window and tokenizer, against formats written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import FamilyCase, llama, tiny_llama, tiny_model
from gguf_writer import converted, gguf, writes
from test_gguf_tokenizer import TEXT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_checkpoint import gguf_file
from rope_extend.models.gguf_metadata import Metadata
from rope_extend.models.gguf_scaling import rope_scaling
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import empty_model, pretrained
from rope_extend.models.rotary_tables import shape_of


def loaded(path: Path, **how: Any) -> Any:
    return pretrained(AutoModelForCausalLM, str(path), **{"dtype": torch.float32, **how}).eval()


def same_weights(found: Any, model: Any) -> None:
    """All weights of a model, in the dtype of the one that was read."""
    ours, expected = found.state_dict(), model.state_dict()
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weight.to(found.dtype), ours[name]), name


BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ("qwen2", {**BASE, "rms_norm_eps": 1e-3}),  # transformers drops the base, and the width of heads
        ("qwen3", {**BASE, "head_dim": 24}),
    ],
)
def test_weights_and_config_are_those_of_the_checkpoint(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(FamilyCase(family, config))
    base = model.config.rope_parameters["rope_theta"]
    found = loaded(converted(model, tmp_path / "tiny.gguf", **{"rope.freq_base": base}))
    same_weights(found, model)
    assert found.config.name_or_path == str(tmp_path / "tiny.gguf")
    assert shape_of(found) == shape_of(model)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


def test_a_file_without_the_number_of_heads_of_keys_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would leave the channels in the order of the file."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda *_: None)
    path = converted(llama(num_attention_heads=4, num_key_value_heads=4), tmp_path / "tiny.gguf")
    with pytest.raises(RopeExtendError, match=r"tiny\.gguf does not state attention\.head_count_kv"):
        loaded(path)


def test_config_and_weights_of_a_large_vocabulary_take_no_more_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's reader takes several for each token, merge and score: ten seconds for those of Qwen."""
    steps, read, counts = 0, gguf.gguf_reader.GGUFReader._get, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        return read(*args, **kwargs)

    paths = [converted(llama(vocab_size=size), tmp_path / f"{size}.gguf") for size in (1024, 4096)]
    monkeypatch.setattr(gguf.gguf_reader.GGUFReader, "_get", counted)
    for path in paths:
        steps = 0
        assert empty_model(str(path)).config.vocab_size == int(path.stem)
        loaded(path)
        counts.append(steps)
    assert counts[0] == counts[1] > 0


def test_answers_end_as_in_llama_cpp(tmp_path: Path) -> None:
    """At the end of a turn and of a message too. Numbers outside the vocabulary are no tokens."""
    ids = {"eos": 2, "eot": 5, "eom": 6, "padding": 2**32 - 1}
    keys = {f"+tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    found = loaded(converted(llama(), tmp_path / "ends.gguf", **keys))
    assert found.generation_config.eos_token_id == [2, 5, 6]
    assert found.config.pad_token_id is None
    rx.convert(tmp_path / "ends.gguf", tmp_path / "converted")
    assert GenerationConfig.from_pretrained(tmp_path / "converted").eos_token_id == [2, 5, 6]
    outside = loaded(converted(llama(), tmp_path / "no.gguf", **{"+tokenizer.ggml.eos_token_id": 999_999}))
    assert outside.config.eos_token_id is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.1.ffn_up.weight", "lacks 1 weights of the model, such as"),
        ("blk.0.attn_q.weight", "lacks 1 weights of the model, such as"),
        ("token_embd.weight", "holds no model: it lacks token_embd.weight"),
        ("output_norm.weight", "lacks 1 weights of the model, such as"),
    ],
)
def test_a_file_without_a_weight_is_refused(name: str, message: str, tmp_path: Path) -> None:
    """transformers would give the weight random values."""
    path = converted(llama(), tmp_path / "tiny.gguf", without=name)
    with pytest.raises(RopeExtendError, match=message):
        loaded(path)
    with pytest.raises(RopeExtendError, match=message):
        rx.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    """transformers' reader has no biases for this architecture."""
    model = llama(attention_bias=True)
    with pytest.raises(RopeExtendError, match=r"holds .* weights, .* would be lost"):
        loaded(converted(model, tmp_path / "tiny.gguf"))


def half(data: np.ndarray) -> np.ndarray:
    return data.view("<f2").astype(np.float32)


def q8_0(rows: np.ndarray) -> np.ndarray:
    """Blocks of 34 bytes: a scale in float16 and 32 numbers of 8 bits."""
    blocks = rows.reshape(-1, 34)
    return (half(blocks[:, :2].copy()) * blocks[:, 2:].view(np.int8)).reshape(len(rows), -1)


def q4_1(rows: np.ndarray) -> np.ndarray:
    """Blocks of 20 bytes: scale and minimum in float16; 16 bytes, the low halves of which come first."""
    blocks = rows.reshape(-1, 20)
    numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (half(blocks[:, :2].copy()) * numbers + half(blocks[:, 2:4].copy())).reshape(len(rows), -1)


@pytest.mark.parametrize(("kind", "decode"), [("Q8_0", q8_0), ("Q4_1", q4_1)])
def test_weights_are_dequantised(kind: str, decode: Callable[..., np.ndarray], tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    path = converted(model, tmp_path / "tiny.gguf", quantized=gguf.GGMLQuantizationType[kind])
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}
    found = loaded(path).state_dict()
    expected = decode(stored["blk.1.ffn_down.weight"])
    torch.testing.assert_close(
        found["model.layers.1.mlp.down_proj.weight"], torch.tensor(expected), rtol=1e-6, atol=0
    )
    pairs = decode(stored["blk.0.attn_k.weight"]).reshape(2, 8, 2, 64)  # neighbours, as llama.cpp rotates
    expected = pairs.swapaxes(1, 2).reshape(32, 64)  # halves, as transformers does
    torch.testing.assert_close(
        found["model.layers.0.self_attn.k_proj.weight"], torch.tensor(expected), rtol=1e-6, atol=0
    )
    step = (model.model.layers[1].mlp.down_proj.weight - found["model.layers.1.mlp.down_proj.weight"]).abs()
    assert 0 < step.max() < 0.02  # the weights are drawn with 0.02
    assert loaded(path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(llama(), tmp_path_factory.mktemp("gguf") / "plain.gguf")


TYPE, BY, FROM = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
ATTENTION = "rope.scaling.attn_factor"
ONE, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
    "attention_factor": 1.1386294361119891, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def longrope(short: list[float], long: list[float], window: int, attention: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": window, "attention_factor": attention,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "tables", "expected"),
    [
        ({}, {}, {}),
        ({TYPE: "none", BY: 4.0}, {}, {}),
        ({TYPE: "linear", BY: 0.0}, {}, {}),
        ({TYPE: "none", "rope.scale_linear": 2.0}, {}, {}),
        ({"rope.scale_linear": 2.0}, {}, LINEAR),
        ({BY: 2.0}, {}, LINEAR),
        ({BY: 2.0, FROM: 64}, {}, {**LINEAR, "original_max_position_embeddings": 64}),
        ({TYPE: "yarn", BY: 4.0, FROM: 32}, {}, YARN),
        ({TYPE: "linear", BY: 2.0, FROM: 64}, {ONE: [1.0, 3.0]}, longrope([2.0, 6.0], [2.0, 6.0], 64, 1.0)),
        ({FROM: 32, ATTENTION: 1.2}, {LONG: [2.0], SHORT: [1.0]}, longrope([1.0], [2.0], 32, 1.2)),
        ({TYPE: "longrope", BY: 4.0, FROM: 32}, {LONG: [2.0], SHORT: [1.0]}, longrope([4.0], [8.0], 32, 1.0)),
        ({TYPE: "none", BY: 4.0, FROM: 32}, {LONG: [2.0], SHORT: [1.0]}, longrope([1.0], [2.0], 32, 1.0)),
        ({TYPE: "longrope"}, {}, "'longrope' has no form"),
        ({ATTENTION: 1.5}, {}, "attn_factor 1.5 without a table"),
        ({TYPE: "yarn"}, {ONE: [1.0]}, "'yarn' has no form"),
        ({}, {LONG: [1.0]}, "only one of"),
        ({}, {ONE: [1.0, 5.0, 3.0]}, "does not say which window"),
    ],
)
def test_scaling_is_read_as_llama_cpp_reads_it_or_refused(
    keys: dict[str, Any], tables: dict[str, list[float]], expected: dict[str, Any] | str
) -> None:
    known = {"general.architecture": "llama", "llama.context_length": 128}
    metadata = Metadata({**known, **{f"llama.{k}": v for k, v in keys.items()}}, tables)
    if isinstance(expected, dict):
        assert rope_scaling(metadata) == expected
        return
    with pytest.raises(RopeExtendError, match=expected):
        rope_scaling(metadata)


@pytest.fixture(scope="module")
def bundled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    backend = tokenizer.backend_tokenizer
    keys = {"ggml.pre": "gpt-2", "ggml.add_bos_token": False}
    for name in ("bos", "eos"):
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            keys[f"ggml.{name}_token_id"] = token
    path = tmp_path_factory.mktemp("bundled") / "bundled.gguf"
    return converted(model, path, tokenizer=writes(backend, "gpt2", **keys))


@pytest.mark.slow
def test_it_is_converted_to_a_checkpoint(bundled_file: Path, tmp_path: Path) -> None:
    directory = rx.convert(bundled_file, tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(directory)
    expected = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    tokenizer, original = AutoTokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(MODEL_DIR)
    assert tokenizer(TEXT).input_ids == original(TEXT).input_ids
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(stock(ids).logits, expected(ids).logits)
    for file in directory.glob("*.json"):
        assert str(tmp_path) not in file.read_text(), file.name
        assert str(bundled_file.parent) not in file.read_text(), file.name
    with pytest.raises(RopeExtendError, match="overwrite"):
        rx.convert(bundled_file, directory)


@pytest.mark.slow
def test_a_run_starts_from_a_file(bundled_file: Path, tmp_path: Path) -> None:
    """Extended, fine-tuned, saved, loaded and measured without a checkpoint."""
    (tmp_path / "book.txt").write_text("The sea was calm and the ship lay still. " * 200)
    recipe = rx.Recipe(
        model=str(bundled_file), data=str(tmp_path / "book.txt"), output_dir=str(tmp_path / "run"),
        target_length=512, block_length=64, steps=1, gradient_accumulation=1, lora_rank=2,
    )  # fmt: skip
    rx.finetune(recipe)
    model = rx.load(tmp_path / "run")
    assert model.peft_config["default"].base_model_name_or_path == str(bundled_file)
    document = rx.Document("text", torch.arange(64))
    assert rx.perplexity(model, [document], [64]).ppl[64] > 1


def test_mistakes_are_named(tmp_path: Path, plain_file: Path) -> None:
    with pytest.raises(RopeExtendError, match=r"no such file: .*plane\.gguf.*Did you mean '.*plain\.gguf'"):
        pretrained(AutoConfig, str(plain_file.with_name("plane.gguf")))
    with pytest.raises(RopeExtendError, match=r"plain\.gguf .*rope-extend convert"):
        LoadOptions(quantize="4bit").empty(str(plain_file))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, or is it?")
    with pytest.raises(RopeExtendError, match=r"cannot read .*bad\.gguf as GGUF"):
        pretrained(AutoConfig, str(tmp_path / "bad.gguf"))
    with pytest.raises(RopeExtendError, match="nothing to convert"):
        rx.convert(MODEL_DIR, tmp_path / "out")
    part = converted(llama(), tmp_path / "part.gguf", **{"+split.count": 3})
    with pytest.raises(RopeExtendError, match="split into 3 files"):
        pretrained(AutoConfig, str(part))
    part.unlink()
    assert gguf_file(tmp_path) == tmp_path / "bad.gguf"
    (tmp_path / "bad.gguf").rename(tmp_path / "bad.GGUF")
    assert gguf_file(tmp_path) == tmp_path / "bad.GGUF"
    (tmp_path / "worse.gguf").touch()
    with pytest.raises(RopeExtendError, match="holds 2 GGUF files"):
        gguf_file(tmp_path)
    assert gguf_file(MODEL_DIR) is None
    assert gguf_file("meta-llama/Meta-Llama-3-8B") is None
