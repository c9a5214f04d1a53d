"""Tokens kept on disk under the content of the text they are from.

The key is a digest of the texts and of what decides how the tokenizer splits them. So neither a file that
moves nor one whose time stamp lies costs or changes anything, and a tokenizer that changes is noticed. Files
appear whole or not at all, and one that was damaged since is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

logger = logging.getLogger(__name__)

Ids = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids of one text, `[T]`."""

_FORMAT = "1"
"""Part of every key: another number where files are written otherwise."""


class TokenCache:
    """A directory of tokenised texts.

    Args:
        directory: the cache that it is part of; that of `datasets` if not given. Nothing is kept where
            caching is switched off there.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        base = Path(datasets.config.HF_DATASETS_CACHE if directory is None else directory)
        self.directory = base / "rope_extend" / "tokens" if datasets.is_caching_enabled() else None

    def get(self, key: str) -> list[Ids] | None:
        """The ids of each text; None if they are not there, or not as they were written."""
        if self.directory is None or not (path := self._path(key)).exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                lengths, ids = file.get_tensor("lengths"), file.get_tensor("ids")
                expected = (file.metadata() or {}).get("sha256")
        except (OSError, SafetensorError) as error:
            logger.warning("the token cache %s cannot be read (%s) and is made again", path, error)
            return None
        if expected != _digest(lengths, ids):
            logger.warning("the token cache %s is not what was written and is made again", path)
            return None
        return np.split(ids, np.cumsum(lengths)[:-1])

    def put(self, key: str, texts: Sequence[Ids]) -> None:
        """Keep the ids of each text; where that cannot be done, say so and go on."""
        if self.directory is None:
            return
        lengths = np.array([len(ids) for ids in texts], dtype=np.int64)
        ids = np.concatenate([*texts, np.zeros(0, dtype=np.int32)]).astype(np.int32)
        path = self._path(key)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # several runs may write the same
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"lengths": lengths, "ids": ids}, partial, {"sha256": _digest(lengths, ids)})
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            logger.warning("the tokens are not kept for next time: cannot write %s: %s", path, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / key[:2] / f"{key}.safetensors"


def _digest(lengths: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(lengths).data)
    digest.update(np.ascontiguousarray(ids).data)
    return digest.hexdigest()


def cache_key(texts: Sequence[str], tokenizer_content: str) -> str:
    """64 hex digits that name these texts, in this order, as this tokenizer splits them."""
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer_content} {len(texts)}".encode())
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def tokenizer_content(tokenizer: Any) -> str:
    """Digest of what decides how a tokenizer splits text, equal in every process that loads the same one."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Left behind by whichever call came last, and overridden by the next one.
        state.pop("truncation", None)
        state.pop("padding", None)
        digest.update(json.dumps(state, sort_keys=True).encode())
        digest.update(str(getattr(tokenizer, "split_special_tokens", False)).encode())
    else:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            for file in sorted(Path(directory).rglob("*")):
                if file.is_file():
                    digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
