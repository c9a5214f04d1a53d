"""Blocks made while a run reads them, from text that is too much for memory.

Documents come in the order of their source, which does not change, are tokenised a few at a time, and are
forgotten once their step is over. Where a run stands is a document, a place in it, and a digest of all text
up to there: a run that goes on reads that text again, without tokenising it, and sees whether it is the same.
Every process reads the whole stream and takes its own blocks, so the order does not depend on how many
there are.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_extend.data import block_starts, format_length, tokenised
from rope_extend.errors import RopeExtendError
from rope_extend.training.packing import RESTART, UNPACKED, packed

logger = logging.getLogger(__name__)

Texts = Callable[[], Iterator[tuple[str, str]]]
"""Begins to read a source from its start: name and text of each document."""


@dataclass(frozen=True)
class Cursor:
    """Where in a stream a block begins.

    Attributes:
        epoch: how often the source was read to its end before.
        document: how many of its documents come before the one in which the block begins.
        offset: in that document: of its blocks, or for packed blocks of its tokens, how many come before.
        digest: SHA-256 of the text up to the end of that document; empty where nothing was read.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0
    digest: str = ""


class Stream:
    """The endless stream of blocks of one source, in its own order, to be read forwards.

    Args:
        texts: begins to read the source.
        tokenizer: a transformers tokenizer.
        length: tokens per block.
        name: of the source, for messages.
        packing: as in a recipe.
        max_tokens: tokens to use of each document; all if None.
        step: how many blocks a step has, over all processes; those of two steps are kept.
    """

    def __init__(
        self,
        texts: Texts,
        tokenizer: Any,
        length: int,
        *,
        name: str,
        packing: str = UNPACKED,
        max_tokens: int | None = None,
        step: int = 1,
    ) -> None:
        self.length, self.name, self.packing, self.step = length, name, packing, step
        self._texts, self._tokenizer, self._max_tokens = texts, tokenizer, max_tokens
        self.restore(0, Cursor())

    def restore(self, position: int, cursor: Cursor) -> None:
        """Go on at a position whose block begins at a cursor; what is before it is out of reach."""
        self._first = position
        self._kept: deque[tuple[Cursor, dict[str, Tensor]]] = deque()
        self._coming = self._blocks(cursor)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """The block at a position, from 0.

        Raises:
            IndexError: it was read and forgotten.
            RopeExtendError: the source cannot be read, has no block, or is not what it was.
        """
        return self._at(position)[1]

    def cursor(self, position: int) -> Cursor:
        """Where the block at a position begins; reads as far as that."""
        return self._at(position)[0]

    def _at(self, position: int) -> tuple[Cursor, dict[str, Tensor]]:
        if position < self._first:
            raise IndexError(f"block {position} is read and forgotten; {self._first} is the first one kept")
        while position >= self._first + len(self._kept):
            self._kept.append(next(self._coming))
            if len(self._kept) > 2 * self.step:
                self._kept.popleft()
                self._first += 1
        return self._kept[position - self._first]

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above; where they restart, in the first step."""
        if self.packing != RESTART:
            return max(0, self.length - window) / self.length
        first = range(self._first, self._first + self.step)
        beyond = sum(int((self[position]["places"] >= window).sum()) for position in first)
        return beyond / (self.step * self.length)

    def _blocks(self, start: Cursor) -> Iterator[tuple[Cursor, dict[str, Tensor]]]:
        """Blocks and where they begin, without end."""
        cut = self._whole if self.packing == UNPACKED else self._packed
        while True:
            made = 0
            for block in cut(start):
                made += 1
                yield block
            if not made and start.document == 0 and start.offset == 0:
                needed = "no document of" if self.packing == UNPACKED else "fewer than"
                raise RopeExtendError(
                    f"the stream {self.name!r} has {needed} {self.length:,} tokens, which a block takes; "
                    "give longer texts, or a shorter block_length"
                )
            start = Cursor(start.epoch + 1)
            logger.info("the stream %r was read to its end; it starts again", self.name)

    def _whole(self, start: Cursor) -> Iterator[tuple[Cursor, dict[str, Tensor]]]:
        """Blocks of one document each."""
        for number, digest, ids in self._documents(start):
            skipped = start.offset if number == start.document else 0
            for offset, first in list(enumerate(block_starts(len(ids), self.length)))[skipped:]:
                block = ids[first : first + self.length]
                yield Cursor(start.epoch, number, offset, digest), {"input_ids": block, "labels": block}

    def _packed(self, start: Cursor) -> Iterator[tuple[Cursor, dict[str, Tensor]]]:
        """Blocks of documents laid end to end."""
        pieces: list[Tensor] = []
        begins, missing = start, self.length
        for number, digest, ids in self._documents(start):
            offset = start.offset if number == start.document else 0
            while offset < len(ids) > 1:  # a single token predicts nothing
                if not pieces:
                    begins = Cursor(start.epoch, number, offset, digest)
                pieces.append(ids[offset : offset + missing])
                offset += len(pieces[-1])
                missing -= len(pieces[-1])
                if missing == 0:
                    yield begins, packed(pieces)
                    pieces, missing = [], self.length

    def _documents(self, start: Cursor) -> Iterator[tuple[int, str, Tensor]]:
        """Number, digest of the text so far, and ids `[T]` of each document from a cursor's to the last."""
        digests: deque[str] = deque()

        def ahead() -> Iterator[tuple[str, str]]:
            digest, number = hashlib.sha256(), -1
            for number, (name, text) in enumerate(self._texts()):
                encoded = text.encode(errors="surrogatepass")
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
                if number < start.document:
                    continue
                digests.append(digest.hexdigest())
                if number == start.document and start.digest not in ("", digests[0]):
                    raise self._changed(start)
                yield name, text
            if number < start.document:
                raise self._changed(start)

        texts = tokenised(ahead(), self._tokenizer, None, first=1)
        for number, (_, ids) in enumerate(texts, start.document):
            yield number, digests.popleft(), torch.from_numpy(ids[: self._max_tokens]).long()

    def _changed(self, start: Cursor) -> RopeExtendError:
        return RopeExtendError(
            f"cannot resume: the first {start.document + 1} documents of the stream {self.name!r} are not "
            "those that the run has read; restore them, or start anew in another output_dir"
        )

    def __repr__(self) -> str:
        packing = "" if self.packing == UNPACKED else f", packing {self.packing}"
        return f"Stream(blocks of {format_length(self.length)} tokens from {self.name!r}{packing})"
