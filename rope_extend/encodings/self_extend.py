"""SelfExtend: near tokens keep their distance, distant ones share positions in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_extend.encodings.core.remap import NEAR, Bands, Region, RemapEncoding
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.logn import log_n_scale
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

    group: int
    window: int
    log_n: bool = False

    name: ClassVar[str] = "self_extend"
    paper: ClassVar[str] = "2401.01325"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("group", "window")
        self._check_flag("log_n")

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Window and group from the lengths, see the class; a parameter that is given is kept.

        Raises:
            RopeExtendError: unknown or invalid parameters, or a group that does not reach the target.
        """
        trained = shape.trained_length
        parameters.setdefault("window", max(1, trained // 4))
        if "group" not in parameters:
            window = parameters["window"] = cls._build({"group": 1, **parameters}).window
            cls._check_window(shape, "window", window)
            room = max(1.0, 2 * trained / 3 - window)
            parameters["group"] = max(2, math.ceil((target_length - window) / room))
        built = cls._build(parameters)
        cls._check_window(shape, "window", built.window)
        reach = built.target_length(shape)
        if reach < target_length:
            if built.window == trained:
                raise RopeExtendError(
                    f"self_extend: with window={trained}, as long as the trained window, no distance is left "
                    f"for tokens beyond it; use a smaller one, such as window={max(1, trained // 4)}"
                )
            needed = math.ceil((target_length - built.window) / (trained - built.window))
            raise RopeExtendError(
                f"self_extend: group={built.group} with window={built.window} reaches {reach} tokens, not "
                f"{target_length}; use group={needed} or more"
            )
        return built

    @property
    def borders(self) -> Bands:
        """Distances from `window` on are changed."""
        return Bands(self.window)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """`i // G + W - W/G` and `j // G` for distant pairs."""
        shift = self.window - self.window / self.group
        return NEAR, Region(lambda i: i // self.group + shift, lambda j: j // self.group)

    def target_length(self, shape: RopeShape) -> int:
        """`(L - W) G + W`, which the largest distance of L - 1 allows."""
        return max(0, shape.trained_length - self.window) * self.group + self.window

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """`max(1, ln(p+1) / ln L)` with `log_n`."""
        return log_n_scale(shape, position_ids) if self.log_n else None
