"""The fitness: losses against naive float64, and a needle whose answer is really scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, llama, tiny_llama
from hypothesis import given
from hypothesis import settings as settings_of_tests
from hypothesis import strategies as st
from tolerances import logit_tolerance
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.evaluation import loss_computer
from rope_extend.searching.evaluations import Evaluator, score
from rope_extend.searching.fitness import Fitness, Loss, NeedleWindow, needle_windows
from rope_extend.searching.search_log import SearchLog
from rope_extend.searching.space import Space, Table

TARGET = 2 * TRAINED


def documents(count: int, length: int = TARGET) -> list[rx.Document]:
    generator = torch.Generator().manual_seed(0)
    return [rx.Document(f"d{n}", torch.randint(1, 90, (length,), generator=generator)) for n in range(count)]


def settings(**values: Any) -> rx.SearchConfig:
    return rx.SearchConfig(
        **{"model": "m/m", "target_length": TARGET, "documents": 2, "holdout": 1, **values}
    )


def naive_losses(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """`-log p` of each token after the first, float64, from the logits of one forward."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].double()
    return -torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def test_the_score_is_the_weighted_mean_loss_under_the_candidate() -> None:
    """Two lengths from one forward, and a needle from another; held-out documents have their own."""
    model, texts = tiny_llama().eval(), documents(3)
    space = Space(rx.info(model).shape, TARGET, 1.25)
    needles = [NeedleWindow(document.input_ids.flip(0), 5) for document in texts]
    fitness = Fitness(texts, [40, TARGET], needles)
    config = settings(lengths=(40, TARGET), length_weights=(1, 2), needle_weight=0.25)
    evaluator = Evaluator(model, fitness, config, space, log=SearchLog(None, {}))
    table = space.table([1 + pair / 4 for pair in range(space.pairs)], 1.1)
    measured = evaluator.scores([table])[0]
    held_out = score(evaluator.held_out(table), evaluator.weights)
    with rx.patch_model(model, space.encoding(table), target_length=TARGET):
        for numbers, value in (([0, 1], measured), ([2], held_out)):
            rows = [naive_losses(model, texts[number].input_ids) for number in numbers]
            answers = [naive_losses(model, needles[number].input_ids)[-5:] for number in numbers]
            parts = [torch.cat([row[:39] for row in rows]), torch.cat(rows), torch.cat(answers)]
            means = [float(part.mean()) for part in parts]
            expected = 0.25 * means[0] + 0.5 * means[1] + 0.25 * means[2]
            assert value == pytest.approx(expected, abs=logit_tolerance(torch.cat(rows)))
    assert (evaluator.log.cost.passes, evaluator.log.cost.forward_tokens) == (6, 6 * TARGET)
    assert rx.current_patch(model) is None


def test_held_out_documents_are_measured_under_both_lists() -> None:
    """Queries within the trained window keep plain RoPE: as in the encoding that is written."""
    model, texts = llama(vocab_size=300), documents(2)
    space = Space(rx.info(model).shape, TARGET, 1.25, original_short=True)
    evaluator = Evaluator(
        model, Fitness(texts, [TARGET]), settings(documents=1), space, log=SearchLog(None, {})
    )
    table = space.table([2.0] * space.pairs)
    losses = evaluator.held_out(table)
    two_lists = rx.encoding("longrope", factor=2.0, long_factor=table.divisors, attention_scale=1.0)
    with rx.patch_model(model, two_lists, target_length=TARGET):
        expected = naive_losses(model, texts[1].input_ids)
    assert score(losses, evaluator.weights) == pytest.approx(
        float(expected.mean()), abs=logit_tolerance(expected)
    )
    with rx.patch_model(model, space.encoding(table), target_length=TARGET):
        one_list = naive_losses(model, texts[1].input_ids)
    assert abs(float(expected.mean() - one_list.mean())) > 10 * logit_tolerance(expected)


