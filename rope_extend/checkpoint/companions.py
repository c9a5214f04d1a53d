"""The files of a base model that a merged checkpoint needs next to its weights: the tokenizer and notices."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from rope_extend.checkpoint.manifest import locate
from rope_extend.checkpoint.saving import save_tokenizer
from rope_extend.errors import RopeExtendError
from rope_extend.models.loading import pretrained

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SENTENCEPIECE = "tokenizer.model"
"""The file from which llama.cpp's converter takes scores of tokens. transformers reads it, but does not write
it again."""


def write_tokenizer(adapter: Path, files: Path, target_length: int, directory: Path) -> None:
    """Write the tokenizer of an adapter or else of the base model, if any, for the extended window.

    Args:
        adapter: the adapter's directory.
        files: the base model's directory.
        target_length: the extended window, in tokens.
        directory: the directory to write to.

    Raises:
        RopeExtendError: the tokenizer cannot be loaded.
        OSError: it cannot be written.
    """
    source = next(
        (path for path in (adapter, files) if any((path / name).exists() for name in _TOKENIZER_FILES)), None
    )
    if source is None:
        return
    tokenizer = pretrained(AutoTokenizer, str(source))
    tokenizer.model_max_length = target_length
    save_tokenizer(tokenizer, directory)
    origin = next((path for path in (source, files) if (path / _SENTENCEPIECE).exists()), None)
    if origin is None or (directory / _SENTENCEPIECE).exists():
        return
    if origin != source and pretrained(AutoTokenizer, str(origin)).get_vocab() != tokenizer.get_vocab():
        logger.warning(
            "%s is not copied: the adapter's tokenizer has other tokens. llama.cpp's converter needs such a "
            "file for tokenizers of SentencePiece; write it yourself",
            origin / _SENTENCEPIECE,
        )
        return
    _copy(origin, _SENTENCEPIECE, directory)


def copy_notices(files: Path, directory: Path, output: Path) -> None:
    """Copy the license and notices of a base model, which must go with its weights.

    Args:
        files: the base model's directory.
        directory: the directory to write to.
        output: the directory in which the files will appear. A different file of the same name there stays.

    Raises:
        OSError: a file cannot be read or written.
    """
    for path in sorted(path for pattern in ("LICENSE*", "NOTICE*") for path in files.glob(pattern)):
        if not path.is_file():
            continue
        there = output / path.name
        if not there.exists() or (there.is_file() and there.read_bytes() == path.read_bytes()):
            _copy(files, path.name, directory)
        else:
            logger.warning("%s is not replaced by the base model's file of that name", there)


def _copy(source: Path, name: str, directory: Path) -> None:
    """Copy a file, unless it is a link to another place, such as a private file."""
    try:
        shutil.copyfile(locate(source, name), directory / name)
    except RopeExtendError as error:
        logger.warning("not copied: %s", error)
