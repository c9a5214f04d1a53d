"""ReRoPE: beyond a window, all tokens are at the same distance, or at one that grows slowly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.encodings.core.remap import NEAR, Bands, Region, RemapEncoding
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.logn import log_n_scale
from rope_extend.errors import RopeExtendError


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

    window: int
    leak: float | None = None
    log_n: bool = True

    name: ClassVar[str] = "rerope"
    paper: ClassVar[str] = "Su 2023 (kexue.fm/archives/9708)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("window")
        if self.leak is not None:
            self._check("leak", minimum=1)
        self._check_flag("log_n")

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The window from the trained length, see the class; a parameter that is given is kept.

        Raises:
            RopeExtendError: unknown or invalid parameters, or a leak that does not reach the target.
        """
        trained = shape.trained_length
        built = cls._build({"window": max(1, trained // 4), **parameters})
        cls._check_window(shape, "window", built.window)
        reach = built.target_length(shape)
        if reach is not None and reach < target_length:
            if built.window == trained:
                raise RopeExtendError(
                    f"rerope: with window={trained}, as long as the trained window, no distance is left for "
                    f"a leak; use leak=None, or a smaller window"
                )
            needed = math.ceil((target_length - built.window) / (trained - built.window))
            raise RopeExtendError(
                f"rerope: leak={built.leak:g} with window={built.window} reaches {reach} tokens, not "
                f"{target_length}; use leak={needed} or more, or leak=None"
            )
        return built

    @property
    def borders(self) -> Bands:
        """Distances from `window` on are changed."""
        return Bands(self.window)

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

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`max(1, ln(p+1) / ln L)` with `log_n`."""
        return log_n_scale(shape, position_ids) if self.log_n else None
