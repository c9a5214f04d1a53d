"""Several short documents in one block, each of which is attended to alone.

Packing wastes no tokens on padding, and uses documents that are shorter than a block. It teaches a model
nothing about distances beyond these documents: attention stops where a document ends, and so does prediction.

Flash attention separates documents by their cumulative lengths. If a model has plain causal attention by
sdpa, the same lengths are used to compute attention document by document, without a mask. All other models
use the mask of transformers for packed sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from rope_extend.data.blocks import Blocks, Piece, block_length
from rope_extend.data.documents import Document
from rope_extend.encodings import Encoding, LinearAttention
from rope_extend.errors import RopeExtendError

logger = logging.getLogger(__name__)

_RECURRENT = ("linear", "conv", "mamba", "hybrid", "recurrent")
"""Parts of the names of layer types that carry a state from token to token, which no mask stops."""


def ended(documents: Sequence[Document], tokenizer: Any) -> list[Document]:
    """Documents that end with the tokenizer's end-of-text token (EOS), as in pretraining.

    Those that end with it already stay as they are, and all if the tokenizer has no such token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        logger.warning("the tokenizer has no end-of-text token (eos_token), so documents end without one")
        return list(documents)
    return [
        document
        if document.input_ids[-1] == end
        else Document(document.name, torch.cat([document.input_ids, torch.tensor([end])]))
        for document in documents
    ]


def packed_blocks(documents: Sequence[Document], length: int) -> Blocks:
    """Concatenate documents and cut the result into blocks of `length` tokens.

    Every token is used once, except those at the end that do not fill a block.

    Args:
        documents: where the text comes from, in order.
        length: tokens per block, at least 2.

    Raises:
        RopeExtendError: all documents together have fewer tokens than a block, or a block has fewer than 2.
    """
    length = block_length(length)
    tokens = sum(map(len, documents))
    if tokens < length:
        raise RopeExtendError(
            f"{len(documents)} documents have {tokens:,} tokens together, but a packed block needs "
            f"{length:,}; give more text, or a shorter block_length"
        )
    pieces: list[list[Piece]] = [[] for _ in range(-(-tokens // length))]
    first = 0  # of the document, among all tokens
    for number, document in enumerate(documents):
        end = first + len(document)
        for block in range(first // length, -(-end // length)):
            inside = max(first, block * length), min(end, (block + 1) * length)
            pieces[block].append((number, inside[0] - first, inside[1] - first))
        first = end
    left_out = f"from {len(documents)} documents, {tokens % length} tokens left over"
    return Blocks(documents, length, pieces[: tokens // length], packed=True, left_out=left_out)


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
