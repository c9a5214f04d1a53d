"""Blocks of tokens for fine-tuning, each from one document.

Documents that are shorter than a block are dropped, counted and reported; they are never padded or joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rope_extend.data.documents import Document
from rope_extend.errors import RopeExtendError
from rope_extend.units import format_length, parse_length


class Blocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Blocks of `length` tokens, each from a single document; made by `cut_blocks`.

    Items are `{"input_ids": int64 [length], "labels": int64 [length]}`; labels are the same tokens, not
    shifted.

    Attributes:
        length: tokens per block.
        dropped_documents: number of documents that are shorter than a block.
    """

    def __init__(self, documents: Sequence[Document], length: int, spans: Sequence[tuple[int, int]]) -> None:
        self.length = length
        self.dropped_documents = sum(len(document) < length for document in documents)
        self._documents = documents
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document, start = self._spans[index]
        ids = self._documents[document].input_ids[start : start + self.length]
        return {"input_ids": ids.clone(), "labels": ids.clone()}  # whoever masks labels changes only those

    def origin(self, index: int) -> tuple[str, int]:
        """The name of the document that a block comes from, and the block's offset in it, in tokens."""
        document, start = self._spans[index]
        return self._documents[document].name, start

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above, which are outside a window of that length."""
        return max(0, self.length - window) / self.length

    def __repr__(self) -> str:
        return (
            f"Blocks({len(self)} of {format_length(self.length)} tokens, "
            f"{self.dropped_documents} documents too short)"
        )


def cut_blocks(documents: Sequence[Document], length: int | str) -> Blocks:
    """Cut documents into fine-tuning blocks of `length` tokens, each from one document, in order.

    Blocks follow each other without overlap. If the rest of a document is at least half a block, a last block
    covers it and overlaps the block before. So nearly all text is used, and at least half of each block is
    new. Documents shorter than `length` are dropped and counted.

    Args:
        documents: where the text comes from.
        length: tokens per block, at least 2; `"32k"` works too.

    Raises:
        RopeExtendError: no document has `length` tokens.
    """
    length = parse_length(length)
    if length < 2:
        raise RopeExtendError(
            f"a block needs at least 2 tokens, one as input and one to predict; got {length}"
        )
    if not documents:
        raise RopeExtendError(f"no documents given, so none has {length:,} tokens; give at least one")
    spans = [
        (i, start) for i, document in enumerate(documents) for start in block_starts(len(document), length)
    ]
    if not spans:
        longest = max(documents, key=len)
        raise RopeExtendError(
            f"none of {len(documents)} documents has {length:,} tokens: the longest, {longest.name!r}, has "
            f"{len(longest):,}. Use a length of {len(longest):,} or less, or longer texts; short texts can "
            "be packed"
        )
    return Blocks(documents, length, spans)


def block_starts(tokens: int, length: int) -> list[int]:
    """The offsets at which `cut_blocks` starts blocks in a document of `tokens` tokens."""
    starts = list(range(0, tokens - length + 1, length))
    rest = tokens % length
    if starts and rest * 2 >= length:
        starts.append(tokens - length)
    return starts
