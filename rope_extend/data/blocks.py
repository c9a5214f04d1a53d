"""Blocks of tokens for fine-tuning: each from one document, or packed from several (`packing.py`).

Documents that are shorter than a block are dropped, counted and reported; they are never padded, and joined
only on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rope_extend.data.choices import CONSECUTIVE
from rope_extend.data.documents import Document
from rope_extend.errors import RopeExtendError
from rope_extend.loss import IGNORED
from rope_extend.units import format_length, parse_length

Piece = tuple[int, int, int]
"""A part of a document: its number, and the offsets of the part's first token and of the one after it."""


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of `length` tokens; made by `cut_blocks` and `packed_blocks`.

    Items are int64 `[length]`: `input_ids`, and `labels`, which are the same tokens, not shifted. Items of
    `packed` blocks are those of `pack`.

    Args:
        documents: where the text comes from.
        length: tokens per block.
        pieces: the parts of documents that make up each block, in order.
        packed: whether a block may have several documents.
        left_out: what is not used, in words.
    """

    def __init__(
        self, documents: Sequence[Document], length: int, pieces: Sequence[Sequence[Piece]],
        *, packed: bool, left_out: str,
    ) -> None:  # fmt: skip
        self.length, self._documents, self._pieces = length, documents, pieces
        self._packed, self._left_out = packed, left_out

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = [self._documents[n].input_ids[start:end] for n, start, end in self._pieces[index]]
        item = pack(parts)
        return item if self._packed else {"input_ids": item["input_ids"], "labels": item["input_ids"].clone()}

    def origin(self, index: int) -> tuple[str, int]:
        """The name of the document with which a block begins, and the block's offset in it, in tokens."""
        document, start, _ = self._pieces[index][0]
        return self._documents[document].name, start

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above, which are outside a window of that length."""
        beyond = sum(max(0, end - start - window) for block in self._pieces for _, start, end in block)
        return beyond / (len(self) * self.length)

    def __repr__(self) -> str:
        name = "PackedBlocks" if self._packed else "Blocks"
        return f"{name}({len(self)} of {format_length(self.length)} tokens, {self._left_out})"


def pack(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Make one item of packed blocks from documents or parts of documents.

    - `input_ids`;
    - `labels`: the same tokens, except -100 for the first token of each document, so that no document is
      predicted from the one before it;
    - `position_ids`: the position of each token in its document, from 0. If a document is cut at the end of a
      block, its rest counts from 0 in the next block.
    """
    ids = torch.cat(list(parts))
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, IGNORED), "position_ids": positions}


def cut_blocks(documents: Sequence[Document], length: int | str, *, packed: bool = False) -> Blocks:
    """Cut documents into fine-tuning blocks of `length` tokens, each from one document, in order.

    Blocks follow each other without overlap. If the rest of a document is at least half a block, a last block
    covers it and overlaps the block before. So nearly all text is used, and at least half of each block is
    new. Documents shorter than `length` are dropped and counted.

    Args:
        documents: where the text comes from.
        length: tokens per block, at least 2; `"32k"` works too.
        packed: whether items are those of packed blocks, such as to be mixed with some.

    Raises:
        RopeExtendError: no document has `length` tokens.
    """
    length = block_length(length)
    if not documents:
        raise RopeExtendError(f"no documents given, so none has {length:,} tokens; give at least one")
    pieces = [
        [(number, start, start + length)]
        for number, document in enumerate(documents)
        for start in block_starts(len(document), length)
    ]
    if not pieces:
        longest = max(documents, key=len)
        raise RopeExtendError(
            f"none of {len(documents)} documents has {length:,} tokens: the longest, {longest.name!r}, has "
            f"{len(longest):,}. Use a length of {len(longest):,} or less, or longer texts; short texts can "
            "be packed"
        )
    short = sum(len(document) < length for document in documents)
    return Blocks(documents, length, pieces, packed=packed, left_out=f"{short} documents too short")


def block_length(length: int | str) -> int:
    """The number of tokens of a block.

    Raises:
        RopeExtendError: it is no length, or below 2 tokens.
    """
    tokens = parse_length(length)
    if tokens < 2:
        raise RopeExtendError(
            f"a block needs at least 2 tokens, one as input and one to predict; got {tokens}"
        )
    return tokens


def block_starts(tokens: int, length: int) -> list[int]:
    """The offsets at which `cut_blocks` starts blocks in a document of `tokens` tokens."""
    starts = list(range(0, tokens - length + 1, length))
    rest = tokens % length
    if starts and rest * 2 >= length:
        starts.append(tokens - length)
    return starts


def as_many_tokens(window: int, length: int, blocks: int, steps: int) -> tuple[int, int, int]:
    """Tokens of a block within a window, blocks of a step, and steps, for as many tokens to within a step.

    They replace `steps` of `blocks` blocks of `length` tokens.
    """
    inside = min(window, length)
    count = -(-blocks * length // inside)
    return inside, count, round(steps * blocks * length / (count * inside))


def control_flags(recipe: Mapping[str, Any], window: int) -> str:
    """The flags with which a recipe trains its control: without an extension, on as many tokens.

    Empty if flags alone cannot turn it into one: with mixed windows, or parameters of the method.
    """
    if recipe.get("mixed_windows") or recipe.get("method_parameters"):
        return ""
    length = recipe.get("block_length") or recipe["target_length"]
    block, count, steps = as_many_tokens(window, length, recipe["gradient_accumulation"], recipe["steps"])
    lengths = f"--target-length {format_length(window)} --block-length {format_length(block)}"
    others = " --positions consecutive" if recipe.get("positions", CONSECUTIVE) != CONSECUTIVE else ""
    others += f" --eval-lengths {format_length(window)}" if recipe.get("eval_lengths") else ""
    return f"--method none {lengths} --gradient-accumulation {count} --steps {steps}{others}"
