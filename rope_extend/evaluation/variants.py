"""A model under each method and with each adapter, one after the other: what evaluations go through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from rope_extend.checkpoint import Record, load_adapter
from rope_extend.data import format_length
from rope_extend.encodings import RopeShape, encoding, method_named
from rope_extend.errors import RopeExtendError
from rope_extend.patching import current_patch, extend, patch_model

AS_IS = "as-is"
"""The method that leaves a checkpoint with the encoding its config gives it."""

PLAIN = "none"
"""The method that reads with plain RoPE: what every other is held against."""


class Variant(NamedTuple):
    """A model that is ready to be measured: what to call it, its adapter's directory, and itself."""

    label: str
    adapter: str | None
    model: nn.Module


def variants(
    lm: Any, methods: Sequence[str], records: Mapping[str, Record], trained: int, longest: int
) -> Iterator[Variant]:
    """Yield the model under each method, untrained, then with each adapter; it is left as it was.

    Args:
        lm: the model; what it is changed to lasts until the next one is asked for.
        methods: rotary methods by name; `none` is plain RoPE, `as-is` what the config says.
        records: of the adapters, by directory.
        trained: the window it was pretrained on, in tokens.
        longest: what methods extend it to, in tokens.
    """
    for method in methods:
        if method == AS_IS:
            yield Variant(method, None, lm)
        elif method == PLAIN:
            with patch_model(lm, encoding("none"), trained_length=trained):
                yield Variant(method, None, lm)
        else:
            with extend(lm, longest, method, trained_length=trained):
                yield Variant(method, None, lm)
    for adapter, label in adapter_labels(records).items():
        tuned = load_adapter(lm, adapter)
        try:
            yield Variant(label, str(adapter), tuned.eval())
        finally:
            patch = current_patch(tuned)
            lm = tuned.unload()
            if patch is not None:
                patch.remove()


def check_method(method: str, shape: RopeShape, longest: int) -> None:
    """Refuse, before anything is loaded, a method that could not be patched in later.

    Raises:
        RopeExtendError: no such method, or nothing to extend.
    """
    if method in (AS_IS, PLAIN):
        return
    named = method_named(method)
    if longest <= shape.trained_length:
        raise RopeExtendError(
            f"the longest length, {longest}, is within the trained window of {shape.trained_length} tokens, "
            f"where there is nothing to extend; add a longer one, or leave methods at {AS_IS} or {PLAIN}"
        )
    named.for_target(shape, longest)


def adapter_labels(records: Mapping[str, Record]) -> dict[str, str]:
    """`yarn + LoRA`; `none + LoRA at 256` for a control; with the directory's name where two are alike."""
    labels = {}
    for adapter, record in records.items():
        labels[adapter] = f"{record.encoding.name} + LoRA"
        if record.encoding.name == "none":
            labels[adapter] += f" at {format_length(record.target_length)}"
    count = Counter(labels.values())
    return {
        adapter: f"{label} ({Path(adapter).name})" if count[label] > 1 else label
        for adapter, label in labels.items()
    }
