"""Adapters of peft: their layers in a model, and which base model they belong to.

A process that has not imported peft has no model with an adapter, so peft is never imported for one without.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rope_extend.errors import RopeExtendError
from rope_extend.models.checkpoint_directory import ADAPTER_WEIGHTS
from rope_extend.models.decoders import unwrap
from rope_extend.models.loading import open_weights
from rope_extend.models.parameters import is_learned

logger = logging.getLogger(__name__)

_IN_FLOAT16 = "the model is in float16, which rounds differently from bfloat16"

_CHANGES_BASE = re.compile("pissa|corda|olora|loftq|lora_ga", re.IGNORECASE)
"""Adapter initialisations that subtract from the base model's weights what they put into the adapter."""


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is a `peft.PeftModel`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def tuner_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """`(path, layer)` of the layers through which peft adapters act on a model."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(path, module) for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def remove_adapter(model: Any) -> Any:
    """Take an adapter out of a model, and return the base model with its own modules.

    peft's own `unload` leaves the trained copies of `modules_to_save`, such as norms and embeddings, in the
    base model. Weights that peft changed in place stay changed: biases (`bias="all"`), and those of
    initialisations such as PiSSA.
    """
    from peft.utils.other import ModulesToSaveWrapper

    originals = [
        (parent, name, child.original_module)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, ModulesToSaveWrapper)
    ]
    base = model.unload()
    for parent, name, original in originals:
        setattr(parent, name, original)
    return base


def changes_base(config: Any) -> str | None:
    """The initialisation of an adapter by which peft changes the base model's weights, also on loading.

    None if the adapter leaves the base model's weights unchanged.
    """
    name = getattr(config, "init_lora_weights", None)
    if isinstance(name, str) and _CHANGES_BASE.match(name):
        return name
    return "kasa" if getattr(config, "kasa_config", None) else None


def base_fingerprint(model: nn.Module) -> str | None:
    """A fingerprint of a base model: SHA-256 over its matrices' names, shapes and 16 values of each.

    It is the same with and without an adapter, patched or not, on any device, and in float32 or bfloat16.
    Vectors are left out, because peft can train biases in place.

    Returns:
        64 hexadecimal digits. None, with a warning, if the values are not available: the model is quantised
        or in float16, or its weights are offloaded, sharded, or merged with an adapter.
    """
    matrices, obstacle = _base_matrices(unwrap(model))
    if obstacle:
        _warn_unchecked(obstacle)
        return None
    return _fingerprint(matrices)


def check_base(
    model: nn.Module, recorded: str | None, adapter: Path, trained_on: str | None, *, advice: str
) -> None:
    """Refuse a base model with other weights than the one that an adapter was trained on.

    A model in float16 is accepted if it is the original, and with a warning if it may be rounded. The record
    of the adapter has the fingerprint, and the name of what it was `trained_on`.
    """
    if recorded is None:
        return
    matrices, obstacle = _base_matrices(unwrap(model))
    if obstacle in (None, _IN_FLOAT16):
        found = _fingerprint(matrices)
        # Records of earlier versions also count what the adapter replaces.
        if recorded in (found, _fingerprint(_without_held(matrices, adapter))):
            return
        if obstacle is None:
            name = unwrap(model).config.name_or_path or "a model made in memory"
            raise RopeExtendError(
                f"the adapter in {adapter} was trained on {trained_on!r} (fingerprint {recorded[:12]}), but "
                f"the base model {name!r} has other weights (fingerprint {found[:12]}){advice}"
            )
    _warn_unchecked(str(obstacle))


def held_weights(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's weights, by the names that they have in the base model.

    Some replace a whole weight of the base model: heads and other `modules_to_save`, and embeddings, which
    peft saves once they are resized.
    """
    path = directory / ADAPTER_WEIGHTS
    if not path.exists():
        return {}
    with open_weights(path) as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    wrappers = r"\.(base_layer|original_module|token_adapter|modules_to_save)(?=\.)"
    return {re.sub(wrappers, "", key.removeprefix("base_model.model.")): shapes[key] for key in shapes}


def fingerprint_without_held(model: nn.Module, recorded: str | None, directory: Path) -> str | None:
    """The recorded fingerprint of a base model, without weights that the adapter in `directory` replaces.

    They do not identify it: new rows of embeddings and new heads are random numbers, others in each process.
    A fingerprint that is not the model's own stays as it is, such as one from before peft changed the model.
    """
    matrices, obstacle = _base_matrices(unwrap(model))
    rest = _without_held(matrices, directory)
    if len(rest) == len(matrices) or obstacle is not None:
        return recorded
    return _fingerprint(rest) if _fingerprint(matrices) == recorded else recorded


def _without_held(matrices: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    held = held_weights(directory)
    return {name: matrix for name, matrix in matrices.items() if name not in held}


def _warn_unchecked(obstacle: str) -> None:
    logger.warning("%s, so it cannot be checked which base model an adapter belongs to", obstacle)


def _base_matrices(base: Any) -> tuple[dict[str, Tensor], str | None]:
    """The matrices of a model without the layers that peft added, by name and sorted by it.

    With them, why their values cannot be compared; None if they can.
    """
    matrices = {}
    wrappers: set[str] = set()
    if "peft" in sys.modules:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
        wrappers = {path for path, module in base.named_modules() if isinstance(module, kinds)}
    # A head tied to the embedding is not always the same tensor once peft has copied one of the two.
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())
    for name, parameter in base.named_parameters():
        if parameter.ndim > 1 or parameter.numel() == 0:
            plain = _name_in_base(name, wrappers)
            if plain is not None and plain not in tied and not is_learned(plain):
                matrices[plain] = parameter
    return dict(sorted(matrices.items())), _obstacle(base, list(matrices.values()))


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
    return _IN_FLOAT16 if any(t.dtype == torch.float16 for t in tensors) else None


def _fingerprint(matrices: dict[str, Tensor]) -> str:
    """SHA-256 over name, shape and 16 values of each matrix, evenly spread and as bfloat16."""
    digest = hashlib.sha256()
    for name, matrix in matrices.items():
        flat = matrix.detach().reshape(-1)
        indices = torch.tensor([(flat.numel() - 1) * i // 15 for i in range(16)], device=flat.device)
        sample = flat[indices].to("cpu", torch.bfloat16).view(torch.int16).numpy()
        digest.update(f"{name} {tuple(matrix.shape)}\n".encode() + sample.tobytes())
    return digest.hexdigest()
