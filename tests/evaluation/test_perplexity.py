"""Perplexity compared with a naive loop with all logits in float64, and its memory."""

import json
import math
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cases import tiny_model
from family_cases import ALL_FAMILIES
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import BaseModelOutput

import rope_extend as rx
from rope_extend.data.documents import Document
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.loss_computer import LossComputer, RunOptions
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.protocols import CONTROL_BLOCKS, control_targets
from rope_extend.evaluation.results import PerplexityResult

VOCABULARY = 61
BY_FAMILY = {case.model_type: case for case in ALL_FAMILIES}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
"""Stock dynamic NTK, which has a table for the whole row."""


def tiny(
    vocabulary: int = VOCABULARY, hidden: int = 32, intermediate: int = 48, **changes: Any
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.5,  # changes the results without evaluation mode
        **changes,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def texts(*lengths: int, vocabulary: int = VOCABULARY) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    return [
        Document(f"text{i}", torch.randint(0, vocabulary, (length,), generator=generator))
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def naive_losses(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Losses of the targets 1 … T−1 in float64, from all logits at once."""
    model.eval()(ids[None, :2])  # stock dynamic NTK keeps the table of a long text until a short one comes
    logits = model(ids[None]).logits[0].double()
    return -logits[:-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


def measure(
    model: torch.nn.Module,
    documents: list[Document],
    lengths: list[int],
    *,
    chunk: int | str | None = None,
    chunk_bytes: int | None = None,
    batch_tokens: int | None = None,
    control_blocks: int = CONTROL_BLOCKS,
    **settings,
) -> PerplexityResult:
    """`perplexity` in chunks of a window, chunks of logits and batches of windows of these sizes."""
    with ExitStack() as stack:
        for name, size in {"chunk_bytes": chunk_bytes, "batch_tokens": batch_tokens}.items():
            if size is not None:
                default = f"rope_extend.evaluation.loss_computer.default_{name}"
                stack.enter_context(patch(default, lambda _, size=size: size))
        options = RunOptions(chunk, control_blocks=control_blocks)
        return perplexity(model, documents, lengths, progress=False, options=options, **settings)


def test_equals_the_naive_loop_over_truncated_documents() -> None:
    model, documents, lengths = tiny(), texts(70, 100, 64), [2, 17, 32, 64]
    result = measure(model, documents, lengths, chunk_bytes=7 * 4 * VOCABULARY)
    for length in lengths:
        losses = torch.cat([naive_losses(model, document.input_ids[:length]) for document in documents])
        assert result.ppl[length] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
        assert result.tokens[length] == len(losses) == 3 * (length - 1)
    by_position = torch.stack([naive_losses(model, document.input_ids[:64]) for document in documents])
    np.testing.assert_allclose(result.block_nll[:, 1:], by_position, rtol=1e-5)
    assert not result.block_nll[:, 0].any()  # nothing predicts the first token
    assert result.block_terms.tolist() == [[0] + 63 * [1]] * 3
    assert result.forward_tokens == 3 * 64
    assert result.passes == 1


def test_losses_of_long_texts_are_kept_in_blocks() -> None:
    """They begin at multiples of 8 here, at each length, and where targets of a control begin or end."""
    model, documents = tiny(), texts(1100, 1100)
    with rx.extend(model, 1100, method="dynamic_ntk"):
        result = measure(model, documents, [61, 1001, 1100])
        losses = torch.stack([naive_losses(model, document.input_ids) for document in documents]).double()
    starts = result.block_edges[:-1].tolist()
    targets = {end for window in (61, 1001) for ends in control_targets(window, 1100, 16) for end in ends}
    assert starts == sorted({*range(0, 1100, 8), 61, 1001, *targets} - {1100})
    padded = torch.nn.functional.pad(losses, (1, 0)).numpy()
    np.testing.assert_allclose(result.block_nll, np.add.reduceat(padded, starts, axis=1), rtol=1e-5)
    assert result.block_terms.sum(1).tolist() == [1099, 1099]
    sums, terms = result.between(61, 1001)
    np.testing.assert_allclose(sums, losses[:, 60:1000].sum(1), rtol=1e-5)
    assert terms.tolist() == [940, 940]


def test_every_length_is_measured_on_the_same_documents() -> None:
    model, documents = tiny(), texts(64, 20, 63, 80)
    result = measure(model, documents, [16, 64])
    assert result.documents == 2
    assert result.ppl == measure(model, [documents[0], documents[3]], [16, 64]).ppl
    assert result.data == measure(model, [documents[0], documents[3]], [16, 64]).data
    assert result.data != measure(model, documents[:1], [16, 64]).data


@pytest.mark.parametrize(("stock", "passes"), [(False, [128]), (True, [32, 64, 128])])
def test_encodings_that_depend_on_length_get_a_pass_for_each_table(stock: bool, passes: list[int]) -> None:
    """One pass per length beyond the window for stock's tables per row; one in all for tables per query."""
    model, documents, lengths = tiny(), texts(128, 130), [16, 32, 64, 128]
    plain = measure(model, documents, lengths)
    if stock:
        model = tiny(rope_parameters=DYNAMIC)
    with nullcontext() if stock else rx.extend(model, 128, method="dynamic_ntk"):
        result = measure(model, documents, lengths)
        truncated = {n: measure(model, documents, [n]) for n in lengths}
        expected = {
            n: torch.cat([naive_losses(model, d.input_ids[:n]) for d in documents]).mean().exp().item()
            for n in lengths
        }
    assert result.passes == len(passes)
    assert result.forward_tokens == 2 * sum(passes)
    for length in lengths:
        assert result.ppl[length] == pytest.approx(expected[length], rel=1e-5)
        assert result.ppl[length] == pytest.approx(truncated[length].ppl[length], rel=1e-6)
    np.testing.assert_allclose(result.block_nll, truncated[128].block_nll)
    assert result.ppl[32] == pytest.approx(plain.ppl[32], rel=1e-6)
    assert result.ppl[128] != pytest.approx(plain.ppl[128], rel=1e-3)


@pytest.mark.parametrize(("window", "length"), [(2, 41), (7, 15), (31, 16), (33, 100), (64, 256), (64, 81)])
@pytest.mark.parametrize("blocks", [3, 16])
def test_every_target_of_the_control_sees_nearly_the_whole_window(
    window: int, length: int, blocks: int
) -> None:
    """It is the only one that can be a control: the unmodified model would beat one that sees less."""
    model, (document,) = tiny(), texts(length)
    result = measure(model, [document], [length], protocol="cropped", window=window, blocks=blocks)
    assert (result.protocol, result.window, result.blocks) == ("cropped", window, blocks)
    losses, whole = result.block_nll[0], min(window, length)
    scored = np.flatnonzero(result.block_terms[0]).tolist()
    np.testing.assert_allclose(losses[1:whole], naive_losses(model, document.input_ids[:whole]), rtol=1e-4)
    assert scored[: whole - 1] == [*range(1, whole)]
    beyond, size = scored[whole - 1 :], max(1, window // 16)
    for target in beyond:
        contexts = range(math.ceil(window * 15 / 16), window + 1)
        seen = [document.input_ids[target - tokens : target + 1] for tokens in contexts]
        expected = [naive_losses(model, each)[-1].item() for each in seen]
        assert min(abs(losses[target] - each) for each in expected) < 1e-4
    firsts = beyond[::size]
    assert beyond == [target for first in firsts for target in range(first, min(first + size, length))]
    assert len(firsts) == max(0, min(blocks, math.ceil((length - window) / size)))
    assert np.ptp(np.diff(firsts)) <= size if len(firsts) > 1 else True  # spread evenly
    # The perplexity is that of all targets: those beyond the window stand for the others.
    mean = losses[beyond].mean() if beyond else 0.0
    estimate = (losses[1:whole].sum() + mean * (length - whole)) / (length - 1)
    assert result.ppl[length] == pytest.approx(math.exp(estimate), rel=1e-5)


@pytest.mark.parametrize("family", [None, "gemma3", "mllama", "fuyu", "generation"])
@pytest.mark.parametrize("begins", [True, False])
def test_windows_of_the_control_begin_with_bos_if_that_helps_the_model(
    begins: bool, family: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that needs it, and one that takes it for a new text, both make the control too bad else.

    Composite configs have it further in.
    """
    model = tiny_model(BY_FAMILY[family]) if family in BY_FAMILY else tiny()
    (document,) = texts(40)
    named = model.generation_config if family == "generation" else model.config.get_text_config()
    named.bos_token_id = 5
    ids = document.input_ids.clone()
    ids[0] = 5 if begins else 6
    chosen = set()
    for seed in range(8):
        ids[1:] = torch.randint(8, 30, (39,), generator=torch.Generator().manual_seed(seed))
        ways = []
        for replaced in (True, False) if begins else (False,):
            losses = [*naive_losses(model, ids[:32])]
            for target in range(32, 40, 2):  # blocks of a sixteenth of the window
                seen = ids[target - 31 : target + 2].clone()
                seen[0] = 5 if replaced else seen[0]
                losses += naive_losses(model, seen)[-2:]
            ways.append(torch.stack(losses))
        chosen.add(best := min(range(len(ways)), key=lambda way: ways[way].sum()))
        result = measure(model, [Document("one", ids)], [40], protocol="cropped", window=32)
        np.testing.assert_allclose(result.block_nll[0, 1:], ways[best], rtol=1e-4, atol=1e-5)
        assert result.forward_tokens == len(ways) * (32 + 4 * 32)
    assert len(chosen) == len(ways)  # each way was the better one once
    if begins and family is None:  # a way that gives no number is not the lower one
        for both in (([math.nan, 1], [3, 4]), ([3, 4], [math.nan, 1])):
            found = iter(both)
            monkeypatch.setattr(LossComputer, "document", lambda *_, it=found: [np.float32(next(it))])
            control = measure(model, [Document("one", ids[:3])], [3], protocol="cropped", window=32)
            assert control.ppl[3] == pytest.approx(math.exp(3.5))


@pytest.mark.parametrize(("window", "lengths"), [(32, [32, 2048]), (50, [50, 700]), (64, [100, 1024])])
def test_a_row_is_compared_on_the_targets_of_its_control_alone(window: int, lengths: list[int]) -> None:
    """Also where blocks of losses are longer than those of targets; a window is a length, or fits blocks."""
    model, documents = tiny(), texts(lengths[1], lengths[1], lengths[1])
    control = measure(model, documents, lengths, protocol="cropped", window=window, blocks=5)
    result = measure(model, documents, lengths, save_losses=True, control_blocks=5)
    (change,) = [each for each in result.against(control) if each.length == lengths[1]]
    targets = [n for start, end in control_targets(window, lengths[1], 5) for n in range(start, end)]
    own = [losses[np.array(targets) - 1].sum() for losses in result.losses[lengths[1]]]
    theirs = control.block_nll[:, control.block_edges[:-1] >= window].sum(1)
    assert change.nats == pytest.approx((sum(own) - theirs.sum()) / (3 * len(targets)), abs=1e-5)
    assert (len(targets), change.documents) == (5 * (window // 16), 3)
    again = PerplexityResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.against(PerplexityResult.from_dict(control.to_dict())) == result.against(control)
    assert measure(model, texts(*lengths), lengths[:1]).against(control) == []  # another text


def test_the_model_is_unchanged_afterwards() -> None:
    """Also by an interruption in chunks, which run one layer after the other."""
    model = tiny().train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model, texts(40), [40], chunk=16)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with model.model.layers[1].register_forward_hook(interrupt), pytest.raises(KeyboardInterrupt):
        measure(model, texts(40), [40], chunk=16)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.is_grad_enabled()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    ids = texts(40)[0].input_ids[None]
    model(ids, labels=ids).loss.backward()  # training still works


def test_a_loss_that_is_not_a_number_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()

    def break_from_30_on(_module: object, _inputs: object, output: BaseModelOutput) -> None:
        output.last_hidden_state[:, 30:] = math.nan

    model.model.register_forward_hook(break_from_30_on)
    result = measure(model, texts(40), [20, 40])
    assert "from position 31 on" in caplog.text
    assert math.isfinite(result.ppl[20])
    assert math.isnan(result.ppl[40])
    again = PerplexityResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert math.isnan(again.ppl[40])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths must be"),
        ({"lengths": [1]}, "2 or above"),
        ({"lengths": [64]}, r"'text1', has 50\. Use lengths up to 50"),
        ({"documents": []}, "no documents"),
        ({"protocol": "slidng"}, "Did you mean 'sliding'"),
        ({"protocol": "cropped"}, "needs a window"),
        ({"protocol": "sliding", "window": 4}, "takes no window; got 4; leave it out, or use one of cropped"),
        ({"protocol": "sliding", "stride": 17}, "stride must be at most 16, the shortest length; got 17"),
        ({"protocol": "sliding"}, "stride must be at most 16, the shortest length; got 256"),
        ({"protocol": "last-k", "last": 4, "lengths": [50]}, "'text1', has 50"),  # one more token is needed
        ({"chunk": "ten"}, "'ten'"),
        ({"protocol": "cropped", "window": 1}, "window must be at least 2"),
        ({"documents": texts(50, vocabulary=500)}, "the model has the tokens 0 to 60"),
    ],
)
def test_mistakes_are_refused_before_any_work(arguments: dict, message: str) -> None:
    model = tiny()
    model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    model.model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(RopeExtendError, match=message):
        measure(model, **{"documents": texts(40, 50), "lengths": [16], **arguments})


def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
    """Token ids from text, one for each letter."""
    return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}


def test_documents_may_be_token_ids_or_text() -> None:
    model, document = tiny(), texts(40)[0]
    expected = measure(model, [document], [16, 40]).ppl
    ids = document.input_ids
    for documents in (document, ids, ids.tolist(), [ids], ids[None], ids.int().numpy()):
        result = measure(model, documents, [16, 40])
        assert (result.ppl, result.documents) == (expected, 1)
    both = measure(model, [ids, ids.tolist(), document], "16")  # text is a sequence too
    assert (both.documents, both.ppl[16]) == (3, pytest.approx(expected[16]))

    text = "a text with more than sixteen letters"
    by_hand = measure(model, torch.tensor(tokenizer(text)["input_ids"]), [16]).ppl
    assert measure(model, text, [16], tokenizer=tokenizer).ppl == by_hand
    assert measure(model, iter([text]), [16], tokenizer=tokenizer).ppl == by_hand


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (["some text"], "document 0 is a string, and no tokenizer is given; pass tokenizer="),
        (torch.rand(40), r"1-D tensor or list of token ids.*; got torch.float32 of shape \(40,\)"),
        ([torch.zeros(2, 40, dtype=torch.int64)], r"document 0 must be .* of shape \(2, 40\)"),
        ({"input_ids": [1, 2]}, "document 0 must be .* dict"),
        ([2**70], "document 0 must be .*; "),
        (b"text", "document 0 must be .*; "),
        ([[1.5, 2.0]], "document 0 must be .*; got torch.float32"),
        (torch.full((40,), -100), "token -100, but the model has the tokens 0 to 60"),
    ],
)
def test_other_documents_are_refused(documents: object, message: str) -> None:
    with pytest.raises(RopeExtendError, match=message):
        measure(tiny(), documents, [16])
    with pytest.raises(RopeExtendError, match="perplexity takes a model, got str; load it first"):
        rx.perplexity("path/to/model", [1, 2, 3], [2])


def sliding(window: int) -> Qwen2ForCausalLM:
    """A model whose every second layer has a sliding window."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
            use_sliding_window=True, sliding_window=window,
            layer_types=["full_attention", "sliding_attention"] * 2,
        )
    )  # fmt: skip


def test_tables_that_change_with_the_length_are_not_processed_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, documents = tiny(rope_parameters=DYNAMIC), texts(128)
    assert measure(model, documents, [64], chunk=16).ppl == measure(model, documents, [64]).ppl
    within = measure(model, documents, [32], chunk=16)  # the table does not change within the trained window
    assert within.ppl[32] == pytest.approx(measure(model, documents, [32]).ppl[32], rel=1e-5)
    whole = measure(model, documents, [128])
    monkeypatch.setattr("rope_extend.evaluation.chunked_forward.MAX_WHOLE", 16)
    assert measure(model, documents, [128]).ppl == whole.ppl  # the default chunk size: in one pass
