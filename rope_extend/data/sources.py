"""Texts from files, globs and hub datasets, one at a time.

Plain text, CSV and JSON lines are decoded here, compressed or not, so that one rule holds for all: UTF-8, or
UTF-16 with its mark, or an error that says what to do. `datasets` reads Parquet, Arrow and hub datasets.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rope_extend.data.bundled import evaluation_files, finetuning_files
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home

_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".log",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh",
})  # fmt: skip
_TABLES = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
# In a directory these are often metadata, such as a list of the texts: they are read only if they are named.
_NAMED_TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv"}
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_ARCHIVES = frozenset({".zip", ".tar", ".tgz", ".7z", ".rar", ".zst"})
_SUFFIXES = _TEXT_SUFFIXES | _TABLES.keys()
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_CHATS = ("messages", "conversations")
"""Usual names of the column of a chat."""
_ZEROS = 0.01
"""A text file may have this share of zero bytes, as a log after a crash has; more are UTF-16 or no text."""
_TIMEOUT = 10.0
"""Seconds to wait for the hub's answer."""
_HEAD = 5
"""Number of rows that are read to detect the columns of a table."""
_BUNDLED = {"demo:finetuning": finetuning_files, "demo:evaluation": evaluation_files}
"""Sources by name: parts of the standard library, whose directory differs between installations."""

Source = str | Path | Sequence[str | Path]


def describe_source(source: Source) -> str:
    """A source in an error or a log line."""
    if not isinstance(source, str | Path):
        return f"{len(source)} sources" if len(source) > 1 else describe_source(source[0])
    return repr(str(source))


def dataset_of(source: Source) -> str | None:
    """The dataset on the hub that a source is, also as the only one of a list; None for files."""
    only = source[0] if isinstance(source, list | tuple) and len(source) == 1 else source
    return only if isinstance(only, str) and not _is_path(only) else None


def source_files(source: Source) -> dict[Path, str]:
    """The files of a source in order, as absolute paths, with short names; none for a hub dataset.

    Raises:
        RopeExtendError: there is nothing to read.
    """
    if dataset_of(source):
        return {}
    entries = [source] if isinstance(source, str | Path) else source
    files = {path: name for entry in entries for path, name in _files(entry)}
    times = Counter(files.values())
    names, parts = files, 0
    while len({*names.values()}) < len(names):  # several directories: with as much of the path as is needed
        parts += 1
        names = {
            path: name if times[name] == 1 else "/".join(path.parts[-len(Path(name).parts) - parts :])
            for path, name in files.items()
        }
    return names


def check_outside(output: str | Path, source: Source | None) -> None:
    """Refuse an output directory inside a directory of texts: its files would be read as texts.

    Raises:
        RopeExtendError: the output lies in the directory of a source, or is that directory.
    """
    for entry in [source] if isinstance(source, str | Path) else source or ():
        path = Path(expand_home(entry))
        if os.path.isdir(path) and Path(output).resolve().is_relative_to(path.resolve()):
            raise RopeExtendError(
                f"the output directory {str(output)!r} lies in the data {str(entry)!r}, and its files would "
                "be read as texts; choose an output directory outside"
            )


def read_texts(
    source: Source, column: str, split: str, *, streaming: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of a source, one at a time, in a stable order.

    Files are read in their directory, and not copied. A hub dataset is downloaded first, unless streamed.

    Args:
        source: as for `load_documents`.
        column: the column of a table that holds the text.
        split: the split of a hub dataset.
        streaming: read a hub dataset over the network as needed.

    Raises:
        RopeExtendError: there is nothing to read, the column does not exist, or a file does not hold what its
            suffix says.
    """
    if named := dataset_of(source):
        source, (dataset, _, config) = named, named.partition(":")
        _check_on_hub(source, dataset)
        options = {"streaming": True} if streaming else {}
        rows = _dataset_rows(source, column, dataset, config or None, split=split, **options)
        for row, text in enumerate(_column(rows, column, source)):
            yield f"{source}#{row}", text
        return
    files = source_files(source)
    if not files:
        raise RopeExtendError("nothing to read: the list of sources is empty")
    for path in sorted(files, key=lambda path: _kind(path) != "text"):  # plain text first
        if _kind(path) == "text":
            yield files[path], read_file(path)
            continue
        for row, text in enumerate(_column(_table(path, column), column, path)):
            yield f"{files[path]}#{row}", text


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix of the contents, and that of the compression; empty if there is none."""
    outer = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), outer) if outer in _OPENERS else (outer, "")


