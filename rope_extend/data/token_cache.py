"""A cache of tokens on disk, keyed by the content of the texts.

The key is a digest of the texts and of everything that decides how the tokenizer splits them. So a moved file
or a wrong time stamp changes nothing, and a changed tokenizer is noticed. Files are written whole or not at
all, and a damaged file is written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rope_extend.files import replacing

logger = logging.getLogger(__name__)

Ids = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids of one text, `[T]`."""

_FORMAT = "3"
"""Part of every key; changes with the format of the files, and with what is done to the tokens."""

_IRRELEVANT = ("chat_template", "is_local", "local_files_only", "model_max_length", "name_or_path")
"""Settings in `tokenizer_config.json` that do not change how text is split. Some tell how it was loaded."""


class TokenCache:
    """A directory of tokenised texts.

    Args:
        directory: parent directory of the cache; the cache of `datasets` if not given. Nothing is kept if
            caching is disabled in `datasets`.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        import datasets  # loads pandas and pyarrow

        base = Path(datasets.config.HF_DATASETS_CACHE if directory is None else directory)
        self.directory = base / "rope_extend" / "tokens" if datasets.is_caching_enabled() else None

    def get(self, key: str) -> list[Ids] | None:
        """The ids of each text; None if they are missing or damaged."""
        if self.directory is None or not (path := self._path(key)).exists():
            return None
        try:
            with np.load(path) as file:  # a zip file, which has a checksum of each array
                lengths, ids = file["lengths"], file["ids"]
        except Exception as error:  # whatever is wrong with the file, the texts are at hand
            logger.warning("the token cache %s is damaged (%s); it is written again", path, error)
            return None
        return np.split(ids, np.cumsum(lengths)[:-1])

    def put(self, key: str, texts: Sequence[Ids]) -> None:
        """Keep the ids of each text; if they cannot be written, log a warning."""
        if self.directory is None:
            return
        lengths = np.array([len(ids) for ids in texts], dtype=np.int64)
        ids = np.concatenate([*texts, np.zeros(0, dtype=np.int32)]).astype(np.int32)
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial, partial.open("wb") as file:  # several runs may write the same file
                np.savez(file, lengths=lengths, ids=ids)
        except OSError as error:
            how = "the texts will be tokenised again next time"
            logger.warning("cannot write the token cache %s: %s; %s", path, error, how)

    def _path(self, key: str) -> Path:
        assert self.directory is not None
        return self.directory / key[:2] / f"{key}.npz"


def cache_key(texts: Sequence[str], tokenizer_content: str) -> str:
    """64 hex digits that identify these texts, in this order, and the tokenizer."""
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer_content} {len(texts)}".encode())
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def tokenizer_content(tokenizer: Any) -> str:
    """Digest of what decides how a tokenizer splits text; equal in every process that loads the same one."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Settings of the last call, which the next call overrides.
        state.pop("truncation", None)
        state.pop("padding", None)
        digest.update(json.dumps(state, sort_keys=True).encode())
        digest.update(str(getattr(tokenizer, "split_special_tokens", False)).encode())
    else:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            for file in sorted(Path(directory).rglob("*")):
                if file.is_file() and file.suffix != ".jinja":  # a chat template
                    digest.update(file.name.encode() + _relevant(file))
    return digest.hexdigest()


def _relevant(file: Path) -> bytes:
    """The contents of a tokenizer's file, without settings that do not change how text is split."""
    if file.name != "tokenizer_config.json":
        return file.read_bytes()
    settings = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in settings.items() if key not in _IRRELEVANT}
    return json.dumps(kept, sort_keys=True).encode()
