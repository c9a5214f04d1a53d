"""The options of a test run, and which tests it has. The fixtures are in `shared_fixtures.py`."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # oneDNN chooses its kernels by the CPU alone. On a CPU with AMX, torch's flash attention in bfloat16 then
    # asks ATen for `pack_vnni2`, which only its AVX-512 kernels have, and raises a RuntimeError.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="rows that CI cannot afford, and more random examples: hours"
    )


def pytest_configure(config: pytest.Config) -> None:
    from covering import OPTIONS
    from hypothesis import settings

    OPTIONS.full = config.getoption("--full")
    config.pluginmanager.import_plugin("shared_fixtures")
    settings.load_profile("full" if OPTIONS.full else "default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full`, leave out what is marked `full`."""
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
