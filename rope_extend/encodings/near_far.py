"""Near and far: one encoding for near tokens, another one for distant tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.encodings.core.methods import rotary_method
from rope_extend.encodings.core.regions import NEAR, Bands, Region
from rope_extend.encodings.core.remap import RemapEncoding
from rope_extend.encodings.core.rope import RopeEncoding, ScaledRope, attribute_of, inner_schedule
from rope_extend.encodings.core.shapes import RopeShape, check_length
from rope_extend.encodings.static import PlainRope
from rope_extend.errors import RopeExtendError

_ANY_SHAPE = RopeShape(dim=128, theta=1e4, trained_length=4096)
"""What an encoding does beyond its table is the same for all shapes."""


@dataclass(frozen=True)
class NearFar(RemapEncoding):
    """Near and far: pairs closer than a window are rotated by one encoding, all others by another one.

    This is the general form of Jet-Long: `near_far(far=jet_long(near=w-1, ...), window=w)` is Jet-Long, and
    with a far schedule such as dynamic YaRN it is its variant with frequencies. If `near` is plain RoPE,
    texts within the window are processed exactly as the model was pretrained.

    For a target length N and a trained length L, `far` is YaRN for N, `near` plain RoPE, and the window 2,048
    as in Jet-Long, or `L // 2` if that is less. If `far` is a method that changes positions, the window is
    the first distance that it changes.

    A softmax has one temperature. So a factor of the far encoding, such as YaRN's or that of `rerope` and
    `logn`, acts on all logits of each query that can have distant pairs: those from position `window` on.

    Attributes:
        far: the encoding of distant pairs: a schedule of frequencies, or a method that changes the positions
            of all pairs from one distance on, such as `self_extend`. If it depends on the length, each query
            has the table of the text that ends with it.
        window: the first distance that is rotated by `far`.
        near: the encoding of near pairs: a static schedule of frequencies.
    """

    far: RopeEncoding
    window: Annotated[int, check_length]
    near: RopeEncoding = field(default_factory=PlainRope)

    name: ClassVar[str] = "near_far"
    paper: ClassVar[str] = "2607.07740"
    inner_name: ClassVar[str] = "far"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "near", inner_schedule(self, "near"))
        object.__setattr__(self, "far", inner_schedule(self, "far", may_remap=True))
        if reason := self.near.why_not_one_table(_ANY_SHAPE):
            raise RopeExtendError(
                f"near_far: near must be one static table, but of {self.near} {reason}; use near=none, or a "
                f"schedule such as ntk"
            )
        self._check_far()

    def _check_far(self) -> None:
        """Refuse what two regions cannot hold."""
        far, problem = self.far, ""
        if isinstance(far, NearFar):
            problem = "has near pairs and a temperature of its own"
        elif isinstance(far, RemapEncoding) and not isinstance(far.borders, Bands):
            problem = "has other regions than near and distant pairs"
        elif far.decay(_ANY_SHAPE) is not None:
            problem = "makes near pairs lose weight too"
        elif far.start_tokens:
            problem = f"keeps the angles of the first {far.start_tokens} positions"
        if problem:
            raise RopeExtendError(
                f"near_far: far cannot be {far.name}, which {problem}; use a schedule such as yarn or "
                f"dynamic_yarn, or self_extend, rerope, string or jet_long"
            )

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """Both encodings and the window from the lengths, see the class; a parameter that is given is kept.

        `near` and `far` may be names of methods, such as `dynamic_yarn`. Their parameters then follow from
        the lengths."""
        given = {"far": "yarn", **parameters}
        for name in ("near", "far"):
            if isinstance(given.get(name), str):
                given[name] = rotary_method(given[name]).for_target(shape, target_length)
        if "window" not in given:
            far = cls.make({**given, "window": 1}).far
            given["window"] = max(1, min(2048, shape.trained_length // 2))
            if isinstance(far, RemapEncoding) and isinstance(far.borders, Bands):
                given["window"] = far.borders.window
        built = cls.make(given)
        built.check_lengths(shape, target_length)
        return built

    depends_on_length = attribute_of("far", "depends_on_length")
    table_length = attribute_of("far", "table_length")
    logit_scale = attribute_of("far", "logit_scale")  # on all pairs of a query
    target_length = attribute_of("far", "target_length")
    inv_freq = attribute_of("near", "inv_freq")
    attention_factor = attribute_of("near", "attention_factor")

    def regions(self, shape: RopeShape, length: int) -> tuple[Region, ...]:
        """The near schedule, and the far one or the far positions."""
        plain = isinstance(self.near, PlainRope)
        near = NEAR if plain else Region(NEAR.query, NEAR.key, self.near)
        if isinstance(self.far, RemapEncoding):
            return near, self.far.regions(shape, length)[1]
        return near, Region(NEAR.query, NEAR.key, self.far)

    def factor_of_queries(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The square of the far factor from position `window` on, and of the near one before; None for 1."""
        near = self.near.attention_factor(shape)
        lengths, which = torch.unique(self.table_length(shape, position_ids + 1), return_inverse=True)
        far = [self.far.attention_factor(shape, length) for length in lengths.tolist()]
        if near == 1 and all(factor == 1 for factor in far):
            return None
        factors = torch.tensor(far, dtype=torch.float64, device=position_ids.device)[which]
        return torch.where(position_ids >= self.window, factors, near) ** 2

    def _reach(self, shape: RopeShape) -> int | None:
        limited = isinstance(self.far, ScaledRope | RemapEncoding) and not self.far.depends_on_length
        return self.far.target_length(shape) if limited else None

    def is_plain(self, shape: RopeShape, lowest: int, highest: int) -> bool:
        """Whether near pairs are plain and there are no others, or the far encoding is plain up to here."""
        if not _is_plain_table(self.near, shape, None):
            return False
        if super().is_plain(shape, lowest, highest):
            return True
        first, last = self.table_length(shape, torch.tensor([lowest + 1, highest + 1], device="cpu")).tolist()
        far = self.regions(shape, last)[1]
        if first != last or not _is_plain_table(far.schedule, shape, last):
            return False
        positions = torch.arange(lowest, highest + 1, dtype=torch.float64, device="cpu")
        return all(torch.equal(of(positions), positions) for of in (far.query, far.key))


def _is_plain_table(schedule: RopeEncoding | None, shape: RopeShape, length: int | None) -> bool:
    """Whether a schedule's table for a length is plain RoPE's; None is plain RoPE."""
    if schedule is None:
        return True
    plain = torch.equal(schedule.inv_freq(shape, length), shape.inv_freq())
    return plain and schedule.attention_factor(shape, length) == 1