def _kind(path: Path) -> str:
    """How a file is read: as text, or as a table in one of the formats of `datasets`."""
    return (_TABLES | _NAMED_TABLES).get(_suffixes(path)[0], "text")


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    """The decoded text of a file, compressed or not; line ends are kept as a table needs them.

    Raises:
        RopeExtendError: it cannot be read, it is an archive, or it is no text.
    """
    suffix, compression = _suffixes(path)
    if suffix in _ARCHIVES:
        raise RopeExtendError(f"{str(path)!r} is an archive; unpack it, and give the files in it")
    try:
        with _OPENERS.get(compression, open)(path, "rb") as file:
            start = file.read(4)
            file.seek(0)
            encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), "utf-8")
            yield io.TextIOWrapper(file, encoding, newline="")
    except UnicodeDecodeError as error:
        raise _no_text(path, f"{error.object[max(0, error.start - 16) : error.start + 8]!r}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = "a directory; give a file" if path.is_dir() else getattr(error, "strerror", None) or error
        raise RopeExtendError(f"cannot read {str(path)!r}: {reason}") from error


def _no_text(path: Path, found: str) -> RopeExtendError:
    return RopeExtendError(
        f"{str(path)!r} is no text in UTF-8: it holds {found}. Convert text of another encoding, such as by "
        f"iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8-{path.name}; drop damaged bytes "
        "by iconv -c -f UTF-8 -t UTF-8; and extract text from other formats"
    )


def read_file(path: Path) -> str:
    """The text of a file that is one document, compressed or not, with line ends as `\\n`.

    Raises:
        RopeExtendError: it cannot be read, it is an archive, or it is no text.
    """
    with _opened(path) as file:
        text = file.read().replace("\r\n", "\n").replace("\r", "\n")
    if (zeros := text.count("\0")) > _ZEROS * len(text):
        raise _no_text(path, f"{zeros:,} zero bytes")
    return text


def _table(path: Path, column: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a table."""
    kind = _kind(path)
    if kind in ("parquet", "arrow"):
        # Streamed, because the cache of `datasets` knows files by path and time, not by content. It takes a
        # data file for a glob pattern, so brackets in its name are escaped.
        file = glob.escape(str(path))
        yield from _dataset_rows(path, column, kind, split="train", data_files=[file], streaming=True)
        return
    number = 1
    with _opened(path) as opened:
        try:
            lines: Iterable[str] = opened
            if kind == "csv":
                csv.field_size_limit(2**31 - 1)  # a document is longer than the default limit
                dialect = "excel-tab" if _suffixes(path)[0] == ".tsv" else "excel"
                for row in csv.DictReader(lines, dialect=dialect, strict=True):
                    number += 1
                    yield row
                return
            if _suffixes(path)[0] == ".json":
                whole = opened.read()
                if whole.lstrip().startswith("["):
                    yield from json.loads(whole)
                    return
                lines = whole.split("\n")
            for number, line in enumerate(lines, start=1):  # noqa: B007 - an error names it
                if line.strip():
                    yield json.loads(line)
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError, csv.Error) as error:
            raise RopeExtendError(
                f"{str(path)!r} does not hold the rows of a table: row {number}: {error}"
            ) from error


def _files(source: str | Path) -> list[tuple[Path, str]]:
    """Every file that `source` names, sorted, as an absolute path and a short name; at least one."""
    if (name := str(source)).startswith("demo:"):
        if name not in _BUNDLED:
            raise RopeExtendError(f"{name!r} is no text of the package; there are {', '.join(_BUNDLED)}")
        return [(path.absolute(), path.name) for path in _BUNDLED[name]()]
    path = Path(expand_home(source))
    if os.path.isfile(path):  # unlike the method, not an error for a name that no file can have
        return [(path.absolute(), path.name)]
    if os.path.isdir(path):
        inside = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
        files = [
            ((path / name).absolute(), name.as_posix())
            for name in inside
            if _suffixes(name)[0] in _SUFFIXES and not any(part.startswith(".") for part in name.parts)
        ]
        problem = (
            f"the directory {str(source)!r} holds no file that ends in {', '.join(sorted(_SUFFIXES))}, and "
            f"{', '.join(_NAMED_TABLES)} are read only if they are named"
        )
    else:
        matches = sorted(glob.glob(str(path), recursive=True))
        files = [(Path(match).absolute(), match) for match in matches if Path(match).is_file()]
        problem = f"no file matches {str(source)!r} (relative to {Path.cwd()})"
    if not files:
        raise RopeExtendError(
            f"nothing to read: {problem}. Give a directory, a file, a glob, or a hub dataset as 'owner/name'"
        )
    return files


def _is_path(source: str) -> bool:
    """Whether a string names files, present or missing, rather than a dataset on the hub, `owner/name`.

    What lies in a directory that is here is a path: without a network, asking the hub takes half a minute.
    """
    directory, _, _ = source.partition(":")[0].rpartition("/")
    return (
        os.path.exists(expand_home(source))
        or glob.has_magic(source)
        or source.startswith(("/", ".", "~"))
        or source.count("/") > 1
        or not directory
        or os.path.isdir(directory)
        or _suffixes(Path(source))[0] in _SUFFIXES | _NAMED_TABLES.keys() | _ARCHIVES
    )


def _check_on_hub(source: str, dataset: str) -> None:
    """Refuse a dataset that is not cached if the hub does not answer; `datasets` asks for half a minute."""
    import datasets
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    owner, _, name = dataset.rpartition("/")
    kept = f"{owner}___{datasets.naming.camelcase_to_snakecase(name)}"
    if is_offline_mode() or (Path(datasets.config.HF_DATASETS_CACHE) / kept).exists():
        return
    try:
        get_hf_file_metadata(hf_hub_url(dataset, "README.md", repo_type="dataset"), timeout=_TIMEOUT)
    except HfHubHTTPError:
        return  # such as a dataset that does not exist: `datasets` says what to do
    except Exception as error:  # no network or a proxy: the classes differ between versions
        raise RopeExtendError(
            f"no file {source!r} (seen from {Path.cwd()}), and the hub cannot be asked for a dataset of that "
            f"name ({type(error).__name__}). Check the path, or the network"
        ) from error


def _dataset_rows(
    source: object, column: str, name: str, *config: str | None, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """The rows that `datasets.load_dataset` reads; after the first ones, only a column of them is read.

    Raises:
        RopeExtendError: the library raised an error; in one line, and with what to do.
    """
    import datasets  # loads pandas and pyarrow

    try:
        table = datasets.load_dataset(name, *config, **options)
        head = list(table.take(_HEAD))
        yield from head
        if len(head) == _HEAD and any(column in row for row in head):
            yield from table.skip(_HEAD).select_columns([column])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RopeExtendError(
            f"cannot read {str(source)!r}: the datasets library, asked for {name!r}, says: "
            f"{error.__cause__ or error}. Give a directory, a file, a glob, or a hub dataset as 'owner/name' "
            "or 'owner/name:config', and the name of one of its splits"
        ) from error


def _column(rows: Iterator[Mapping[str, Any]], column: str, source: object) -> Iterator[str]:
    """The texts of a column of a table; an empty text where the value is missing.

    Raises:
        RopeExtendError: the column does not exist, or it holds something else than text.
    """
    head = list(itertools.islice(rows, _HEAD))
    if not all(isinstance(row, Mapping) for row in head):
        raise RopeExtendError(f"{str(source)!r} holds {head[0]!r}, where a row with columns should be")
    names = list(dict.fromkeys(name for row in head for name in row))
    texts = [name for name in names if all(isinstance(row.get(name), str | None) for row in head)]
    if head and column not in texts:
        problem = "holds no text" if column in names else "does not exist"
        advice = f"those with text are {texts}: name one of these as text_column"
        if chat := next((name for name in (column, *_CHATS) if name in names and name not in texts), None):
            advice += (
                f". If {chat!r} holds a chat, write it as text first, with the model's own template: "
                f'{{"text": tokenizer.apply_chat_template(row[{chat!r}], tokenize=False)}}'
            )
        raise RopeExtendError(
            f"the column {column!r} {problem} in {str(source)!r}; its columns are {names}, and {advice}"
        )
    for number, row in enumerate(itertools.chain(head, rows)):
        text = row.get(column) if isinstance(row, Mapping) else row
        if not isinstance(text, str | None):
            raise RopeExtendError(f"row {number} of {str(source)!r} holds no text in {column!r}: {text!r}")
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:  # JSON can write one half of a pair, which no tokenizer takes
            half = error.object[error.start]
            raise RopeExtendError(
                f"row {number} of {str(source)!r} holds {half!r} in {column!r}, half of a surrogate pair, "
                "which is no character; remove it, or leave out the row"
            ) from error
        yield text or ""
