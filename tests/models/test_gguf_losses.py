"""What transformers drops of a GGUF file, against the model that the file was made of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FamilyCase, llama, stock, tiny_model
from gguf_writer import converted, without_weights, writes
from test_gguf_models import loaded
from test_gguf_tokenizer import byte_level
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_scaling import llama3_of
from rope_extend.models.loading import pretrained


def llama3_divisors(dim: int, base: float, factor: float, window: int) -> list[float]:
    """As llama.cpp's converter computes them: plain frequencies by those of transformers, in float32."""
    scaled = stock("llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    table, _ = scaled(rx.RopeShape(dim, base, window), window)
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return (plain / torch.tensor(table)).tolist()


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
    path = without_weights(tmp_path / "gemma.gguf", "gemma2", ("token_embd.weight",))
    with pytest.raises(
        RopeExtendError, match=r"'gemma2', and .* for llama, qwen2, qwen3 only\. Use the original"
    ):
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
