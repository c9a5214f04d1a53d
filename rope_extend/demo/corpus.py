"""Text for the demonstration model, found on any machine that has Python: no download is needed.

Three disjoint sets of Python source files:

- **pretraining**: the packages installed beside this one (`site-packages`), less every file that copies
  the standard library;
- **fine-tuning** and **evaluation**: two parts of the Python standard library, which the model never saw
  in pretraining, split by file.

`passkey_document` and `key_value_document` write short retrieval tasks. A few per cent of the pretraining
tokens are such documents, and an evaluator can use the same functions with longer filler.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

FINETUNING_SHARE = 0.6
"""Share of the standard library's files that goes to fine-tuning; the rest is for evaluation."""

MIN_CHARACTERS = 10_000
"""Default length of a held-out file: more than 8 windows of 256 tokens at about 3.5 characters a token."""

LONG_LINE = 40
"""A stripped line of at least this many characters is long enough to identify the file it came from."""

MAX_COPIED = 0.2
"""A package file with more than this fraction of its long lines in the standard library is a copy of it."""

MAX_REPEATED = 0.6
"""A package file that shares more than this fraction with files already taken is a near-duplicate."""

# Directories of the standard library that are tests, programs on top of it, third-party code, or data.
# distutils and lib2to3 left Python in 3.12 and 3.13 and hold variants of other modules, such as tokenize.
_EXCLUDED_DIRECTORIES = frozenset(
    {
        "__phello__",
        "__pycache__",
        "dist-packages",
        "distutils",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
# Tables rather than code: predicting them says little about a language model of Python.
_EXCLUDED_FILES = frozenset(
    {"_opcode_metadata.py", "html/entities.py", "keyword.py", "locale.py", "stringprep.py", "token.py"}
    | {"sunau.py"}  # half of its long lines are also in wave.py
)
_GENERATED = re.compile(r"auto-?generated|generated (?:by|from|automatically)|do not (?:edit|modify)", re.I)
_TEST_PARTS = frozenset({"test", "tests", "testing", "conftest.py"})


def standard_library_dir() -> Path:
    """The directory that holds the running Python's standard library as source files.

    Raises `FileNotFoundError` where the library is not there as `*.py` files: a zip-imported or frozen
    Python, or an image from which the sources were stripped.
    """
    directory = Path(sysconfig.get_paths()["stdlib"])
    if not (directory / "argparse.py").is_file():
        raise FileNotFoundError(
            f"the Python standard library is not at {directory} as source files (a zip-imported, frozen or "
            "stripped Python?); the demonstration fine-tunes and evaluates on those files, so run it with a "
            "Python that has them, or pass your own text files instead"
        )
    return directory


def site_packages_dir() -> Path:
    """The directory of the packages installed for the running Python."""
    return Path(sysconfig.get_paths()["purelib"])


def read_text(path: Path) -> str:
    """A source file's text, with bytes that are not UTF-8 replaced and line ends as `\\n`."""
    return path.read_text(encoding="utf-8", errors="replace")


def held_out_files(min_characters: int = MIN_CHARACTERS) -> list[Path]:
    """Every standard-library file that may be used for fine-tuning or evaluation, sorted by relative path."""
    root = standard_library_dir()
    return [
        path
        for path in _sources(root)
        if _is_held_out(path.relative_to(root)) and len(read_text(path)) >= min_characters
    ]


def finetuning_files(min_characters: int = MIN_CHARACTERS) -> list[Path]:
    """The standard-library files to fine-tune on: about 60 % of them, never one that is evaluated on."""
    root = standard_library_dir()
    return [p for p in held_out_files(min_characters) if _for_finetuning(p.relative_to(root))]


def evaluation_files(min_characters: int = MIN_CHARACTERS) -> list[Path]:
    """The standard-library files to evaluate on: about 40 % of them, neither pretrained nor tuned on."""
    root = standard_library_dir()
    return [p for p in held_out_files(min_characters) if not _for_finetuning(p.relative_to(root))]


@dataclass
class CorpusReport:
    """How many package files were looked at, why files were left out, and how many bytes remain."""

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
    """The files to pretrain on, in a fixed shuffled order, and the account of how they were chosen."""

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
    """Choose the package sources to pretrain on, leaving out every copy of the standard library.

    Left out, and counted in the report: tests, very small and very large files, generated files, files of
    which more than `max_copied` of the long lines occur in the standard library, exact duplicates, files
    that mostly repeat files already taken, and what exceeds `max_package_bytes` for one package (so that
    a few large packages do not make up most of the text). Files are visited in the order of a hash of
    their path, so the choice depends on the installed packages and on nothing else.

    `standard_library` are the files to guard against; by default all of the running Python's, the ones
    that are never evaluated on included.
    """
    root = site_packages_dir() if site_packages is None else site_packages
    reference = _standard_library_sources() if standard_library is None else standard_library
    guarded = _line_set(map(read_text, reference))
    taken: set[int] = set()
    digests: set[bytes] = set()
    report = CorpusReport()
    files: list[Path] = []
    for path in sorted(_sources(root), key=lambda p: _hash(p.relative_to(root))):
        relative = path.relative_to(root)
        package = relative.parts[0]
        # This project, and the stub of an editable install: it names the directories of one machine.
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


@dataclass(frozen=True)
class RetrievalDocument:
    """A document whose last words can only be known from an earlier place in it.

    `prompt` ends just before the answer; a model solves the task when its greedy continuation of `prompt`
    begins with `answer`.
    """

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The whole document, as a model is trained on it."""
        return f"{self.prompt}{self.answer}\n"


def passkey_document(
    rng: random.Random, *, filler_lines: int = 16, depth: float | None = None, digits: int = 5
) -> RetrievalDocument:
    """A page of code-like filler that hides one number, and asks for it at the end.

    `depth` places the number: 0 before all filler, 1 after it, by default anywhere at random. With 16
    filler lines a document fits in 256 tokens of the bundled tokenizer; longer filler makes a longer task.
    """
    if filler_lines < 0 or digits < 1:
        raise ValueError(f"filler_lines must be ≥ 0 and digits ≥ 1, got {filler_lines} and {digits}")
    answer = _digits(rng, digits)
    position = rng.random() if depth is None else depth
    if not 0.0 <= position <= 1.0:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    lines = [_filler_line(rng) for _ in range(filler_lines)]
    lines.insert(round(position * filler_lines), f"# Remember the pass key.\nPASS_KEY = {answer}")
    prompt = "\n".join([*lines, "# What is the pass key?", "PASS_KEY = "])
    return RetrievalDocument(prompt, answer)


def key_value_document(
    rng: random.Random, *, pairs: int = 12, queries: int = 1, digits: int = 4
) -> RetrievalDocument:
    """A table of random keys and numbers, then look-ups of which the last is the one to answer.

    With 12 pairs and up to 3 queries a document fits in 256 tokens of the bundled tokenizer.
    """
    if pairs < 1 or queries < 1 or digits < 1:
        raise ValueError(f"pairs, queries and digits must be ≥ 1, got {pairs}, {queries} and {digits}")
    table: dict[str, str] = {}
    while len(table) < pairs:
        table["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4))] = _digits(rng, digits)
    lines = ["TABLE = {", *(f'    "{key}": {value},' for key, value in table.items()), "}"]
    asked = rng.choices(list(table), k=queries)
    lines += [f'assert TABLE["{key}"] == {table[key]}' for key in asked[:-1]]
    prompt = "\n".join([*lines, f'assert TABLE["{asked[-1]}"] == '])
    return RetrievalDocument(prompt, table[asked[-1]])


def _sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if path.is_file())


def _standard_library_sources() -> list[Path]:
    """All of the standard library but its tests, the modules that are never evaluated on included."""
    root = standard_library_dir()
    left_out = {"site-packages", "dist-packages", "test", "tests"}  # Packages may be installed below it.
    return [p for p in _sources(root) if left_out.isdisjoint(p.relative_to(root).parts)]


def _hash(relative: Path) -> str:
    return hashlib.sha256(relative.as_posix().encode()).hexdigest()


def _for_finetuning(relative: Path) -> bool:
    return int(_hash(relative)[:13], 16) / 16**13 < FINETUNING_SHARE


def _is_held_out(relative: Path) -> bool:
    directories = relative.parts[:-1]
    if relative.as_posix() in _EXCLUDED_FILES or relative.name.startswith("_sysconfigdata"):
        return False
    return not any(d in _EXCLUDED_DIRECTORIES or d.startswith("config-") for d in directories)


def _is_test(relative: Path) -> bool:
    return any(part in _TEST_PARTS for part in relative.parts) or relative.name.startswith("test_")


def _long_lines(text: str) -> list[str]:
    # Imports and comments are left out: two files under one licence header are not copies of each other.
    lines = (line.strip() for line in text.splitlines())
    return [
        line for line in lines if len(line) >= LONG_LINE and not line.startswith(("import ", "from ", "#"))
    ]


def _line_set(texts: Iterable[str]) -> set[int]:
    # Hashes, not strings: the packages' long lines alone would take a few hundred megabytes.
    found: set[int] = set()
    for text in texts:
        found.update(map(hash, _long_lines(text)))
    return found


def _fraction_in(lines: list[str], known: set[int]) -> float:
    return sum(hash(line) in known for line in lines) / len(lines) if lines else 0.0


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(count - 1))


_NOUNS = ("node", "item", "path", "name", "line", "index", "value", "size", "count", "key", "file", "data")
_VERBS = ("get", "set", "add", "load", "make", "read", "find", "check", "update", "parse", "write", "close")


def _filler_line(rng: random.Random) -> str:
    """One line of plausible code; its own numbers keep the pass key from being the only one."""
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
