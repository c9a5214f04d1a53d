"""Segments of the CUDA allocator that grow, so that memory is less fragmented."""

from __future__ import annotations

import os

import torch

_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables with the allocator's settings. If both are set, torch 2.13 reads only the first."""
_SETTING = "expandable_segments"
_GROW = f"{_SETTING}:True"


def expand_segments() -> None:
    """Let the CUDA allocator grow its segments, which reduces fragmentation.

    Has an effect only if CUDA is not yet initialized in this process. It is added to each variable that the
    user set. If one of them says that segments do not grow, all stay as they are.
    """
    if not torch.cuda.is_available() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    present = _settings() or {_NAMES[0]: ""}
    lacking = {name: settings for name, settings in present.items() if _GROW not in settings}
    if any(_SETTING in settings for settings in lacking.values()):
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
