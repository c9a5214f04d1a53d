"""The page of each method: its formula gives the numbers of the code, and the rest is what the code says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import method_pictures
import pytest
import torch
import write_methods
from method_pictures import MODEL, ROTARY, TARGET
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rope_extend.attention.kernel import linear_attention
from rope_extend.encodings import (
    AbsoluteEncoding,
    BiasEncoding,
    Learned,
    LinearAttention,
    RemapEncoding,
    RopeEncoding,
    Shaw,
    encoding,
    encoding_names,
)
from rope_extend.method_names import method_names

PAGES = Path(__file__).parents[2] / "docs" / "methods"
LENGTHS = (1, ROTARY.trained_length, ROTARY.trained_length + 1, 3 * ROTARY.trained_length, TARGET)
POSITIONS = (0, 1, 15, 16, 511, 512, 513, 1023, 1024, 2047, 2048, 4096, 5119, TARGET - 1)
FLOAT64 = 1e-9
"""Relative: a few operations in float64, whose angles are at most 16,384 radians."""
FLOAT32 = 2e-5
"""Relative: biases and vectors are float32, and the longest sums have 64 terms."""


def functions(name: str) -> dict[str, Any]:
    """The names that the Python of a page defines, with the symbols of docs/methods.md."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    target = method_pictures.target_of(name)
    names: dict[str, Any] = {
        "math": math, "d": ROTARY.dim, "b": ROTARY.theta, "L": ROTARY.trained_length, "N": target,
        "s": target / ROTARY.trained_length, "H": MODEL.heads, "D": MODEL.hidden_size,
    }  # fmt: skip
    exec(code, names)
    return names


def values(function: Callable[..., Any] | None, *arguments: Any) -> float:
    """What a function of a page gives; 1 for a factor that the page does not mention."""
    return 1.0 if function is None else function(*arguments)


def of_length(function: Callable[..., Any] | None, *arguments: Any) -> float:
    """As `values`, for a function that may take the length as its last argument."""
    if function is not None and function.__code__.co_argcount < len(arguments):
        arguments = arguments[:-1]
    return values(function, *arguments)


def test_every_method_has_a_page() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == list(method_names())
    assert sorted(picture.stem for picture in (PAGES / "pictures").iterdir()) == list(method_names())


@pytest.mark.parametrize("name", encoding_names())
def test_the_page_is_what_the_code_says(name: str, tmp_path: Path) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    hand = write_methods.by_hand(text)
    assert text == write_methods.page(name, hand), "run python tools/write_methods.py"
    method_pictures.draw_method(name, tmp_path / "drawn.svg")
    drawn, kept = (drawing(path) for path in (tmp_path / "drawn.svg", PAGES / "pictures" / f"{name}.svg"))
    assert drawn[0] == kept[0], "run python tools/write_methods.py"
    assert drawn[1] == pytest.approx(kept[1], abs=0.01)  # points of 1/72 inch


def drawing(file: Path) -> tuple[list[str], list[float]]:
    """The words and the numbers of a picture; names of its parts are left out."""
    parts = re.split(
        r"(-?\d+\.?\d*)", re.sub(r'id="\w+"|url\(#\w+\)|href="#\w+"', "", file.read_text(encoding="utf-8"))
    )
    return parts[::2], [float(number) for number in parts[1::2]]


