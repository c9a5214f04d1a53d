"""What a model trains on: blocks of documents for any trainer, and the data of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import datasets
import torch
from transformers import AutoConfig

from rope_extend.attention.packed import check_packed_attention
from rope_extend.data.blocks import cut_blocks
from rope_extend.data.choices import UNPACKED
from rope_extend.data.documents import Document, check_vocabulary, fingerprint, in_common, load_documents
from rope_extend.data.given_blocks import MADE
from rope_extend.data.mixed_windows import mixed_windows
from rope_extend.data.mixing import Mixture
from rope_extend.data.packing import check_packing, ended, packed_blocks
from rope_extend.data.sampled_positions import PositionCollator, check_sampled
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.models.loading import pretrained
from rope_extend.patching import current_patch
from rope_extend.training.chunked_loss import has_chunked_loss
from rope_extend.training.recipe import Recipe
from rope_extend.units import parse_length


def blocks(
    documents: Sequence[Document],
    length: int | str,
    *,
    packing: bool = False,
    positions: str | None = None,
    model: torch.nn.Module | None = None,
    seed: int = 0,
    tokenizer: Any | None = None,
) -> TrainerBlocks:
    """Cut documents into blocks of `length` tokens, for `Trainer`, trainers built on it, and your own loop.

    Items have `input_ids`, `labels`, which are not shifted, and `attention_mask`, `position_ids` or both,
    int64 `[length]`. Block number n is the same in every process and after every resume.

    Args:
        documents: from `load_documents`.
        length: tokens per block, at least 2; `"32k"` works too.
        packing: concatenate documents of any length; `position_ids` restart in each. It needs
            `chunked_loss(model)`, which keeps documents apart under any trainer. Otherwise each block is from
            one document, and shorter ones are dropped.
        positions: `pose`, `cream` or `random`: short blocks at `position_ids` of the whole window to which
            `model` is extended. Those of a block are the same in every epoch; `PositionCollator` draws new
            ones.
        model: the extended model, whose window and vocabulary blocks are checked against; needed for
            `packing` and `positions`, to which not every method and family is suited.
        seed: seed of the positions.
        tokenizer: with `packing`, each document ends with its end-of-text token (EOS), as in pretraining.

    Raises:
        RopeExtendError: texts that are too short, or not of this model; packing together with positions,
            either without a model, or a model to which they are not suited.
    """
    length, patch = parse_length(length), None if model is None else current_patch(model)
    if patch is not None:
        check_vocabulary(documents, cast(Any, model).get_input_embeddings().weight.shape[0])
        window, bound = patch.target_length, "at most" if positions is None else "less than"
        wrong = length > window - (positions is not None)
        refuse_if(wrong, f"blocks: length {length} must be {bound} {window}, to which model is extended")
    if not packing and positions is None:
        return TrainerBlocks(cut_blocks(documents, length))
    refuse_if(
        packing and positions is not None,
        f"blocks: packing and positions={positions!r} cannot be combined, because both choose position_ids; "
        "leave one of them out",
    )
    if model is None or patch is None:
        name = "packing" if packing else "positions"
        raise RopeExtendError(
            f"blocks: {name} needs the extended model, because some methods are not suited to it; call "
            "rope_extend.extend(model, ...) first, and give model=model"
        )
    if positions is None:
        refuse_if(
            not has_chunked_loss(model),
            "blocks: packing needs rope_extend.chunked_loss(model), which keeps the documents of a row "
            "apart; call it before",
        )
        check_packing(patch.encoding, model.config)
        check_packed_attention(model)
        documents = documents if tokenizer is None else ended(documents, tokenizer)
        return TrainerBlocks(packed_blocks(documents, length))
    collator = PositionCollator(positions, patch.target_length, seed=seed)
    check_sampled(collator.sampler, patch.encoding, patch.shape, model.config, patch.target_length)
    collator.positions(length, 0)  # refuses a block that is too short, or longer than the window
    return TrainerBlocks(cut_blocks(documents, length), collator)


class TrainerBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What `blocks` returns; with a `count`, that number of blocks of an endless stream, as a run reads."""

    def __init__(
        self, parts: Any, collator: PositionCollator | None = None, count: int | None = None
    ) -> None:
        self._parts, self._collator, self._count = parts, collator, count
        MADE.add(self)

    def __len__(self) -> int:
        return len(self._parts) if self._count is None else self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = range(len(self))[index]
        item = dict(self._parts[number])
        if self._collator is not None:
            return self._collator.placed(item, number)
        if "position_ids" in item or self._count is not None:
            return item
        return {**item, "attention_mask": torch.ones_like(item["input_ids"])}  # which TRL needs

    def to_dataset(self) -> datasets.Dataset:
        """The same blocks for trainers that take a Hugging Face dataset, such as TRL's; nothing is copied.

        Give `SFTTrainer` also `data_collator=transformers.default_data_collator` and
        `SFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False)`.
        """
        numbers = datasets.Dataset.from_dict({"number": list(range(len(self)))})

        def chosen(rows: dict[str, list[int]]) -> dict[str, list[torch.Tensor]]:
            items = [self[number] for number in rows["number"]]
            return {name: [item[name] for item in items] for name in items[0]}

        return numbers.with_transform(chosen)

    def __repr__(self) -> str:
        sampled = "" if self._collator is None else f" at positions {self._collator.sampler}"
        return f"{self._parts!r}{sampled}"


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        blocks: the blocks to train on, in the order in which they are read.
        fingerprint: that of the documents.
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

    Documents to evaluate on are long enough for every window. They are not cut, so that their fingerprint
    does not depend on the lengths.

    Args:
        lengths: windows to evaluate at, in tokens.
        trained_length: the pretrained window, in tokens.

    Raises:
        RopeExtendError: as `load_documents` and `cut_blocks`.
    """
    documents = partial(load_documents, tokenizer=tokenizer, text_column=recipe.text_column)
    texts = documents(
        recipe.data, split=recipe.split, max_documents=recipe.max_documents,
        min_tokens=2 if recipe.packs else recipe.length,
    )  # fmt: skip
    config = pretrained(AutoConfig, recipe.model).get_text_config(decoder=True)
    check_vocabulary(texts, config.vocab_size)
    if recipe.packs:
        texts = ended(texts, tokenizer)
    if recipe.mixed_windows:
        share, seed = recipe.short_share, recipe.seed
        blocks = mixed_windows(texts, recipe.length, trained_length, share, seed=seed)
    else:
        cut = cut_blocks if recipe.packing == UNPACKED else packed_blocks
        blocks = Mixture([cut(texts, recipe.length)], seed=recipe.seed)
    held_out: list[Document] = []
    if recipe.eval_data is not None:
        try:
            held_out = documents(
                recipe.eval_data, split=recipe.eval_split, max_documents=recipe.eval_documents,
                min_tokens=max(lengths),
            )  # fmt: skip
        except RopeExtendError as error:
            raise RopeExtendError(f"{error} (eval_data; eval_data=PATH names other documents)") from error
    longest = max(lengths, default=0)
    scored = [Document(document.name, document.input_ids[:longest]) for document in held_out]
    return RunData(blocks, fingerprint(texts), held_out, lengths, in_common(scored, texts))
