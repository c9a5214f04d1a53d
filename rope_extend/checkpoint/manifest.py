"""The integrity of a checkpoint's directory: that it is whole and what was written, and which base it is for.

Everything here guards against damage and mix-ups, not against an attacker: whoever can write the weights can
write their digests. What an attacker could gain from is refused without them: pickles, which run code when
they are read, and files outside the directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rope_extend.errors import RopeExtendError
from rope_extend.inspection import unwrap
from rope_extend.learned import LEARNED_FILE, is_learned

logger = logging.getLogger(__name__)

RECORD_NAME = "rope_extend.json"
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", LEARNED_FILE)
"""Weight files, those that a loader would read; other names are the user's own business."""
CONFIGS = ("config.json", "adapter_config.json", INDEX_NAME)
"""What decides, beside the weights, what is computed."""

_PICKLE = re.compile(r".*\.(bin|pt|pth|ckpt|pkl|pickle)", re.IGNORECASE)
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|random_states|training_args|custom_checkpoint)"
    r"[^/]*"
)
"""Pickles that Trainer and accelerate put beside the weights. Nothing here reads them."""
_IDLE_KEYS = re.compile(
    r"_name_or_path|base_model_name_or_path|revision|transformers_version|peft_version|use_cache|inference_mode"
    r"|.*_token_id"
)
"""Keys of a config that its owner may edit: they name things, and change nothing that is computed."""
_CHANGES_BASE = re.compile("pissa|corda|olora|loftq|lora_ga", re.IGNORECASE)
"""Initialisations that take out of the base model's weights what they put into the adapter."""


# ---------------------------------------------------------------------------------------------------------
# The files of a directory


def check_directory(
    directory: Path, weights: dict[str, str], configs: dict[str, str], *, contents: bool = True
) -> None:
    """Refuse a checkpoint's directory that is not whole, not sound, or not as it was written.

    Args:
        directory: an adapter or a full checkpoint.
        weights: the record's digests of weight files; none are compared if empty, as in schema 1.
        configs: the record's digests of configs; likewise.
        contents: also read all weights, for their digests and for values that are not finite.

    Raises:
        RopeExtendError: pickled weights; a file that is missing, unreadable or outside the directory; a
            damaged safetensors header; a digest that differs; a file too many; a weight that is not finite.
    """
    try:
        _refuse_pickles(directory)
        for name in (RECORD_NAME, *CONFIGS):
            if name == RECORD_NAME or (directory / name).is_symlink() or (directory / name).exists():
                locate(directory, name)
        names = weight_files(directory)
        _check_complete(directory, names)
        for name in names:
            check_header(locate(directory, name))
        if contents:
            _compare("weight file", directory, weights, weight_digests)
            _compare("config", directory, configs, config_digests)
            for name in names:
                check_finite(directory / name)
    except OSError as error:
        raise RopeExtendError(f"cannot read the checkpoint {directory}: {error}") from error


def weight_files(directory: Path) -> list[str]:
    """Names of the weight files in a directory, sorted: those that are there, and those that the index names.

    Raises:
        RopeExtendError: the index is damaged, or names a file that is not directly in the directory.
    """
    names = {path.name for pattern in WEIGHTS for path in directory.glob(pattern)}
    if (directory / INDEX_NAME).exists():
        path = directory / INDEX_NAME
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RopeExtendError(f"{path} has no weight_map; restore the file, or save the model again")
        for name in weight_map.values():
            if not _is_plain(name):
                raise RopeExtendError(
                    f"{path} names {name!r}, which is no safetensors file of this directory; it is not read"
                )
        names.update(weight_map.values())
    return sorted(names)


