"""Attention sinks (StreamingLLM): the first tokens and a window of the last ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rope_extend.encodings.core.remap import NEAR, Region, RemapEncoding, StartAndWindow
from rope_extend.encodings.core.shapes import RopeShape


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

    sinks: int
    window: int

    name: ClassVar[str] = "sinks"
    paper: ClassVar[str] = "2309.17453"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("sinks", "window")

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Both numbers from the trained length, see the class; a parameter that is given is kept.

        Raises:
            RopeExtendError: unknown or invalid parameters, or more tokens than the trained window.
        """
        trained = shape.trained_length
        sinks = cls._build({"window": 1, "sinks": max(1, min(4, trained - 1)), **parameters}).sinks
        built = cls._build({"window": max(1, trained - sinks), **parameters, "sinks": sinks})
        cls._check_window(shape, "sinks + window", built.sinks + built.window)
        return built

    @property
    def borders(self) -> StartAndWindow:
        """The first `sinks` keys, the last `window`, and what is dropped."""
        return StartAndWindow(self.sinks, self.window)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """A query is at most at `n + W - 1` for the first keys, as in a cache of `n + W` tokens."""
        last = self.sinks + self.window - 1
        return NEAR, Region(lambda i: i.clamp(max=last), lambda j: j)
