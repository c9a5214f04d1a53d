"""Tables of divisors that were published, by name.

The names are those of the files they come from. All belong to fine-tuned checkpoints. Untrained models
need other divisors, which `rope-extend search` finds.
"""

from __future__ import annotations

from dataclasses import dataclass

from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.units import format_length

LONG, SHORT = "long_factor", "short_factor"
"""The parameters of `longrope` that tables are for."""


@dataclass(frozen=True)
class PublishedTable:
    """A published table.

    Attributes:
        name: its name in the source.
        model: the model that it was searched for.
        shape: the rotary shape of that model, as pretrained.
        parameter: the parameter of `longrope` that it is for, `long_factor` or `short_factor`.
        length: the length of the texts that it was searched for, in tokens.
        target_length: the window of the checkpoint that it belongs to, in tokens.
        source: where it was published.
        licence: the licence of the source.
        divisors: the divisor of each channel pair, the fastest first.
        note: what a user must know of it; empty if nothing.
    """

    name: str
    model: str
    shape: RopeShape
    parameter: str
    length: int
    target_length: int
    source: str
    licence: str
    divisors: tuple[float, ...]
    note: str = ""


_LLAMA_2 = RopeShape(128, 10_000.0, 4096)
_LLAMA_3 = RopeShape(128, 500_000.0, 8192)
_LONGROPE = "2402.13753, github.com/microsoft/LongRoPE, evaluation/rope_rescale-new-2.pt"
_LONGROPE_2 = "2502.20082, factors released with nnscaler"


def _llama_2(name: str, parameter: str, length: int, target_length: int, divisors: str) -> PublishedTable:
    note = (
        ""
        if parameter == LONG or length == _LLAMA_2.trained_length
        else ("for texts up to 8k; longrope has one short list, which ends at the trained window")
    )
    values = tuple(map(float, divisors.split()))
    return PublishedTable(
        name, "Llama 2 7B", _LLAMA_2, parameter, length, target_length, _LONGROPE, "MIT", values, note
    )


def _longrope_2() -> PublishedTable:
    """LongRoPE2's table for Llama 3 8B: `21.81^(i/33)` before pair 33, and then from 21.81 up to 26.05."""
    critical, low, high, pairs = 33, 21.81, 26.05, _LLAMA_3.dim // 2
    upper = [low + (high - low) * n / (pairs - 1 - critical) for n in range(pairs - critical)]
    return PublishedTable(
        "longrope2_llama3_8b_128k", "Llama 3 8B", _LLAMA_3, LONG, 131_072, 131_072, _LONGROPE_2, "MIT",
        (*(low ** (i / critical) for i in range(critical)), *upper),
        "from pair 33 on, only the ends are the published numbers; the values between them are on a line",
    )  # fmt: skip


