"""The scaling of positions in a GGUF file, as `rope_parameters` of transformers.

It is read as llama.cpp computes it; see `checkpoint/export/gguf.py` for the sources. `gguf_metadata.py` has
checked its values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from rope_extend.encodings import Llama3, RopeShape
from rope_extend.encodings.core.shapes import MAX_FACTOR, MAX_LENGTH
from rope_extend.errors import RopeExtendError
from rope_extend.models.gguf_metadata import ADVICE, LIST, LONG, SHORT, Metadata

ZERO_FREQUENCY_FACTOR = 1e30
"""The factor of a pair with frequency zero, as llama.cpp's own converter writes it for Gemma 4."""
DEFAULT_BASE = 10_000.0
"""llama.cpp's base for a file that states none."""
_FITS = 1e-4
"""Largest relative difference of a divisor. Frequencies in float32 are off by up to 1e-6 for a base of 5e5,
and a divisor near the factor s changes by 4/3 s times that. No known model has s above 64."""


def rope_scaling(metadata: Metadata) -> dict[str, Any]:
    """The `rope_parameters` that a GGUF file's scaling of positions means in transformers; empty for none.

    `original_max_position_embeddings` is missing from `linear` scaling if the file does not state it.

    Raises:
        RopeExtendError: transformers has no form for this scaling, or the file does not state the window that
            its table of divisors belongs to.
    """
    keys = metadata.of_architecture
    kind = keys("rope.scaling.type", "linear")
    factor = float(keys("rope.scaling.factor", keys("rope.scale_linear", 0.0)) or 1.0)
    stated = keys("rope.scaling.original_context_length", 0)
    attention = float(keys("rope.scaling.attn_factor", 1.0) or 1.0)
    if kind == "none":
        factor = 1.0
    if metadata.tables:
        if max(max(table) for table in metadata.tables.values()) >= ZERO_FREQUENCY_FACTOR:
            raise RopeExtendError(
                "the file has pairs of channels that do not turn, as those of p_rope, clipped and nope, and "
                f"no config of transformers says so. {ADVICE}"
            )
        if kind not in ("none", "linear", "longrope"):
            raise RopeExtendError(f"a table of divisors with rope.scaling.type {kind!r} has no form here")
        return _with_tables(metadata, factor, stated, attention)
    if kind == "yarn":
        # llama.cpp computes with 32 and 1, whatever yarn_beta_fast and yarn_beta_slow of the file say.
        return {
            "rope_type": "yarn", "factor": factor,
            "original_max_position_embeddings": stated or keys("context_length", 0),
            "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
            "beta_fast": 32.0, "beta_slow": 1.0,
        }  # fmt: skip
    if kind not in ("none", "linear"):
        raise RopeExtendError(f"rope.scaling.type {kind!r} has no form in transformers without its tables")
    if attention != 1.0:
        raise RopeExtendError(f"rope.scaling.attn_factor {attention} without a table has no form here")
    if factor == 1:
        return {}
    window = {"original_max_position_embeddings": stated} if stated else {}
    return {"rope_type": "linear", "factor": factor, **window}


def _with_tables(metadata: Metadata, factor: float, stated: int, attention: float) -> dict[str, Any]:
    """The `rope_parameters` of a file with divisors, of which `rope_freqs.weight` has precedence.

    llama.cpp divides by the factor too, for every `rope.scaling.type` except `none`.
    """
    tables = {name: [value * factor for value in table] for name, table in metadata.tables.items()}
    short, long = tables.get(SHORT), tables.get(LONG)
    if LIST in tables:
        short = long = tables[LIST]
        base = float(metadata.of_architecture("rope.freq_base", DEFAULT_BASE))
        found = llama3_of(long, base) if attention == 1.0 else None
        if found is not None and stated in (0, found["original_max_position_embeddings"]):
            return found
    if short is None or long is None:
        raise RopeExtendError("only one of rope_factors_long and rope_factors_short is in the file")
    if not stated:
        raise RopeExtendError(
            "the file has a table of divisors of its frequencies, and does not say which window the model "
            f"was pretrained on (rope.scaling.original_context_length). {ADVICE}"
        )
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": stated, "attention_factor": attention,
    }  # fmt: skip


def llama3_of(divisors: Sequence[float], base: float) -> dict[str, Any] | None:
    """Llama 3.1's scaling with exactly these divisors `[dim / 2]`; None if there is none.

    A file of a Llama 3.1 holds the divisors only, and the window of pretraining is a parameter of their
    formula. Each divisor between 1 and the factor gives one estimate of it. The ramp is that of all Llama
    models, from 1 to 4 turns: the divisors alone determine the window only up to its scale.
    """
    factor, pairs = max(divisors), len(divisors)
    windows = [
        2 * math.pi * base ** (index / pairs) * (1 + 3 * (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for index, divisor in enumerate(divisors)
        if 1 < divisor < factor
    ]
    if not windows or factor > MAX_FACTOR or (window := round(median(windows))) > MAX_LENGTH:
        return None
    shape, encoding = RopeShape(2 * pairs, base, window), Llama3(factor)
    expected = shape.inv_freq() / encoding.inv_freq(shape)
    if not torch.allclose(torch.tensor(divisors, dtype=torch.float64), expected, rtol=_FITS, atol=0):
        return None
    return encoding.rope_parameters(shape)