def test_a_candidate_is_measured_once_on_each_document() -> None:
    model, texts = tiny_llama().eval(), documents(2)
    space = Space(rx.info(model).shape, TARGET, 1.25)
    evaluator = Evaluator(model, Fitness(texts, [TARGET]), settings(), space, log=SearchLog(None, {}))
    table = space.table([1.0] * space.pairs)
    forwards: list[int] = []
    handle = model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    first = evaluator.scores([table], 1)
    assert len(forwards) == 1
    both = evaluator.scores([table, table])
    assert len(forwards) == 2
    assert evaluator.scores([table]) == both[:1]
    assert evaluator.scores([table], 1) == first
    assert (len(forwards), evaluator.passes) == (2, 2)
    handle.remove()


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    assert score([{"8": Loss(float("nan"), 4)}], {"8": 1.0}) == float("inf")
    assert score([{"8": Loss(float("inf"), 4)}], {"8": 1.0}) == float("inf")
    assert score([{"8": Loss(2.0, 4)}, {"8": Loss(6.0, 4)}], {"8": 1.0}) == 1.0


def test_a_needle_of_a_model_that_gives_nan_stays_in_the_log(tmp_path: Path) -> None:
    log = SearchLog(tmp_path / "log.jsonl", {})
    table = Table((1.0,))
    log.add(table, ["search 0"], [{"8": Loss(float("nan"), 4)}], log.cost)
    log.close()
    again = SearchLog(tmp_path / "log.jsonl", {})
    assert again.losses == log.losses == {(table, "search 0"): {"8": Loss(float("inf"), 4)}}


@pytest.fixture(scope="module")
def bundled() -> tuple[torch.nn.Module, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.mark.parametrize("name", [str(MODEL_DIR), "m/m"])
@given(depth=st.floats(0, 1), length=st.integers(250, 400), seed=st.integers(0, 99))
@settings_of_tests(max_examples=8)
def test_the_answer_stands_in_the_needle_and_at_the_end(
    name: str, depth: float, length: int, seed: int, bundled: tuple[torch.nn.Module, Any]
) -> None:
    """Nothing cuts the answer off, and the rest is the document."""
    tokenizer = bundled[1]
    words = "the harbour lay quiet. A lantern burned on the pier! " * 99
    text = rx.Document("a", torch.tensor(tokenizer(words)["input_ids"]))
    (window,) = needle_windows([text], tokenizer, length, (depth,), seed=seed, model=name)
    assert 0.75 * length <= len(window.input_ids) <= length
    answer, asked = (
        tokenizer.decode(part)
        for part in (window.input_ids[-window.answer :], window.input_ids[: -window.answer])
    )
    assert answer.strip().isdecimal()
    assert len(answer.strip()) == (5 if name == str(MODEL_DIR) else 7)
    assert asked.count(answer.strip()) == 1
    assert name == str(MODEL_DIR) or "The harbour".lower() in asked


def test_the_loss_of_the_answer_falls_when_the_needle_is_there(
    bundled: tuple[torch.nn.Module, Any],
) -> None:
    """The proof that the needle is scored: with other numbers in the needle, the same answer costs more."""
    model, tokenizer = bundled
    texts = documents(4)
    windows, others = (
        needle_windows(texts, tokenizer, 200, (0.0, 0.5), seed=seed, model=str(MODEL_DIR)) for seed in (0, 1)
    )
    changed = [
        NeedleWindow(
            torch.cat([other.input_ids[: -other.answer], window.input_ids[-window.answer :]]), window.answer
        )
        for window, other in zip(windows, others, strict=True)
    ]
    with_needle, without = (
        score(Fitness(texts, [], each).measure(model, range(4)), {"needle": 1.0})
        for each in (windows, changed)
    )
    assert with_needle < 0.5 * without
    naive = [naive_losses(model, window.input_ids)[-window.answer :] for window in windows]
    expected = float(torch.cat(naive).mean())
    assert with_needle == pytest.approx(expected, abs=1e-4 + logit_tolerance(torch.cat(naive)))


def test_the_answers_are_the_only_positions_of_the_head(
    bundled: tuple[torch.nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = bundled
    windows = needle_windows(
        [rx.Document("a", torch.arange(100, 300))], tokenizer, 200, (0.0,), seed=0, model=str(MODEL_DIR)
    )
    rows: list[int] = []
    original = loss_computer.token_losses

    def token_losses(states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(states.shape[:-1].numel())
        return original(states, *arguments, **options)

    monkeypatch.setattr(loss_computer, "token_losses", token_losses)
    Fitness([rx.Document("a", torch.arange(100, 300))], [], windows).measure(model, [0])
    assert sum(rows) == windows[0].answer
