"""Searches on a model that was extended before: LongRoPE's second search, and the one for short texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, tiny_llama
from tolerances import assert_same_but_rounding
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.encodings import LongRoPE
from rope_extend.models.current_table import current_table
from rope_extend.searching.closed_forms import published, seeds
from rope_extend.searching.evaluations import Evaluator, score
from rope_extend.searching.fitness import Fitness
from rope_extend.searching.run_search import plan_search
from rope_extend.searching.search_log import SearchLog
from rope_extend.searching.space import Space

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


def plain(shape: rx.RopeShape) -> list[float]:
    return [shape.theta ** (-2 * i / shape.dim) for i in range(shape.dim // 2)]


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


@pytest.mark.parametrize("strategy", ["longrope", pytest.param("race", marks=pytest.mark.slow)])
def test_the_search_for_short_texts_ends_in_two_lists(
    strategy: str, extended: Path, work: Path, tmp_path: Path
) -> None:
    """The long list is the model's own, the short one is found; stock transformers loads both."""
    output = tmp_path / "out"
    result = rx.search(
        settings(extended, work, output, strategy=strategy, search_for="short", target_length=TRAINED),
        progress=False,
    )
    table, factor = present(result.shape)
    encoding = result.encoding
    assert isinstance(encoding, LongRoPE)
    assert encoding.inv_freq(result.shape, NOW).tolist() == pytest.approx(table, rel=1e-13)
    assert encoding.attention_scale == pytest.approx(factor, rel=1e-13)
    assert encoding.factor == NOW / TRAINED
    assert (encoding.short_factor or (1.0,) * 8) == result.table.divisors
    # Plain RoPE and the present table are always among what the held-out documents compare.
    assert (1.0,) * 8 in {row.table.divisors for row in result.rows}
    now = next(row for row in result.rows if row.label == "as it is")
    exact = [f / p for f, p in zip(plain(result.shape), table, strict=True)]
    assert now.table.divisors == pytest.approx(exact, rel=1e-13)
    written = json.loads((output / "encoding.json").read_text())
    assert written["target_length"] == NOW
    # No divisor exceeds the largest one of the present table.
    assert max(result.table.divisors) <= NOW / TRAINED
    # It was measured on texts of the trained window, where the short list is used.
    model = AutoModelForCausalLM.from_pretrained(extended).eval()
    documents = rx.load_documents(
        str(work / "data"), AutoTokenizer.from_pretrained(extended), min_tokens=TRAINED, max_tokens=TRAINED
    )
    with rx.patch_model(model, encoding, target_length=NOW):
        measured = rx.perplexity(model, documents[1:3], TRAINED, progress=False)
    assert float(torch.tensor(measured.ppl[TRAINED]).log()) == pytest.approx(result.winner.score, abs=1e-5)
    ids = torch.arange(3, 3 + TRAINED)[None]
    with rx.patch_model(model, encoding, target_length=NOW), torch.no_grad():
        expected = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        assert_same_but_rounding(stock(ids).logits, expected)


def test_as_it_is_means_exactly_the_list_that_the_model_has() -> None:
    """With two lists that no candidate has: divisors below 1, falling ones, and digits beyond hundredths."""
    model = tiny_llama().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # so that the model looks at positions
                weight.normal_(
                    0, (2 if "q_proj" in name or "k_proj" in name else 1) / weight.shape[-1] ** 0.5
                )
    lists = {
        "long_factor": [0.9, 1, 1.2, 1.5, 2, 2, 2, 2],
        "short_factor": [0.93, 0.9, 1, 1.1234, 1.2, 1.2, 1.3, 2.5],
    }
    rx.extend(model, NOW, "longrope", attention_scale=1.12345, **lists)
    current = current_table(model)
    space = Space(current.pretrained, NOW, 1.0, long=current)
    config = rx.SearchConfig("m/m", TRAINED, documents=1, holdout=1, strategy="longrope")
    rows = published(config, space)
    written = space.result(rows["as it is"])
    assert written.short_factor == tuple(lists["short_factor"])
    assert written.long_factor == pytest.approx(tuple(lists["long_factor"]), rel=1e-14)
    assert written.attention_scale == 1.12345
    assert rows["table of long texts"].divisors == pytest.approx(tuple(lists["long_factor"]))
    assert set(rows["none"].divisors) == {1.0}
    for table in seeds(space, 1.12345):
        space.check(table)
    ids = torch.arange(3, 3 + TRAINED)
    fitness = Fitness([rx.Document("a", ids)] * 2, [TRAINED])
    evaluator = Evaluator(model, fitness, config, space, log=SearchLog(None, {}))
    measured = score(evaluator.held_out(rows["as it is"]), evaluator.weights)
    with torch.no_grad():
        expected = float(model(ids[None], labels=ids[None]).loss)
    assert measured == pytest.approx(expected, abs=1e-5)
    one_table = score(evaluator.held_out(rows["table of long texts"]), evaluator.weights)
    assert abs(one_table - expected) > 1e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_length": NOW}, "target_length must exceed the trained window of 64 tokens, got 64"),
        ({"short": "original"}, "leave one of the two out"),
        ({"strategy": "longrope", "start_tokens": True}, "leave one of the two out"),
        ({"search_for": "short"}, "target_length must be at most the 32 tokens of pretraining"),
        ({"search_for": "short", "target_length": 32, "start": "pretrained"}, "set start to current"),
    ],
)
def test_mistakes_get_one_clear_error(
    extended: Path, work: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopeExtendError, match=message):
        rx.search(settings(extended, work, None, **{"strategy": "longrope", **values}), progress=False)


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("none", {}, "the model has plain RoPE"),
        ("clipped", {}, "some channel pairs of this model do not rotate"),
        (
            "longrope",
            {"long_factor": [1, 1.5, 1.2, *[2] * 5], "short_factor": [1, 1.5, 1.2, *[2] * 5]},
            "never fall from one channel pair to the next.* 1, 1.5, 1.2, 2, 2, 2, 2, 2;",
        ),
    ],
)
def test_a_search_for_short_texts_needs_divisors_that_never_fall(
    method: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Said before the weights are loaded: the checkpoint has none."""
    model = tiny_llama()
    if method != "none":
        rx.extend(model, NOW, method, **values)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(RopeExtendError, match=message):
        plan_search(
            settings(tmp_path, tmp_path, None, strategy="longrope", search_for="short", target_length=TRAINED)
        )
