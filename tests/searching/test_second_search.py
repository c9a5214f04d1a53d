"""LongRoPE's second search, on a model that was extended before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.searching.run_search import plan_search

NOW, TARGET = 2 * TRAINED, 4 * TRAINED
SMALL = {"population": 6, "mutants": 2, "crossovers": 2, "parents": 4, "iterations": 2}

pytestmark = pytest.mark.usefixtures("private_cache")


@pytest.fixture(scope="module")
def extended(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with YaRN in its config, for twice the window of pretraining."""
    directory = tmp_path_factory.mktemp("extended") / "model"
    model = AutoModelForCausalLM.from_pretrained(work / "model")
    with rx.extend(model, NOW, "yarn"):
        model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(work / "model").save_pretrained(directory)
    return directory


def settings(model: Path, work: Path, output: Path | None, **values: Any) -> rx.SearchConfig:
    return rx.SearchConfig(
        **{
            "model": str(model), "data": str(work / "data"), "target_length": TARGET, "documents": 1,
            "holdout": 2, "output": None if output is None else str(output), "start": "current", **SMALL,
            **values,
        }
    )  # fmt: skip


def present(shape: rx.RopeShape) -> tuple[list[float], float]:
    yarn = rx.encoding("yarn", factor=NOW / TRAINED)
    assert isinstance(yarn, rx.encodings.RopeEncoding)
    return yarn.inv_freq(shape).tolist(), yarn.attention_factor(shape)


@pytest.mark.parametrize("strategy", ["longrope", pytest.param("race", marks=pytest.mark.slow)])
def test_the_second_search_multiplies_the_table_that_the_model_has(
    strategy: str, extended: Path, work: Path, tmp_path: Path
) -> None:
    """What is written is one table: the present one divided by the divisors that were found."""
    output = tmp_path / "out"
    result = rx.search(settings(extended, work, output, strategy=strategy), progress=False)
    table, factor = present(result.shape)
    assert result.shape.trained_length == TRAINED
    encoding = result.encoding
    expected = [f / d for f, d in zip(table, result.table.divisors, strict=True)]
    assert encoding.inv_freq(result.shape).tolist() == pytest.approx(expected, rel=1e-13)
    assert encoding.attention_scale == pytest.approx(factor * result.table.attention_factor, rel=1e-13)
    assert encoding.factor == TARGET / TRAINED
    assert not encoding.depends_on_length
    assert {"linear", "ntk"} & {row.label for row in result.rows}
    assert "Divisors of the table that the model had" in (output / "README.md").read_text()
    # The winner's loss, by rope_extend.perplexity with the directory as a method.
    model = AutoModelForCausalLM.from_pretrained(extended).eval()
    documents = rx.load_documents(
        str(work / "data"), AutoTokenizer.from_pretrained(extended), min_tokens=TARGET, max_tokens=TARGET
    )
    with rx.extend(model, TARGET, str(output)) as patch:
        assert patch.encoding == encoding
        measured = rx.perplexity(model, documents[1:3], TARGET, progress=False)
    assert float(torch.tensor(measured.ppl[TARGET]).log()) == pytest.approx(result.winner.score, abs=1e-5)
    assert rx.search(
        settings(extended, work, output, strategy=strategy), resume=True, progress=False
    ).encoding == encoding  # fmt: skip


@pytest.mark.slow
def test_a_saved_table_is_no_method_on_top(extended: Path, work: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    rx.search(settings(extended, work, output, iterations=0), progress=False)
    model = AutoModelForCausalLM.from_pretrained(extended)
    with pytest.raises(RopeExtendError, match="a saved encoding already is the whole table"):
        rx.extend(model, TARGET, str(output), start="current")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_length": NOW}, "target_length must exceed the trained window of 64 tokens, got 64"),
        ({"short": "original"}, "leave one of the two out"),
        ({"strategy": "longrope", "start_tokens": True}, "leave one of the two out"),
    ],
)
def test_mistakes_get_one_clear_error(
    extended: Path, work: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopeExtendError, match=message):
        rx.search(settings(extended, work, None, **{"strategy": "longrope", **values}), progress=False)


def test_a_table_with_frequencies_of_zero_has_no_divisors(tmp_path: Path) -> None:
    """Said before the weights are loaded: the checkpoint has none."""
    model = tiny_llama()
    rx.extend(model, NOW, "clipped")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(RopeExtendError, match="some channel pairs of this model do not rotate"):
        plan_search(settings(tmp_path, tmp_path, None, strategy="longrope"))
