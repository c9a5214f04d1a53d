"""A GGUF file as an ordinary checkpoint of transformers."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint.saving import save_tokenizer
from rope_extend.checkpoint.staging import staged
from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_checkpoint import gguf_file
from rope_extend.models.loading import pretrained


def convert(
    source: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model of a GGUF file as a checkpoint: config, safetensors, tokenizer and chat template.

    Every command takes a GGUF file where it takes a model. A checkpoint is needed to merge an adapter, to
    quantise again, and for other tools.

    Args:
        source: a GGUF file, or a directory with one.
        directory: the directory to write to.
        dtype: dtype of the weights. float32 holds the dequantised values exactly.
        max_shard_size: maximum size of one weight file, as `save_pretrained` takes it.
        overwrite: replace a checkpoint in that directory.

    Returns:
        The directory.

    Raises:
        RopeExtendError: `source` is no GGUF file or of an architecture that transformers does not read; the
            directory holds a checkpoint, or cannot be written to.
    """
    if (path := gguf_file(Path(source))) is None:
        raise RopeExtendError(f"{source} is no GGUF file and holds none; there is nothing to convert")
    target = Path(directory)
    with staged(target, overwrite=overwrite) as staging:
        tokenizer = pretrained(AutoTokenizer, str(path))
        model = pretrained(AutoModelForCausalLM, str(path), dtype=dtype)
        model.save_pretrained(
            staging, **({} if max_shard_size is None else {"max_shard_size": max_shard_size})
        )
        save_tokenizer(tokenizer, staging)
    return target
