"""What transformers drops of a GGUF file, against the model that the file was made of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FamilyCase, llama, tiny_model
from gguf_writer import converted, of_family, without_weights
from test_gguf_models import loaded
from test_gguf_tokenizer import byte_level, writes
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_extend as rx
from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_metadata import Metadata
from rope_extend.models.gguf_scaling import llama3_of, rope_scaling
from rope_extend.models.loading import pretrained

_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 16, "attn_implementation": "eager"}
_GEMMA_KEYS = {
    "attention.key_length": 24, "attention.value_length": 24, "attention.sliding_window": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
EPSILON, RMS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
THETA = {"rope_type": "default", "rope_theta": 1e6}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "starcoder2": (
        {"rope_parameters": THETA, "norm_epsilon": 1e-3},
        {"rope.freq_base": 1e6, EPSILON: 1e-3},
    ),
    "stablelm": (
        {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}, "layer_norm_eps": 1e-3},
        {"rope.freq_base": 1e6, EPSILON: 1e-3, "rope.dimension_count": 8},
    ),
    "nemotron": (
        {"norm_eps": 1e-2},
        {"rope.freq_base": 1e4, EPSILON: 1e-2, "rope.dimension_count": 8},
    ),
    "qwen3": (
        {"head_dim": 24, "rope_parameters": THETA},
        {"attention.key_length": 24, RMS: 1e-6, "rope.freq_base": 1e6},
    ),
    "phi3": (
        {"sliding_window": 8, "pad_token_id": 0},
        {RMS: 1e-5, "attention.sliding_window": 8},
    ),
    "gemma2": (
        {**_GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
        {**_GEMMA_KEYS, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "gemma3_text": (
        {
            **_GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        {
            **_GEMMA_KEYS, "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4,
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
    ),
}  # fmt: skip
"""The config of a tiny model by its family, and the keys of its file besides the sizes."""
OFFSET = ("nemotron", "gemma2", "gemma3_text")
"""Their files hold the weights of norms plus 1."""


@pytest.mark.parametrize("family", CASES)
def test_the_model_is_that_of_the_file(family: str, tmp_path: Path) -> None:
    config, keys = CASES[family]
    model = tiny_model(FamilyCase(family, config))
    path = of_family(model, tmp_path / "tiny.gguf", keys, norm_offset=float(family in OFFSET))
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        found, expected = loaded(path)(ids).logits, model(ids).logits
    scale = expected.abs().max()  # an offset of 1 costs weights of norms one rounding of float32
    torch.testing.assert_close(found, expected, rtol=0, atol=float(1e-5 * scale))


def llama3_divisors(dim: int, base: float, factor: float, window: int) -> list[float]:
    """As llama.cpp's converter computes them: plain frequencies by those of transformers, in float32."""
    config = LlamaConfig(
        head_dim=dim,
        max_position_embeddings=round(factor * window),
        rope_parameters={
            "rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": window,
        },
    )  # fmt: skip
    table, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (plain / table).tolist()


