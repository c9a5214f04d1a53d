"""The training data of a recipe: sources are read, cut into blocks, and ordered."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rope_extend.data.blocks import Blocks, cut_blocks
from rope_extend.data.choices import RESTART, UNPACKED
from rope_extend.data.documents import Document, fingerprint, in_common, load_documents
from rope_extend.data.mixed_windows import mixed_windows
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import PackedBlocks, packed_blocks
from rope_extend.errors import RopeExtendError
from rope_extend.training.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Attributes:
        blocks: the blocks in the order in which they are read.
        fingerprint: that of the documents.
        documents: the documents.
    """

    blocks: Mixture
    fingerprint: str
    documents: Sequence[Document]


def load_training_data(recipe: Recipe, tokenizer: Any, trained_length: int | None = None) -> TrainingData:
    """Load the blocks of a run.

    Args:
        recipe: the run.
        tokenizer: the model's tokenizer.
        trained_length: the pretrained window in tokens, which `mixed_windows` needs.

    Raises:
        RopeExtendError: as `load_documents` and `cut_blocks`; the message names the source if there are
            several.
    """
    if recipe.mixed_windows:
        assert trained_length is not None
        documents = _documents(recipe, recipe.data, tokenizer)
        blocks = mixed_windows(documents, recipe.length, trained_length, recipe.short_share, seed=recipe.seed)
        return TrainingData(blocks, fingerprint(documents), documents)
    weighted = recipe.data_weights is not None
    sources: list[list[Document]] = []
    parts: list[Blocks | PackedBlocks] = []
    for name in recipe.data if weighted else [recipe.data]:
        with _naming(name, weighted):
            sources.append(_documents(recipe, name, tokenizer))
            parts.append(_blocks(sources[-1], recipe))
    content = [fingerprint(documents) for documents in sources]
    joined = hashlib.sha256(" ".join(content).encode()).hexdigest()[:16]
    return TrainingData(
        Mixture(parts, recipe.data_weights or (1.0,), seed=recipe.seed),
        joined if weighted else content[0],
        [document for documents in sources for document in documents],
    )


def source_names(recipe: Recipe) -> tuple[str, ...]:
    """The names of the sources that a run mixes, in the order of `Mixture.epochs`; often none."""
    if recipe.mixed_windows:
        return ("long blocks", "short blocks")
    return tuple(recipe.data) if recipe.data_weights is not None else ()


def load_held_out(recipe: Recipe, tokenizer: Any, lengths: Sequence[int]) -> list[Document]:
    """Documents to evaluate on, long enough for every window; none without `eval_data`.

    They are not cut, so that their fingerprint does not depend on the lengths.

    Raises:
        RopeExtendError: as `load_documents`.
    """
    if recipe.eval_data is None:
        return []
    return load_documents(
        recipe.eval_data,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.eval_split,
        min_tokens=max(lengths),
        max_documents=recipe.eval_documents,
    )


def trained_on(held_out: Sequence[Document], training: TrainingData, lengths: Sequence[int]) -> int:
    """How many of the documents to evaluate on, cut to the largest window, are also training data."""
    longest = max(lengths, default=0)
    scored = [Document(document.name, document.input_ids[:longest]) for document in held_out]
    return in_common(scored, training.documents)


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
    return load_documents(
        source,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.split,
        min_tokens=2 if recipe.packs else recipe.length,
        max_documents=recipe.max_documents,
        max_tokens=recipe.max_tokens,
        streaming=recipe.streaming,
    )


def _blocks(documents: Sequence[Document], recipe: Recipe) -> Blocks | PackedBlocks:
    if recipe.packing == UNPACKED:
        return cut_blocks(documents, recipe.length)
    return packed_blocks(documents, recipe.length, restarts=recipe.packing == RESTART)
