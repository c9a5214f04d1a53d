"""KERPLE: biases from conditionally positive definite kernels, with two learned numbers per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_extend.encodings.core.alternatives import BiasEncoding
from rope_extend.encodings.core.shapes import ModelShape
from rope_extend.errors import RopeExtendError


@dataclass(frozen=True)
class Kerple(BiasEncoding):
    """KERPLE: each logit is lowered by the logarithm, or a power, of the distance, learned per head.

    Attributes:
        kernel: `log` for `-r1 ln(1 + r2 r)`, or `power` for `-r1 r^r2`, at distance r.
        per_layer: whether each layer has its own r1 and r2, as in the paper's code.
    """

    kernel: str = "log"
    per_layer: bool = True

    name: ClassVar[str] = "kerple"
    paper: ClassVar[str] = "2205.09921"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel not in ("log", "power"):
            raise RopeExtendError(f"{self.name}: kernel must be 'log' or 'power', got {self.kernel!r}")

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """`r1` and `r2`, each `[heads]`, which `positive` maps to the kernel's r1 and r2.

        The kernel's r1 and r2 start evenly spread over the heads, in the ranges of the paper's code: 0 to 2
        and 0 to 1 for the log kernel, 0 to 1 and 0 to 2 for the power kernel.
        """
        spread = (torch.arange(shape.heads) + 0.5) / shape.heads
        r1, r2 = (2 * spread, spread) if self.kernel == "log" else (spread, 2 * spread)
        return {"r1": r1.log(), "r2": r2.log() if self.kernel == "log" else torch.logit(r2 / 2)}

    def positive(self, learned: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """r1 and r2 of each head, `[heads]` float32: above 0, and r2 of the power kernel below 2.

        The learned numbers are the logarithm or the logit of these. No optimizer step can therefore leave
        the range in which the kernel is conditionally positive definite.
        """
        r2 = learned["r2"]
        return learned["r1"].exp(), r2.exp() if self.kernel == "log" else 2 * r2.sigmoid()

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`-r1 ln(1 + r2 r)` or `-r1 r^r2`, `[heads, ...]` float32."""
        r1, r2 = (each.view(-1, *[1] * distance.dim()) for each in self.positive(learned))
        far = distance.to(torch.float32)
        return -r1 * (torch.log1p(r2 * far) if self.kernel == "log" else far**r2)
