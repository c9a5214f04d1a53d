"""Settings of `rope_extend.search`, from YAML, flags or Python.

The module imports neither torch nor transformers, so that `--help` and errors in arguments come quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from rope_extend.checks import number
from rope_extend.config import COUNT, LENGTH, MODEL, PATH, POSITIVE_COUNT, SOURCES, Config
from rope_extend.errors import refuse_if
from rope_extend.evaluation.evaluation_config import (
    LOADING,
    Attention,
    Device,
    Dtype,
    Split,
    TextColumn,
    TrainedLength,
)
from rope_extend.models.locating import check_path

PAPER_EVALUATIONS = 64 + 40 * 32
"""Evaluations of LongRoPE's search: its first population, and 32 new candidates in each of 40 iterations."""
RACE_SHARE = 20
"""A search uses at most one document pass for this number of passes of LongRoPE's search."""
FINALISTS = 3
"""Searched candidates that are compared on held-out documents."""
HELD_OUT_TABLES = FINALISTS + 4
"""Tables that are measured on the held-out documents: the finalists, and the closed forms as published."""
SMALLEST_RACE, SMALLEST_FOR_EACH = 50, 8
"""The fewest passes, in all and for each document: a search compares closed forms, and looks further."""


@dataclass(frozen=True)
class SearchConfig(Config):
    """Settings of a search for frequency divisors: `rope_extend.search` and `rope-extend search`.

    Raises:
        RopeExtendError: a value of the wrong type or outside its range, or two fields that contradict each
            other.
    """

    model: Annotated[str, MODEL, "directory or hub id of the checkpoint"]
    target_length: Annotated[int, LENGTH, "the context window to reach, in tokens"]
    data: Annotated[
        str | tuple[str, ...] | None,
        replace(SOURCES, repeated=True),
        "long documents: a directory, glob, file or hub id; may be given several times",
    ] = None
    output: Annotated[str | None, PATH, "directory of the search: its log, and the encoding"] = None
    documents: Annotated[int, POSITIVE_COUNT, "documents to search on, each of target_length tokens"] = 5
    holdout: Annotated[
        int, POSITIVE_COUNT, "further documents, which decide between the finalists and are not searched on"
    ] = 5
    attention_factor: Annotated[
        float | None,
        number(0.01, below=100),
        "fixed factor on cos and sin (default: it is searched)",
    ] = None
    seed: Annotated[int, COUNT, "random seed; the same seed gives the same result"] = 0
    trained_length: TrainedLength = None
    text_column: TextColumn = "text"
    split: Split = "train"
    device: Device = None
    dtype: Dtype = None
    attention: Attention = None

    label: ClassVar[str] = "search"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "what is measured": ("documents", "holdout"),
        LOADING: ("device", "dtype", "attention"),
    }  # fmt: skip
    examples: ClassVar[str] = "configs/search/"
    flags: ClassVar[Mapping[str, str]] = {"attention": "--attn"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.model)
        refuse_if(
            self.race_passes < max(SMALLEST_RACE, SMALLEST_FOR_EACH * self.documents),
            f"search: with {self.documents} documents and {self.holdout} held out, nothing is left of the "
            f"budget, a {RACE_SHARE}th of LongRoPE's search; use more documents, or a smaller holdout",
        )

    @property
    def race_passes(self) -> int:
        """Documents that a search may measure before the held-out ones, each counted once for a candidate."""
        return PAPER_EVALUATIONS * self.documents // RACE_SHARE - HELD_OUT_TABLES * self.holdout
