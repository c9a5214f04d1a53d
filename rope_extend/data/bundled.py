"""Texts that every machine with Python has: no download is needed.

The standard library's source files are split by file into two disjoint parts: one to fine-tune on, one to
evaluate on. The bundled model saw neither in pretraining.

`passkey_document` writes short retrieval tasks, such as the bundled model saw in pretraining.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

MODEL_DIR: Path = Path(__file__).resolve().parents[1] / "demo" / "model"
"""Directory of the bundled Llama checkpoint; `AutoModelForCausalLM.from_pretrained(MODEL_DIR)` loads it."""
FINETUNING_SHARE = 0.6
"""Share of the standard library's files to fine-tune on; the rest is for evaluation."""

MIN_CHARACTERS = 10_000
"""Default length of a held-out file: more than 8 windows of 256 tokens at about 3.5 characters a token."""

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
        FileNotFoundError: there are no `*.py` files, as in a zip-imported or frozen Python, or in an image
            without the sources.
    """
    directory = Path(sysconfig.get_paths()["stdlib"])
    if not (directory / "argparse.py").is_file():
        raise FileNotFoundError(
            f"there are no source files of the Python standard library in {directory} (a zip-imported, "
            "frozen or stripped Python?). The demonstration trains and evaluates on these files: use a "
            "Python that has them, or give your own text files"
        )
    return directory


def read_text(path: Path) -> str:
    """The text of a source file; invalid UTF-8 is replaced, and line ends are `\\n`."""
    return path.read_text(encoding="utf-8", errors="replace")


def held_out_files(min_characters: int = MIN_CHARACTERS) -> list[Path]:
    """The standard-library files of both parts, sorted by relative path."""
    root = standard_library_dir()
    return [path for path, characters in _held_out(root) if characters >= min_characters]


@cache  # reading the standard library takes seconds, and one process may need several parts of it
def _held_out(root: Path) -> tuple[tuple[Path, int], ...]:
    """The files of both parts, with their numbers of characters."""
    files = sorted(path for path in root.rglob("*.py") if path.is_file())
    return tuple((path, len(read_text(path))) for path in files if _is_held_out(path.relative_to(root)))


def finetuning_files(min_characters: int = MIN_CHARACTERS) -> list[Path]:
    """The standard-library files to fine-tune on: about 60 %, none of which is evaluated on."""
    root = standard_library_dir()
    return [p for p in held_out_files(min_characters) if _for_finetuning(p.relative_to(root))]


def evaluation_files(min_characters: int = MIN_CHARACTERS) -> list[Path]:
    """The standard-library files to evaluate on: about 40 %, unseen in pretraining and fine-tuning."""
    root = standard_library_dir()
    return [p for p in held_out_files(min_characters) if not _for_finetuning(p.relative_to(root))]


class RetrievalDocument(NamedTuple):
    """A document that ends in an answer which can only be known from an earlier part of it.

    Attributes:
        prompt: all text before the answer.
        answer: what follows; a model solves the task if its greedy continuation of `prompt` begins with it.
    """

    prompt: str
    answer: str


def passkey_document(
    rng: random.Random, *, filler_lines: int = 16, depth: float | None = None
) -> RetrievalDocument:
    """Write a page of code-like filler that contains one number of 5 digits, and asks for it at the end.

    Args:
        rng: source of all random choices.
        filler_lines: length of the filler. With 16 lines, a document fits in 256 tokens of the bundled
            tokenizer.
        depth: where the number stands: 0 is before all filler, 1 after it; random if not given.
    """
    answer = random_digits(rng, 5)
    position = rng.random() if depth is None else depth
    lines = [_filler_line(rng) for _ in range(filler_lines)]
    lines.insert(round(position * filler_lines), f"# Remember the pass key.\nPASS_KEY = {answer}")
    prompt = "\n".join([*lines, "# What is the pass key?", "PASS_KEY = "])
    return RetrievalDocument(prompt, answer)


def _for_finetuning(relative: Path) -> bool:
    """By the SHA-256 of the path, which is the same on all machines."""
    return int(hashlib.sha256(relative.as_posix().encode()).hexdigest()[:13], 16) / 16**13 < FINETUNING_SHARE


def _is_held_out(relative: Path) -> bool:
    directories = relative.parts[:-1]
    if relative.as_posix() in _EXCLUDED_FILES or relative.name.startswith("_sysconfigdata"):
        return False
    return not any(d in _EXCLUDED_DIRECTORIES or d.startswith("config-") for d in directories)


def random_digits(rng: random.Random, count: int) -> str:
    """A number of `count` digits, the first of which is not 0."""
    return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(count - 1))


_NOUNS = ("node", "item", "path", "name", "line", "index", "value", "size", "count", "key", "file", "data")
_VERBS = ("get", "set", "add", "load", "make", "read", "find", "check", "update", "parse", "write", "close")


def _filler_line(rng: random.Random) -> str:
    """One line of plausible code. It has numbers too, so that the pass key is not the only one."""
    noun, other, verb = rng.choice(_NOUNS), rng.choice(_NOUNS), rng.choice(_VERBS)
    return rng.choice(
        (
            f"{noun} = {verb}_{other}({noun}, {rng.randint(0, 99)})",
            f"self.{noun} = {other}[{rng.randint(0, 9)}]",
            f"if {noun} is None: {other} = {rng.randint(0, 99)}",
            f"{noun}s.append({verb}_{other}({noun}))",
            f"for {noun} in {other}s: {verb}_{noun}({other})",
            f"return {verb}_{noun}({other}, {noun})",
        )
    )