@pytest.mark.parametrize(
    ("dim", "base", "factor", "window"),
    [
        (128, 5e5, 8.0, 8192),  # Llama 3.1, 3.3
        (64, 5e5, 32.0, 8192),  # Llama 3.2 1B
        (128, 1e6, 4.0, 32_768),
        (128, 5e5, 16.0, 9_973),
    ],
)
def test_the_parameters_of_llama_3_are_found_in_its_divisors(
    dim: int, base: float, factor: float, window: int
) -> None:
    divisors = llama3_divisors(dim, base, factor, window)
    expected = {
        "rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": window,
    }  # fmt: skip
    assert llama3_of(divisors, base) == expected
    for index in (5, dim // 4 + 6, dim // 2 - 1):  # kept, on the ramp or beyond it, divided by the factor
        assert llama3_of([d * (1.01 if i == index else 1) for i, d in enumerate(divisors)], base) is None
    assert llama3_of([1.0] * (dim // 2), base) is None


def test_a_llama_3_has_the_window_of_its_pretraining(tmp_path: Path) -> None:
    """So the default extension starts where that of the checkpoint does."""
    divisors = llama3_divisors(16, 1e4, 8.0, 32)
    model, table = llama(max_position_embeddings=256), {"rope_freqs.weight": divisors}
    path = converted(model, tmp_path / "tiny.gguf", tables=table)
    info = rx.info(path)
    assert (info.shape.trained_length, info.window) == (32, 256)
    assert info.encoding == "llama3(factor=8)"
    model = loaded(path)
    patch = rx.extend(model, 512, method="yarn")
    assert (str(patch.encoding), patch.shape.trained_length) == ("yarn(factor=16)", 32)


def test_other_divisors_need_the_window(tmp_path: Path) -> None:
    divisors = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0]
    model, table = llama(max_position_embeddings=256), {"rope_freqs.weight": divisors}
    with pytest.raises(RopeExtendError, match="does not say which window"):
        rx.info(converted(model, tmp_path / "unknown.gguf", tables=table))
    keys = {"rope.scaling.original_context_length": 64}
    assert rx.info(converted(model, tmp_path / "t.gguf", tables=table, **keys)).shape.trained_length == 64


def test_a_file_with_linear_scaling_is_loaded(tmp_path: Path) -> None:
    model = llama(max_position_embeddings=128)
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    window = {"rope.scaling.original_context_length": 32}
    stated = converted(model, tmp_path / "stated.gguf", **keys, **window)
    assert rx.info(stated).shape.trained_length == 32
    found = loaded(stated)
    assert rx.info(found).shape.trained_length == 32
    reference = llama(max_position_embeddings=128, rope_parameters={
        "rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0
    })  # fmt: skip
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, reference(ids).logits)
    rx.extend(found, 512, trained_length=64, method="yarn")  # a window of the user's own choice
    stock = AutoModelForCausalLM.from_pretrained(rx.save(found, tmp_path / "saved"))
    assert rx.info(stock).shape.trained_length == 64
    unstated = converted(model, tmp_path / "unstated.gguf", **keys)
    with pytest.raises(RopeExtendError, match="Give trained_length="):
        rx.info(unstated)
    assert rx.info(unstated, trained_length=64).shape.trained_length == 64
    assert rx.info(loaded(unstated), trained_length=64).shape.trained_length == 64


def test_the_window_of_a_phi_3_is_that_of_the_file(tmp_path: Path) -> None:
    """Its config has another attribute for it, 4,096 by default, which decides between the two lists."""
    short, long = [1.0] * 8, [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0]
    scaling = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": 16, "attention_factor": 1.25,
    }  # fmt: skip
    windows = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    model = tiny_model(FamilyCase("phi3", {**windows, "rope_parameters": scaling, "pad_token_id": 0}))
    keys = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    tables = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    padding = {"+tokenizer.ggml.padding_token_id": 0}
    path = converted(model, tmp_path / "tiny.gguf", tables=tables, **keys, **padding)
    found, ids = loaded(path), torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    with pytest.raises(RopeExtendError, match="scales its positions"):
        rx.info(converted(model, tmp_path / "yarn.gguf", **padding, **{"rope.scaling.type": "yarn"}))


