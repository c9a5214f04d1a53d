"""The text that the bundled model was pretrained on."""

from __future__ import annotations

import hashlib
import random
import re
import sysconfig
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rope_extend.data.bundled import (
    RetrievalDocument,
    path_hash,
    python_files,
    random_digits,
    read_text,
    standard_library_dir,
)

MAX_COPIED = 0.2
"""A package file counts as a copy if more than this fraction of its long lines is in the standard library."""
MAX_REPEATED = 0.6
"""A package file is a near-duplicate if it shares more than this fraction with files already taken."""
LONG_LINE = 40
"""A stripped line of at least this many characters identifies the file it came from."""
_GENERATED = re.compile(r"auto-?generated|generated (?:by|from|automatically)|do not (?:edit|modify)", re.I)
_TEST_PARTS = frozenset({"test", "tests", "testing", "conftest.py"})


@dataclass
class CorpusReport:
    """The number of package files seen, the numbers left out by reason, and the bytes that remain."""

    seen: int = 0
    tests: int = 0
    size: int = 0
    generated: int = 0
    copies_of_standard_library: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    over_package_cap: int = 0
    kept: int = 0
    kept_bytes: int = 0
    bytes_by_package: dict[str, int] = field(default_factory=dict)
    copied_files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PretrainingCorpus:
    """The files to pretrain on, in a fixed shuffled order, and a report on how they were chosen."""

    files: tuple[Path, ...]
    report: CorpusReport


def pretraining_corpus(
    site_packages: Path | None = None,
    *,
    max_package_bytes: int = 8_000_000,
    max_file_bytes: int = 200_000,
    min_file_bytes: int = 400,
    max_copied: float = MAX_COPIED,
    max_repeated: float = MAX_REPEATED,
    standard_library: Collection[Path] | None = None,
) -> PretrainingCorpus:
    """Choose the package sources to pretrain on, without copies of the standard library.

    The report counts the files that are left out:

    - tests, very small and very large files, and generated files,
    - files with more than `max_copied` of their long lines in the standard library,
    - exact duplicates, and files that mostly repeat files already taken,
    - files beyond `max_package_bytes` of one package, so that a few large packages do not dominate.

    Files are visited in the order of a hash of their path, so the choice depends only on the installed
    packages. `standard_library` are the files that must not be copied; by default the whole standard library
    of the running Python, including modules that no evaluation uses.
    """
    root = site_packages_dir() if site_packages is None else site_packages
    reference = _standard_library_sources() if standard_library is None else standard_library
    guarded = _line_set(map(read_text, reference))
    taken: set[int] = set()
    digests: set[bytes] = set()
    report = CorpusReport()
    files: list[Path] = []
    for path in sorted(python_files(root), key=lambda p: path_hash(p.relative_to(root))):
        relative = path.relative_to(root)
        package = relative.parts[0]
        # This project, and the stub of an editable install, which contains directories of one machine.
        if package == "rope_extend" or package.startswith("__editable__"):
            continue
        report.seen += 1
        if _is_test(relative):
            report.tests += 1
            continue
        if not min_file_bytes <= path.stat().st_size <= max_file_bytes:
            report.size += 1
            continue
        text = read_text(path)
        if _GENERATED.search(text[:600]):
            report.generated += 1
            continue
        lines = _long_lines(text)
        if _fraction_in(lines, guarded) > max_copied:
            report.copies_of_standard_library += 1
            report.copied_files.append(relative.as_posix())
            continue
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        if digest in digests:
            report.duplicates += 1
            continue
        if _fraction_in(lines, taken) > max_repeated:
            report.near_duplicates += 1
            continue
        used = report.bytes_by_package.get(package, 0)
        size = len(text.encode("utf-8", "replace"))
        if used + size > max_package_bytes:
            report.over_package_cap += 1
            continue
        digests.add(digest)
        taken.update(map(hash, lines))
        report.bytes_by_package[package] = used + size
        report.kept += 1
        report.kept_bytes += size
        files.append(path)
    report.copied_files.sort()
    report.bytes_by_package = dict(sorted(report.bytes_by_package.items(), key=lambda item: -item[1]))
    return PretrainingCorpus(tuple(files), report)


def copied_line_fraction(text: str, others: Iterable[str]) -> float:
    """Fraction of a text's long lines of code that occur in other texts.

    A long line has 40 characters or more without its indentation; imports and comments do not count.
    """
    return _fraction_in(_long_lines(text), _line_set(others))


def key_value_document(
    rng: random.Random, *, pairs: int = 12, queries: int = 1, digits: int = 4
) -> RetrievalDocument:
    """A table of random keys and numbers, then look-ups; the last one is the question.

    With 12 pairs and up to 3 queries a document fits in 256 tokens of the bundled tokenizer.
    """
    if pairs < 1 or queries < 1 or digits < 1:
        raise ValueError(f"pairs, queries and digits must be ≥ 1, got {pairs}, {queries} and {digits}")
    table: dict[str, str] = {}
    while len(table) < pairs:
        table["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4))] = random_digits(rng, digits)
    lines = ["TABLE = {", *(f'    "{key}": {value},' for key, value in table.items()), "}"]
    asked = rng.choices(list(table), k=queries)
    lines += [f'assert TABLE["{key}"] == {table[key]}' for key in asked[:-1]]
    prompt = "\n".join([*lines, f'assert TABLE["{asked[-1]}"] == '])
    return RetrievalDocument(prompt, table[asked[-1]])


def site_packages_dir() -> Path:
    """The directory of the packages installed for the running Python."""
    return Path(sysconfig.get_paths()["purelib"])


def _standard_library_sources() -> list[Path]:
    """The standard library without its tests, including modules that no evaluation uses."""
    root = standard_library_dir()
    left_out = {"site-packages", "dist-packages", "test", "tests"}  # packages may be installed below it
    return [p for p in python_files(root) if left_out.isdisjoint(p.relative_to(root).parts)]


def _is_test(relative: Path) -> bool:
    return any(part in _TEST_PARTS for part in relative.parts) or relative.name.startswith("test_")


def _long_lines(text: str) -> list[str]:
    # Without imports and comments: two files with the same licence header are not copies of each other.
    lines = (line.strip() for line in text.splitlines())
    return [
        line for line in lines if len(line) >= LONG_LINE and not line.startswith(("import ", "from ", "#"))
    ]


def _line_set(texts: Iterable[str]) -> set[int]:
    # Hashes, not strings: the packages' long lines alone would take a few hundred megabytes.
    hashes: set[int] = set()
    for text in texts:
        hashes.update(map(hash, _long_lines(text)))
    return hashes


def _fraction_in(lines: list[str], known: set[int]) -> float:
    return sum(hash(line) in known for line in lines) / len(lines) if lines else 0.0
