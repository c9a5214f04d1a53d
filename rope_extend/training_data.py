"""What a recipe trains on: its sources read, cut into blocks, and put in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from rope_extend.data import Blocks, Document, blocks, fingerprint, load_documents
from rope_extend.errors import RopeExtendError
from rope_extend.mixing import Mixture
from rope_extend.packing import RESTART, UNPACKED, PackedBlocks, packed_blocks
from rope_extend.recipe import Recipe


def load_training_data(recipe: Recipe, tokenizer: Any) -> tuple[Mixture, str]:
    """The blocks that a run reads, and the fingerprint of the documents they are from.

    Raises:
        RopeExtendError: what `load_documents` and `blocks` refuse, naming the source if there are several.
    """
    if recipe.data_weights is None:
        documents = _documents(recipe, recipe.data, tokenizer)
        return Mixture([_blocks(documents, recipe)], seed=recipe.seed), fingerprint(documents)
    sources, names = [], []
    for name in recipe.data:
        try:
            documents = _documents(recipe, name, tokenizer)
            sources.append(_blocks(documents, recipe))
        except RopeExtendError as error:
            raise RopeExtendError(f"the source {name!r} of data: {error}") from error
        names.append(fingerprint(documents))
    joined = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
    return Mixture(sources, recipe.data_weights, seed=recipe.seed), joined


def _documents(recipe: Recipe, source: str | Sequence[str], tokenizer: Any) -> list[Document]:
    return load_documents(
        source,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.split,
        min_tokens=recipe.length if recipe.packing == UNPACKED else 2,
        max_documents=recipe.max_documents,
        max_tokens=recipe.max_tokens,
    )


def _blocks(documents: Sequence[Document], recipe: Recipe) -> Blocks | PackedBlocks:
    if recipe.packing == UNPACKED:
        return blocks(documents, recipe.length, shuffle=False)
    return packed_blocks(documents, recipe.length, restarts=recipe.packing == RESTART)
