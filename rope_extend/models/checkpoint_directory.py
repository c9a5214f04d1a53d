"""A checkpoint's directory by the names of its files: the one list of them, and what a directory is.

Lists are patterns of `fnmatch`, which the hub's client takes as well. What may be saved next to a model or
an adapter has its name here, and is then staged, replaced, published and downloaded with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase

CONFIG, ADAPTER_CONFIG, RECORD_NAME = "config.json", "adapter_config.json", "rope_extend.json"
LEARNED_FILE = "encoding.safetensors"
"""What an encoding has learned."""
ADAPTER_WEIGHTS, INDEX_NAME = "adapter_model.safetensors", "model.safetensors.index.json"
CARD_NAME, PICTURE_NAME, TOKENIZER_CONFIG = "README.md", "perplexity.png", "tokenizer_config.json"
CONFIGS = (CONFIG, ADAPTER_CONFIG, INDEX_NAME)
"""The files that, together with the weights, decide what is computed."""

_SHARD = f"-{'[0-9]' * 5}-of-{'[0-9]' * 5}"
WEIGHTS = (
    LEARNED_FILE,
    *(f"{name}{shard}.safetensors" for name in ("model", "adapter_model") for shard in ("", _SHARD)),
)
"""What a loader reads as weights. Files of other names belong to the user."""
CHECKPOINT = (
    *WEIGHTS, *CONFIGS, RECORD_NAME, "generation_config.json", "adapter_model.bin",
    "pytorch_model.bin", f"pytorch_model{_SHARD}.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""The files of a model or an adapter, including those of former formats. A new one replaces them all."""
TOKENIZER = (
    *(f"{name}.json" for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens")),
    "vocab.json", "chat_template.json", "chat_template.jinja", "merges.txt", "vocab.txt", "tokenizer.model",
    "sentencepiece.model", "sentencepiece.bpe.model", "spiece.model", "spm.model",
)  # fmt: skip
"""The files of a tokenizer. A checkpoint that brings its own replaces them all, since a loader mixes them."""
NOTICES = ("LICENSE*", "NOTICE*")
PUBLISHED = (
    *CHECKPOINT, *TOKENIZER, *NOTICES, CARD_NAME, PICTURE_NAME,
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""What is uploaded. A directory may hold other JSON, texts and pictures, which belong to the user."""
DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *NOTICES)
"""What is downloaded: never a pickle, never code."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name is one of a list."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_model(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a model of transformers."""
    return os.path.exists(os.path.join(directory, CONFIG))


def is_adapter(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds an adapter of peft. It may hold its base model as well."""
    return os.path.exists(os.path.join(directory, ADAPTER_CONFIG))


def is_recorded(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds the record of an encoding, so that rope_extend wrote it."""
    return os.path.exists(os.path.join(directory, RECORD_NAME))
