"""Blocks of two windows: every row trains as its documents would alone, each under its own table."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TRAINED, llama, tiny_llama
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.attention.packed import document_inputs
from rope_extend.data.documents import Document
from rope_extend.data.mixed_windows import check_mixed_windows, mixed_windows
from rope_extend.loss import IGNORED
from rope_extend.training.finetune import Recipe, finetune

BLOCK = 96
"""Tokens of a block: three times the trained window."""
PAIRS = 8
LONG = tuple(1.0 + 0.5 * i for i in range(PAIRS))
SHORT = tuple(1.0 + 0.1 * i for i in range(PAIRS))
TWO_TABLES = {
    "short_original": {"inner": {"name": "yarn", "factor": 3.0}},
    "longrope": {"factor": 3.0, "long_factor": LONG, "short_factor": SHORT},
}


def texts(*sizes: int) -> list[Document]:
    return [
        Document(str(i), torch.randint(3, 60, (size,), generator=torch.Generator().manual_seed(i)))
        for i, size in enumerate(sizes)
    ]


def made(name: str) -> rx.Encoding:
    return rx.encoding(name.split()[0], **TWO_TABLES[name])


def results(model: Any, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model that computes in float64 throughout: transformers' norm and tables are float32 in any model."""

    def norm(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
        return (
            self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)
    return llama().double()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of the next tokens, by torch alone."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def mixed_batch() -> tuple[dict[str, Tensor], list[Tensor]]:
    """A batch of a long and a short row, and its documents."""
    sources = mixed_windows(texts(BLOCK + 10, 20, 40, 31, 9), BLOCK, TRAINED, 0.5, seed=0).sources
    rows = [sources[0][0], sources[1][0]]
    starts = (rows[1]["position_ids"] == 0).nonzero().flatten().tolist()
    alone = [rows[1]["input_ids"][a:b] for a, b in pairwise([*starts, BLOCK])]
    assert [len(text) for text in alone] == [20, 32, 8, 31, 5]
    return default_collate(rows), [rows[0]["input_ids"], *alone]


@pytest.mark.parametrize("name", TWO_TABLES)
def test_loss_and_gradients_are_those_of_the_rows_alone(name: str, exact: PreTrainedModel) -> None:
    """Against each document by itself, in float64."""
    batch, alone = mixed_batch()
    with rx.patch_model(exact, made(name), target_length=BLOCK):
        inputs = document_inputs(exact, batch["position_ids"])
        ours = results(exact, summed(exact(batch["input_ids"], **inputs).logits, batch["labels"]))
        losses = [summed(exact(text[None]).logits, text[None]) for text in alone]
        theirs = results(exact, torch.stack(losses).sum())
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for key, gradient in theirs[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[1][key], gradient, rtol=0, atol=1e-11 * scale, msg=key)


def test_blocks_are_of_two_kinds_in_their_shares() -> None:
    documents = texts(300, 50, 20, 70, 33, 40, 95)
    blocks = mixed_windows(documents, BLOCK, TRAINED, 0.25, seed=3)
    counts = [0, 0]
    for position in range(400):
        item = blocks[position]
        source, _ = blocks.locate(position)
        counts[source] += 1
        last = int(item["position_ids"].max())
        assert (last == BLOCK - 1) if source == 0 else (last < TRAINED)
        assert bool(((item["labels"] == IGNORED) == (item["position_ids"] == 0)).all())
    assert counts[1] / 400 == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 400) ** 0.5)
    short = blocks.sources[1]
    # All tokens of the short documents once, in order, except those left over.
    joined = torch.cat([document.input_ids for document in documents if len(document) < BLOCK])
    packed = torch.cat([short[i]["input_ids"] for i in range(len(short))])
    assert len(joined) - len(packed) < BLOCK + len(documents)


def test_without_short_documents_the_long_ones_are_cut() -> None:
    documents = texts(100, 130)
    short = mixed_windows(documents, BLOCK, TRAINED, 0.6, seed=0).sources[1]
    # Two long blocks, so three short ones are needed, and the text is enough for two.
    assert len(short) == 230 // BLOCK
    assert all(int(short[i]["position_ids"].max()) < TRAINED for i in range(len(short)))
    turns = [text.input_ids[start : start + TRAINED] for start in (0, TRAINED) for text in documents]
    assert short[0]["input_ids"].tolist() == torch.cat(turns)[:BLOCK].tolist()
    with pytest.raises(RopeExtendError, match="none of 2 documents has 96 tokens"):
        mixed_windows(texts(50, 60), BLOCK, TRAINED, 0.3, seed=0)
    # Pieces of 32, 32, 32 and 1 token, and a single token predicts nothing.
    with pytest.raises(RopeExtendError, match=r"needs 97 tokens, and 1 documents.* have 96 together"):
        mixed_windows(texts(97), 97, TRAINED, 0.3, seed=0)


@pytest.mark.parametrize("stray", [(20,), (95, 35)])
def test_a_few_stray_short_documents_are_not_the_whole_short_share(stray: tuple[int, ...]) -> None:
    """Pieces of the long documents are added until both kinds repeat equally often."""
    documents = texts(*[960] * 14, *stray)
    long, short = mixed_windows(documents, BLOCK, TRAINED, 0.3, seed=0).sources
    assert (len(long), len(short)) == (140, 60)
    first = torch.cat([short[0]["input_ids"], short[1]["input_ids"]])[: sum(stray)]
    assert first.tolist() == torch.cat([text.input_ids for text in documents[14:]]).tolist()


@pytest.mark.parametrize(
    ("encoding", "length", "reason"),
    [
        (rx.encoding("yarn", factor=3.0), BLOCK, r"cannot be combined with yarn.*no second table"),
        (rx.encoding("alibi"), BLOCK, "no second table"),
        (made("short_original"), TRAINED, "needs blocks beyond the trained window of 32 tokens"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(encoding: Any, length: int, reason: str) -> None:
    shape = rx.RopeShape(16, 1e4, TRAINED)
    with pytest.raises(RopeExtendError, match=reason):
        check_mixed_windows(length, encoding, shape, tiny_llama().config)


@pytest.fixture
def mixed(recipe: Recipe) -> Recipe:
    return replace(
        recipe, method="short_original(yarn)", packing="none", mixed_windows=True, short_share=0.5,
        batch_size=2, gradient_accumulation=1,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_with_mixed_windows_trains_and_resumes(
    mixed: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rope_extend.training.finetune._MANY_EPOCHS", 0.5)
    with caplog.at_level(logging.INFO):
        result = finetune(mixed)
    assert "50 % PackedBlocks" in caplog.text
    assert "the long blocks are read 0.6 times by the last step; add texts, or lower steps" in caplog.text
    assert 0 < result.share_beyond < 0.5
    other = replace(mixed, output_dir=str(tmp_path / "other"))
    finetune(replace(other, steps=2))
    finetune(other, resume=True)
    ours, theirs = (load_file(Path(each.output_dir) / "adapter_model.safetensors") for each in (mixed, other))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert "mixed_windows True, short_share 0.5" in (Path(mixed.output_dir) / "README.md").read_text()


def test_a_method_with_one_table_is_refused_before_the_data_is_read(mixed: Recipe) -> None:
    with pytest.raises(RopeExtendError, match=r"mixed_windows cannot be combined with yarn.*short_original"):
        finetune(replace(mixed, method="yarn", data="no/such/directory"))
