"""Jet-Long: near tokens keep their distance, distant ones share positions, the more the longer the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_extend.encodings.core.remap import NEAR, Bands, Region, RemapEncoding
from rope_extend.encodings.core.shapes import RopeShape


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

    near: int
    window: int

    name: ClassVar[str] = "jet_long"
    paper: ClassVar[str] = "2607.07740"
    depends_on_length = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("near", "window")

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Both numbers from the trained length, see the class; a parameter that is given is kept.

        Raises:
            RopeExtendError: unknown or invalid parameters, or more than the trained window.
        """
        trained = shape.trained_length
        built = cls._build({"near": max(1, min(2048, trained // 4)), "window": trained, **parameters})
        for field in ("near", "window"):
            cls._check_window(shape, field, getattr(built, field))
        return built

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The next multiple of the window, int64: texts up to it have the same groups."""
        return -(-lengths // self.window) * self.window

    def is_plain(self, shape: RopeShape, lowest: int, highest: int) -> bool:
        """Whether the text is within the window, or all its pairs are near."""
        return highest < self.window or super().is_plain(shape, lowest, highest)

    def largest_distance(self, shape: RopeShape, length: int) -> float:
        """The largest distance in a text: at its end, or where the group grew last."""
        ends = {length, length // self.window * self.window or length}
        return max(super(JetLong, self).largest_distance(shape, end) for end in ends)

    @property
    def borders(self) -> Bands:
        """Distances above `near` are changed."""
        return Bands(self.near + 1)

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """`i // G` and `j // G` for distant pairs."""
        group = max(1, length // self.window)
        return NEAR, Region(lambda i: i // group, lambda j: j // group)
