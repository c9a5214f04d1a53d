"""Texts that every machine with Python has: no download is needed.

The standard library's source files are split by file into two disjoint parts: one to fine-tune on, one to
evaluate on. The bundled model saw neither in pretraining.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import cache
from pathlib import Path

from rope_extend.errors import RopeExtendError

MODEL_DIR: Path = Path(__file__).resolve().parents[1] / "demo" / "model"
"""Directory of the bundled Llama checkpoint; `AutoModelForCausalLM.from_pretrained(MODEL_DIR)` loads it."""
FINETUNING_SHARE = 0.6
"""Share of the standard library's files to fine-tune on; the rest is for evaluation."""

MIN_CHARACTERS = 10_000
"""Least length of a held-out file: more than 8 windows of 256 tokens at about 3.5 characters a token."""

# Left out of both parts: tests, programs on top of the standard library, third-party code, and data.
# distutils and lib2to3 left Python in 3.12 and 3.13 and hold variants of other modules, such as tokenize.
_EXCLUDED_DIRECTORIES = frozenset({
    "__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idlelib",
    "lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo",
})  # fmt: skip
# Tables rather than code: predicting them says little about a language model of Python.
_EXCLUDED_FILES = frozenset(
    {"_opcode_metadata.py", "html/entities.py", "keyword.py", "locale.py", "stringprep.py", "token.py"}
    | {"sunau.py"}  # half of its long lines are also in wave.py
)


def standard_library_dir() -> Path:
    """The directory that holds the running Python's standard library as source files.

    Raises:
        RopeExtendError: there are no `*.py` files, as in a zip-imported or frozen Python, or in an image
            without the sources.
    """
    directory = Path(sysconfig.get_paths()["stdlib"])
    if not (directory / "argparse.py").is_file():
        raise RopeExtendError(
            f"there are no source files of the Python standard library in {directory} (a zip-imported, "
            "frozen or stripped Python?). The demonstration trains and evaluates on these files: use a "
            "Python that has them, or give your own text files"
        )
    return directory


def read_text(path: Path) -> str:
    """The text of a source file; invalid UTF-8 is replaced, and line ends are `\\n`."""
    return path.read_text(encoding="utf-8", errors="replace")


@cache  # reading the standard library takes seconds, and one process may need several parts of it
def _held_out(root: Path) -> tuple[Path, ...]:
    """The files of both parts, sorted by relative path."""
    files = sorted(
        path for path in root.rglob("*.py") if path.is_file() and _is_held_out(path.relative_to(root))
    )
    return tuple(path for path in files if len(read_text(path)) >= MIN_CHARACTERS)


def finetuning_files() -> list[Path]:
    """The standard-library files to fine-tune on: about 60 %, none of which is evaluated on."""
    root = standard_library_dir()
    return [path for path in _held_out(root) if _for_finetuning(path.relative_to(root))]


def evaluation_files() -> list[Path]:
    """The standard-library files to evaluate on: about 40 %, unseen in pretraining and fine-tuning."""
    root = standard_library_dir()
    return [path for path in _held_out(root) if not _for_finetuning(path.relative_to(root))]


def _for_finetuning(relative: Path) -> bool:
    """By the SHA-256 of the path, which is the same on all machines."""
    return int(hashlib.sha256(relative.as_posix().encode()).hexdigest()[:13], 16) / 16**13 < FINETUNING_SHARE


def _is_held_out(relative: Path) -> bool:
    directories = relative.parts[:-1]
    if relative.as_posix() in _EXCLUDED_FILES or relative.name.startswith("_sysconfigdata"):
        return False
    return not any(d in _EXCLUDED_DIRECTORIES or d.startswith("config-") for d in directories)
