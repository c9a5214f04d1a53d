"""Blocks cut while a run reads them, for text that does not fit into memory.

Documents come in the fixed order of their source. They are tokenised a few at a time, and dropped when their
step is over. The state of a run is a document, an offset in it, and a digest of all text up to there: a
resumed run reads that text again, without tokenising it, and compares the digest. Every process reads the
whole stream and uses its own blocks, so the order does not depend on the number of processes.
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

from rope_extend.data.blocks import block_starts
from rope_extend.data.choices import RESTART, UNPACKED
from rope_extend.data.documents import tokenised
from rope_extend.data.packing import packed
from rope_extend.data.token_cache import tokenizer_content
from rope_extend.errors import RopeExtendError
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

Texts = Callable[[], Iterator[tuple[str, str]]]
"""Starts to read a source: yields the name and the text of each document."""


@dataclass(frozen=True)
class Cursor:
    """Where in a stream a block begins.

    Attributes:
        epoch: how often the source was read to its end before.
        document: number of the document in which the block begins, from 0.
        offset: number of the block in that document, or of its first token if blocks are packed; from 0.
        digest: SHA-256 of the text up to the end of that document; empty if nothing was read.
        tokenizer: digest of the tokenizer; empty if nothing was read, and in early checkpoints.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0
    digest: str = ""
    tokenizer: str = ""


class Stream:
    """The endless stream of blocks of one source, in its own order; it is read forwards only.

    Args:
        texts: starts to read the source.
        tokenizer: a transformers tokenizer.
        length: tokens per block.
        name: name of the source, for messages.
        packing: as in a recipe.
        max_tokens: tokens to use of each document; all if None.
        step: number of blocks in a step, over all processes. The blocks of two steps are kept.
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
        self._content = tokenizer_content(tokenizer)
        self.restore(0, Cursor())

    def restore(self, position: int, cursor: Cursor) -> None:
        """Resume at a position whose block begins at a cursor; earlier blocks are no longer available.

        Raises:
            RopeExtendError: another tokenizer made the cursor.
        """
        if cursor.tokenizer not in ("", self._content):
            raise RopeExtendError(
                f"cannot resume: the tokenizer of the stream {self.name!r} has changed since the run began; "
                "restore it, or start a new run in another output_dir"
            )
        self._first = position
        self._kept: deque[tuple[Cursor, dict[str, Tensor]]] = deque()
        self._upcoming = self._blocks(cursor)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        """The block at a position, from 0.

        Raises:
            IndexError: the block was dropped.
            RopeExtendError: the source cannot be read, has no block, or has changed.
        """
        return self._at(position)[1]

    def cursor(self, position: int) -> Cursor:
        """Where the block at a position begins; reads the stream up to there."""
        return self._at(position)[0]

    def _at(self, position: int) -> tuple[Cursor, dict[str, Tensor]]:
        if position < self._first:
            raise IndexError(f"block {position} was dropped; the first one kept is {self._first}")
        while position >= self._first + len(self._kept):
            self._kept.append(next(self._upcoming))
            if len(self._kept) > 2 * self.step:
                self._kept.popleft()
                self._first += 1
        return self._kept[position - self._first]

    def share_beyond(self, window: int) -> float:
        """Share of the tokens at positions `window` and above; of the first step, if positions restart."""
        if self.packing != RESTART:
            return max(0, self.length - window) / self.length
        first = range(self._first, self._first + self.step)
        beyond = sum(int((self[position]["document_positions"] >= window).sum()) for position in first)
        return beyond / (self.step * self.length)

    def _blocks(self, start: Cursor) -> Iterator[tuple[Cursor, dict[str, Tensor]]]:
        """Yield blocks and where they begin, without end."""
        cut = self._unpacked if self.packing == UNPACKED else self._packed
        while True:
            count = 0
            for block in cut(start):
                count += 1
                yield block
            if not count and start.document == 0 and start.offset == 0:
                needed = "no document of" if self.packing == UNPACKED else "fewer than"
                raise RopeExtendError(
                    f"the stream {self.name!r} has {needed} {self.length:,} tokens, the length of a block; "
                    "give longer texts, or a shorter block_length"
                )
            start = Cursor(start.epoch + 1)
            logger.info("the stream %r was read to its end and starts again", self.name)

    def _unpacked(self, start: Cursor) -> Iterator[tuple[Cursor, dict[str, Tensor]]]:
        """Yield blocks of one document each."""
        for number, digest, ids in self._documents(start):
            skipped = start.offset if number == start.document else 0
            for offset, first in list(enumerate(block_starts(len(ids), self.length)))[skipped:]:
                block = ids[first : first + self.length]
                yield self._cursor(start.epoch, number, offset, digest), {"input_ids": block, "labels": block}

    def _cursor(self, epoch: int, document: int, offset: int, digest: str) -> Cursor:
        return Cursor(epoch, document, offset, digest, self._content)

    def _packed(self, start: Cursor) -> Iterator[tuple[Cursor, dict[str, Tensor]]]:
        """Yield blocks of concatenated documents."""
        pieces: list[Tensor] = []
        begins, missing = start, self.length
        for number, digest, ids in self._documents(start):
            offset = start.offset if number == start.document else 0
            while offset < len(ids) > 1:  # a single token predicts nothing
                if not pieces:
                    begins = self._cursor(start.epoch, number, offset, digest)
                pieces.append(ids[offset : offset + missing])
                offset += len(pieces[-1])
                missing -= len(pieces[-1])
                if missing == 0:
                    yield begins, packed(pieces)
                    pieces, missing = [], self.length

    def _documents(self, start: Cursor) -> Iterator[tuple[int, str, Tensor]]:
        """Yield number, digest of the text so far and ids `[T]` of each document from `start` on."""
        digests: deque[str] = deque()

        def texts_from_start() -> Iterator[tuple[str, str]]:
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

        texts = tokenised(texts_from_start(), self._tokenizer, None, first=1)
        for number, (_, ids) in enumerate(texts, start.document):
            yield number, digests.popleft(), torch.from_numpy(ids[: self._max_tokens]).long()

    def _changed(self, start: Cursor) -> RopeExtendError:
        return RopeExtendError(
            f"cannot resume: the first {start.document + 1} documents of the stream {self.name!r} have "
            "changed since the run read them; restore them, or start a new run in another output_dir"
        )

    def __repr__(self) -> str:
        packing = "" if self.packing == UNPACKED else f", packing {self.packing}"
        return f"Stream(blocks of {format_length(self.length)} tokens from {self.name!r}{packing})"
