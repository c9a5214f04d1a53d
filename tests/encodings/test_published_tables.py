"""Published tables by name: their numbers, and the model and window that they belong to."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import tiny_llama

import rope_extend as rx
from rope_extend.encodings import LongRoPE
from rope_extend.encodings.core.published_tables import PUBLISHED_TABLES, PublishedTable

LLAMA_2 = rx.RopeShape(128, 1e4, 4096)
LLAMA_3 = rx.RopeShape(128, 5e5, 8192)


@pytest.mark.parametrize("table", PUBLISHED_TABLES.values(), ids=lambda table: table.name)
def test_tables_fit_their_model(table: PublishedTable) -> None:
    assert len(table.divisors) == table.shape.dim // 2
    assert all(low <= high for low, high in itertools.pairwise(table.divisors))
    assert table.divisors[0] >= 1
    assert table.divisors[-1] <= 1.75 * table.target_length / table.shape.trained_length


def test_the_numbers_are_those_of_the_papers() -> None:
    """From the analysis of the released file: where it leaves 1, where it reaches s, and its last value."""
    first = PUBLISHED_TABLES["ft_la2_128k"].divisors
    assert set(first[:19]) == {1.0}
    assert (first[19], first[43], first[44]) == (1.01, 29.16, 32)
    second, last = (PUBLISHED_TABLES[name].divisors for name in ("ft_la2_256k", "2048k_la2_256k"))
    assert (second[13], second[14], second[17], last[-1]) == (1.42, 3.07, 11.31, 575.8)
    assert last[-1] / second[-1] == pytest.approx(8.89, abs=0.005)
    rule = PUBLISHED_TABLES["longrope2_llama3_8b_128k"].divisors
    assert rule[11] == pytest.approx(21.81 ** (1 / 3))
    assert (rule[33], rule[-1]) == (21.81, pytest.approx(26.05))


def test_extend_takes_names() -> None:
    encoding = LongRoPE.for_target(LLAMA_2, 131_072, long_factor="ft_la2_128k", short_factor="4k_la2_128k")
    assert encoding.factor == 32
    assert encoding.long_factor == PUBLISHED_TABLES["ft_la2_128k"].divisors
    assert encoding.short_factor == PUBLISHED_TABLES["4k_la2_128k"].divisors
    divisors = LLAMA_2.inv_freq() / encoding.inv_freq(LLAMA_2, 131_072)
    torch.testing.assert_close(divisors.tolist(), list(encoding.long_factor))
    assert LongRoPE.from_dict(encoding.to_dict()) == encoding  # a record has the numbers, not the name


@pytest.mark.parametrize(
    ("shape", "target", "parameters", "message"),
    [
        (LLAMA_3, 131_072, {"long_factor": "ft_la2_128k"}, "is for Llama 2 7B"),
        (LLAMA_2, 65_536, {"long_factor": "ft_la2_128k"}, "is for 128k tokens, got 64k"),
        (LLAMA_2, 131_072, {"long_factor": "4k_la2_128k"}, "is a short_factor, not a long_factor"),
        (
            LLAMA_2,
            262_144,
            {"long_factor": "ft_la2_256k", "short_factor": "8k_la2_256k"},
            "is for texts up to 8k, beyond the trained window",
        ),
        (
            LLAMA_2,
            131_072,
            {"long_factor": "la2"},
            "the name of a published table; got 'la2'. Tables: ft_la2",
        ),
    ],
)
def test_tables_of_other_models_are_refused(
    shape: rx.RopeShape, target: int, parameters: dict[str, str], message: str
) -> None:
    with pytest.raises(rx.RopeExtendError, match=message):
        LongRoPE.for_target(shape, target, **parameters)


def test_a_name_without_a_model_is_refused() -> None:
    with pytest.raises(rx.RopeExtendError, match="no model is given to check it against"):
        rx.encoding("longrope", factor=32.0, long_factor="ft_la2_128k")
    with pytest.raises(rx.RopeExtendError, match="is for Llama 2 7B"):
        rx.extend(tiny_llama(), 64, "longrope", long_factor="ft_la2_128k")
