"""The memory of a device, and how much of it weights take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers.utils import cached_file

from rope_extend.models.decoders import unwrap
from rope_extend.models.load_options import LoadOptions, is_quantized

MARGIN = 0.95
"""Share of the free memory that plans use; kernels and allocators need the rest."""

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables with the settings of CUDA's allocator; every version of torch reads the first."""


def expand_segments() -> None:
    """Let the CUDA allocator grow its segments, which reduces fragmentation, unless the user set it up.

    Has an effect only if CUDA is not yet initialized in this process.
    """
    if torch.cuda.is_available() and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def weight_bytes(name: str, model: nn.Module, load_options: LoadOptions) -> int:
    """Bytes of a checkpoint's weights once they are loaded; `model` is that checkpoint on the meta device."""
    config = unwrap(model).config
    if is_quantized(config):  # loaded as the files hold them
        file = cached_file(name, "config.json", local_files_only=True)
        assert file is not None
        return sum(weights.stat().st_size for weights in Path(file).parent.glob("*.safetensors"))
    total = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    return total if load_options.quantize is None else total - quantized_savings(model, load_options.quantize)


def quantized_savings(model: nn.Module, kind: str) -> int:
    """Bytes that `4bit` or `8bit` saves on the weights; `model` may be on the meta device."""
    head = unwrap(model).get_output_embeddings()
    share = 1.0 if kind == "8bit" else 0.5 + 4 / 64  # one float32 per 64 values
    matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    saved = sum(weight.nbytes - int(share * weight.numel()) for weight in matrices)
    return saved - max(weight.nbytes for weight in matrices)  # one matrix at a time is dequantized


def available_memory(load_options: LoadOptions) -> int:
    """Bytes available on the device, or the limit if it is less; of several GPUs, the one with the least."""
    from accelerate.utils import get_max_memory

    place = load_options.torch_device
    if place.type == "cuda":
        gpus = range(torch.cuda.device_count()) if load_options.device_map is not None else [place]
        free = min(_free_on_gpu(gpu) for gpu in gpus)
    elif place.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    else:
        free = min(get_max_memory()["cpu"], _control_group())
    return free if load_options.limit_memory is None else min(free, load_options.limit_memory)


def _free_on_gpu(gpu: torch.device | int) -> int:
    """Bytes that this process can still allocate on a GPU, including what torch keeps cached."""
    cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    return int(torch.cuda.mem_get_info(gpu)[0]) + cached


_OUT_OF_MEMORY = (
    "can't allocate memory",  # the CPU allocator
    "CUDA error: out of memory",  # pinned host memory, and kernels of torch
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "leave memory available for cuDNN",
)
"""Texts of plain RuntimeErrors that mean a lack of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of a device or of the host ran out.

    Libraries that torch calls, such as cuBLAS and cuDNN, report it by a plain RuntimeError.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a container's limit leaves, which the numbers of the system do not show."""
    try:
        left = int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
        counts = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize
    return max(0, left + int(counts.get("inactive_file", 0)))  # the page cache is dropped if memory is short
