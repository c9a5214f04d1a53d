"""Methods that rotate distant pairs in another way: which engines compute them, and from which keys.

Only dual chunk attention has a key that others read, `dual_chunk_attention_config` of Qwen2.5-1M's config.
The facts come from the sources of the engines:

- SGLang, `layers/attention/dual_chunk_flashattention_backend.py`, `layers/rotary_embedding` and `models/`:
  the key turns the backend on (pull request 9032). It expects five rotations of each query, which three model
  classes give it. Without `original_max_position_embeddings`, a prefill looks up a factor that is None. With
  it, keys and the softmax have the factor `max(1, 0.1 ln(length / original) + 1)`. That is 1 up to this
  length, which is the extended window here. `chunk_size` is the largest distance S, and a chunk has
  `chunk_size - local_size` tokens.
- vLLM 0.9 and 0.10: `DUAL_CHUNK_FLASH_ATTN`, with the same keys, in four model classes. It came with pull
  request 11844, which the notes of release 0.9.0 list; earlier versions ignore the key. A chunk must be whole
  blocks of the cache, which have 16 tokens by default. vLLM 0.11 removed the backend (pull request 25351);
  what is left of the key in later versions computes nothing.
- llama.cpp, issue 4886: `--grp-attn-n` moves positions in the cache block by block, as its author says; that
  is another map than SelfExtend's. Its server has had no such option since pull request 9860.
- transformers keeps the key in a config, and ignores it.
"""

from __future__ import annotations

from typing import Any

from rope_extend.encodings import DualChunk, RemapEncoding
from rope_extend.models.stock_config import DUAL_CHUNK_KEY

FIRST_VLLM, LAST_VLLM = (0, 9), (0, 10)
"""The first and the last version of vLLM that compute dual chunk attention."""
VLLM_BLOCK = 16
"""Tokens of a block of vLLM's cache."""
FAMILIES = {
    "sglang": ("qwen2", "qwen2_moe", "qwen3_moe"),
    "vllm": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
"""The families whose model classes read the key."""


def served_keys(encoding: RemapEncoding, target_length: int) -> dict[str, Any]:
    """The keys in `config.json` from which engines compute a method; empty if there are none.

    Args:
        encoding: the method.
        target_length: the extended window, in tokens.
    """
    if not isinstance(encoding, DualChunk):
        return {}
    values = {
        "chunk_size": encoding.chunk + encoding.local,
        "local_size": encoding.local,
        "original_max_position_embeddings": target_length,
    }
    return {DUAL_CHUNK_KEY: values}


def remap_obstacle(encoding: RemapEncoding, target: str, model_type: str | None, version: str | None) -> str:
    """Why an engine does not compute a method, as a phrase; empty if it does.

    Args:
        encoding: the method.
        target: one of `TARGETS`.
        model_type: the family; None for one of Llama's shape.
        version: the version of the engine; None if it is not known.
    """
    if target == "llama.cpp":
        return "its only such map, --grp-attn-n, moves cached positions block by block, which is another one"
    if target not in FAMILIES or not isinstance(encoding, DualChunk):
        return "it rotates distant pairs of tokens in another way than near ones, inside attention"
    if target == "vllm" and (version is None or not FIRST_VLLM <= _numbers(version) <= LAST_VLLM):
        first, last = (".".join(map(str, numbers)) for numbers in (FIRST_VLLM, LAST_VLLM))
        then = (
            f"give that version if it is yours (--target-version {last})" if version is None else "use SGLang"
        )
        return (
            f"only vLLM {first} to {last} computes it, from {DUAL_CHUNK_KEY}, and earlier and later ones do "
            f"not; {then}"
        )
    if model_type not in FAMILIES[target]:
        return f"it reads {DUAL_CHUNK_KEY} in models of {', '.join(FAMILIES[target])} only"
    if target == "vllm" and encoding.chunk % VLLM_BLOCK:
        nearest = max(1, encoding.chunk // VLLM_BLOCK) * VLLM_BLOCK
        return f"a chunk must be whole blocks of its cache, of {VLLM_BLOCK} tokens each; use chunk={nearest}"
    return ""


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version, checked by `check_version`."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
