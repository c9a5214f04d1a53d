"""What a method computes for a typical small model, as the rows of a table for its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from method_pictures import MODEL, ROTARY, TARGET, example, learned_rows, shown_kind, target_of

from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    Encoding,
    Learned,
    LinearAttention,
    RemapEncoding,
    RopeEncoding,
    Shaw,
)
from rope_extend.units import format_length

Rows = list[list[str]]
"""The lines of a table, its heading first."""
PAIRS = (0, 8, 16, 24, 31)
LENGTHS = (ROTARY.trained_length, 2 * ROTARY.trained_length, TARGET)
DISTANCES = (1, 16, 128, 1024, 2047, 4096, TARGET - 1)
HEADS = (1, 4, 8)


def numbers(name: str) -> Rows:
    """The worked numbers of a method.

    Raises:
        RopeExtendError: an unknown name.
    """
    encoding = example(name)
    compute: dict[type[Encoding], Callable[..., Rows]] = {
        RemapEncoding: _given, Shaw: _ranges, BiasEncoding: _biases, Learned: _rows,
        AbsoluteEncoding: _vectors, LinearAttention: _features, RopeEncoding: _schedule,
    }  # fmt: skip
    return compute[shown_kind(encoding)](encoding)


def factors(name: str) -> list[str]:
    """Sentences on the factors of a rotary method, in addition to its frequencies."""
    encoding = example(name)
    if not isinstance(encoding, RopeEncoding):
        return []
    said = []
    of_lengths = {length: encoding.attention_factor(ROTARY, length) for length in LENGTHS}
    if set(of_lengths.values()) != {1.0}:
        same = len(set(of_lengths.values())) == 1
        given = "" if same else " for " + ", ".join(map(format_length, of_lengths)) + " tokens"
        values = ", ".join(f"{value:.4f}" for value in dict.fromkeys(of_lengths.values()))
        said.append(f"Cos and sin are multiplied by {values}{given}.")
    positions = torch.tensor([length - 1 for length in LENGTHS])
    for scale in (encoding.logit_scale(ROTARY, positions), _factor_of_queries(encoding, positions)):
        if scale is not None:
            at = ", ".join(dict.fromkeys(f"{value:.4f}" for value in scale.tolist()))
            where = ", ".join(f"{position:,}" for position in positions.tolist())
            said.append(f"Logits of the queries at {where} are multiplied by {at}.")
    return said


def _factor_of_queries(encoding: RopeEncoding, positions: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(encoding, RemapEncoding):
        return None
    return encoding.factor_of_queries(ROTARY, positions)


def _schedule(encoding: RopeEncoding) -> Rows:
    """Tokens per turn of some pairs; and the factor between some distances under a decay."""
    plain = ROTARY.inv_freq()
    lengths = LENGTHS if encoding.depends_on_length else (TARGET,)
    names = [f"at {format_length(length)}" for length in lengths] if len(lengths) > 1 else [encoding.name]
    rows = [["pair", "plain RoPE, tokens per turn", *names, "plain frequency ÷ this one"]]
    decay = encoding.decay(ROTARY)
    rows[0] += ["factor at distance 512"] if decay is not None else []
    for pair in PAIRS:
        found = [float(encoding.inv_freq(ROTARY, length)[pair]) for length in lengths]
        cells = [_turn(float(plain[pair])), *map(_turn, found), _ratio(float(plain[pair]), found[-1])]
        rows.append(
            [str(pair), *cells, *([f"{math.exp(512 * decay[pair]):.4f}"] if decay is not None else [])]
        )
    return rows


def _turn(frequency: float) -> str:
    return f"{2 * math.pi / frequency:,.2f}" if frequency else "does not rotate"


def _ratio(plain: float, frequency: float) -> str:
    return f"{plain / frequency:.4f}" if frequency else "–"


def _given(encoding: RemapEncoding) -> Rows:
    """The distance given to some true ones, for the last token of a text; and the far table of `near_far`."""
    last = target_of(encoding.name) - 1
    far = encoding.regions(ROTARY, last + 1)[1].schedule
    if far is not None:
        plain, table = ROTARY.inv_freq(), far.inv_freq(ROTARY, last + 1)
        rows = [["pair", "near, tokens per turn", "far, tokens per turn", "plain frequency ÷ far one"]]
        return rows + [
            [str(pair), _turn(near), _turn(found), _ratio(near, found)]
            for pair in PAIRS
            for near, found in [(float(plain[pair]), float(table[pair]))]
        ]
    distances = [distance for distance in DISTANCES if distance < last] + [last]
    given = encoding.distance(ROTARY, torch.tensor(last), last - torch.tensor(distances)).tolist()
    cells = ["not seen" if math.isnan(found) else f"{found:,.2f}" for found in given]
    return _by("true distance, tokens", distances, {"distance given, tokens": cells})


def _by(name: str, values: Sequence[int], columns: dict[str, list[str]]) -> Rows:
    """A row for each of some values: the value, and its cell of each column."""
    cells = zip(*columns.values(), strict=True)
    return [[name, *columns], *([f"{value:,}", *row] for value, row in zip(values, cells, strict=True))]


def _biases(encoding: BiasEncoding) -> Rows:
    """The bias of the last query at some distances, with the initial parameters."""
    distances = torch.tensor(DISTANCES)
    bias = encoding.bias(MODEL, distances, torch.full_like(distances, TARGET - 1), encoding.initial(MODEL))
    columns = {f"head {head}": [f"{value:,.4f}" for value in bias[head - 1].tolist()] for head in HEADS}
    return _by("distance, tokens", DISTANCES, columns)


def _ranges(encoding: Shaw) -> Rows:
    rows = torch.tensor(DISTANCES).clamp(max=encoding.reach).tolist()
    return _by("distance, tokens", DISTANCES, {"row of the table": [*map(str, rows)]})


def _vectors(encoding: AbsoluteEncoding) -> Rows:
    positions, channels = (0, 1, 100, TARGET - 1), (0, 1, 32, 33)
    found = encoding.vectors(MODEL, torch.tensor(positions), {})
    columns = {f"channel {c}": [f"{value + 0.0:.4f}" for value in found[:, c].tolist()] for c in channels}
    return _by("position", positions, columns)


def _rows(encoding: Learned) -> Rows:
    """The row of the table that some positions get."""
    positions = (0, 1000, ROTARY.trained_length - 1, ROTARY.trained_length, TARGET - 1)
    found = learned_rows(torch.tensor(positions))
    columns = {f"{rule}: row": [f"{row:,.2f}" for row in rows.tolist()] for rule, rows in found.items()}
    return _by("position", positions, columns)


def _features(encoding: LinearAttention) -> Rows:
    values = (-2.0, -0.5, 0.0, 0.5, 2.0)
    found = encoding.features(torch.tensor(values)).tolist()
    return [["x", "φ(x)"]] + [[f"{x:g}", f"{y:.4f}"] for x, y in zip(values, found, strict=True)]
