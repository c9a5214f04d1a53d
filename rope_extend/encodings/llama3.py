"""Llama 3.1's scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rope_extend.encodings.core.rope import ScaledRope
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.encodings.ntk_by_parts import by_parts
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Llama3(ScaledRope):
    """Llama 3.1's scaling: YaRN's blend with a ramp in the number of turns, and no attention factor.

    Attributes:
        factor: `s = target_length / trained_length`.
        low_freq_factor: frequencies with fewer turns than this within the trained window are divided by s.
        high_freq_factor: frequencies with more turns than this are kept.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    name: ClassVar[str] = "llama3"
    paper: ClassVar[str] = "2407.21783"
    rope_type: ClassVar[str | None] = "llama3"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("low_freq_factor", "high_freq_factor"):
            self._check(field, minimum=0, maximum=1e6, above=True)
        if self.high_freq_factor <= self.low_freq_factor:
            raise RopeExtendError(
                "llama3: high_freq_factor must exceed low_freq_factor, "
                f"got {self.high_freq_factor:g} and {self.low_freq_factor:g}"
            )

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`(1 - keep) * theta_i / s + keep * theta_i`, `[dim/2]` float64, radians per token."""
        return by_parts(shape, self.factor, self.low_freq_factor, self.high_freq_factor)

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `llama3`, with the trained length that its ramp depends on."""
        return {**super().rope_parameters(shape), "original_max_position_embeddings": shape.trained_length}
