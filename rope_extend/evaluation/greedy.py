"""Greedy generation: the most likely token each time, whatever the checkpoint's generation config says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig

from rope_extend.models.view import unwrap

_REMINDER = "transformers.generation.stopping_criteria"
"""The logger that reminds of `max_position_embeddings`, which the methods exceed on purpose."""


@contextmanager
def greedy(model: nn.Module) -> Iterator[None]:
    """Within the block, `generate` of a model uses nothing of the checkpoint's generation config.

    `generate` would take all that it is not given from there: penalties and forbidden tokens, which change
    the answer, or a kind of cache. Nor does it say that the text exceeds the config's window.

    Args:
        model: any model; without a generation config only the reminder is silenced.
    """
    logger = logging.getLogger(_REMINDER)
    has_own = getattr(model, "generation_config", None) is not None
    base: Any = unwrap(model) if has_own else None
    own = base.generation_config if has_own else None
    logger.addFilter(_nothing)
    if has_own:
        base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        logger.removeFilter(_nothing)
        if has_own:
            base.generation_config = own


def _nothing(_: logging.LogRecord) -> bool:
    return False
