"""The configs of well-known checkpoints, written by hand: only what sizes and positions follow from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rope_extend.memory.plan import Budget
from rope_extend.training.memory_options import MemoryOptions
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_estimator import StepEstimate
from rope_extend.training.step_plan import TrainingPlan

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def _config(
    model_type: str, sizes: tuple[int, ...], vocabulary: int, window: int, theta: float, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type, **dict(zip(_SIZES, sizes, strict=True)), "vocab_size": vocabulary,
        "max_position_embeddings": window, "rope_theta": theta, "dtype": "bfloat16", **others,
    }  # fmt: skip


_LLAMA_31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2-7b": _config("llama", (4096, 11_008, 32, 32, 32), 32_000, 4096, 1e4),
    "llama3-8b": _config("llama", (4096, 14_336, 32, 32, 8), 128_256, 8192, 5e5),
    "llama31-8b": _config("llama", (4096, 14_336, 32, 32, 8), 128_256, 131_072, 5e5, rope_scaling=_LLAMA_31),
    "tinyllama-1b": _config("llama", (2048, 5632, 22, 32, 4), 32_000, 2048, 1e4),
    "smollm2-1.7b": _config("llama", (2048, 8192, 24, 32, 32), 49_152, 8192, 130_000.0),
    "qwen2-7b": _config("qwen2", (3584, 18_944, 28, 28, 4), 152_064, 131_072, 1e6),
    "qwen25-7b-instruct": _config("qwen2", (3584, 18_944, 28, 28, 4), 152_064, 32_768, 1e6),
    "qwen25-3b": _config("qwen2", (2048, 11_008, 36, 16, 2), 151_936, 32_768, 1e6),
    "qwen25-math-7b": _config("qwen2", (3584, 18_944, 28, 28, 4), 152_064, 4096, 1e4),
    "qwen3-1.7b-base": _config("qwen3", (2048, 6144, 28, 16, 8), 151_936, 32_768, 1e6, head_dim=128),
    "qwen3-8b": _config("qwen3", (4096, 12_288, 36, 32, 8), 151_936, 40_960, 1e6, head_dim=128),
    "mistral-7b-v0.1": _config(
        "mistral", (4096, 14_336, 32, 32, 8), 32_000, 32_768, 1e4, sliding_window=4096
    ),
    "mistral-7b-v0.3": _config(
        "mistral", (4096, 14_336, 32, 32, 8), 32_768, 32_768, 1e6, sliding_window=None
    ),
    "gemma-2b": _config("gemma", (2048, 16_384, 18, 8, 1), 256_000, 8192, 1e4, head_dim=256),
    "gemma-7b": _config("gemma", (3072, 24_576, 28, 16, 16), 256_000, 8192, 1e4, head_dim=256),
    "gemma2-2b": _config(
        "gemma2", (2304, 9216, 26, 8, 4), 256_000, 8192, 1e4, head_dim=256, sliding_window=4096
    ),
    "gemma2-9b": _config(
        "gemma2", (3584, 14_336, 42, 16, 8), 256_000, 8192, 1e4, head_dim=256, sliding_window=4096
    ),
    "gemma3-1b": _config(
        "gemma3_text", (1152, 6912, 26, 4, 1), 262_144, 32_768, 1e6, head_dim=256, sliding_window=512,
        rope_local_base_freq=1e4, sliding_window_pattern=6,
    ),
    "phi-2": _config(
        "phi", (2560, 10_240, 32, 32, 32), 51_200, 2048, 1e4, partial_rotary_factor=0.4
    ),
    "phi3-mini-4k": _config(
        "phi3", (3072, 8192, 32, 32, 32), 32_064, 4096, 1e4, sliding_window=2047,
        original_max_position_embeddings=4096, pad_token_id=32_000,
    ),
    "phi4": _config(
        "phi3", (5120, 17_920, 40, 40, 10), 100_352, 16_384, 250_000.0, sliding_window=None,
        original_max_position_embeddings=16_384, pad_token_id=100_349,
    ),
}  # fmt: skip


def write_config(directory: Path, name: str, **changes: Any) -> Path:
    """A directory that holds the config of a checkpoint and nothing else."""
    path = directory / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return path


def a_plan(needed: int = 1) -> TrainingPlan:
    """The plan of a step on a GPU with 24 GB, without memory options; `needed` is in bytes."""
    step = StepEstimate(weights=0, peak=needed, memory_options=MemoryOptions(), quantized=False)
    recipe = Recipe(model="m", data="d", output_dir="o", target_length=4096)
    return TrainingPlan(recipe, (step,), step, Budget(torch.device("cuda"), 24 * 10**9))
