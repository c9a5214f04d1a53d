"""Block lengths that change during a run: short blocks first, which are cheap, then long ones.

Every stage has the same number of tokens per step: shorter blocks come in larger number. The stage and the
content of a step follow from the step alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rope_extend.data.mixing import Mixture
from rope_extend.data.streaming import Cursor, Stream
from rope_extend.units import format_length


@dataclass(frozen=True)
class Stage:
    """Consecutive steps with blocks of one length.

    Attributes:
        first_step: the first step of the stage, counted from 0.
        length: tokens per block.
        rows: number of blocks with as many tokens as one of the run's longest blocks.
        blocks: the source of the blocks; each stage reads it from its start.
    """

    first_step: int
    length: int
    rows: int
    blocks: Mixture | Stream


class Curriculum:
    """The stages of a run; a single one if its block length does not change.

    Args:
        stages: in order, the first from step 0; each lasts until the next begins.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages

    def at(self, step: int) -> Stage:
        """The stage of a step, counted from 0."""
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def _steps(self, total: int) -> list[int]:
        """How many of the first `total` steps are in each stage."""
        edges = [min(stage.first_step, total) for stage in self.stages] + [total]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    def share_beyond(self, window: int, steps: int) -> float:
        """Share of the tokens of the first `steps` steps at positions `window` and above."""
        parts = zip(self._steps(steps), self.stages, strict=True)
        return sum(count * stage.blocks.share_beyond(window) for count, stage in parts) / steps

    def epochs(self, steps: int, sequences: int) -> list[float]:
        """How often each source of a mixture was read from end to end in the first `steps` steps.

        Args:
            steps: optimizer steps.
            sequences: number of the run's longest blocks in one step, over all processes.
        """
        parts = zip(self._steps(steps), self.stages, strict=True)
        by_stage = [
            stage.blocks.epochs(count * sequences * stage.rows)
            for count, stage in parts
            if isinstance(stage.blocks, Mixture)
        ]
        return [sum(times) for times in zip(*by_stage, strict=True)]

    def cursor(self, position: int) -> dict[str, Any] | None:
        """Where in the stream the block at a position begins, for a checkpoint; None without streaming."""
        blocks = self.stages[0].blocks
        return asdict(blocks.cursor(position)) if isinstance(blocks, Stream) else None

    def restore(self, position: int, cursor: dict[str, Any] | None) -> None:
        """Resume at a position with the result of `cursor` for it; only streams need this."""
        blocks = self.stages[0].blocks
        if isinstance(blocks, Stream):
            blocks.restore(position, Cursor(**(cursor or {})))

    def __repr__(self) -> str:
        if len(self.stages) == 1:
            return repr(self.stages[0].blocks)
        parts = (f"{format_length(s.length)} from step {s.first_step}: {s.blocks}" for s in self.stages)
        return f"Curriculum({'; '.join(parts)})"
