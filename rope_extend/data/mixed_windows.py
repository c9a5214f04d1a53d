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

from collections.abc import Sequence
from typing import Any

from rope_extend.data.blocks import cut_blocks
from rope_extend.data.choices import RESTART
from rope_extend.data.documents import Document
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import PackedBlocks, packed_blocks, packing_reason
from rope_extend.encodings import Encoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.units import format_length


def mixed_windows(
    documents: Sequence[Document], length: int, window: int, short_share: float, *, seed: int
) -> Mixture:
    """The blocks of both kinds, drawn by their shares.

    Long blocks are cut from documents of at least a block. Short blocks hold the documents that are shorter
    than a block; if there are none, all documents. Of these, each document longer than the window is cut into
    pieces of the window.

    Args:
        documents: where the text comes from.
        length: tokens per block.
        window: the trained window, in tokens.
        short_share: the share of short blocks.
        seed: seed of the run.

    Raises:
        RopeExtendError: no document fills a block, or the short ones together do not.
    """
    long = cut_blocks([document for document in documents if len(document) >= length] or documents, length)
    # One document fills each block, so these are packed blocks too, with the same inputs as short ones.
    whole = [Document(long.origin(index)[0], long[index]["input_ids"]) for index in range(len(long))]
    short = [document for document in documents if len(document) < length] or documents
    return Mixture(
        [packed_blocks(whole, length, restarts=True), short_blocks(short, length, window)],
        (1 - short_share, short_share),
        seed=seed,
    )


def short_blocks(documents: Sequence[Document], length: int, window: int) -> PackedBlocks:
    """Packed blocks in which no document, or piece of one, is longer than the window.

    Raises:
        RopeExtendError: the documents together do not fill a block.
    """
    pieces = [
        Document(document.name, document.input_ids[start : start + window])
        for document in documents
        for start in range(0, len(document), window)
        if len(document) - start > 1  # a single token predicts nothing
    ]
    return packed_blocks(pieces, length, restarts=True)


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
    reason = None
    if not encoding.effects(shape).depends_on_length:
        reason = (
            "it has no second table for the trained window, so short texts would be processed in another way "
            "than in training; use short_original(yarn), or longrope with a short_factor"
        )
    else:
        # The documents of a short block are all within the trained window, and share its table.
        reason = packing_reason(RESTART, encoding, shape, config, one_table=True)
    if reason is not None:
        raise RopeExtendError(
            f"mixed_windows cannot be combined with {encoding} on {config.model_type}: {reason}"
        )