@pytest.mark.parametrize("name", encoding_names(RopeEncoding))
def test_the_formula_of_a_rotary_method_is_that_of_the_code(name: str) -> None:
    """Every effect of the encoding is on the page: a factor that the page does not mention is 1."""
    found, encoding = functions(name), method_pictures.example(name)
    assert isinstance(encoding, RopeEncoding)
    positions = torch.tensor(POSITIONS)
    if "frequency" in found or not encoding.remaps:
        for length in LENGTHS:
            expected = [of_length(found["frequency"], i, length) for i in range(ROTARY.dim // 2)]
            assert encoding.inv_freq(ROTARY, length).tolist() == pytest.approx(expected, rel=FLOAT64)
            factor = of_length(found.get("attention_factor"), length)
            assert encoding.attention_factor(ROTARY, length) == pytest.approx(factor, rel=FLOAT64)
    scale = encoding.logit_scale(ROTARY, positions)
    ours = [1.0] * len(POSITIONS) if scale is None else scale.tolist()
    assert ours == pytest.approx([values(found.get("logit_scale"), p) for p in POSITIONS], rel=FLOAT64)
    decay = encoding.decay(ROTARY)
    for i in (0, 7, 31):
        for r in (0, 1, 512, 5000):
            ours = 1.0 if decay is None else math.exp(r * float(decay[i]))
            assert ours == pytest.approx(values(found.get("decay"), i, r), rel=FLOAT64)


@pytest.mark.parametrize(
    "name", [name for name in encoding_names(RopeEncoding) if method_pictures.example(name).remaps]
)
def test_the_distances_of_a_method_are_those_of_the_code(name: str) -> None:
    found, encoding = functions(name), method_pictures.example(name)
    assert isinstance(encoding, RemapEncoding)
    queries = [p for p in POSITIONS if p < method_pictures.target_of(name)]
    for i in queries:
        keys = [j for j in (*queries, i - 1, i - 127) if 0 <= j <= i]
        expected = [found["distance"](i, j) for j in keys]
        ours = encoding.distance(ROTARY, torch.tensor(i), torch.tensor(keys)).tolist()
        assert [None if math.isnan(each) else each for each in ours] == pytest.approx(expected, abs=1e-9)
    positions = torch.tensor(POSITIONS)
    factor = encoding.factor_of_queries(ROTARY, positions)
    ours = [1.0] * len(POSITIONS) if factor is None else factor.tolist()
    assert ours == pytest.approx([values(found.get("factor_of_queries"), p) for p in POSITIONS], rel=FLOAT64)
    far = encoding.regions(ROTARY, TARGET)[1].schedule
    assert (far is None) == ("far_frequency" not in found)
    if far is not None:
        expected = [found["far_frequency"](i) for i in range(ROTARY.dim // 2)]
        assert far.inv_freq(ROTARY, TARGET).tolist() == pytest.approx(expected, rel=FLOAT64)


@pytest.mark.parametrize("name", encoding_names(BiasEncoding))
def test_the_formula_of_a_bias_is_that_of_the_code(name: str) -> None:
    found, encoding = functions(name), method_pictures.example(name)
    distances = torch.tensor([0, 1, 15, 16, 17, 100, 127, 128, 129, 2000, TARGET - 1])
    if isinstance(encoding, Shaw):
        rows = {"key_vectors": torch.arange(encoding.reach + 1.0)[:, None]}
        index = encoding.bias_of(torch.ones(1, 1, 1, 1), distances[None, None], rows).flatten()
        assert index.tolist() == [found["vector_index"](r) for r in distances.tolist()]
        return
    assert isinstance(encoding, BiasEncoding)
    for query, heads in ((TARGET - 1, 8), (3000, 8), (1000, 8), (1000, 1), (3000, 12)):
        model, seen = replace(MODEL, heads=heads), distances[distances <= query]
        initial = encoding.initial(model)
        found |= {"H": heads, "learned": {key: value.tolist() for key, value in initial.items()}}
        bias = encoding.bias(model, seen, torch.full_like(seen, query), initial)
        for head in range(1, heads + 1):
            expected = [found["bias"](r, query, head) for r in seen.tolist()]
            assert bias[head - 1].tolist() == pytest.approx(expected, rel=FLOAT32, abs=1e-5)


def test_the_page_of_clipped_knows_a_single_pair() -> None:
    slowest = ROTARY.inv_freq()[-2:]
    length = int(2 * math.pi / float(slowest.prod().sqrt()))  # between the turns of the last two pairs
    found = functions("clipped")
    found["L"] = length
    table = [found["frequency"](i) for i in range(ROTARY.dim // 2)]
    assert table[-2:] == [pytest.approx(float(slowest[0]), rel=FLOAT64), 0]
    clipped = encoding("clipped").for_target(replace(ROTARY, trained_length=length), 2 * length)
    assert isinstance(clipped, RopeEncoding)
    ours = clipped.inv_freq(replace(ROTARY, trained_length=length), length).tolist()
    assert ours == pytest.approx(table, rel=FLOAT64)


@pytest.mark.parametrize("name", encoding_names(AbsoluteEncoding))
def test_the_formula_of_a_vector_is_that_of_the_code(name: str) -> None:
    found, encoding = functions(name), method_pictures.example(name)
    positions = torch.tensor(POSITIONS)
    if isinstance(encoding, Learned):
        for beyond, rows in method_pictures.learned_rows(positions).items():
            expected = [found["row"](p, beyond) for p in POSITIONS]
            assert rows.tolist() == pytest.approx(expected, rel=FLOAT32)
        return
    assert isinstance(encoding, AbsoluteEncoding)
    ours = encoding.vectors(MODEL, positions, {}).tolist()
    expected = [[found["vector"](p, c) for c in range(MODEL.hidden_size)] for p in POSITIONS]
    for row, each in zip(ours, expected, strict=True):
        assert row == pytest.approx(each, abs=FLOAT32)


@pytest.mark.parametrize("name", encoding_names(LinearAttention))
def test_the_features_are_those_of_the_code(name: str) -> None:
    found, encoding = functions(name), method_pictures.example(name)
    assert isinstance(encoding, LinearAttention)
    x = [-3.0, -1.0, 0.0, 0.5, 2.0]
    assert encoding.features(torch.tensor(x)).tolist() == pytest.approx(
        [found["feature"](each) for each in x], rel=FLOAT32
    )
    table = encoding.inner.inv_freq(ROTARY)
    assert table.tolist() == pytest.approx(
        [found["frequency"](i) for i in range(ROTARY.dim // 2)], rel=FLOAT64
    )
    tokens = 6
    q, k, v = torch.randn(3, tokens, ROTARY.dim, generator=torch.Generator().manual_seed(0)).double()
    features = [encoding.features(states).double()[None, None] for states in (q, k)]
    angles = torch.outer(torch.arange(tokens), table).repeat(1, 2)[None]
    turned = apply_rotary_pos_emb(*features, angles.cos(), angles.sin())
    ours, _ = linear_attention(*(each.float() for each in (*features, *turned, v[None, None])), None)
    expected = [found["output"](m, q.tolist(), k.tolist(), v.tolist()) for m in range(tokens)]
    torch.testing.assert_close(ours[0, 0], torch.tensor(expected), rtol=0, atol=FLOAT32)
