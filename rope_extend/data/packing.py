"""Several short documents in one block, each of which is attended to alone.

Packing wastes no tokens on padding, and uses documents that are shorter than a block. It teaches a model
nothing about distances beyond these documents: attention stops where a document ends, and so does prediction.

Flash attention separates documents by their cumulative lengths. If a model has plain causal attention by
sdpa, the same lengths are used to compute attention document by document, without a mask. All other models
use the mask of transformers for packed sequences.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rope_extend.data.documents import Document
from rope_extend.encodings import Encoding, LinearAttention
from rope_extend.errors import RopeExtendError
from rope_extend.loss import IGNORED
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

_RECURRENT = ("linear", "conv", "mamba", "hybrid", "recurrent")
"""Parts of the names of layer types that carry a state from token to token, which no mask stops."""


class PackedBlocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of `length` tokens, cut from all documents concatenated; made by `packed_blocks`.

    Items are int64 `[length]`:

    - `input_ids`;
    - `labels`: the same tokens, except -100 for the first token of each document, so that no document is
      predicted from the one before it;
    - `position_ids`: the position of each token in its document, from 0. If a document is cut at the end of a
      block, its rest counts from 0 in the next block.

    Attributes:
        length: tokens per block.
    """

    def __init__(self, documents: Sequence[Document], length: int) -> None:
        self.length, self._documents = length, documents
        self._ends = np.cumsum([len(document) for document in documents]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.length
        pieces: list[Tensor] = []
        number, filled = bisect_right(self._ends, first), 0
        while filled < self.length:
            document = self._documents[number].input_ids
            start = max(0, first - (self._ends[number] - len(document)))
            pieces.append(document[start : start + self.length - filled])
            filled += len(pieces[-1])
            number += 1
        return packed(pieces)

    @property
    def tokens_left_over(self) -> int:
        """Number of tokens at the end that do not fill a block."""
        return int(self._ends[-1] % self.length)

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above, which are outside a window of that length."""
        beyond = sum(int((self[index]["position_ids"] >= window).sum()) for index in range(len(self)))
        return beyond / (len(self) * self.length)

    def __repr__(self) -> str:
        return (
            f"PackedBlocks({len(self)} of {format_length(self.length)} tokens, from {len(self._documents)} "
            f"documents, {self.tokens_left_over} tokens left over)"
        )


def ended(documents: Sequence[Document], tokenizer: Any, max_tokens: int | None = None) -> list[Document]:
    """Documents that end with the tokenizer's end-of-text token (EOS), as in pretraining.

    Those that end with it already stay as they are, those of `max_tokens` tokens, which go on, and all if the
    tokenizer has no such token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        logger.warning("the tokenizer has no end-of-text token (eos_token), so documents end without one")
        return list(documents)
    return [
        document
        if len(document) == max_tokens or document.input_ids[-1] == end
        else Document(document.name, torch.cat([document.input_ids, torch.tensor([end])]))
        for document in documents
    ]


def packed(pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """Make one item of `PackedBlocks` from documents or pieces of documents."""
    ids = torch.cat(list(pieces))
    positions = torch.cat([torch.arange(len(piece)) for piece in pieces])
    labels = ids.masked_fill(positions == 0, IGNORED)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def packed_blocks(documents: Sequence[Document], length: int) -> PackedBlocks:
    """Concatenate documents and cut the result into blocks of `length` tokens.

    Every token is used once, except those at the end that do not fill a block.

    Args:
        documents: where the text comes from, in order.
        length: tokens per block, at least 2.

    Raises:
        RopeExtendError: all documents together have fewer tokens than a block, or a block has fewer than 2.
    """
    if length < 2:
        raise RopeExtendError(
            f"a block needs at least 2 tokens, one as input and one to predict; got {length}"
        )
    tokens = sum(map(len, documents))
    if tokens < length:
        raise RopeExtendError(
            f"{len(documents)} documents have {tokens:,} tokens together, but a packed block needs "
            f"{length:,}; give more text, or a shorter block_length"
        )
    return PackedBlocks(documents, length)


def scored(items: Sequence[dict[str, Tensor]]) -> int:
    """The number of tokens that are predicted in some blocks; the first token of a block never is."""
    return sum(int((item["labels"][1:] != IGNORED).sum()) for item in items)


def check_packing(encoding: Encoding, config: Any) -> None:
    """Refuse an encoding or a family with which documents cannot share a row.

    Raises:
        RopeExtendError: names the encoding, the family, the reason, and what to do instead.
    """
    if (reason := packing_reason(encoding, config)) is not None:
        raise RopeExtendError(
            f"packing cannot be combined with {encoding} on {config.model_type}: {reason}. Blocks of one "
            "document each work with every encoding (packing: none)"
        )


def packing_reason(encoding: Encoding, config: Any) -> str | None:
    """Why documents cannot share a row under an encoding in a family, as a clause; None if they can."""
    if isinstance(encoding, LinearAttention):
        return "it carries sums from token to token, which no mask stops at the end of a document"
    layers = getattr(config.get_text_config(), "layer_types", None) or ()
    kinds = {kind for kind in layers if any(name in kind for name in _RECURRENT)}
    if kinds:
        return (
            f"layers of type {', '.join(sorted(kinds))} carry a state from token to token, which no mask "
            "stops at the end of a document"
        )
    if config.model_type == "blt":
        return "its patches of bytes do not end where a document does"
    return None
