"""Each protocol compared with the loop of the script it is named after, rewritten here."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_perplexity import measure, naive_losses, texts, tiny

import rope_extend as rx
from rope_extend.data.documents import Document
from rope_extend.evaluation.protocols import PROTOCOLS, protocol_help

BOS = 1
SAME = {"rel": 1e-4}


@torch.no_grad()
def stock_loss(model, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """`model(input_ids, labels=labels).loss`: the mean over the labels that are not −100."""
    return model.eval()(input_ids=ids[None], labels=labels[None]).loss.item()


@pytest.mark.parametrize(("length", "stride"), [(16, 4), (16, 16), (24, 7), (50, 5)])
def test_sliding_is_position_interpolations(length: int, stride: int) -> None:
    """Strided evaluation per token, as in Press et al. and the documentation of transformers."""
    model, documents = tiny(), texts(60, 77, 65)  # 65: without overlap, a last window of one token
    total, count = 0.0, 0
    for document in documents:
        ids, scored = document.input_ids, 1
        for begin in range(0, len(ids), stride):
            stop = min(begin + length, len(ids))
            losses = naive_losses(model, ids[begin:stop])[scored - stop :]
            total, count, scored = total + losses.sum().item(), count + len(losses), stop
            if stop == len(ids):
                break
    # Without overlap, the first token of each window has no context.
    seams = sum((len(document) - 1) // stride for document in documents) if stride == length else 0
    assert count == sum(len(document) - 1 for document in documents) - seams
    result = measure(model, documents, [length], protocol="sliding", stride=stride)
    assert result.ppl[length] == pytest.approx(math.exp(total / count), **SAME)
    assert result.tokens[length] == count
    assert (result.stride, result.window, result.last) == (stride, None, None)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(("length", "stride"), [(16, 4), (24, 7)])
def test_sliding_window_mean_is_yarns_and_easycontexts(length: int, stride: int, bos: bool) -> None:
    """Their loop: tokens without BOS, BOS before every window, the mean of all window means."""
    model, documents = tiny(), texts(60, 77)
    model.config.bos_token_id = BOS
    if bos:
        documents = [Document(d.name, torch.cat([torch.tensor([BOS]), d.input_ids])) for d in documents]
    means = []
    for document in documents:
        tokens = document.input_ids[1:] if bos else document.input_ids
        room, scored = length - bos, 0
        for begin in range(0, len(tokens), stride):
            stop = min(begin + room, len(tokens))
            ids = tokens[begin:stop]
            if bos:
                ids = torch.cat([torch.tensor([BOS]), ids])
            labels = ids.clone()
            labels[: -(stop - scored)] = -100
            means.append(stock_loss(model, ids, labels))
            scored = stop
            if stop == len(tokens):
                break
    result = measure(model, documents, [length], protocol="sliding-window-mean", stride=stride)
    assert result.ppl[length] == pytest.approx(math.exp(np.mean(means)), **SAME)
    assert sum(result.document_terms[length]) == len(means)
    per_token = measure(model, documents, [length], protocol="sliding", stride=stride)
    assert result.ppl[length] != pytest.approx(per_token.ppl[length], **SAME)


def test_last_k_is_reropes() -> None:
    """`input_ids[:, -(L+1):]` without the last token as input, and the mean loss of the last k."""
    model, documents, k = tiny(), texts(60, 77, 53), 8
    result = measure(model, documents, [8, 20, 52], protocol="last-k", last=k)
    for length in (8, 20, 52):
        loss = 0.0
        for document in documents:
            ids = document.input_ids[-(length + 1) :]
            with torch.no_grad():
                logits = model.eval()(ids[None, :-1]).logits[0, -k:]
            loss += torch.nn.functional.cross_entropy(logits, ids[-k:]).item()
        assert result.ppl[length] == pytest.approx(math.exp(loss / 3), **SAME)
        assert result.tokens[length] == 3 * k
    # Positions count from the start of the window: the targets are at its end.
    assert np.flatnonzero(result.block_terms.sum(0)).tolist() == list(range(53 - k, 52))  # the last has two
    assert result.block_terms.sum() == 3 * k


@pytest.mark.parametrize("length", [7, 15, 19, 58])
def test_disjoint_is_rolling_loglikelihood(length: int) -> None:
    """lm-evaluation-harness: one token of context per window, and a last window that overlaps."""
    model, documents = tiny(), texts(60, 77)
    total, count = 0.0, 0
    for document in documents:
        # The first token is the prefix token; all others are predicted once.
        prefix, tokens = document.input_ids[:1], document.input_ids[1:]
        first = min(length, len(tokens))
        pairs = [(torch.cat([prefix, tokens[: first - 1]]), tokens[:first])]
        done = first
        while done < len(tokens):
            many = min(len(tokens) - done, length)
            stop = done + many
            pairs.append((tokens[stop - length - 1 : stop - 1], tokens[stop - many : stop]))
            done = stop
        for read, wanted in pairs:
            with torch.no_grad():
                logits = model.eval()(read[None]).logits[0, -len(wanted) :].double()
            total -= logits.log_softmax(-1).gather(1, wanted[:, None]).sum().item()
            count += len(wanted)
    result = measure(model, documents, [length], protocol="disjoint")
    assert count == result.tokens[length] == 59 + 76
    assert result.ppl[length] == pytest.approx(math.exp(total / count), **SAME)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("length", [8, 15])
def test_disjoint_second_half_is_llama_cpps(length: int, bos: bool) -> None:
    """llama-perplexity: complete chunks of n_ctx, scored from n_ctx / 2 on; BOS replaces the first token."""
    model, (document,) = tiny(), texts(77)
    model.config.bos_token_id = BOS
    tokens = document.input_ids.clone()
    tokens[0] = BOS if bos else 2
    total, count = 0.0, 0
    for chunk in range(len(tokens) // length):
        piece = tokens[chunk * length : (chunk + 1) * length].clone()
        if bos:
            piece[0] = BOS
        losses = naive_losses(model, piece)  # entry j: the loss of the token at j + 1
        for j in range(length // 2, length - 1):
            total, count = total + losses[j].item(), count + 1
    result = measure(model, [Document("one", tokens)], [length], protocol="disjoint-second-half")
    assert result.ppl[length] == pytest.approx(math.exp(total / count), **SAME)
    assert result.tokens[length] == count


@pytest.mark.parametrize("name", PROTOCOLS)
def test_several_lengths_equal_separate_measurements(name: str) -> None:
    """Each also in chunks of a window."""
    model, documents, nested = tiny(), texts(70, 77), PROTOCOLS[name].nested
    options = dict.fromkeys(PROTOCOLS[name].settings, 6)
    options |= {"blocks": 99} if "blocks" in options else {}  # all: fewer are spread up to the longest length
    together = measure(model, documents, [12, 33], protocol=name, **options)
    assert together.passes == (1 if nested else 2)
    for length in (12, 33):
        alone = measure(model, documents, [length], protocol=name, chunk=5, **options)
        assert together.ppl[length] == pytest.approx(alone.ppl[length], rel=1e-5)
        assert together.tokens[length] == alone.tokens[length]
    assert int(together.block_terms.sum()) == together.tokens[33]
    if PROTOCOLS[name].average == "token":  # the same losses, by position
        mean = together.block_nll.sum() / together.block_terms.sum()
        assert np.exp(mean) == pytest.approx(together.ppl[33])


def test_a_length_dependent_encoding_uses_the_table_of_each_window() -> None:
    """A window of N uses the table for N, as a separate forward over it would."""
    model, (document,) = tiny(), texts(100)
    with rx.extend(model, 128, method="dynamic_ntk"):
        result = measure(model, [document], [32, 64], protocol="sliding", stride=16)
        for length in (32, 64):
            losses, scored = [], 1
            for begin in range(0, 100, 16):
                stop = min(begin + length, 100)
                losses.append(naive_losses(model, document.input_ids[begin:stop])[scored - stop :])
                scored = stop
                if stop == 100:
                    break
            expected = torch.cat(losses).mean().exp().item()
            assert result.ppl[length] == pytest.approx(expected, **SAME)


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_batches_have_the_allowed_size_and_change_nothing(batch_tokens: int) -> None:
    model, documents = tiny(), texts(100)
    seen = []
    handle = model.model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    result = measure(
        model, documents, [16], protocol="sliding", stride=4, batch_tokens=batch_tokens, save_losses=True
    )
    handle.remove()
    assert all(rows * tokens <= max(batch_tokens, 16) for rows, tokens in seen)
    assert sum(rows * tokens for rows, tokens in seen) == result.forward_tokens
    assert max(rows for rows, _ in seen) == {1: 1, 40: 2, 1000: 21}[batch_tokens]
    whole = measure(model, documents, [16], protocol="sliding", stride=4, save_losses=True)
    np.testing.assert_allclose(result.losses[16][0], whole.losses[16][0], rtol=1e-4, atol=1e-5)


def test_only_scored_tokens_go_through_the_head() -> None:
    model, rows = tiny(), []
    model.lm_head.register_forward_pre_hook(lambda _module, args: rows.append(args[0].shape[1]))
    result = measure(model, texts(100), [64], protocol="sliding", stride=4)
    tries = sum(1 for count in rows if count == 1)  # token_losses finds the vocabulary size once per call
    assert sum(rows) - tries == result.tokens[64] == 99


def test_every_protocol_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
    for name, one in PROTOCOLS.items():
        assert f"`{name}`" in rx.perplexity.__doc__
        assert f"| `{name}`" in page
        assert f"| {one.measures} | {one.flaw} |" in page
        assert one.source in protocol_help()