_TABLES = (
    _llama_2(
        "ft_la2_128k",
        LONG,
        131_072,
        131_072,
        "1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1.01 1.06 1.2 1.4 1.69 1.94 2.14 2.5 2.84 3.06 3.55 3.78 "
        "3.95 5.18 5.26 6.38 6.66 7.42 8 11.75 17.29 18.37 25.72 28.49 29.16 32 32 32 32 32 32 32 32 32 "
        "32 32 32 32 32 32 32 32 32 32 32",
    ),
    _llama_2(
        "ft_la2_256k",
        LONG,
        262_144,
        262_144,
        "1.02 1.03 1.05 1.05 1.05 1.05 1.07 1.09 1.1 1.12 1.12 1.18 1.34 1.42 3.07 3.91 4.81 11.31 11.59 "
        "12.05 12.59 14.75 15.35 15.78 16.71 17.78 17.92 19.65 20.65 24.23 26.85 27.26 30.53 31.23 33.08 "
        "33.49 33.93 36.33 42.14 42.62 43.38 43.43 43.97 55.76 57.31 59.34 59.54 60.9 60.95 60.98 60.98 "
        "61.63 62.23 62.36 62.93 62.99 63.7 63.8 64 64.29 64.34 64.48 64.49 64.77",
    ),
    _llama_2(
        "2048k_la2_256k",
        LONG,
        2_097_152,
        2_097_152,
        "1.112 1.143 1.186 1.186 1.186 1.218 1.263 1.286 1.32 1.378 1.378 1.451 1.648 1.747 3.807 5.044 "
        "6.686 16.06 16.57 17.95 19.01 24.48 27.78 28.88 31.92 35.2 40.86 47.95 52.45 68.81 77.06 79.05 "
        "119.1 124 144.9 162.8 166.6 204.5 254.5 260.4 278.5 284.9 318.3 413.2 424.7 440.3 476.3 487.8 "
        "488.8 495.2 497 502.3 507.2 508.2 514.1 517.1 531.9 534 536.3 548.4 553.3 556.5 566.2 575.8",
    ),
    _llama_2(
        "4k_la2_128k",
        SHORT,
        4_096,
        131_072,
        "1.01 1.02 1.06 1.08 1.08 1.1 1.1 1.11 1.11 1.11 1.14 1.14 1.15 1.16 1.17 1.21 1.22 1.24 1.26 "
        "1.27 1.28 1.28 1.33 1.33 1.33 1.34 1.41 1.41 1.43 1.45 1.46 1.48 1.53 1.62 1.63 1.71 1.75 1.79 "
        "1.79 1.84 1.96 1.98 1.98 1.98 2 2 2 2 2.03 2.07 2.16 2.17 2.18 2.18 2.23 2.28 2.38 2.43 2.46 "
        "2.48 2.63 2.69 2.76 2.79",
    ),
    _llama_2(
        "8k_la2_128k",
        SHORT,
        8_192,
        131_072,
        "1.02 1.02 1.08 1.11 1.16 1.16 1.16 1.17 1.18 1.18 1.2 1.23 1.27 1.28 1.28 1.3 1.3 1.31 1.31 1.33 "
        "1.34 1.35 1.35 1.36 1.37 1.38 1.4 1.58 1.63 1.64 1.65 1.69 1.76 1.89 1.91 1.99 1.99 2 2.01 2.01 "
        "2.03 2.03 2.04 2.05 2.06 2.06 2.07 2.07 2.24 2.25 2.31 2.5 2.53 2.54 2.54 2.61 2.7 2.71 2.72 2.8 "
        "2.8 2.89 2.97 3",
    ),
    _llama_2(
        "4k_la2_256k",
        SHORT,
        4_096,
        262_144,
        "1.13 1.16 1.23 1.24 1.29 1.32 1.43 1.44 1.52 1.64 1.7 1.74 1.75 1.8 1.87 2.11 2.29 2.94 3.21 "
        "3.32 3.7 4.01 4.22 4.23 4.24 4.49 5.52 6.06 6.08 6.21 6.93 6.95 7.06 7.17 7.19 7.26 7.29 7.43 "
        "7.72 7.96 8.09 8.4 8.76 9.19 10.52 11.23 12.58 13.44 13.99 14.46 15.03 15.25 16.5 19.11 20.51 "
        "35.73 43.36 44.01 48.61 50.74 56.98 60.93 61.22 62.04",
    ),
    _llama_2(
        "8k_la2_256k",
        SHORT,
        8_192,
        262_144,
        "1.265 1.28 1.29 1.36 1.4 1.435 1.485 1.5 1.54 1.87 1.96 1.965 2.01 2.01 2.065 2.1 2.1 2.135 "
        "2.235 2.275 2.365 2.365 2.455 2.46 2.645 2.655 2.685 2.71 2.79 2.84 2.905 2.925 2.96 2.985 3.02 "
        "3.045 3.045 3.05 3.22 3.285 3.32 3.355 3.42 3.425 3.455 3.53 3.55 3.905 4.03 4.145 4.235 4.285 "
        "4.285 4.29 4.38 4.495 4.52 4.58 4.775 4.775 4.775 4.82 4.825 4.96",
    ),
    _longrope_2(),
)
PUBLISHED_TABLES = {table.name: table for table in _TABLES}
"""All tables by name."""


def published_divisors(name: str, parameter: str, shape: RopeShape, target_length: int) -> tuple[float, ...]:
    """The divisors of a published table, for a model and a window.

    Raises:
        RopeExtendError: no such table, or it belongs to another parameter, model or window.
    """
    table = PUBLISHED_TABLES.get(name)
    if table is None:
        raise RopeExtendError(
            f"longrope: {parameter} must be a list of numbers, or the name of a published table; got "
            f"{name!r}. Tables: {', '.join(PUBLISHED_TABLES)} (`rope-extend methods --tables`)"
        )
    wrong = ""
    if parameter != table.parameter:
        wrong = f"is a {table.parameter}, not a {parameter}"
    elif shape != table.shape:
        wrong = f"is for {table.model}, {table.shape}, and this model has {shape}"
    elif parameter == SHORT and table.length != shape.trained_length:
        wrong = f"is for texts up to {format_length(table.length)}, beyond the trained window"
    elif target_length != table.target_length:
        wrong = f"is for {format_length(table.target_length)} tokens, got {format_length(target_length)}"
    if wrong:
        raise RopeExtendError(f"longrope: the table {name} {wrong}; search one with `rope-extend search`")
    return table.divisors
