"""Sources are mixed by weight, in an order that follows from position and seed alone."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shorter_blocks import parts
from tokenizers import decoders, processors
from transformers import PreTrainedTokenizerFast

from rope_extend import RopeExtendError
from rope_extend.data.blocks import Blocks, cut_blocks
from rope_extend.data.documents import Document
from rope_extend.data.mixing import Mixture


def source(number: int, count: int, length: int = 8) -> Blocks:
    """A source of `count` blocks whose tokens say where they are from: 1,000,000 times the source."""
    tokens = torch.arange(count * length) + 1_000_000 * number
    return cut_blocks([Document(str(number), tokens)], length)


def firsts(mixture: Mixture, positions: range) -> list[int]:
    return [int(mixture[position]["input_ids"][0]) for position in positions]


def test_one_source_comes_in_the_order_that_it_always_had() -> None:
    """Runs from before there were mixtures keep their order."""
    made = Mixture([source(0, 50)], seed=3)
    for epoch in range(3):
        expected = np.random.default_rng([3, epoch]).permutation(50)
        assert firsts(made, range(50 * epoch, 50 * epoch + 50)) == [8 * int(index) for index in expected]
    assert made.epochs(125) == [2.5]


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5), st.integers(0, 2**31), st.integers(0, 20_000))
def test_locations_and_counts_agree_with_a_count_from_the_start(
    weights: list[float], seed: int, position: int
) -> None:
    made = Mixture([source(i, 3) for i in range(len(weights))], weights, seed=seed)
    chosen = [made.locate(p)[0] for p in range(max(0, position - 20), position)]
    before = made.counts(max(0, position - 20))
    assert before.sum() == max(0, position - 20)
    for offset, number in enumerate(chosen):
        assert made.locate(max(0, position - 20) + offset) == (number, before[number])
        before[number] += 1
    assert made.counts(position).tolist() == before.tolist()


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 2), (0.98, 0.02)])
def test_shares_are_within_the_expected_error(weights: tuple[float, ...]) -> None:
    n = 40_000
    made = Mixture([source(i, 5) for i in range(len(weights))], weights, seed=1)
    for count, weight in zip(made.counts(n), weights, strict=True):
        share = weight / sum(weights)
        assert abs(count / n - share) < 4 * math.sqrt(share * (1 - share) / n)


def test_each_source_is_read_whole_before_it_repeats_in_another_order() -> None:
    sizes = (7, 7, 40)
    made = Mixture([source(i, size) for i, size in enumerate(sizes)], (1, 1, 1), seed=5)
    read: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for first in firsts(made, range(400)):
        read[first // 1_000_000].append(first % 1_000_000 // 8)
    for number, size in enumerate(sizes):
        epochs = [read[number][i : i + size] for i in range(0, len(read[number]) - size, size)]
        assert len(epochs) >= 2
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]
    assert read[0][:7] != read[1][:7]  # sources of one size have orders of their own
    assert made.epochs(400) == [len(read[i]) / size for i, size in enumerate(sizes)]


def test_the_order_does_not_depend_on_who_asks_first() -> None:
    sources = [source(0, 11), source(1, 4)]
    whole = firsts(Mixture(sources, (0.6, 0.4), seed=2), range(9000))
    late = Mixture(sources, (0.6, 0.4), seed=2)
    assert firsts(late, range(8990, 9000)) == whole[8990:]  # as in a resumed run
    assert firsts(Mixture(sources, (0.6, 0.4), seed=3), range(9000)) != whole


def test_share_beyond_is_weighted() -> None:
    made = Mixture([source(0, 5, 8), source(1, 5, 8)], (3, 1))
    assert made.share_beyond(6) == pytest.approx(0.25)
    assert repr(made).startswith("Mixture(75 % Blocks(5 of 8")


def documents_of(tokenizer: PreTrainedTokenizerFast, letters: str) -> list[Document]:
    texts = ["a" + "".join(random.Random(n).choices(letters, k=1600 + 100 * n)) for n in range(5)]
    return [Document(str(n), torch.tensor(tokenizer(text)["input_ids"])) for n, text in enumerate(texts)]


@pytest.fixture
def without_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A token for each byte."""
    plain = copy.deepcopy(tokenizer)
    plain.backend_tokenizer.post_processor = processors.ByteLevel()
    plain.backend_tokenizer.decoder = decoders.ByteLevel()
    return plain


@pytest.mark.parametrize("each", [2, 4])
@pytest.mark.parametrize("letters", ["abcdefgh", "äëïöü"], ids=["whole", "within a character"])
def test_a_control_reads_the_tokens_of_the_long_blocks(
    letters: str, each: int, without_bos: PreTrainedTokenizerFast
) -> None:
    """`tools/shorter_blocks.py` puts each part where the order of a run finds it in the step of its block."""
    documents, length = documents_of(without_bos, letters), 256 * each
    texts, differing = parts(documents, without_bos, length, 256, 4, 3)
    shorter = [Document(text, torch.tensor(without_bos(text)["input_ids"])) for text in texts]
    long = Mixture([cut_blocks(documents, length)], seed=3)
    control = Mixture([cut_blocks(shorter, 256)], seed=3)
    wrong = 0
    for step in range(4):
        read = [control[each * step + part]["input_ids"] for part in range(each)]
        wrong += int((torch.cat(read) != long[step]["input_ids"]).sum())
    assert wrong == differing
    assert bool(wrong) == (letters[0] == "ä")


def test_a_text_that_gives_too_few_tokens_for_its_part_is_refused(
    without_bos: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = documents_of(without_bos, "abc")
    monkeypatch.setattr(type(without_bos), "decode", lambda *_: "a")
    with pytest.raises(RopeExtendError, match=r"256 tokens at token .* has 1 if it is tokenised again; give"):
        parts(documents, without_bos, 512, 256, 4, 3)
