"""RoFormer's linear attention: rotation where softmax is replaced by a feature map."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from rope_extend.encodings.base import Encoding, KernelEncoding, RopeEncoding, RopeShape
from rope_extend.encodings.none import PlainRope
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class LinearAttention(KernelEncoding):
    """Linear attention: a sum that is carried along stands for all earlier tokens, at a cost that stays.

    Features of queries and keys are rotated in the numerator and not in the denominator, as RoFormer has it.
    A model that was trained with softmax has to be trained on before it reads anything by it.

    Attributes:
        inner: the rotary schedule, an encoding or its `to_dict()`; plain RoPE by default. The factor that it
            may have for logits is left out, since there are none.
    """

    inner: RopeEncoding = dataclasses.field(default_factory=PlainRope)

    name: ClassVar[str] = "linear_attention"
    paper: ClassVar[str] = "2104.09864"

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = Encoding.from_dict(self.inner) if isinstance(self.inner, Mapping) else self.inner
        if not isinstance(inner, RopeEncoding):
            raise RopeExtendError(
                f"{self.name}: inner must be a rotary schedule, such as encoding('yarn', factor=8.0), "
                f"got {self.inner!r}"
            )
        if inner.depends_on_length or inner.rotates_in_attention:
            raise RopeExtendError(
                f"{self.name}: {inner} rotates a key by the query that reads it, and here keys are added up "
                f"before a query reads them; give a static schedule, such as yarn or linear"
            )
        object.__setattr__(self, "inner", inner)

    def target_length(self, shape: RopeShape) -> int | None:
        """The inner schedule's."""
        return self.inner.target_length(shape)

    def features(self, states: Tensor) -> Tensor:
        """`elu(x) + 1` (2006.16236), above 0, float32 `[..., head_dim]`."""
        return functional.elu(states.to(torch.float32)) + 1

    def __str__(self) -> str:
        """`linear_attention(yarn(factor=8))`."""
        return f"{self.name}({self.inner})"