def test_the_ramp_of_yarn_is_that_of_llama_cpp(caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp, measured, computes a Llama with 32 and 1 whatever these keys say."""
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_slow": 2.0}
    known = {"general.architecture": "llama", "llama.context_length": 128}
    with caplog.at_level(logging.WARNING):
        found = rope_scaling(
            Metadata({**known, **{f"llama.{key}": value for key, value in keys.items()}}, {})
        )
    assert (found["beta_fast"], found["beta_slow"]) == (32.0, 1.0)
    assert "yarn_beta_slow 2 is ignored" in caplog.text


_SIZES = {
    "context_length": 8192, "feed_forward_length": 36_864, "attention.head_count": 32,
    "attention.head_count_kv": 16, "attention.key_length": 128, "attention.value_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


WIDTHS = {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 160}


@pytest.mark.parametrize(
    ("arch", "layers", "width", "keys", "expected"),
    [
        # `query_pre_attn_scalar` of the 27B checkpoints is that of the hidden size.
        ("gemma2", 46, 4608, {}, {"query_pre_attn_scalar": 144, "head_dim": 128}),
        ("gemma2", 42, 4608, {}, {"query_pre_attn_scalar": 128, "head_dim": 128}),
        ("gemma3", 62, 5376, {}, {"query_pre_attn_scalar": 168, "head_dim": 128}),
        ("gemma3", 48, 4096, {}, {"query_pre_attn_scalar": 128, "head_dim": 128}),
        (
            "qwen2moe", 2, 256, WIDTHS,
            {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
        ),
    ],
)  # fmt: skip
def test_sizes_that_a_file_says_by_other_keys_are_read(
    arch: str, layers: int, width: int, keys: dict[str, int], expected: dict[str, int], tmp_path: Path
) -> None:
    sizes = {**_SIZES, "block_count": layers, "embedding_length": width, "vocab_size": 256, **keys}
    path = without_weights(tmp_path / "sizes.gguf", arch, ("token_embd.weight",), **sizes)
    config = pretrained(AutoConfig, str(path))
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_gemma_4_has_a_config(tmp_path: Path) -> None:
    """Its layers differ in the width of a head."""
    keys = {**_SIZES, "block_count": 6, "embedding_length": 256, "rope.freq_base": 5e5, "vocab_size": 256}
    path = without_weights(tmp_path / "gemma.gguf", "gemma4", ("token_embd.weight",), **keys)
    config = pretrained(AutoConfig, str(path))
    assert config.rope_parameters["full_attention"]["rope_theta"] == 5e5
    tensors = ("token_embd.weight", "rope_freqs.weight")
    with pytest.raises(RopeExtendError, match="of the family gemma4_text is not read"):
        pretrained(AutoConfig, str(without_weights(path.with_name("table.gguf"), "gemma4", tensors, **keys)))


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"+general.type": "adapter"}, ("blk.0.attn_q.weight.lora_a",), "general.type is 'adapter'"),
        ({"+general.type": "mmproj"}, ("v.patch_embd.weight",), "general.type is 'mmproj'"),
        ({}, ("blk.0.attn_q.weight",), r"lacks token_embd\.weight"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    keys: dict[str, Any], tensors: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = without_weights(tmp_path / "part.gguf", "llama", tensors, **keys)
    for read in (lambda: rx.info(path), lambda: loaded(path)):
        with pytest.raises(RopeExtendError, match=message):
            read()


def test_what_transformers_cannot_read_leads_to_the_original(tmp_path: Path) -> None:
    path = converted(llama(head_dim=32), tmp_path / "wide.gguf", **{"attention.head_count": 4})
    with pytest.raises(RopeExtendError, match="Use the original checkpoint"):
        loaded(path)
    path = without_weights(tmp_path / "bert.gguf", "bert", ("token_embd.weight",))
    with pytest.raises(RopeExtendError, match="Use the original checkpoint"):
        rx.info(path)


@pytest.mark.parametrize(
    ("value", "dtype", "limit"), [(float("nan"), torch.float32, "float32"), (1e6, torch.float16, "float16")]
)
def test_weights_that_are_not_finite_are_not_converted(
    value: float, dtype: torch.dtype, limit: str, tmp_path: Path
) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = value
    path = file_of(model, tmp_path / "tiny.gguf", "gpt-2")
    with pytest.raises(RopeExtendError, match=rf"mlp\.up_proj\.weight holds values.* in torch\.{limit}"):
        rx.convert(path, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def file_of(model: Any, path: Path, words: str, names: dict[str, str] | None = None, **keys: Any) -> Path:
    """A file with a tokenizer of its own, whatever the model's vocabulary."""
    values = {"ggml.pre": words, "ggml.bos_token_id": 1, "ggml.eos_token_id": 0, **keys}
    return converted(model, path, tokenizer=writes(byte_level(words), "gpt2", names, **values))


def qwen2(vocabulary: int) -> Any:
    return tiny_model(FamilyCase("qwen2", {"vocab_size": vocabulary}))


def test_a_tokenizer_that_stock_reads_otherwise_is_not_converted(tmp_path: Path) -> None:
    """transformers reads the tokenizer of each Qwen2 as Qwen's."""
    path = file_of(qwen2(400), tmp_path / "tiny.gguf", "gpt-2")
    with pytest.raises(
        RopeExtendError, match=r"its Qwen2Tokenizer, which reads .* otherwise than tiny\.gguf"
    ):
        rx.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stock_adds_no_token_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As DeepSeek-R1-Distill-Qwen, which has Qwen's words and no `<|endoftext|>` to pad with."""
    names = {"<|endoftext|>": "<end>", "<|im_start|>": "<begin>"}
    pattern = {"ggml.pre": "deepseek-r1-qwen"}
    model = qwen2(byte_level("qwen2").get_vocab_size())
    path = file_of(model, tmp_path / "tiny.gguf", "qwen2", names, **pattern)
    with caplog.at_level(logging.WARNING):
        stock = AutoTokenizer.from_pretrained(rx.convert(path, tmp_path / "out"))
    ours = pretrained(AutoTokenizer, str(path))
    assert len(stock) == len(ours)
    assert (stock.unk_token, stock.pad_token, stock.eos_token) == (None, None, "<end>")
    assert stock("It was <|endoftext|>").input_ids == ours("It was <|endoftext|>").input_ids


def test_an_adapter_next_to_the_file_is_refused(tmp_path: Path) -> None:
    """transformers would load it too, and fails."""
    path = converted(llama(), tmp_path / "tiny.gguf")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(RopeExtendError, match=r"an adapter lies next to tiny\.gguf, in .*; move one of them"):
        loaded(path)
