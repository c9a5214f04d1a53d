"""Starts `make gpu` from the source tree, installed or not."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def use_source_tree() -> None:
    """Let this checkout be imported without an installation."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import rope_extend

    if importlib.util.find_spec("rope_extend.patches") is None:  # only an installation puts it in the package
        rope_extend.__path__.append(str(ROOT))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    use_source_tree()
    from gpu.run_sections import main

    sys.exit(main())
