"""What a GGUF file says besides its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError

LIST, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""The tensors of divisors of the frequencies."""
_EMBEDDING = "token_embd.weight"
ADVICE = "Use the original checkpoint"


@dataclass(frozen=True)
class Metadata:
    """What a GGUF file says besides its weights.

    Attributes:
        keys: all keys and values.
        tables: divisors of the frequencies, `[dim / 2]`, by the tensor's name.
        weights: the number of values in all other tensors.
        embeds: whether the file has an embedding of tokens, as every language model has.
    """

    keys: Mapping[str, Any]
    tables: Mapping[str, list[float]]
    weights: int = 0
    embeds: bool = True

    @property
    def architecture(self) -> str:
        """The architecture, which is also the prefix of its keys."""
        return str(self.keys.get("general.architecture", ""))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value below the architecture's name, such as `rope.freq_base`."""
        return self.keys.get(f"{self.architecture}.{key}", default)


def gguf_metadata(path: Path) -> Metadata:
    """Keys and tables of a GGUF file.

    Raises:
        RopeExtendError: the package gguf is not installed, or this is no GGUF file.
    """
    return _metadata(*state(path))


def state(path: Path) -> tuple[Path, int, int]:
    """What a file's contents are remembered by: its path, the time of its last change, and its size."""
    status = path.stat()
    return path.resolve(), status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _metadata(path: Path, _changed: int, _size: int) -> Metadata:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RopeExtendError(
            f"reading {path.name} needs the package gguf: pip install 'rope_extend[gguf]'"
        ) from error
    try:
        reader = GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
        tables = {
            tensor.name: [float(value) for value in tensor.data]
            for tensor in reader.tensors
            if tensor.name in (LIST, SHORT, LONG)
        }
        weights = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in tables)
        embeds = any(tensor.name == _EMBEDDING for tensor in reader.tensors)
    except Exception as error:  # the reader raises what the damage leads to
        raise RopeExtendError(f"cannot read {path} as GGUF ({type(error).__name__}: {error})") from error
    if "general.architecture" not in keys:
        raise RopeExtendError(f"{path} names no architecture; it holds no model")
    if keys.get("split.count", 1) > 1:
        raise RopeExtendError(
            f"{path} is one part of a model that is split into {keys['split.count']} files, which is not "
            "supported. Join them with llama.cpp's llama-gguf-split --merge"
        )
    return Metadata(keys, tables, weights, embeds)


def check_is_model(path: Path, metadata: Metadata) -> None:
    """Refuse a file that belongs to a model and is none, before a model is made for it.

    Raises:
        RopeExtendError: it is an adapter, a projector or a matrix of importance, or holds no weights.
    """
    kind = metadata.keys.get("general.type", "model")
    if kind != "model":
        raise RopeExtendError(
            f"{path.name} holds no model: its general.type is {kind!r}. Give the file of the model that it "
            "belongs to"
        )
    if not metadata.embeds:
        raise RopeExtendError(f"{path.name} holds no model: it lacks {_EMBEDDING}. {ADVICE}")