def _is_plain(name: Any) -> bool:
    """Whether a name from a file is that of a safetensors file in the same directory, on any system."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and PurePosixPath(name).name == name
        and not set(name) & set("\\:\0")
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a mapping.

    Raises:
        RopeExtendError: it cannot be read, or holds something else.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is not a regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RopeExtendError(
            f"cannot read {path}: {error}; restore the file, or save the model again"
        ) from error
    if not isinstance(data, dict):
        raise RopeExtendError(f"{path} holds a {type(data).__name__}, not a mapping; restore the file")
    return data


def _refuse_pickles(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        if _PICKLE.fullmatch(path.name) and not _TRAINING_STATE.fullmatch(path.name):
            raise RopeExtendError(
                f"{path} is a pickle, which can run any code when it is read, so its directory is refused; "
                "rope_extend writes and reads safetensors only. Convert it, or remove it"
            )


def locate(directory: Path, name: str) -> Path:
    """The file behind a name in a directory; links may stay inside, or lead to the blobs of a hub cache.

    Raises:
        RopeExtendError: there is none, it is no regular file, or it lies elsewhere.
    """
    path, root = directory / name, directory.resolve()
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: links in a circle, before Python 3.13. ValueError: a name that no file can have.
        raise RopeExtendError(
            f"{path} is missing or cannot be reached ({error}); restore the file, or save the model again"
        ) from error
    blobs = [
        parent.parent / "blobs"
        for parent in root.parents
        if parent.name == "snapshots" and parent.parent.name.startswith("models--")
    ]
    if not any(real.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise RopeExtendError(
            f"{path} is a link to {real}, outside the checkpoint, and is not read; put a copy there"
        )
    if not real.is_file():
        raise RopeExtendError(f"{path} is not a regular file")
    return real


def _check_complete(directory: Path, names: list[str]) -> None:
    """Refuse a directory without the weights that a loader would look for."""
    adapter = (directory / "adapter_config.json").exists()
    wanted = "adapter_model.safetensors" if adapter else "model.safetensors"
    if wanted not in names and (adapter or not (directory / INDEX_NAME).exists()):
        raise RopeExtendError(
            f"{directory} holds no {wanted}, so it is no whole checkpoint; restore the file, or save the "
            "model again"
        )


def check_header(path: Path) -> None:
    """Refuse a safetensors file that is truncated, or whose header does not describe the bytes behind it.

    Raises:
        RopeExtendError: as above.
    """
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except OSError:
        raise
    except Exception as error:  # SafetensorError, and UnicodeError for a name that the library cannot open
        raise RopeExtendError(
            f"{path} is truncated or damaged ({error}); restore the file, or save the model again"
        ) from error


def check_finite(path: Path) -> None:
    """Refuse a safetensors file with a NaN or an infinity; reads one tensor at a time.

    Raises:
        RopeExtendError: naming the first tensor that holds one.
    """
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if not _is_finite(file.get_tensor(name)):
                raise RopeExtendError(
                    f"{path}: {name} holds values that are NaN or infinite, so all that the model computes "
                    "would be; go back to an earlier checkpoint"
                )


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    chunks: Iterable[Tensor] = torch.split(tensor.flatten(), 2**24)
    return all(bool(torch.isfinite(c if c.itemsize > 1 else c.float()).all()) for c in chunks)


# ---------------------------------------------------------------------------------------------------------
# Digests


def weight_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every weight file in a directory, by name."""
    made = {}
    for name in weight_files(directory):
        if not (directory / name).exists():  # a missing shard: the comparison says so
            continue
        with (directory / name).open("rb") as file:
            made[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return made


def config_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of what each config in a directory says, by name; layout and names in it do not count."""
    made = {}
    for name in CONFIGS:
        if (directory / name).exists():
            data = read_json(directory / name)
            said = {key: value for key, value in data.items() if not _IDLE_KEYS.fullmatch(key)}
            made[name] = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return made


def _compare(
    kind: str, directory: Path, recorded: dict[str, str], find: Callable[[Path], dict[str, str]]
) -> None:
    """Refuse files that are not those on record."""
    if not recorded:
        return
    found = find(directory)
    for what, names in (
        ("is missing", recorded.keys() - found.keys()),
        ("was added later", found.keys() - recorded.keys()),
        ("is not what was saved", {name for name in recorded if found.get(name) != recorded[name]}),
    ):
        if names:
            raise RopeExtendError(
                f"{kind} {sorted(names)[0]!r} in {directory} {what}, by the digests in {RECORD_NAME}; "
                "restore the directory, or if the change is yours, load with check_files=False and save again"
            )


# ---------------------------------------------------------------------------------------------------------
# The base model


IN_FLOAT16 = "the model is in float16, which rounds other than bfloat16"


def base_fingerprint(model: nn.Module, *, in_float16: bool = False) -> str | None:
    """What tells a base model from another: SHA-256 over its matrices' names, shapes and some values.

    The same with and without an adapter, patched or not, on any device, and in float32 or bfloat16: values
    are compared as bfloat16. Vectors are left out, since peft can train biases in place. 16 values of each
    matrix are read, so it takes milliseconds.

    Args:
        model: the base model, or one with an adapter.
        in_float16: also of a model in float16, which has that of its original if that was in float16 too, and
            else may not.

    Returns:
        64 hexadecimal digits; None, with a warning, where the values are not to be had: in a quantised or
        float16 model, with weights offloaded, sharded, or with an adapter merged into them.
    """
    base = unwrap(model)
    matrices = base_matrices(base)
    obstacle = _obstacle(base, [matrix for _, matrix in matrices])
    if obstacle and not (in_float16 and obstacle == IN_FLOAT16):
        warn_unchecked(obstacle)
        return None
    return fingerprint(matrices)


def fingerprint(matrices: Iterable[tuple[str, Tensor]]) -> str:
    """`base_fingerprint` over tensors that may come one at a time, in the order of `base_matrices`."""
    digest = hashlib.sha256()
    for name, matrix in matrices:
        digest.update(f"{name} {tuple(matrix.shape)}\n".encode())
        digest.update(_sample(matrix))
    return digest.hexdigest()


def changes_base(config: Any) -> str | None:
    """The initialisation of an adapter by which peft changes the base model's weights, also on loading."""
    name = getattr(config, "init_lora_weights", None)
    if isinstance(name, str) and _CHANGES_BASE.match(name):
        return name
    return "kasa" if getattr(config, "kasa_config", None) else None


def warn_unchecked(obstacle: str) -> None:
    """Say why a base model could not be compared with the one on record."""
    logger.warning("%s, so that it cannot be checked which base model an adapter belongs to", obstacle)


def base_matrices(base: Any) -> list[tuple[str, Tensor]]:
    """`(name, tensor)` of the matrices that a model has without the layers that peft put in, by name."""
    found = []
    wrappers = {
        name
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }
    # A head tied to the embedding is not always the same tensor once peft has copied one of the two.
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())
    for name, parameter in base.named_parameters():
        if parameter.ndim > 1 or parameter.numel() == 0:
            plain = _name_in_base(name, wrappers)
            if plain is not None and plain not in tied and not is_learned(plain):
                found.append((plain, parameter))
    return sorted(found, key=lambda row: row[0])


def _name_in_base(name: str, wrappers: set[str]) -> str | None:
    """The name that a parameter has without peft's wrappers; None for one that an adapter brought."""
    kept: list[str] = []
    parts = name.split(".")
    for i, part in enumerate(parts):
        if ".".join(parts[:i]) not in wrappers:
            kept.append(part)
        elif part not in ("base_layer", "original_module"):
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
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in base.modules()):
        return "an adapter is merged into the model's weights"
    return IN_FLOAT16 if any(t.dtype == torch.float16 for t in tensors) else None


def _sample(matrix: Tensor, count: int = 16) -> bytes:
    """Bytes of evenly spaced values of a matrix, the first and the last among them, as bfloat16."""
    flat = matrix.detach().reshape(-1)
    last = flat.numel() - 1
    where = torch.tensor([last * i // (count - 1) for i in range(count)], device=flat.device)
    return flat[where].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
