"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


def add_tokens(writer: Any, count: int) -> None:
    """A vocabulary that splits no text."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([gguf.TokenType.NORMAL] * count)


def writes(
    tokenizer: Any, kind: str, names: dict[str, str] | None = None, **keys: Any
) -> Callable[[Any, int], None]:
    """Adds a tokenizer to a file, as llama.cpp's converter does; `names` are other texts of some tokens."""
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    tokens = [(names or {}).get(token, token) for token in tokens]

    def write(writer: Any, _count: int) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        control = gguf.TokenType.CONTROL
        writer.add_token_types([control if t[0] == "<" and len(t) > 1 else 1 for t in tokens])
        if kind == "gpt2":
            writer.add_token_merges([" ".join(pair) for pair in merges])
        else:
            ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
            writer.add_token_scores([-float(ranks.get(token, -1)) for token in tokens])
        _add_keys(writer, {f"+tokenizer.{key}": value for key, value in keys.items()})

    return write


def converted(
    model: Any,
    path: Path,
    *,
    quantized: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: Callable[[Any, int], None] = add_tokens,
    without: str | None = None,
    tables: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """The file that llama.cpp's converter writes for a Llama, Qwen3 or Phi-3 model without scaling.

    Vectors, and by default all weights, are float32. Llama's queries and keys are stored with the two
    channels of a pair side by side. `tokenizer` adds the vocabulary. The tensor `without` is left out, and
    the `tables` of divisors are added.
    """
    config = model.config
    arch = config.model_type
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    writer, names = gguf.GGUFWriter(path, arch), gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rotated = getattr(config, "partial_rotary_factor", None) or config.rope_parameters.get(
        "partial_rotary_factor", 1
    )
    writer.add_rope_dimension_count(int(head_dim * rotated))
    if "rope.freq_base" not in keys:
        writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokenizer(writer, config.vocab_size)
    _add_keys(writer, keys)
    for name, divisors in (tables or {}).items():
        writer.add_tensor(name, np.asarray(divisors, np.float32))
    for name, weight in model.state_dict().items():
        inner, suffix = name.rsplit(".", 1)
        stored = f"{names.get_name(inner)}.{suffix}"
        if stored == without:
            continue
        data = weight.float().numpy()
        if writer.arch == "llama" and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else kv
            data = data.reshape(count, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        data = np.ascontiguousarray(data)
        kind = quantized if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(data, kind), raw_dtype=kind)
    return _written(writer, path)


def without_weights(path: Path, arch: str, tensors: tuple[str, ...] = (), **keys: Any) -> Path:
    """A file with keys, and with tensors of ones: `tensors`, and one of each of its layers."""
    writer = gguf.GGUFWriter(path, arch)
    _add_keys(writer, keys)
    layers = range(keys.get("block_count", 0))
    for name in (*tensors, *(f"blk.{layer}.attn_norm.weight" for layer in layers)):
        writer.add_tensor(name, np.ones(2**16 if name in tensors else 4, np.float32))
    return _written(writer, path)


def _add_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    """Keys below the architecture's name, and after a `+`, in full."""
    for key, value in keys.items():
        name = key[1:] if key[0] == "+" else f"{writer.arch}.{key}"
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
