"""What a GGUF file says besides its weights, and the one check of all of it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rope_extend.checks import Kind, integer, number, such
from rope_extend.encodings.core.shapes import MAX_FACTOR, MAX_LENGTH
from rope_extend.errors import RopeExtendError

LIST, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""The tensors of divisors of the frequencies."""
_EMBEDDING = "token_embd.weight"
ADVICE = "Use the original checkpoint"
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


@dataclass(frozen=True)
class Metadata:
    """What a GGUF file says besides its weights.

    Attributes:
        keys: all keys and values, but for long lists and lists of texts.
        tables: divisors of the frequencies, `[dim / 2]`, by the tensor's name.
        weights: the number of values in all other tensors.
        blocks: the number of layers that have tensors.
        embeds: whether the file has an embedding of tokens, as every language model has.
        lists: the reader's fields with the other lists, which take seconds to read; see `field_value`.
    """

    keys: Mapping[str, Any]
    tables: Mapping[str, list[float]]
    weights: int = 0
    blocks: int = 0
    embeds: bool = True
    lists: Mapping[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The architecture, which is also the prefix of its keys."""
        return str(self.keys.get("general.architecture", ""))

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value below the architecture's name, such as `rope.freq_base`."""
        return self.keys.get(f"{self.architecture}.{key}", default)


def gguf_metadata(path: Path) -> Metadata:
    """Keys and tables of a GGUF file, checked: it holds a whole model."""
    return _metadata(*state(path))


def state(path: Path) -> tuple[Path, int, int]:
    """What a file's contents are remembered by: its path, the time of its last change, and its size."""
    status = path.stat()
    return path.resolve(), status.st_mtime_ns, status.st_size


def gguf_reader(path: Path) -> Any:
    """The reader of the package gguf for a file, with `field_value` for its fields."""
    try:
        import_module("gguf")
    except ImportError as error:
        raise RopeExtendError(f"reading {path.name} needs the package gguf: pip install gguf") from error
    try:
        return _skipping_reader()(path)
    except Exception as error:  # the reader raises what the damage leads to
        raise RopeExtendError(f"cannot read {path} as GGUF ({type(error).__name__}: {error})") from error


_LONG = 1024


@cache
def _skipping_reader() -> Any:
    """The class of a reader that steps over lists of texts, and over lists of `_LONG` numbers and more.

    Such a list is one part of its field, the last, and `field.data` is empty. The package's own reader makes
    two arrays of each of the 300,000 texts of a large vocabulary, which takes ten seconds.
    """
    gguf: Any = import_module("gguf.gguf_reader")
    kinds = gguf.GGUFValueType

    class SkippingReader(gguf.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == kinds.ARRAY:
                inner, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
                kind, count, start = kinds(inner[0]), int(length[0]), orig_offs + 12
                number, text = self.gguf_scalar_to_np.get(kind), kind == kinds.STRING
                if text:
                    size, contents, end = f"{length.dtype.str[0]}Q", memoryview(self.data), start
                    for _ in range(count):
                        end += 8 + struct.unpack_from(size, contents, end)[0]
                    number, count = np.uint8, end - start
                if text or (number is not None and count >= _LONG):
                    part = self._get(start, number, count)
                    return 12 + part.nbytes, [inner, length, part], [], [kinds.ARRAY, kind]
            return super()._get_field_parts(orig_offs, raw_type)

    return SkippingReader


@contextmanager
def lists_skipped() -> Iterator[None]:
    """Let transformers read no vocabulary within the context: config and weights need only its length."""
    gguf: Any = import_module("gguf")

    def reader(path: str) -> Any:
        found = gguf_reader(Path(path))
        words, kind = found.get_field("tokenizer.ggml.tokens"), gguf.GGUFValueType.UINT64
        if words is not None:
            name = f"{found.get_field('general.architecture').contents()}.vocab_size"
            length = gguf.ReaderField(words.offset, name, [words.parts[-2]], [0], [kind])
            found.fields.setdefault(name, length)
        return found

    before, gguf.GGUFReader = gguf.GGUFReader, reader
    try:
        yield
    finally:
        gguf.GGUFReader = before


@lru_cache(maxsize=2)
def _metadata(path: Path, _changed: int, _size: int) -> Metadata:
    reader = gguf_reader(path)
    try:
        lists = {name: entry for name, entry in reader.fields.items() if _is_skipped(entry)}
        keys = {name: field_value(entry) for name, entry in reader.fields.items() if name not in lists}
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
        tables = {
            name: [float(value) for value in tensors[name].data]
            for name in (LIST, SHORT, LONG)
            if name in tensors
        }
        metadata = Metadata(
            keys,
            tables,
            weights=sum(int(tensor.n_elements) for name, tensor in tensors.items() if name not in tables),
            blocks=len({match[1] for name in tensors if (match := _BLOCK.match(name))}),
            embeds=_EMBEDDING in tensors,
            lists=lists,
        )
    except Exception as error:
        raise RopeExtendError(f"cannot read {path} as GGUF ({type(error).__name__}: {error})") from error
    _check(path, metadata)
    return metadata


def _is_skipped(entry: Any) -> bool:
    return len(entry.types) == 2 and not entry.data


def field_value(entry: Any, *, raw: bool = False) -> Any:
    """The value of a key. A token need not be valid UTF-8: with `raw`, texts are bytes."""
    data, skipped = entry.parts[-1], _is_skipped(entry)
    if entry.types[-1].name != "STRING":
        return data.tolist() if skipped else entry.contents()
    texts, end, data = list[bytes](), 0, data.tobytes()
    while skipped and end < len(data):
        start = end + 8
        end = start + struct.unpack_from(f"{entry.parts[-2].dtype.str[0]}Q", data, end)[0]
        texts.append(data[start:end])
    values = [text if raw else text.decode("utf-8", "replace") for text in (texts if skipped else [data])]
    return values if skipped else values[0]


_FACTOR = such("0 or a factor", lambda value: value == 0 or number(1, MAX_FACTOR).parse(value) >= 1)
_NUMBERS: Mapping[str, Kind] = {
    "context_length": integer(1, MAX_LENGTH), "attention.layer_norm_rms_epsilon": number(0, 1, above=True),
    "rope.freq_base": number(1, above=True), "rope.scale_linear": _FACTOR, "rope.scaling.factor": _FACTOR,
    "rope.scaling.attn_factor": number(0, MAX_FACTOR),
    "rope.scaling.original_context_length": integer(0, MAX_LENGTH),
}  # fmt: skip
"""The values of keys below the architecture's name that would mislead silently."""


def _check(path: Path, metadata: Metadata) -> None:
    """Refuse a file that holds no whole model, and numbers with which no model computes anything."""
    keys, architecture = metadata.keys, metadata.architecture
    if "general.architecture" not in keys:
        raise RopeExtendError(f"{path} names no architecture; it holds no model")
    if (kind := keys.get("general.type", "model")) != "model":
        raise RopeExtendError(
            f"{path.name} holds no model: its general.type is {kind!r}. Give the file of the model that it "
            "belongs to"
        )
    if keys.get("split.count", 1) not in (0, 1):
        raise RopeExtendError(
            f"{path} is one part of a model that is split into {keys['split.count']} files, which is not "
            "supported. Join them with llama.cpp's llama-gguf-split --merge"
        )
    if not metadata.embeds:
        raise RopeExtendError(f"{path.name} holds no model: it lacks {_EMBEDDING}. {ADVICE}")
    # A file with fewer layers than it says would be a model of any size before a weight is missed.
    numbers = {**_NUMBERS, "block_count": integer(1, max(1, metadata.blocks))}
    try:
        for name, check in numbers.items():
            if (value := metadata.of_architecture(name)) is not None:
                check(path.name, f"{architecture}.{name}", value)
        for name, table in metadata.tables.items():
            for value in table:
                number(0, above=True)(path.name, name, value)
    except RopeExtendError as error:
        raise RopeExtendError(f"{error}. {ADVICE}") from error
