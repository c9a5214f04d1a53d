"""Long documents in, token blocks out.

What teaches a model to use a longer window is a text that is really that long: blocks glued from short
texts never reach the new positions with anything to look back at. So a block here always comes from one
document, and what is too short is dropped, counted and reported, never padded or joined.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import datasets
import numpy as np
import torch

from rope_extend.demo import evaluation_files, finetuning_files
from rope_extend.errors import RopeExtendError
from rope_extend.token_cache import Ids, TokenCache, cache_key, tokenizer_content

logger = logging.getLogger(__name__)

_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".log",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh",
})  # fmt: skip
_TABLE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# A directory of texts often has a .json beside them that is no text; one that is named outright is read.
_SUFFIXES = _TEXT_SUFFIXES | {".jsonl", ".parquet"}
_HEAD = 5
"""By how many rows of a table its columns are known."""
_AT_ONCE = 64
"""How many texts are tokenised, and kept in one file, at once: documents are long."""
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_DEMO: dict[str | Path, Callable[[], list[Path]]] = {
    "demo:finetuning": finetuning_files,
    "demo:evaluation": evaluation_files,
}


# --------------------------------------------------------------------------------------------- lengths


def parse_length(length: str | SupportsIndex) -> int:
    """Turn ``"32k"``, ``"1M"``, ``"4096"`` or ``4096`` into a number of tokens; k is 1024, M is 1024².

    Raises:
        RopeExtendError: for anything that is not a whole, positive number of tokens.
    """
    tokens: float | None = None
    if isinstance(length, str):
        match = re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([km]?)\s*", length, re.IGNORECASE | re.ASCII)
        if match and "." in match[1]:
            tokens = float(match[1]) * _UNITS[match[2].lower()]
        elif match:
            tokens = int(match[1]) * _UNITS[match[2].lower()]
    elif not isinstance(length, bool) and hasattr(length, "__index__"):
        tokens = operator.index(length)
    if tokens is None or tokens <= 0 or tokens != int(tokens):
        raise RopeExtendError(
            f"not a length in tokens: {length!r}. A length is a whole number above zero, such as 4096, "
            "'4096', '32k' (32 × 1024) or '1M' (1024 × 1024)"
        )
    return int(tokens)


def format_length(tokens: int) -> str:
    """Write a number of tokens as people say it: 32768 is ``"32k"``, 1048576 is ``"1M"``, 1000 is ``"1000"``.

    Inverse of :func:`parse_length`.
    """
    for unit, size in (("M", _UNITS["m"]), ("k", _UNITS["k"])):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


# ------------------------------------------------------------------------------------------- documents


@dataclass(frozen=True, eq=False)
class Document:
    """One text, tokenised: ``input_ids`` is int64 ``[T]`` on the CPU, ``name`` says where it came from."""

    name: str
    input_ids: torch.Tensor

    def __len__(self) -> int:
        """Length in tokens."""
        return self.input_ids.numel()


def load_documents(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    text_column: str = "text",
    split: str = "train",
    min_tokens: int = 0,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    cache_dir: str | Path | None = None,
) -> list[Document]:
    """Read documents from files or the hub and tokenise them, once: the cache is keyed by their content.

    Args:
        source: a directory (searched for text, source code, JSONL and Parquet; hidden ones are skipped), a
            file, a glob pattern, a list of these, or the id of a hub dataset, ``"owner/name"`` or
            ``"owner/name:config"``, or ``"demo:finetuning"`` and ``"demo:evaluation"``, two disjoint parts
            of the Python standard library, which every user has. A text file is one document; so is each
            row of a table.
        tokenizer: a transformers tokenizer. It adds the special tokens that it adds by default (BOS, where
            the model was trained with one), so positions count as they did in training.
        text_column: the column of a table that holds the text.
        split: the split of a hub dataset.
        min_tokens: skip documents with fewer tokens than this.
        max_documents: stop after this many documents; what comes after them is not tokenised.
        max_tokens: cut each document to its first ``max_tokens`` tokens.
        cache_dir: where tokens and hub datasets are kept; the cache of ``datasets`` if not given.

    Returns:
        Documents in a stable order: files by path, rows by number.

    Raises:
        RopeExtendError: if there is nothing to read, no such column, only empty documents, or no document
            of ``min_tokens`` tokens.
    """
    for name, limit in (("max_documents", max_documents), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise RopeExtendError(f"{name} must be at least 1, or None for no limit; got {limit!r}")
    documents: list[Document] = []
    lengths: dict[str, int] = {}
    texts = read_texts(source, text_column, split, cache_dir)
    for name, ids in tokenised(texts, tokenizer, TokenCache(cache_dir), first=max_documents):
        lengths[name] = len(ids)
        if len(ids) and len(ids) >= min_tokens:
            documents.append(Document(name, torch.from_numpy(ids[:max_tokens].astype(np.int64))))
        if len(documents) == max_documents:
            return documents
    source = _with_demo_files(source)
    if not any(lengths.values()):
        raise RopeExtendError(f"every document in {_describe(source)} is empty ({len(lengths)} read)")
    if not documents:
        longest = max(lengths, key=lambda name: lengths[name])
        raise RopeExtendError(
            f"no document of at least {min_tokens:,} tokens in {_describe(source)}: the longest of "
            f"{len(lengths)}, {longest!r}, has {lengths[longest]:,}. Ask for min_tokens={lengths[longest]} "
            "or less, or give longer texts; a recipe's packing reads short ones"
        )
    if len(documents) < len(lengths):
        logger.info("%s: %d of %d documents are empty or shorter than %d tokens",
                    _describe(source), len(lengths) - len(documents), len(lengths), min_tokens)  # fmt: skip
    return documents


def fingerprint(documents: Iterable[Document]) -> str:
    """Sixteen hex digits that name exactly these token sequences, in this order."""
    digest = hashlib.sha256()
    for document in documents:
        ids = np.ascontiguousarray(document.input_ids.numpy(), dtype="<i8")
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
    return digest.hexdigest()[:16]


def _with_demo_files(source: str | Path | Sequence[str | Path]) -> str | Path | Sequence[str | Path]:
    """Replace the names of the demonstration's texts by their files, which lie elsewhere in each Python."""
    names = [source] if isinstance(source, str | Path) else list(source)
    try:
        found = [path for name in names for path in (_DEMO[name]() if name in _DEMO else [name])]
    except FileNotFoundError as error:
        raise RopeExtendError(str(error)) from error
    return source if found == names else found


