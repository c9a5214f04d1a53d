"""Blocks of two windows in one run, so that a longer window does not cost quality in the old one.

LongRoPE2 (2502.20082) trains both at once. A block is one of two kinds:

- long: one document that fills the block. Its later tokens lie beyond the trained window, so they use the
  table of the extension;
- short: documents of at most the trained window, packed. Positions restart in each, so all use the table of
  the trained window, which is the original one.

A method with two tables chooses between them by the positions alone. So each block gets what its documents
would get if they were processed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rope_extend.data.blocks import cut_blocks
from rope_extend.data.documents import Document
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import packed_blocks, packing_reason
from rope_extend.encodings import Encoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.units import format_length


def mixed_windows(
    documents: Sequence[Document], length: int, window: int, short_share: float, *, seed: int
) -> Mixture:
    """The blocks of both kinds, drawn by their shares.

    Long blocks are cut from documents of at least a block. Short blocks hold the documents that are shorter
    than a block. If they would repeat before the long blocks have been read once, as many pieces of the long
    documents are added as are missing. Each document longer than the window is cut into pieces of the
    window. The blocks follow from the documents, not from the number of steps, so a run can be resumed with
    more steps.

    Args:
        documents: where the text comes from.
        length: tokens per block.
        window: the trained window, in tokens.
        short_share: the share of short blocks.
        seed: seed of the run.

    Raises:
        RopeExtendError: no document fills a block, or the pieces together do not.
    """
    filling = [document for document in documents if len(document) >= length]
    long = cut_blocks(filling or documents, length, packed=True)  # one document fills each
    # All short documents, then pieces of the others, one of each in turn, until there are enough blocks.
    short = [document for document in documents if len(document) < length]
    pieces = [piece for document in short for piece in _pieces([document], window)]
    tokens = sum(map(len, pieces))
    needed = max(1, round(len(long) * short_share / (1 - short_share)))
    for piece in _pieces(filling, window):
        if tokens >= needed * length:
            break
        pieces.append(piece)
        tokens += len(piece)
    if tokens < length:
        raise RopeExtendError(
            f"mixed_windows: a short block needs {length:,} tokens, and {len(documents)} documents, cut into "
            f"pieces of {window:,} tokens, have {tokens:,} together; give more text"
        )
    return Mixture([long, packed_blocks(pieces, length)], (1 - short_share, short_share), seed=seed)


def _pieces(documents: Sequence[Document], window: int) -> Iterator[Document]:
    """Pieces of at most the window: the first of each document, then the second of each, and so on."""
    start = 0
    # A single token predicts nothing.
    while documents := [document for document in documents if len(document) - start > 1]:
        for document in documents:
            yield Document(document.name, document.input_ids[start : start + window])
        start += window


def check_mixed_windows(length: int, encoding: Encoding, shape: RopeShape, config: Any) -> None:
    """Refuse an encoding, a block length or a family with which blocks of two windows cannot be mixed.

    Raises:
        RopeExtendError: names what cannot be combined, the reason, and what to do instead.
    """
    if length <= shape.trained_length:
        raise RopeExtendError(
            f"mixed_windows needs blocks beyond the trained window of {format_length(shape.trained_length)} "
            f"tokens, and block_length is {format_length(length)}; raise it, or leave mixed_windows out"
        )
    reason = packing_reason(encoding, config)
    if not encoding.depends_on_length:
        reason = (
            "it has no second table for the trained window, so short texts would be processed in another way "
            "than in training; use short_original(yarn), or longrope with a short_factor"
        )
    if reason is not None:
        raise RopeExtendError(
            f"mixed_windows cannot be combined with {encoding} on {config.model_type}: {reason}"
        )
