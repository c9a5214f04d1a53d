"""Checks on a small published Llama with real books, if both are available.

The environment variable ROPE_EXTEND_TEST_FILES names a directory with the checkpoint, `models/stories260K`,
and texts, `data/books/validation`. The suite is complete without them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx

FILES = Path(os.environ.get("ROPE_EXTEND_TEST_FILES", "not-given"))
MODEL, BOOKS = FILES / "models" / "stories260K", FILES / "data" / "books" / "validation"
WINDOW, TARGET = 512, 4096

pytestmark = [
    pytest.mark.skipif(
        not (MODEL.exists() and BOOKS.exists()), reason=f"{MODEL.name} or the books are not available"
    ),
    pytest.mark.usefixtures("private_cache"),
]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.fixture
def documents() -> list[rx.Document]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return rx.load_documents(BOOKS, tokenizer, min_tokens=TARGET, max_tokens=TARGET, max_documents=4)


def test_its_window_and_base_are_recognised() -> None:
    found = rx.info(str(MODEL))
    assert (found.shape.trained_length, found.shape.theta, found.encoding) == (WINDOW, 10_000.0, "none")


def test_it_fails_at_eight_times_its_window_and_ntk_mends_it(
    model: torch.nn.Module, documents: list[rx.Document]
) -> None:
    """Books are far from the children's stories it was trained on, so only the shape of the curve counts."""

    def curve() -> dict[int, float]:
        return rx.perplexity(model, documents, [TARGET // 2, TARGET], progress=False).ppl

    plain = curve()
    extended = {}
    for method in ("linear", "ntk"):
        with rx.extend(model, TARGET, method):
            extended[method] = curve()
    assert plain[TARGET] > 1.2 * plain[TARGET // 2]
    assert extended["ntk"][TARGET] < 1.05 * extended["ntk"][TARGET // 2]
    assert extended["ntk"][TARGET] < plain[TARGET]
    assert extended["ntk"][TARGET] < extended["linear"][TARGET]  # linear needs training, as its paper says
    assert curve() == plain


def test_it_reloads_in_stock_transformers(model: torch.nn.Module, tmp_path: Path) -> None:
    input_ids = torch.randint(3, 500, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for method in ("linear", "ntk", "yarn", "llama3", "abf"):
            with rx.extend(model, TARGET, method):
                expected = model(input_ids).logits
                model.save_pretrained(tmp_path / method)
            stock = AutoModelForCausalLM.from_pretrained(tmp_path / method).eval()
            torch.testing.assert_close(stock(input_ids).logits, expected, rtol=0, atol=1e-3)


def test_methods_that_change_positions_are_ahead_without_training(
    model: torch.nn.Module, documents: list[rx.Document]
) -> None:
    """At eight times the window; the order on the page docs/training_free.md, where it is clear."""

    def ppl(method: str) -> float:
        with rx.extend(model, TARGET, method):
            return rx.perplexity(model, documents, [TARGET], progress=False).ppl[TARGET]

    found = {method: ppl(method) for method in ("rerope", "self_extend", "jet_long", "dynamic_ntk", "yarn")}
    assert max(found["rerope"], found["self_extend"]) < found["jet_long"]
    assert found["jet_long"] < found["dynamic_ntk"] / 1.2
    assert found["dynamic_ntk"] < found["yarn"]
