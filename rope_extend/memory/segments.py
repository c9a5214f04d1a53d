"""Segments of the CUDA allocator that grow, so that memory is less fragmented."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)

_NAME, _GROW = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def expand_segments(setting: bool | str) -> None:
    """Let the CUDA allocator grow its segments, which reduces fragmentation.

    Has an effect only if CUDA is not yet initialized in this process. A setting in the user's environment is
    kept.

    Args:
        setting: True, False, or `auto`: on if there is a GPU.
    """
    if setting is False:
        return
    if not torch.cuda.is_available():
        if setting is True:
            logger.info("expandable_segments has no effect: there is no GPU")
        return
    present = _settings()
    if "expandable_segments" in present:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if setting is True:
            logger.warning(
                "expandable_segments has no effect: CUDA is already initialized; set "
                "%s=%s before the program starts", _NAME, _GROW,
            )  # fmt: skip
        return
    os.environ[_NAME] = ",".join(filter(None, (present, _GROW)))


def segments_are_fixed() -> bool:
    """Whether CUDA is in use with segments that cannot grow, so that large tensors leave gaps."""
    return torch.cuda.is_initialized() and _GROW not in _settings()  # type: ignore[no-untyped-call]


def _settings() -> str:
    return os.environ.get(_NAME) or os.environ.get("PYTORCH_ALLOC_CONF", "")
