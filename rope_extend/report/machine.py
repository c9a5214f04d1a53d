"""What this machine offers: versions, devices, attention, optional packages, memory and disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from rope_extend.files import expand_home
from rope_extend.report.versions import package_version, versions
from rope_extend.units import format_bytes

OPTIONAL = {
    "bitsandbytes": ("quantize: 4bit", "pip install 'rope_extend[quantize]'"),
    "flash_attn": ("--attn flash_attention_2", "pip install flash-attn"),
    "gguf": ("GGUF files as models, and export --to llama.cpp", "pip install 'rope_extend[gguf]'"),
    "lm_eval": ("the command lm-eval", "pip install 'rope_extend[lm-eval]'"),
    "tensorboard": ("trackers: [tensorboard]", "pip install 'rope_extend[tensorboard]'"),
}
"""Optional packages: what needs each, and how to install it."""
LITTLE_DISK = 20 * 10**9
"""Bytes of free disk below which a warning appears: a model of 7B parameters takes 14 GB in bfloat16."""


class Finding(NamedTuple):
    """One line of the check: its subject, the result, and what to do; `advice` is empty if all is well."""

    subject: str
    result: str
    advice: str = ""


def examine(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check everything that a run depends on. Nothing is downloaded, and no memory is taken."""
    found = {**versions(), **{name: package_version(name) for name in ("peft", "accelerate", "datasets")}}
    for name, (use, command) in OPTIONAL.items():
        missing = f"not installed; only for {use}: {command}"
        found[name] = package_version(name) if importlib.util.find_spec(name) else missing
    findings = [Finding(name, version) for name, version in found.items()]
    return [*findings, *_devices(), *_disks(environment)]


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            "GPU", "none found by torch",
            f"runs use the CPU in float32. This torch is {torch.__version__}: if the machine has a GPU, "
            "install a build for it",
        )  # fmt: skip
        if torch.backends.mps.is_available():
            yield Finding("mps", "available", "give --device mps; fine-tuning on it is not tested")
        yield Finding("CPU threads", str(torch.get_num_threads()))
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            f"GPU {index}", f"{properties.name}, {format_bytes(free)} of {format_bytes(total)} free",
            "" if free > 0.8 * total else "another process uses much of its memory",
        )  # fmt: skip
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    yield Finding(
        "bfloat16", "supported" if bfloat16 else "not supported by this GPU",
        "" if bfloat16 else "weights are loaded in float32, which takes twice the memory",
    )  # fmt: skip


def _disks(environment: Mapping[str, str]) -> Iterator[Finding]:
    home = Path(environment.get("HF_HOME") or Path(expand_home("~"), ".cache", "huggingface"))
    for subject, path in (("hub cache", home), ("this directory", Path.cwd())):
        free = shutil.disk_usage(next(part for part in (path, *path.parents) if part.exists())).free
        yield Finding(
            subject, f"{path}: {format_bytes(free)} free",
            "" if free >= LITTLE_DISK
            else "a model of 7B parameters takes 14 GB; free some space, or set HF_HOME",
        )  # fmt: skip
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "on", "yes"):
        yield Finding("hub", "offline, by HF_HUB_OFFLINE", "only models and data in the cache can be loaded")
