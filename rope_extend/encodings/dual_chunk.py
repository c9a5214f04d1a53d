"""Dual chunk attention: distances within a chunk, to the chunk before, and to all earlier chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from rope_extend.encodings.core.remap import Chunks, Region, RemapEncoding
from rope_extend.encodings.core.shapes import RopeShape


@dataclass(frozen=True)
class DualChunk(RemapEncoding):
    """Dual chunk attention: text is cut into chunks of C tokens, and no distance exceeds `S = C + local`.

    A key at j is rotated to `j mod C`. Its query is rotated to `i mod C` in the same chunk, to
    `min(i mod C + C, S)` in the next chunk, and to `min(2C - 1, S)` in all later ones.

    For a trained length L, S is `3 L / 4` and `local` is `L / 8`, as in the authors' code.

    Attributes:
        chunk: C, the length of a chunk.
        local: how many tokens the largest distance exceeds a chunk by.
    """

    chunk: int
    local: int

    name: ClassVar[str] = "dual_chunk"
    paper: ClassVar[str] = "2402.17463"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("chunk", "local")

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Both numbers from the trained length, see the class; a parameter that is given is kept.

        Raises:
            RopeExtendError: unknown or invalid parameters, or distances beyond the trained window.
        """
        local = cls._build({"chunk": 1, "local": max(1, shape.trained_length // 8), **parameters}).local
        largest = 3 * shape.trained_length // 4
        built = cls._build({"chunk": max(1, largest - local), **parameters, "local": local})
        cls._check_window(shape, "chunk + local", built.chunk + built.local)
        return built

    @property
    def borders(self) -> Chunks:
        """Whole chunks, counted from position 0."""
        return Chunks(self.chunk)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """Keys are at `j mod C`; a query is within its chunk, one chunk further, or at the largest."""
        size, largest = self.chunk, self.chunk + self.local

        def key(positions: torch.Tensor) -> torch.Tensor:
            return positions % size

        return (
            Region(key, key),
            Region(lambda i: (i % size + size).clamp(max=largest), key),
            Region(lambda i: torch.full_like(i, min(2 * size - 1, largest)), key),
        )
