"""Which base model an adapter belongs to: a fingerprint of the base model's weights, and its comparison."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rope_extend.checkpoint.peft_models import tuner_layers, wrapper_paths
from rope_extend.errors import RopeExtendError
from rope_extend.models.parameters import is_learned
from rope_extend.models.view import unwrap

logger = logging.getLogger(__name__)

IN_FLOAT16 = "the model is in float16, which rounds differently from bfloat16"

_CHANGES_BASE = re.compile("pissa|corda|olora|loftq|lora_ga", re.IGNORECASE)
"""Adapter initialisations that subtract from the base model's weights what they put into the adapter."""


def base_fingerprint(model: nn.Module, *, in_float16: bool = False) -> str | None:
    """A fingerprint of a base model: SHA-256 over its matrices' names, shapes and some values.

    It is the same with and without an adapter, patched or not, on any device, and in float32 or bfloat16:
    values are compared as bfloat16. Vectors are left out, because peft can train biases in place. 16 values
    of each matrix are read, so it takes milliseconds.

    Args:
        model: the base model, or one with an adapter.
        in_float16: also compute it for a model in float16. The result equals that of the original model if
            the original was in float16 too; otherwise it may differ.

    Returns:
        64 hexadecimal digits. None, with a warning, if the values are not available: the model is quantised
        or in float16, or its weights are offloaded, sharded, or merged with an adapter.
    """
    base = unwrap(model)
    matrices = base_matrices(base)
    obstacle = _obstacle(base, [matrix for _, matrix in matrices])
    if obstacle and not (in_float16 and obstacle == IN_FLOAT16):
        warn_unchecked(obstacle)
        return None
    return fingerprint_of(matrices)


def fingerprint_of(matrices: Iterable[tuple[str, Tensor]]) -> str:
    """`base_fingerprint` of tensors that may come one at a time, in the order of `base_matrices`."""
    return _digest(_lines(matrices).values())


def check_base_fingerprint(
    matrices: Iterable[tuple[str, Tensor]],
    recorded: str,
    *,
    adapter: Path,
    token_layers: Collection[str],
    trained_on: str | None,
    base: str,
    advice: str,
) -> None:
    """Refuse a base model with other weights than the one that an adapter was trained on.

    Args:
        matrices: of the base model at hand, in the order of `base_matrices`.
        recorded: the fingerprint in the adapter's record.
        adapter: the adapter's directory.
        token_layers: the layers in which the adapter trains single tokens, see `token_layers_of`. Early
            versions left their matrices out of the fingerprint; such a fingerprint is accepted too.
        trained_on: the base model that the record names.
        base: the name of the base model at hand.
        advice: what to do, the end of the error message.

    Raises:
        RopeExtendError: the fingerprints differ.
    """
    lines = _lines(matrices)
    fingerprint = _digest(lines.values())
    left_out = {f"{layer}.weight" for layer in token_layers}
    earlier = _digest(line for name, line in lines.items() if name not in left_out)
    if recorded not in (fingerprint, earlier):
        raise RopeExtendError(
            f"the adapter in {adapter} was trained on {trained_on!r} (fingerprint {recorded[:12]}), but the "
            f"base model {base!r} has other weights (fingerprint {fingerprint[:12]}){advice}"
        )


def token_layers_of(base: Any, config: Any) -> set[str]:
    """Paths of the layers in which an adapter trains single tokens (peft's `trainable_token_indices`).

    Args:
        base: the base model, with or without the adapter.
        config: the adapter's config.
    """
    indices = getattr(config, "trainable_token_indices", None) or ()
    paths = dict(base.named_modules())
    if isinstance(indices, dict):
        return {path for path in paths if any(f".{path}".endswith(f".{name}") for name in indices)}
    embedding = base.get_input_embeddings() if indices else None
    return {path for path, module in paths.items() if module is embedding}


def changes_base(config: Any) -> str | None:
    """The initialisation of an adapter by which peft changes the base model's weights, also on loading.

    None if the adapter leaves the base model's weights unchanged.
    """
    name = getattr(config, "init_lora_weights", None)
    if isinstance(name, str) and _CHANGES_BASE.match(name):
        return name
    return "kasa" if getattr(config, "kasa_config", None) else None


def warn_unchecked(obstacle: str) -> None:
    """Log why a base model cannot be compared with the one in the record."""
    logger.warning("%s, so it cannot be checked which base model an adapter belongs to", obstacle)


def base_matrices(base: Any) -> list[tuple[str, Tensor]]:
    """`(name, tensor)` of the matrices of a model without the layers that peft added, sorted by name."""
    matrices = []
    wrappers = wrapper_paths(base)
    # A head tied to the embedding is not always the same tensor once peft has copied one of the two.
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())
    for name, parameter in base.named_parameters():
        if parameter.ndim > 1 or parameter.numel() == 0:
            plain = _name_in_base(name, wrappers)
            if plain is not None and plain not in tied and not is_learned(plain):
                matrices.append((plain, parameter))
    return sorted(matrices, key=lambda row: row[0])


def _lines(matrices: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    """What the fingerprint is computed from: name, shape and some values of each matrix, by name."""
    return {name: f"{name} {tuple(matrix.shape)}\n".encode() + _sample(matrix) for name, matrix in matrices}


def _digest(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _name_in_base(name: str, wrappers: set[str]) -> str | None:
    """The name that a parameter has without peft's wrappers; None for a parameter that an adapter added."""
    kept: list[str] = []
    parts = name.split(".")
    for i, part in enumerate(parts):
        if ".".join(parts[:i]) not in wrappers:
            kept.append(part)
        elif part not in ("base_layer", "original_module", "token_adapter"):
            return None
    return ".".join(kept)


def _obstacle(base: Any, tensors: list[Tensor]) -> str | None:
    """Why the values of a base model cannot be compared; None if they can."""
    if getattr(base, "is_quantized", False) or not all(t.is_floating_point() for t in tensors):
        return "the model is quantised"
    if any(t.itemsize == 1 for t in tensors):
        return "the model is in 8 bits"
    if any(t.is_meta or t.numel() == 0 or isinstance(t, DTensor) for t in tensors):
        return "the model's weights are offloaded or sharded"
    if any(layer.merged for _, layer in tuner_layers(base)):
        return "an adapter is merged into the model's weights"
    return IN_FLOAT16 if any(t.dtype == torch.float16 for t in tensors) else None


def _sample(matrix: Tensor, count: int = 16) -> bytes:
    """Bytes of evenly spaced values of a matrix, the first and the last among them, as bfloat16."""
    flat = matrix.detach().reshape(-1)
    last = flat.numel() - 1
    indices = torch.tensor([last * i // (count - 1) for i in range(count)], device=flat.device)
    return flat[indices].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
