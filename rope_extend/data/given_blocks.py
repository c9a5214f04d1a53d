"""Whether a trainer trains the blocks that it was given: a batch of it is compared with them.

Trainers cut rows to a length of their own, drop columns that they do not know, and have collators that number
the tokens anew. Each changes silently what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

from rope_extend.data.sampled_positions import PositionCollator
from rope_extend.errors import RopeExtendError

_ROWS = 32
"""Number of rows that are compared: the first block of packed documents may hold only one of them."""
MADE: WeakSet[Any] = WeakSet()
"""The datasets of blocks of this process."""


def check_batches(loader: Any) -> None:
    """Refuse a data loader whose batches are not the blocks that they are made of.

    Args:
        loader: that of a trainer; one without rows by number, or of other data, passes.

    Raises:
        RopeExtendError: tokens or positions differ, or the labels of a block with positions; says what to
            change.
    """
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    ours = isinstance(getattr(collate, "data_collator", collate), PositionCollator)  # it counts its calls
    if collate is None or ours or not hasattr(dataset, "__len__"):
        return
    for number in range(min(len(dataset), _ROWS)):
        row = dataset[number]
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return
        _check_row(row, collate, known=dataset in MADE)


def _check_row(row: Mapping[str, Any], collate: Any, *, known: bool) -> None:
    origins = [row] if known else _origins(torch.as_tensor(row["input_ids"])) or [row]
    batch = collate([row])
    found = [_differing(batch, block) for block in origins]
    if all(found):
        raise RopeExtendError(
            f"the trainer does not train the blocks that it was given: {found[0]} of its batches differ. "
            "Give it data_collator=transformers.default_data_collator; with TRL, blocks.to_dataset(), and "
            "SFTConfig(dataset_kwargs={'skip_prepare_dataset': True}, remove_unused_columns=False)"
        )


def _differing(batch: Mapping[str, Any], block: Mapping[str, Any]) -> str | None:
    """What the first row of a batch has not as a block has it; labels count if documents or positions do."""
    names = ("input_ids", "position_ids", "labels") if "position_ids" in block else ("input_ids",)
    for name in names:
        if name not in block:
            continue
        if name not in batch or not torch.equal(
            torch.as_tensor(batch[name])[0], torch.as_tensor(block[name])
        ):
            return name
    return None


def _origins(ids: torch.Tensor) -> list[Mapping[str, torch.Tensor]]:
    """The blocks whose tokens a row has, or begins with: one at most of each dataset."""
    found = []
    for made in MADE:
        for number in range(len(made)):
            block = made[number]
            if torch.equal(block["input_ids"][: len(ids)], ids):
                found.append(block)
                break
    return found
