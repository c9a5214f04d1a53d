"""The training data of a recipe: sources are read, cut into blocks, and ordered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rope_extend.data.blocks import Blocks, cut_blocks
from rope_extend.data.choices import RESTART, UNPACKED
from rope_extend.data.curriculum import Curriculum, Stage
from rope_extend.data.documents import Document, fingerprint, load_documents
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import PackedBlocks, packed_blocks
from rope_extend.data.sources import read_texts
from rope_extend.data.streaming import Stream
from rope_extend.errors import RopeExtendError
from rope_extend.training.recipe import Recipe


def load_training_data(recipe: Recipe, tokenizer: Any, processes: int = 1) -> tuple[Curriculum, str]:
    """Load the blocks of a run, stage by stage, and the fingerprint of their documents.

    A stream has no fingerprint: its cursor has a digest of the text that was read.

    Raises:
        RopeExtendError: as `load_documents` and `cut_blocks`; the message names the source if there are
            several.
    """
    if recipe.streaming:
        stream = _stream(recipe, tokenizer, processes)
        stream[0]  # fail now if it cannot be read
        return Curriculum([Stage(0, recipe.length, 1, stream)]), "stream"
    weighted = recipe.data_weights is not None
    names = list(recipe.data) if weighted else [recipe.data]
    sources: list[list[Document]] = []
    for name in names:
        with _naming(name, weighted):
            sources.append(_documents(recipe, name, tokenizer))
    stages, first = [], 0
    for length, steps in [*(recipe.curriculum or ()), (recipe.length, recipe.steps)]:
        parts = []
        for name, documents in zip(names, sources, strict=True):
            with _naming(name, weighted):
                parts.append(_blocks(documents, length, recipe))
        mixture = Mixture(parts, recipe.data_weights or (1.0,), seed=recipe.seed)
        stages.append(Stage(first, length, recipe.length // length, mixture))
        first += steps
    content = [fingerprint(documents) for documents in sources]
    joined = hashlib.sha256(" ".join(content).encode()).hexdigest()[:16]
    return Curriculum(stages), joined if weighted else content[0]


def _stream(recipe: Recipe, tokenizer: Any, processes: int) -> Stream:
    return Stream(
        partial(read_texts, recipe.data, recipe.text_column, recipe.split, None, streaming=True),
        tokenizer,
        recipe.length,
        name=str(recipe.data),
        packing=recipe.packing,
        max_tokens=recipe.max_tokens,
        step=recipe.batch_size * recipe.gradient_accumulation * processes,
    )


@contextmanager
def _naming(source: str | Sequence[str], several: bool) -> Iterator[None]:
    """Name the source in an error, if there are several."""
    try:
        yield
    except RopeExtendError as error:
        if not several:
            raise
        raise RopeExtendError(f"the source {source!r} of data: {error}") from error


def _documents(recipe: Recipe, source: str | Sequence[str], tokenizer: Any) -> list[Document]:
    shortest = min(length for length, _ in [*(recipe.curriculum or ()), (recipe.length, 0)])
    return load_documents(
        source,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.split,
        min_tokens=shortest if recipe.packing == UNPACKED else 2,
        max_documents=recipe.max_documents,
        max_tokens=recipe.max_tokens,
    )


def _blocks(documents: Sequence[Document], length: int, recipe: Recipe) -> Blocks | PackedBlocks:
    if recipe.packing == UNPACKED:
        return cut_blocks(documents, length)
    return packed_blocks(documents, length, restarts=recipe.packing == RESTART)
