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
from collections.abc import Callable, Sequence
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


def cached(key: str, encode: Callable[[], list[Ids]]) -> list[Ids]:
    """The ids of each text of a key: those that are kept, or else those of `encode`, which are kept then.

    They are kept in the cache of `datasets`, and not if caching is disabled there. A file that is damaged or
    cannot be written is named in a warning.
    """
    import datasets  # loads pandas and pyarrow

    if not datasets.is_caching_enabled():
        return encode()
    path = Path(datasets.config.HF_DATASETS_CACHE) / "rope_extend" / "tokens" / key[:2] / f"{key}.npz"
    try:
        with np.load(path) as file:  # a zip file, with checksums that are compared only at the end of a part
            if (part := file.zip.testzip()) is not None:
                raise ValueError(f"the checksum of {part} is wrong")
            return np.split(file["ids"], np.cumsum(file["lengths"])[:-1])
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # whatever is wrong with the file, the texts are at hand
        logger.warning("the token cache %s is damaged (%s); it is written again", path, error)
    texts = encode()
    lengths = np.array([len(ids) for ids in texts], dtype=np.int64)
    ids = np.concatenate([*texts, np.zeros(0, dtype=np.int32)]).astype(np.int32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:  # several runs may write the same file
            np.savez(file, lengths=lengths, ids=ids)
    except OSError as error:
        how = "the texts will be tokenised again next time"
        logger.warning("cannot write the token cache %s: %s; %s", path, error, how)
    return texts


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
