"""Adjusted base frequency (ABF): a larger base, given directly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_extend.encodings.core.checks import check_number
from rope_extend.encodings.core.encoding import check_parameters
from rope_extend.encodings.core.rope import RopeEncoding
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class ABF(RopeEncoding):
    """Adjusted base frequency: a larger base, given directly, as in Code Llama and Llama 2 Long.

    Attributes:
        theta: the new base.
    """

    theta: float

    name: ClassVar[str] = "abf"
    paper: ClassVar[str] = "2309.16039"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "theta", check_number("abf", "theta", self.theta, minimum=1, maximum=1e15, above=True)
        )

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """Plain RoPE's table at the new base, `[dim/2]` float64, radians per token."""
        return shape.inv_freq(self.theta)

    def target_length(self, shape: RopeShape) -> int | None:
        """None: a base alone does not say which window it is meant for."""
        return None

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Without `theta`, uses the critical base for the target: `theta^(ln(L'/2pi) / ln(L/2pi))`.

        The channels that complete a turn within the trained window then complete one within the target
        (Theorem 1 of 2310.05209).

        Raises:
            RopeExtendError: the trained window is too short for the rule, or a parameter is invalid.
        """
        check_parameters(cls, parameters)
        if "theta" not in parameters:
            if shape.trained_length <= 2 * math.pi:
                raise RopeExtendError(
                    f"abf: the rule for theta needs a trained window of 7 tokens or more, this one has "
                    f"{shape.trained_length}; give theta="
                )
            growth = math.log(target_length / (2 * math.pi)) / math.log(shape.trained_length / (2 * math.pi))
            parameters["theta"] = shape.theta**growth
        return cls(**parameters)

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """Stock `default` with the new theta, which every loader supports."""
        return {"rope_type": "default", "rope_theta": self.theta}
