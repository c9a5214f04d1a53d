"""STRING: positions of distant tokens are shifted back to distances that are frequent in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rope_extend.encodings.core.remap import NEAR, Bands, Region, RemapEncoding
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


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

    shift: int
    local: int

    name: ClassVar[str] = "string"
    paper: ClassVar[str] = "2410.18745"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_whole("shift", "local")
        if self.local > self.shift:
            raise RopeExtendError(
                f"string: local={self.local} exceeds shift={self.shift}, so distances would grow; use "
                f"local={self.shift} or less"
            )

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Both numbers from the lengths, see the class; a parameter that is given is kept.

        Raises:
            RopeExtendError: unknown or invalid parameters, or a target that is not reached.
        """
        trained = shape.trained_length
        default = max(1, min(128, trained // 16))
        local = cls._build({"shift": parameters.get("local", default), "local": default, **parameters}).local
        needed = target_length - trained + local
        built = cls._build(
            {"shift": max(trained // 3, local, min(needed, trained)), **parameters, "local": local}
        )
        cls._check_window(shape, "shift", built.shift)
        reach = built.target_length(shape)
        if reach < target_length:
            nearest = f"use shift={needed} or more"
            if needed > trained:
                nearest = (
                    f"its largest reach is {2 * trained - local} tokens with local={local}; for longer texts "
                    f"use self_extend, rerope, jet_long or dual_chunk"
                )
            raise RopeExtendError(
                f"string: shift={built.shift} with local={local} reaches {reach} tokens, not "
                f"{target_length}; {nearest}"
            )
        return built

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