def _describe(source: str | Path | Sequence[str | Path]) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else f"{len(source)} sources"


def read_texts(
    source: str | Path | Sequence[str | Path],
    column: str,
    split: str,
    cache_dir: str | Path | None,
    *,
    streaming: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of a source, one at a time, in a stable order.

    Files are read where they lie, and nothing of them is kept. A hub dataset is downloaded first, unless it
    is streamed.

    Args:
        source: as for `load_documents`.
        column: of a table, that holds the text.
        split: of a hub dataset.
        cache_dir: where hub datasets are kept.
        streaming: read a hub dataset over the network as it is needed.

    Raises:
        RopeExtendError: nothing to read, no such column, or a file that is not what its name says.
    """
    source = _with_demo_files(source)
    if isinstance(source, str) and not _is_path(source):
        dataset, _, config = source.partition(":")
        options = {"streaming": True} if streaming else {}
        table = _load(source, dataset, config or None, split=split, cache_dir=cache_dir, **options)
        for row, text in enumerate(_column(table, column, source, dataset)):
            yield f"{source}#{row}", text
        return
    files: dict[str, dict[Path, str]] = {}
    for one in [source] if isinstance(source, str | Path) else source:
        for path, name in _files(one):
            files.setdefault(_TABLE_BUILDERS.get(path.suffix.lower(), "text"), {})[path] = name
    if not files:
        raise RopeExtendError("nothing to read: the list of sources is empty")
    for path, name in files.pop("text", {}).items():  # plain text first
        yield name, _text_of(path)
    for builder, names in sorted(files.items(), reverse=True):
        # A data file is a pattern to `datasets`; a bracket in its name is not meant as one. Streamed, because
        # what `datasets` keeps of a file it knows by path and time, not by content.
        paths = [glob.escape(str(path)) for path in names if path.stat().st_size]  # `datasets` fails on none
        if not paths:
            continue
        table = _load(source, builder, split="train", cache_dir=cache_dir, data_files=paths, streaming=True)
        label = next(iter(names.values())) if len(names) == 1 else builder
        for row, text in enumerate(_column(table, column, source, builder)):
            yield f"{label}#{row}", text


def _text_of(path: Path) -> str:
    try:
        # A stray byte in one file of a directory must not stop the run.
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RopeExtendError(f"cannot read {str(path)!r}: {error.strerror}") from error


def _files(source: str | Path) -> list[tuple[Path, str]]:
    """Every file that ``source`` names, sorted, as an absolute path and a short name; at least one."""
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.absolute(), path.name)]
    if path.is_dir():
        inside = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
        found = [
            ((path / name).absolute(), name.as_posix())
            for name in inside
            if name.suffix.lower() in _SUFFIXES and not any(part.startswith(".") for part in name.parts)
        ]
        missing = f"the directory {str(source)!r} holds no file that ends in {', '.join(sorted(_SUFFIXES))}"
    else:
        matches = sorted(glob.glob(str(path), recursive=True))
        found = [(Path(match).absolute(), match) for match in matches if Path(match).is_file()]
        missing = f"no file matches {str(source)!r} (seen from {Path.cwd()})"
    if not found:
        raise RopeExtendError(
            f"nothing to read: {missing}. Give a directory, a file, a glob, or a hub dataset as 'owner/name'"
        )
    return found


def _is_path(source: str) -> bool:
    """Whether a string names files, present or missing, rather than a dataset on the hub."""
    return (
        Path(source).expanduser().exists()
        or glob.has_magic(source)
        or source.startswith(("/", ".", "~"))
        or source.count("/") > 1
        or Path(source).suffix.lower() in _SUFFIXES | _TABLE_BUILDERS.keys()
    )


def _load(source: object, *args: Any, cache_dir: str | Path | None, **options: Any) -> Any:
    cache = None if cache_dir is None else str(cache_dir)
    with _explained(source, args[0]):
        return datasets.load_dataset(*args, cache_dir=cache, **options)


@contextmanager
def _explained(source: object, name: str) -> Iterator[None]:
    """Say in one line what the datasets library could not read."""
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RopeExtendError(
            f"cannot read {str(source)!r}, taken as {name!r} by the datasets library, which says: "
            f"{error.__cause__ or error}. Give a directory, a file, a glob, or a hub dataset as 'owner/name' "
            "or 'owner/name:config'"
        ) from error


def _column(table: Any, column: str, source: object, kind: str) -> Iterator[str]:
    """The texts of a table's column, of a dataset or a streamed one; an empty text where there is none.

    Raises:
        RopeExtendError: there is no such column, or it holds something else.
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


def tokenised(
    texts: Iterable[tuple[str, str]], tokenizer: Any, cache: TokenCache | None, *, first: int | None = None
) -> Iterator[tuple[str, Ids]]:
    """Yield the name and the token ids, int32 `[T]`, of each text, a few texts at a time.

    Args:
        texts: names and texts; read as far as is asked for.
        tokenizer: a transformers tokenizer.
        cache: where tokens are kept; nowhere if None.
        first: how many texts are enough to begin with; a caller who wants the first ten long books of a
            library need not wait for all of it.
    """
    content, pairs = tokenizer_content(tokenizer), iter(texts)
    size = min(first or _AT_ONCE, _AT_ONCE)
    while chunk := list(itertools.islice(pairs, size)):
        size = min(2 * size, _AT_ONCE)
        key = cache_key([text for _, text in chunk], content) if cache else ""
        found = cache.get(key) if cache else None
        if found is None:
            found = _encode([text for _, text in chunk], tokenizer)
            if cache:
                cache.put(key, found)
        yield from zip((name for name, _ in chunk), found, strict=True)


def _encode(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    # Not verbose: long is what we want. An empty text stays empty, also if the tokenizer adds a BOS to it.
    ids = iter(tokenizer([text for text in texts if text], verbose=False)["input_ids"] if any(texts) else [])
    return [np.asarray(next(ids) if text else [], dtype=np.int32) for text in texts]


# ---------------------------------------------------------------------------------------------- blocks


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of ``length`` tokens, each from a single document; made by :func:`blocks`.

    Items are ``{"input_ids": int64 [length], "labels": int64 [length]}``; labels are the same tokens, not
    shifted.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        length: int,
        spans: Sequence[tuple[int, int]],
        dropped_documents: int,
    ) -> None:
        self.length = length
        self.dropped_documents = dropped_documents
        self._documents = documents
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document, start = self._spans[index]
        ids = self._documents[document].input_ids[start : start + self.length]
        return {"input_ids": ids, "labels": ids}

    def source(self, index: int) -> tuple[str, int]:
        """Name of the document that a block comes from, and the offset in tokens at which it starts there."""
        document, start = self._spans[index]
        return self._documents[document].name, start

    @property
    def tokens(self) -> int:
        """Number of tokens in all blocks."""
        return len(self) * self.length

    def share_beyond(self, window: int) -> float:
        """Share of the tokens that sit at positions ``window`` and above: what the old window never saw."""
        return max(0, self.length - window) / self.length

    def __repr__(self) -> str:
        return (
            f"Blocks({len(self)} of {format_length(self.length)} tokens, "
            f"{self.dropped_documents} documents too short)"
        )


def blocks(
    documents: Sequence[Document],
    length: int | str,
    *,
    seed: int = 0,
    shuffle: bool = True,
    max_blocks: int | None = None,
) -> Blocks:
    """Cut documents into fine-tuning blocks of ``length`` tokens, each from one document.

    Blocks follow each other without overlap. The rest of a document gets a last block, which then overlaps
    the one before it, if it is at least half a block: so nearly all text is used, and no token is ever read
    mostly for the second time. Documents shorter than ``length`` are dropped and counted.

    Args:
        documents: where the text comes from.
        length: tokens per block, at least 2; ``"32k"`` works too.
        seed: seed of the shuffle, independent of torch's global one.
        shuffle: mix the blocks of all documents; otherwise they come in order.
        max_blocks: keep only this many, after the shuffle.

    Raises:
        RopeExtendError: if no document has ``length`` tokens.
    """
    length = parse_length(length)
    if length < 2:
        raise RopeExtendError(f"a block needs 2 tokens or more, one to read and one to predict; got {length}")
    if max_blocks is not None and max_blocks < 1:
        raise RopeExtendError(f"max_blocks must be at least 1, or None for all of them; got {max_blocks!r}")
    spans = [
        (i, start) for i, document in enumerate(documents) for start in block_starts(len(document), length)
    ]
    if not spans:
        raise RopeExtendError(_nothing_long_enough(documents, length))
    if shuffle:
        order = torch.randperm(len(spans), generator=torch.Generator().manual_seed(seed))
        spans = [spans[i] for i in order.tolist()]
    dropped = sum(len(document) < length for document in documents)
    return Blocks(documents, length, spans[:max_blocks], dropped)


def block_starts(tokens: int, length: int) -> list[int]:
    """Where in a document of so many tokens its blocks begin, as `blocks` cuts it."""
    starts = list(range(0, tokens - length + 1, length))
    rest = tokens % length
    if starts and rest * 2 >= length:
        starts.append(tokens - length)
    return starts


def _nothing_long_enough(documents: Sequence[Document], length: int) -> str:
    if not documents:
        return f"no documents given, so none has {length:,} tokens"
    longest = max(documents, key=len)
    return (
        f"none of {len(documents)} documents has {length:,} tokens: the longest, {longest.name!r}, has "
        f"{len(longest):,}. A length of {len(longest):,} or less works; or give longer texts: short ones are "
        "not glued together, because nothing in them looks back that far; a recipe's packing lays them side "
        "by side"
    )
