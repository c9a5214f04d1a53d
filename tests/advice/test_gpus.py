"""GPUs by name and by memory, as people write them."""

from __future__ import annotations

import pytest

import rope_extend as rx
from rope_extend.cli.main import parse
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.memory.gpus import find_gpu


@pytest.mark.parametrize(
    ("text", "name", "gigabytes"),
    [
        ("h100", "H100", 80),
        ("H100-PCIe", "H100 PCIe", 80),
        ("rtx 4090", "RTX 4090", 24),
        ("4090", "RTX 4090", 24),
        ("a100_80gb", "A100 80GB", 80),
        ("24GB", "24 GB", 24),
        ("1.5TB", "1500 GB", 1500),
    ],
)
def test_gpus_by_name_and_by_memory(text: str, name: str, gigabytes: int) -> None:
    gpu = find_gpu(text)
    assert (gpu.name, gpu.memory) == (name, gigabytes * 10**9)
    assert find_gpu(gpu.name) == gpu
    several = find_gpu(f"8x{text}")
    assert (several.name, several.memory, several.count) == (name, gpu.memory, 8)
    assert find_gpu(f"2x4x{text}") == several


@pytest.mark.parametrize("text", ["1KB", "24GiB", "rtx 4090"])
def test_a_gpu_at_the_command_line_is_the_one_that_was_written(text: str) -> None:
    words = ["advise", str(MODEL_DIR), "--target-length", "2k", "--gpu", text]
    assert find_gpu(parse(words).gpu) == find_gpu(text)
    assert "e-" not in find_gpu(text).name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1000", "'h1000'. Give the name of a GPU .*h100"),
        ("v100", "'v100'. Give the name"),
        ("0xh100", "of several, such as 8xh100"),
        ("24", "with its unit"),
    ],
)
def test_an_unknown_gpu_is_refused_with_those_that_are_known(text: str, message: str) -> None:
    with pytest.raises(rx.RopeExtendError, match=message):
        find_gpu(text)
