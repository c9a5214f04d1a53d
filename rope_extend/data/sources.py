"""Texts from files, globs and hub datasets, one at a time."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rope_extend.data.bundled import evaluation_files, finetuning_files
from rope_extend.errors import RopeExtendError

_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".log",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh",
})  # fmt: skip
_TABLE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# In a directory, a .json file is often metadata rather than text: it is read only if it is named itself.
_BEGINNING = 2**16
"""Characters of a file that show whether it is text."""
_SUFFIXES = _TEXT_SUFFIXES | {".jsonl", ".parquet"}
_HEAD = 5
"""Number of rows that are read to detect the columns of a table."""
_BUNDLED: dict[str | Path, Callable[[], list[Path]]] = {
    "demo:finetuning": finetuning_files,
    "demo:evaluation": evaluation_files,
}
"""Sources by name: parts of the standard library, whose directory differs between installations."""

Source = str | Path | Sequence[str | Path]


def describe_source(source: Source) -> str:
    """A source in an error or a log line."""
    return repr(str(source)) if isinstance(source, str | Path) else f"{len(source)} sources"


def _with_bundled_files(source: Source) -> Source:
    """Replace the names of bundled sources by their files."""
    names = [source] if isinstance(source, str | Path) else list(source)
    for name in names:
        if str(name).startswith("demo:") and name not in _BUNDLED:
            raise RopeExtendError(
                f"{str(name)!r} is no text of the package; there are {', '.join(map(str, _BUNDLED))}"
            )
    if not any(name in _BUNDLED for name in names):
        return source
    try:
        return [path for name in names for path in (_BUNDLED[name]() if name in _BUNDLED else [name])]
    except FileNotFoundError as error:
        raise RopeExtendError(str(error)) from error


def is_dataset(source: str) -> bool:
    """Whether a source is a dataset on the hub, which has splits."""
    return source not in _BUNDLED and not _is_path(source)


def dataset_id(source: str) -> str:
    """The id of a hub dataset without its config, `owner/name`."""
    return source.partition(":")[0]


_HELD_OUT = ("validation", "valid", "val", "dev", "test")
"""Usual names of splits to evaluate on, the best first."""


def held_out_split(source: str, known: Collection[str] = ()) -> str:
    """The split of a hub dataset to evaluate on: that for validation, else test, else the only one left.

    Args:
        source: a hub dataset, as for `load_documents`.
        known: splits of it that the model was trained on; `all` for every one.

    Raises:
        RopeExtendError: its splits cannot be listed, or it is not clear which one to use.
    """
    import datasets  # loads pandas and pyarrow

    name, _, config = source.partition(":")
    with _explained(source, name):
        splits = list(datasets.get_dataset_split_names(name, config or None))
    left = [split for split in splits if split not in known and "all" not in known]
    usual = [split for split in _HELD_OUT if split in left]
    if not usual and len(left) != 1:
        trained = f" and trains on {', '.join(sorted(known))}" if known else ""
        raise RopeExtendError(
            f"eval_data {source!r} has the splits {', '.join(splits)}{trained}, so it is not clear which "
            "one to evaluate on. Set eval_split, or give other documents as eval_data"
        )
    return (usual or left)[0]


def source_files(source: Source) -> dict[Path, Path]:
    """The files of a source in order, by the path without links; none for a hub dataset.

    Raises:
        RopeExtendError: there is nothing to read.
    """
    source = _with_bundled_files(source)
    if isinstance(source, str) and is_dataset(source):
        return {}
    entries = [source] if isinstance(source, str | Path) else source
    return {path.resolve(): path for entry in entries for path, _ in _files(entry)}


def read_texts(
    source: Source, column: str, split: str, cache_dir: str | Path | None, *, streaming: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of a source, one at a time, in a stable order.

    Files are read in their directory, and not copied. A hub dataset is downloaded first, unless streamed.

    Args:
        source: as for `load_documents`.
        column: the column of a table that holds the text.
        split: the split of a hub dataset.
        cache_dir: directory for hub datasets; the cache of `datasets` if None.
        streaming: read a hub dataset over the network as needed.

    Raises:
        RopeExtendError: there is nothing to read, the column does not exist, or a file does not hold what its
            suffix says.
    """
    source = _with_bundled_files(source)
    if isinstance(source, str) and not _is_path(source):
        dataset, _, config = source.partition(":")
        options = {"streaming": True} if streaming else {}
        table = _load(source, dataset, config or None, split=split, cache_dir=cache_dir, **options)
        for row, text in enumerate(_column(table, column, source, dataset)):
            yield f"{source}#{row}", text
        return
    files: dict[str, dict[Path, str]] = {}
    for entry in [source] if isinstance(source, str | Path) else source:
        for path, name in _files(entry):
            files.setdefault(_TABLE_BUILDERS.get(path.suffix.lower(), "text"), {})[path] = name
    if not files:
        raise RopeExtendError("nothing to read: the list of sources is empty")
    for path, name in files.pop("text", {}).items():  # plain text first
        yield name, _read_file(path)
    for builder, names in sorted(files.items(), reverse=True):
        # `datasets` takes a data file for a glob pattern, so brackets in its name are escaped. It fails on
        # empty files. Files are streamed, because its cache knows them by path and time, not by content.
        paths = [glob.escape(str(path)) for path in names if path.stat().st_size]
        if not paths:
            continue
        table = _load(source, builder, split="train", cache_dir=cache_dir, data_files=paths, streaming=True)
        label = next(iter(names.values())) if len(names) == 1 else builder
        for row, text in enumerate(_column(table, column, source, builder)):
            yield f"{label}#{row}", text


