"""Segments of the CUDA allocator that grow, so that memory is less fragmented."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables with the allocator's settings. If both are set, torch 2.13 reads only the first."""
_SETTING = "expandable_segments"
_GROW = f"{_SETTING}:True"


def expand_segments(setting: bool | str) -> None:
    """Let the CUDA allocator grow its segments, which reduces fragmentation.

    Has an effect only if CUDA is not yet initialized in this process. It is added to each variable that the
    user set. If one of them says that segments do not grow, all stay as they are.

    Args:
        setting: True, False, or `auto`: on if there is a GPU.
    """
    if setting is False:
        return
    if not torch.cuda.is_available():
        if setting is True:
            logger.info("expandable_segments has no effect: there is no GPU")
        return
    present = _settings() or {_NAMES[0]: ""}
    lacking = {name: settings for name, settings in present.items() if _GROW not in settings}
    if not lacking or any(_SETTING in settings for settings in lacking.values()):
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if setting is True:
            logger.warning(
                "expandable_segments has no effect: CUDA is already initialized; set "
                "%s=%s before the program starts", _NAMES[0], _GROW,
            )  # fmt: skip
        return
    for name, settings in lacking.items():
        os.environ[name] = ",".join(filter(None, (settings, _GROW)))


def segments_are_fixed() -> bool:
    """Whether CUDA is in use with segments that cannot grow, so that large tensors leave gaps."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    present = _settings().values()
    return not present or any(_GROW not in settings for settings in present)


def _settings() -> dict[str, str]:
    """The settings by variable that is set, without spaces, which torch ignores."""
    return {name: "".join(os.environ[name].split()) for name in _NAMES if name in os.environ}
