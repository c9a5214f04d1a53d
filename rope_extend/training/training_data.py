"""The data of a run: blocks to train on, from sources that are read, cut and ordered; and held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_extend.data.blocks import cut_blocks
from rope_extend.data.choices import UNPACKED
from rope_extend.data.documents import Document, fingerprint, in_common, load_documents
from rope_extend.data.mixed_windows import mixed_windows
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import ended, packed_blocks
from rope_extend.errors import RopeExtendError
from rope_extend.training.recipe import Recipe


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        blocks: the blocks to train on, in the order in which they are read.
        fingerprint: that of the documents of each source.
        held_out: documents to evaluate on; may be empty.
        lengths: windows to evaluate at, in tokens.
        trained_on: how many of the documents to evaluate on are also training data.
    """

    blocks: Mixture
    fingerprint: str
    held_out: Sequence[Document]
    lengths: Sequence[int]
    trained_on: int


def load_data(recipe: Recipe, tokenizer: Any, lengths: Sequence[int], trained_length: int) -> RunData:
    """Load the data of a run.

    Args:
        recipe: the run.
        tokenizer: the model's tokenizer.
        lengths: windows to evaluate at, in tokens.
        trained_length: the pretrained window, in tokens.

    Raises:
        RopeExtendError: as `load_documents` and `cut_blocks`; names the source if there are weights.
    """
    names = [recipe.data] if recipe.data_weights is None else recipe.data
    cut = cut_blocks if recipe.packing == UNPACKED else packed_blocks
    sources, parts = [], []
    for name in names:
        try:
            sources.append(_documents(recipe, name, tokenizer))
            if not recipe.mixed_windows:
                parts.append(cut(sources[-1], recipe.length))
        except RopeExtendError as error:
            if recipe.data_weights is None:
                raise
            raise RopeExtendError(f"the source {name!r} of data: {error}") from error
    if recipe.mixed_windows:
        share, seed = recipe.short_share, recipe.seed
        blocks = mixed_windows(sources[0], recipe.length, trained_length, share, seed=seed)
    else:
        blocks = Mixture(parts, recipe.data_weights or (1.0,), seed=recipe.seed)
    held_out = load_held_out(recipe, tokenizer, lengths)
    longest = max(lengths, default=0)
    scored = [Document(document.name, document.input_ids[:longest]) for document in held_out]
    known = in_common(scored, [document for documents in sources for document in documents])
    return RunData(blocks, " ".join(map(fingerprint, sources)), held_out, lengths, known)


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


def _documents(recipe: Recipe, source: str | Sequence[str], tokenizer: Any) -> list[Document]:
    documents = load_documents(
        source,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.split,
        min_tokens=2 if recipe.packs else recipe.length,
        max_documents=recipe.max_documents,
        max_tokens=recipe.max_tokens,
        streaming=recipe.streaming,
    )
    return (
        ended(documents, tokenizer, recipe.max_tokens) if recipe.packs and recipe.end_of_text else documents
    )
