"""The training data of a recipe: sources are read, cut into blocks, and ordered."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rope_extend.data.blocks import Blocks, cut_blocks
from rope_extend.data.choices import RESTART, UNPACKED
from rope_extend.data.curriculum import Curriculum, Stage
from rope_extend.data.documents import Document, fingerprint, in_common, load_documents
from rope_extend.data.mixed_windows import mixed_windows
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import PackedBlocks, packed_blocks
from rope_extend.data.sources import dataset_id, held_out_split, is_dataset, read_texts, source_files
from rope_extend.data.streaming import Stream
from rope_extend.errors import RopeExtendError
from rope_extend.training.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Attributes:
        blocks: the blocks, stage by stage.
        fingerprint: that of the documents; "stream" for a stream, whose cursor has a digest of the text.
        documents: the documents; None for a stream.
    """

    blocks: Curriculum
    fingerprint: str
    documents: Sequence[Document] | None


def load_training_data(
    recipe: Recipe, tokenizer: Any, processes: int = 1, trained_length: int | None = None
) -> TrainingData:
    """Load the blocks of a run.

    Args:
        recipe: the run.
        tokenizer: the model's tokenizer.
        processes: number of processes with different blocks.
        trained_length: the pretrained window in tokens, which `mixed_windows` needs.

    Raises:
        RopeExtendError: as `load_documents` and `cut_blocks`; the message names the source if there are
            several.
    """
    if recipe.streaming:
        stream = _stream(recipe, tokenizer, processes)
        stream[0]  # fail now if it cannot be read
        return TrainingData(Curriculum([Stage(0, recipe.length, 1, stream)]), "stream", None)
    if recipe.mixed_windows:
        return _mixed_windows(recipe, tokenizer, trained_length)
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
    every = [document for documents in sources for document in documents]
    return TrainingData(Curriculum(stages), joined if weighted else content[0], every)


def _mixed_windows(recipe: Recipe, tokenizer: Any, trained_length: int | None) -> TrainingData:
    assert trained_length is not None
    documents = _documents(recipe, recipe.data, tokenizer)
    blocks = mixed_windows(documents, recipe.length, trained_length, recipe.short_share, seed=recipe.seed)
    stages = Curriculum([Stage(0, recipe.length, 1, blocks)])
    return TrainingData(stages, fingerprint(documents), documents)


def source_names(recipe: Recipe) -> tuple[str, ...]:
    """The names of the sources that a run mixes, in the order of `Curriculum.epochs`; often none."""
    if recipe.mixed_windows:
        return ("long blocks", "short blocks")
    return tuple(recipe.data) if recipe.data_weights is not None else ()


def check_split(recipe: Recipe) -> None:
    """Refuse to evaluate on the split of a hub dataset that the run trains on, if the recipe names both.

    Without `eval_split`, `load_held_out` chooses another one. Parts of one split, such as `train[:90%]` and
    `train[90%:]`, are compared by their documents, and refused for a stream, whose documents are not known.

    Raises:
        RopeExtendError: names the dataset and the split.
    """
    used, evaluated = _split_names(recipe.split), _split_names(recipe.eval_split or "")
    same = recipe.eval_split == recipe.split or (recipe.streaming and used & evaluated)
    for source in sorted(_entries(recipe.eval_data)):
        if same and any(_is_one_dataset(source, name) for name in _entries(recipe.data)):
            raise RopeExtendError(
                f"recipe: eval_data {source!r} is also data, and both use the split {recipe.split!r}, so the "
                "run would be evaluated on its training text. Set eval_split to another split, such as test, "
                "or leave it out"
            )


def _is_one_dataset(one: str, other: str) -> bool:
    """Whether two sources are the same hub dataset; without a config, it may be any."""
    if not (is_dataset(one) and is_dataset(other)):
        return False
    (name, _, config), (name_too, _, config_too) = one.partition(":"), other.partition(":")
    return name == name_too and (config == config_too or not config or not config_too)


def _split_names(split: str) -> set[str]:
    """The splits that an expression such as `train[:90%]+test` takes parts of."""
    return set(re.findall(r"[\w.-]+(?=\[|\+|$)", split.replace(" ", "")))


def _eval_split(recipe: Recipe) -> str:
    """The split of `eval_data`: that of the recipe, or else one that the run does not train on."""
    source = recipe.eval_data
    if recipe.eval_split is not None:
        return recipe.eval_split
    if not isinstance(source, str) or not is_dataset(source):
        return recipe.split  # files have no splits
    same = any(is_dataset(name) and dataset_id(name) == dataset_id(source) for name in _entries(recipe.data))
    trained = _split_names(recipe.split) if same else set()
    split = held_out_split(source, trained)
    logger.info("evaluating on the split %r of %r", split, source)
    return split


def load_held_out(recipe: Recipe, tokenizer: Any, lengths: Sequence[int]) -> list[Document]:
    """Documents to evaluate on, long enough for every window; none without `eval_data`.

    They are not cut, so that their fingerprint does not depend on the lengths.

    Raises:
        RopeExtendError: as `load_documents`, or `held_out_split` without `eval_split`.
    """
    if recipe.eval_data is None:
        return []
    return load_documents(
        recipe.eval_data,
        tokenizer,
        text_column=recipe.text_column,
        split=_eval_split(recipe),
        min_tokens=max(lengths),
        max_documents=recipe.eval_documents,
    )


def trained_on(
    recipe: Recipe,
    held_out: Sequence[Document],
    training: TrainingData,
    tokenizer: Any,
    lengths: Sequence[int],
) -> int:
    """How many of the documents to evaluate on, cut to the largest window, are also training data.

    The documents of a stream are not known, but its files are: there, the documents of these files count.
    Hub datasets have none; they are not evaluated on the split of the stream, see `check_split`.
    """
    if recipe.eval_data is None:
        return 0
    if training.documents is not None:
        longest = max(lengths)
        scored = [Document(document.name, document.input_ids[:longest]) for document in held_out]
        return in_common(scored, training.documents)
    streamed, evaluated = source_files(recipe.data), source_files(recipe.eval_data)
    shared = tuple(str(path) for resolved, path in evaluated.items() if resolved in streamed)
    if not shared or len(shared) == len(evaluated):
        return len(held_out) if shared else 0
    try:
        documents = load_held_out(replace(recipe, eval_data=shared), tokenizer, lengths)
    except RopeExtendError:  # all of them are too short, so none is among the documents to evaluate on
        return 0
    return in_common(held_out, documents)


def _entries(source: str | Sequence[str] | None) -> set[str]:
    return {source} if isinstance(source, str) else set(source or ())


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
        min_tokens=2 if recipe.packs else shortest,
        max_documents=recipe.max_documents,
        max_tokens=recipe.max_tokens,
    )


def _blocks(documents: Sequence[Document], length: int, recipe: Recipe) -> Blocks | PackedBlocks:
    if recipe.packing == UNPACKED:
        return cut_blocks(documents, length)
    return packed_blocks(documents, length, restarts=recipe.packing == RESTART)
