"""Documents: texts of any source, tokenised once.

A model learns to use a longer window only from texts that are really that long: concatenated short texts
contain no long-range context. So documents stay separate, and blocks are cut within them.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rope_extend.data.sources import describe_source, read_texts
from rope_extend.data.token_cache import Ids, cache_key, cached, tokenizer_content
from rope_extend.errors import RopeExtendError

logger = logging.getLogger(__name__)

_BATCH = 64
"""Number of texts that are tokenised together and kept in one file; documents are long."""


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised text.

    Attributes:
        name: where the text comes from.
        input_ids: int64 `[T]`, on the CPU.
    """

    name: str
    input_ids: torch.Tensor

    def __len__(self) -> int:
        """Length in tokens."""
        return self.input_ids.numel()


def check_vocabulary(documents: Sequence[Document], size: int) -> None:
    """Refuse documents with tokens that a model with `size` embeddings does not have."""
    lowest = min(int(document.input_ids.min()) for document in documents)
    highest = max(int(document.input_ids.max()) for document in documents)
    if lowest < 0 or highest >= size:
        raise RopeExtendError(
            f"the documents contain token {lowest if lowest < 0 else highest}, but the model has the tokens "
            f"0 to {size - 1}; tokenize them with this model's tokenizer, without padding and masked labels"
        )


def load_documents(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    text_column: str = "text",
    split: str = "train",
    min_tokens: int = 0,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    distinct: bool = False,
    streaming: bool = False,
) -> list[Document]:
    """Read documents from files or the hub and tokenise them; tokens are cached by the content of the texts.

    A text file is one document, and so is each row of a table. docs/training.md lists the forms of text.

    Args:
        source: one of these, or a list of them:
            a directory (searched for text, source code, JSON lines, Parquet and Arrow; hidden files are
            skipped), a file, a glob pattern; the id of a hub dataset, `"owner/name"` or
            `"owner/name:config"`; `"demo:finetuning"` or `"demo:evaluation"`, two disjoint parts of the
            Python standard library, which every user has.
        tokenizer: a transformers tokenizer. It adds its default special tokens (BOS, if the model was trained
            with one), so positions count as they did in training. A text that begins with a BOS token, which
            chat templates write, gets no second one.
        text_column: the column of a table that holds the text.
        split: the split of a hub dataset.
        min_tokens: documents with fewer tokens are skipped.
        max_documents: stop after this many documents; the rest is not tokenised.
        max_tokens: cut each document to its first `max_tokens` tokens.
        distinct: leave out documents whose tokens, cut to `max_tokens`, are those of an earlier one. A text
            that is measured twice says no more, but seems to.
        streaming: read a hub dataset over the network as far as `max_documents` needs, and keep no copy.

    Returns:
        Documents in a stable order: files by path, rows by number.

    Raises:
        RopeExtendError: this is no tokenizer, there is nothing to read, the column does not exist, all
            documents are empty, or none has `min_tokens` tokens.
    """
    if not callable(tokenizer):
        raise RopeExtendError(
            f"load_documents needs the tokenizer of the model, got {tokenizer!r}; load it first, such as by "
            "rope_extend.load_tokenizer"
        )
    for name, limit in (("max_documents", max_documents), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise RopeExtendError(f"{name} must be at least 1, or None for no limit; got {limit!r}")
    documents: list[Document] = []
    lengths: dict[str, int] = {}
    first_of: dict[str, Document] = {}
    too_short = 0
    texts = read_texts(source, text_column, split, streaming=streaming)
    for name, ids in _tokenised(texts, tokenizer, max_documents):
        lengths[name] = len(ids)
        if not len(ids) or len(ids) < min_tokens:
            too_short += 1
            continue
        document = Document(name, torch.from_numpy(ids[:max_tokens].astype(np.int64)))
        same = first_of.setdefault(fingerprint([document]), document) if distinct else document
        if same is document:
            documents.append(document)
        else:
            logger.warning("%s is left out: its tokens are those of %s", name, same.name)
        if len(documents) == max_documents:
            return documents
    described = describe_source(source)
    if not any(lengths.values()):
        raise RopeExtendError(f"every document in {described} is empty ({len(lengths)} read)")
    if not documents:
        longest = max(lengths, key=lambda name: lengths[name])
        raise RopeExtendError(
            f"no document of at least {min_tokens:,} tokens in {described}: the longest of {len(lengths)}, "
            f"{longest!r}, has {lengths[longest]:,}. Give longer texts, or shorter lengths, windows or "
            "blocks; only `rope-extend finetune --packing restart` trains on shorter texts"
        )
    if too_short:
        words = "%s: %d of %d documents are empty or shorter than %d tokens"
        logger.info(words, described, too_short, len(lengths), min_tokens)
    return documents


def fingerprint(documents: Iterable[Document]) -> str:
    """Sixteen hex digits that identify these token sequences, in this order."""
    digest = hashlib.sha256()
    for document in documents:
        ids = np.ascontiguousarray(document.input_ids.numpy(), dtype="<i8")
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
    return digest.hexdigest()[:16]


def in_common(documents: Sequence[Document], others: Iterable[Document]) -> int:
    """How many of `documents` are also among `others`.

    Two documents count as the same if one begins with all of the other. Then it does not matter to how many
    tokens each was cut. If one has fewer than 64 tokens, they must be equal.
    """
    by_start: dict[bytes, list[int]] = {}
    for number, document in enumerate(documents):
        by_start.setdefault(_start(document), []).append(number)
    found: set[int] = set()
    for other in others:
        for number in by_start.get(_start(other), ()):
            both = min(len(other), len(documents[number]))
            if torch.equal(other.input_ids[:both], documents[number].input_ids[:both]):
                found.add(number)
    return len(found)


def _start(document: Document) -> bytes:
    return document.input_ids[:64].numpy().tobytes()


def _tokenised(
    texts: Iterator[tuple[str, str]], tokenizer: Any, first: int | None
) -> Iterator[tuple[str, Ids]]:
    """Yield the name and the token ids, int32 `[T]`, of each text, read only as far as the caller iterates.

    Texts are tokenised in batches. Of them, `first` is the largest size of the first one: a caller who needs
    ten documents need not wait for a full batch.
    """
    content, size = tokenizer_content(tokenizer), min(first or _BATCH, _BATCH)
    while batch := list(itertools.islice(texts, size)):
        size = min(2 * size, _BATCH)
        names, contents = zip(*batch, strict=True)
        ids = cached(cache_key(contents, content), partial(_encode, contents, tokenizer))
        yield from zip(names, ids, strict=True)


def _encode(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    # verbose=False: no warning about long texts. An empty text stays empty, even if the tokenizer adds a BOS.
    ids = iter(tokenizer([text for text in texts if text], verbose=False)["input_ids"] if any(texts) else [])
    each = (once(next(ids), text, tokenizer) if text else [] for text in texts)
    return [np.asarray(found, dtype=np.int32) for found in each]


def once(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """Token ids of a text without the BOS and EOS tokens that the tokenizer added to those of the text.

    Chat templates write them, and most tokenizers add them again. No model was trained on two.
    """
    bos, eos = (getattr(tokenizer, name, None) for name in ("bos_token", "eos_token"))
    if (
        bos
        and text.startswith(bos)
        and not text.startswith(2 * bos)
        and ids[:2] == 2 * [tokenizer.bos_token_id]
    ):
        ids = ids[1:]
    if eos and text.endswith(eos) and not text.endswith(2 * eos) and ids[-2:] == 2 * [tokenizer.eos_token_id]:
        ids = ids[:-1]
    return ids