def _read_file(path: Path) -> str:
    try:
        # A stray byte in one file of a directory must not stop the run.
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RopeExtendError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if text[:_BEGINNING].count("\0") > len(text[:_BEGINNING]) / 100:
        raise RopeExtendError(
            f"{str(path)!r} is no text in UTF-8: it holds zero bytes, as binary files and UTF-16 do. Give "
            "text files, or convert this one"
        )
    return text


def _files(source: str | Path) -> list[tuple[Path, str]]:
    """Every file that `source` names, sorted, as an absolute path and a short name; at least one."""
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.absolute(), path.name)]
    if path.is_dir():
        inside = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
        files = [
            ((path / name).absolute(), name.as_posix())
            for name in inside
            if name.suffix.lower() in _SUFFIXES and not any(part.startswith(".") for part in name.parts)
        ]
        problem = f"the directory {str(source)!r} holds no file that ends in {', '.join(sorted(_SUFFIXES))}"
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
        Path(source).expanduser().exists()
        or glob.has_magic(source)
        or source.startswith(("/", ".", "~"))
        or source.count("/") > 1
        or not directory
        or Path(directory).is_dir()
        or Path(source).suffix.lower() in _SUFFIXES | _TABLE_BUILDERS.keys()
    )


def _load(source: object, *args: Any, cache_dir: str | Path | None, **options: Any) -> Any:
    import datasets  # loads pandas and pyarrow

    cache = None if cache_dir is None else str(cache_dir)
    with _explained(source, args[0]):
        return datasets.load_dataset(*args, cache_dir=cache, **options)


@contextmanager
def _explained(source: object, name: str) -> Iterator[None]:
    """Raise an error of the `datasets` library again, in one line and with what to do."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RopeExtendError(
            f"cannot read {str(source)!r}: the datasets library, asked for {name!r}, says: "
            f"{error.__cause__ or error}. Give a directory, a file, a glob, or a hub dataset as 'owner/name' "
            "or 'owner/name:config'"
        ) from error


def _column(table: Any, column: str, source: object, kind: str) -> Iterator[str]:
    """The texts of a column of a dataset, streamed or not; an empty text where the value is missing.

    Raises:
        RopeExtendError: the column does not exist, or it holds something else than text.
    """
    with _explained(source, kind):
        head = list(table.take(_HEAD))
    names = list(dict.fromkeys(name for row in head for name in row))
    texts = [name for name in names if all(isinstance(row.get(name), str | None) for row in head)]
    if head and column not in texts:
        problem = "holds no text" if column in names else "does not exist"
        raise RopeExtendError(
            f"the column {column!r} {problem} in {str(source)!r}; its columns are {names}, and "
            f"those with text are {texts}: name one of these as text_column"
        )
    rows = iter(table.select_columns([column]) if head else ())
    for number in itertools.count():
        with _explained(source, kind):
            row = next(rows, None)
        if row is None:
            return
        text = row[column]
        if not isinstance(text, str | None):
            raise RopeExtendError(f"row {number} of {str(source)!r} holds no text in {column!r}: {text!r}")
        yield text or ""
