"""The options of a test run, and which tests it has. The fixtures are in `shared_fixtures.py`."""

from __future__ import annotations

import gc
import os

import forked_workers
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
        "--full", action="store_true", help="every method in every family, and random examples: takes hours"
    )
    forked_workers.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests run: what imports make is no garbage
    from covering import OPTIONS
    from hypothesis import settings

    forked_workers.one_thread()
    OPTIONS.full = config.getoption("--full")
    config.pluginmanager.import_plugin("shared_fixtures")
    config.pluginmanager.import_plugin("less_work")
    config.pluginmanager.register(forked_workers)
    settings.load_profile("full" if OPTIONS.full else "default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full`, leave out what is marked `full`."""
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Modules and tests are most of all objects, and stay: later collections of garbage leave them out."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
