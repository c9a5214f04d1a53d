"""RoFormer's linear attention: RoPE with a feature map instead of softmax."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.encodings.core.encoding import Encoding
from rope_extend.encodings.core.rope import RopeEncoding, attribute_of, inner_schedule
from rope_extend.encodings.static import PlainRope
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class LinearAttention(Encoding):
    """Linear attention: one running sum stands for all earlier tokens, at a constant cost per token.

    Features of queries and keys are rotated in the numerator but not in the denominator, as in RoFormer.
    A model trained with softmax does not work with it until it is fine-tuned.

    Attributes:
        inner: the rotary schedule, an encoding or its `to_dict()`; plain RoPE by default. A factor on
            logits is ignored, because there are no logits.
    """

    inner: RopeEncoding = dataclasses.field(default_factory=PlainRope)

    name: ClassVar[str] = "linear_attention"
    paper: ClassVar[str] = "2104.09864"
    inner_name: ClassVar[str] = "inner"
    replaces_rotation = True
    target_length = attribute_of("inner", "target_length")

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = inner_schedule(self)
        if inner.depends_on_length or inner.rotates_in_attention:
            raise RopeExtendError(
                f"{self.name}: keys are summed before any query is known, but {inner} rotates a key for each "
                f"query; give a static schedule, such as yarn or linear"
            )
        object.__setattr__(self, "inner", inner)

    def features(self, states: Tensor) -> Tensor:
        """`elu(x) + 1` (2006.16236), above 0, float32 `[..., head_dim]`."""
        return functional.elu(states.to(torch.float32)) + 1
