"""Position maps: distant pairs of tokens get distances that occurred in training. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from rope_extend.checks import FLAG, number
from rope_extend.encodings.core.regions import NEAR, Bands, Chunks, Region, StartAndWindow
from rope_extend.encodings.core.remap import RemapEncoding
from rope_extend.encodings.core.shapes import RopeShape, check_length
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class SelfExtend(RemapEncoding):
    """SelfExtend: near tokens keep their distance, distant ones share positions in groups of G.

    A query at i and a key at j with `i - j >= W` are rotated to `i // G + W - W/G` and `j // G`. So the
    largest distance in a text of N tokens is about `W + (N - W) / G`.

    For a target length N and a trained length L, the window is `L // 4`, and the group is the smallest with
    which that largest distance is at most `2 L / 3`, as the authors advise.

    Attributes:
        group: G, how many neighbouring positions become one.
        window: W, the first distance that is changed.
        log_n: whether the logits of queries beyond the trained window are multiplied by `ln(p+1) / ln L`.
    """

    group: Annotated[int, check_length]
    window: Annotated[int, check_length]
    log_n: Annotated[bool, FLAG] = False

    name: ClassVar[str] = "self_extend"
    paper: ClassVar[str] = "2401.01325"

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        window = given.get("window", max(1, trained // 4))
        room = max(1.0, 2 * trained / 3 - window)
        return {"window": window, "group": max(2, math.ceil((target - window) / room))}

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """`i // G + W - W/G` and `j // G` for distant pairs."""
        shift = self.window - self.window / self.group
        return NEAR, Region(lambda i: i // self.group + shift, lambda j: j // self.group)

    def target_length(self, shape: RopeShape) -> int:
        """`(L - W) G + W`, which the largest distance of L - 1 allows."""
        return max(0, shape.trained_length - self.window) * self.group + self.window


@dataclass(frozen=True)
class ReRoPE(RemapEncoding):
    """ReRoPE: from distance w on, every token is at distance w; with a leak, at `w + (r - w) / leak`.

    For a trained length L the window is `L // 4`. Without a leak, any target is reached.

    Attributes:
        window: w, the first distance that is changed.
        leak: how many tokens beyond the window count as one (Leaky ReRoPE); None for a constant distance.
        log_n: whether the logits of queries beyond the trained window are multiplied by `ln(p+1) / ln L`,
            as the author's code always does.
    """

    window: Annotated[int, check_length]
    leak: Annotated[float | None, number(1)] = None
    log_n: Annotated[bool, FLAG] = True

    name: ClassVar[str] = "rerope"
    paper: ClassVar[str] = "Su 2023 (kexue.fm/archives/9708)"

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"window": max(1, trained // 4)}

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """w and 0 for distant pairs, or `(i + w (leak - 1)) / leak` and `j / leak`."""
        leak, window = self.leak, self.window
        if leak is None:
            return NEAR, Region(lambda i: torch.full_like(i, window), torch.zeros_like)
        return NEAR, Region(lambda i: (i + window * (leak - 1)) / leak, lambda j: j / leak)

    def target_length(self, shape: RopeShape) -> int | None:
        """`w + (L - w) leak` with a leak; without one there is no limit."""
        if self.leak is None:
            return None
        return math.floor(self.window + max(0, shape.trained_length - self.window) * self.leak)


@dataclass(frozen=True)
class String(RemapEncoding):
    """STRING: from distance S on, tokens are given distances from W on: `r - S + W`.

    In training, long distances are rare, so models use them badly. STRING does without the rarest within the
    trained window. Beyond it, it gains S - W tokens, at most the trained length.

    For a target length N and a trained length L, S is `L // 3`, or as much more as the target needs, and W is
    128, or `L // 16` if that is less.

    Attributes:
        shift: S, the first distance that is changed.
        local: W, the distance that it is changed to.
    """

    shift: Annotated[int, check_length]
    local: Annotated[int, check_length]

    name: ClassVar[str] = "string"
    paper: ClassVar[str] = "2410.18745"
    within: ClassVar[tuple[str, ...]] = ("shift",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local > self.shift:
            raise RopeExtendError(
                f"string: local={self.local} exceeds shift={self.shift}, so distances would grow; use "
                f"local={self.shift} or less"
            )

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        local = given.get("local", min(given.get("shift", trained), max(1, min(128, trained // 16))))
        needed = min(target - trained + local, trained)
        return {"local": local, "shift": max(trained // 3, local, needed)}

    @property
    def borders(self) -> Bands:
        """Distances from `shift` on are changed."""
        return Bands(self.shift)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """`i - S + W` and `j` for distant pairs."""
        return NEAR, Region(lambda i: i - self.shift + self.local, lambda j: j)

    def target_length(self, shape: RopeShape) -> int:
        """`L + S - W`."""
        return shape.trained_length + self.shift - self.local


@dataclass(frozen=True)
class JetLong(RemapEncoding):
    """Jet-Long: as SelfExtend, with groups that grow with the text.

    A text of T tokens has groups of `G = ceil(T / window)`. A query at i and a key at j more than `near`
    tokens apart are rotated to `i // G` and `j // G`. Texts within the window are processed exactly as the
    model was pretrained, and texts of any length have distances below the window.

    Here the text of a query ends with it. So a token does not depend on later ones, and rows of a batch do
    not depend on each other. The authors' code uses the longest row of the batch.

    For a trained length L, the window is L, and `near` is 2,048 as in the paper, or `L // 4` if that is less.

    Attributes:
        near: the largest distance that is not changed.
        window: the length of text from which on positions are shared.
    """

    near: Annotated[int, check_length]
    window: Annotated[int, check_length]

    name: ClassVar[str] = "jet_long"
    paper: ClassVar[str] = "2607.07740"
    within: ClassVar[tuple[str, ...]] = ("near", "window")
    depends_on_length = True

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"near": max(1, min(2048, trained // 4)), "window": trained}

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The next multiple of the window, int64: texts up to it have the same groups."""
        return -(-lengths // self.window) * self.window

    def is_plain(self, shape: RopeShape, lowest: int, highest: int) -> bool:
        """Whether the text is within the window, or all its pairs are near."""
        return highest < self.window or super().is_plain(shape, lowest, highest)

    @property
    def borders(self) -> Bands:
        """Distances above `near` are changed."""
        return Bands(self.near + 1)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """`i // G` and `j // G` for distant pairs."""
        group = max(1, length // self.window)
        return NEAR, Region(lambda i: i // group, lambda j: j // group)


@dataclass(frozen=True)
class Sinks(RemapEncoding):
    """Attention sinks: each token sees the first n tokens and the last W; all others are dropped.

    A text of any length is processed with distances below `n + W`. It does not make a model use more than
    `n + W` tokens. Models put much of their attention on the first tokens, and fail without them.

    For a trained length L, n is 4 and the window `L - 4`. `rope_extend.sink_cache(model)` is a cache that
    holds no more than these tokens.

    Attributes:
        sinks: n, the first tokens that are always seen.
        window: W, the last tokens that are seen, the token itself included.
    """

    sinks: Annotated[int, check_length]
    window: Annotated[int, check_length]

    name: ClassVar[str] = "sinks"
    paper: ClassVar[str] = "2309.17453"
    within: ClassVar[tuple[str, ...]] = ("sinks + window",)

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        sinks = given.get("sinks", max(1, min(4, trained - 1)))
        return {"sinks": sinks, "window": max(1, trained - sinks)}

    @property
    def borders(self) -> StartAndWindow:
        """The first `sinks` keys, the last `window`, and what is dropped."""
        return StartAndWindow(self.sinks, self.window)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """A query is at most at `n + W - 1` for the first keys, as in a cache of `n + W` tokens."""
        last = self.sinks + self.window - 1
        return NEAR, Region(lambda i: i.clamp(max=last), lambda j: j)


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

    chunk: Annotated[int, check_length]
    local: Annotated[int, check_length]

    name: ClassVar[str] = "dual_chunk"
    paper: ClassVar[str] = "2402.17463"
    within: ClassVar[tuple[str, ...]] = ("chunk + local",)

    @classmethod
    def _from_lengths(cls, trained: int, target: int, given: Mapping[str, Any]) -> dict[str, Any]:
        local = given.get("local", max(1, trained // 8))
        return {"local": local, "chunk": max(1, 3 * trained // 4 - local)}

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
