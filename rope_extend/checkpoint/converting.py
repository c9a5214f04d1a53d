"""A GGUF file as an ordinary checkpoint of transformers."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint.manifest import check_finite, read_json
from rope_extend.checkpoint.saving import write_model, write_tokenizer
from rope_extend.checkpoint.staging import staged
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home, write_json
from rope_extend.models.gguf_checkpoint import gguf_file
from rope_extend.models.loading import pretrained

_TEXTS = (
    "It was 1984, wasn't it? IT'S 12345 o'clock; she'll ÜBER-sleep",
    "  two  spaces\n\n\tthen a tab, and 3 ends \r\n \r\n",
    "def f(x):\n    return x**2  # naïve, 日本語 🎉 — «end»",
)
"""Texts in which the tokenizers of the known families differ. They are in NFC: stock transformers composes
the accents of a few families, which changes hardly any text."""


def convert(
    source: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> Path:
    """Write the model of a GGUF file as a checkpoint: config, safetensors, tokenizer and chat template.

    Args:
        source: a GGUF file, or a directory with one.
        directory: the directory to write to.
        dtype: dtype of the weights. float32 holds the dequantised values exactly.
        overwrite: replace a checkpoint in that directory.

    Returns:
        The directory.

    Raises:
        RopeExtendError: `source` is no GGUF file or of an architecture that transformers does not read; a
            weight is not finite in `dtype`; stock transformers would read the tokenizer as another one; the
            directory holds a checkpoint, or cannot be written to.
    """
    path = _source(Path(expand_home(source)))
    target = Path(expand_home(directory))
    with staged(target, overwrite=overwrite) as staging:
        tokenizer = pretrained(AutoTokenizer, str(path))
        write_tokenizer(tokenizer, staging)
        # Null for each special token that the file has none for: stock classes would add their own.
        config, missing = staging / "tokenizer_config.json", ("bos", "eos", "unk", "pad")
        write_json(config, {**{f"{name}_token": None for name in missing}, **read_json(config)})
        pretrained(AutoConfig, str(path)).save_pretrained(staging)  # it decides the tokenizer's class
        _check_tokenizer(path, tokenizer, staging)
        write_model(pretrained(AutoModelForCausalLM, str(path), dtype=dtype), staging)
        check_finite(staging)
    return target


def _source(source: Path) -> Path:
    """The GGUF file to convert."""
    if (path := gguf_file(source)) is not None:
        return path
    if source.is_dir() and (files := sorted(file.name for file in source.glob("*.gguf"))):
        raise RopeExtendError(
            f"{source} holds a checkpoint of transformers already (it has a config file). To convert a GGUF "
            f"file in it, give that file's path: {', '.join(files)}"
        )
    raise RopeExtendError(f"{source} is no GGUF file and holds none; there is nothing to convert")


def _check_tokenizer(path: Path, tokenizer: Any, directory: Path) -> None:
    """Refuse a tokenizer that stock transformers reads as another one, as it does for some families.

    transformers 5.23 reads the tokenizer of every `qwen2` checkpoint as Qwen's, whatever the files say.
    """
    stock = pretrained(AutoTokenizer, str(directory))
    kind = f"stock transformers reads the tokenizer of this checkpoint as its {type(stock).__name__}"
    advice = "Use the GGUF file itself, or the original checkpoint"
    if added := sorted(stock.get_vocab().keys() - tokenizer.get_vocab().keys()):
        raise RopeExtendError(f"{kind}, with tokens that {path.name} has not, such as {added[0]!r}. {advice}")
    marked = "".join(f"a {token}b" for token in tokenizer.all_special_tokens)
    for text in (*_TEXTS, marked):
        if stock(text).input_ids != tokenizer(text).input_ids:
            raise RopeExtendError(f"{kind}, which reads {text!r} otherwise than {path.name} says. {advice}")
