"""lm-evaluation-harness on patched models: it finds their window, and gives the same results.

Optional: `pip install lm_eval`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.data.documents import Document

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

ROOT = Path(__file__).parents[2]
TOKENIZER = AutoTokenizer.from_pretrained(MODEL_DIR)
TEXT = (ROOT / "rope_extend" / "encodings" / "core" / "rope.py").read_text()[:9000]  # about 3,000 tokens


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


def harness(model: PreTrainedModel, **options: object) -> HFLM:
    return HFLM(pretrained=model, tokenizer=TOKENIZER, device="cpu", **options)


def requests(kind: str, *arguments: tuple[str, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)]


def test_the_harness_finds_the_window_of_a_patched_model(model: PreTrainedModel) -> None:
    assert harness(model).max_length == 256
    for method in ("linear", "ntk", "yarn", "llama3", "ntk_by_parts"):
        with rx.extend(model, 1024, method) as patch:
            assert harness(model).max_length == patch.target_length == 1024
    assert harness(model).max_length == 256
    # Length-dependent methods keep the trained window in the config, so the harness needs max_length.
    with rx.extend(model, 1024, "dynamic_ntk") as patch:
        assert harness(model).max_length == 256
        assert harness(model, max_length=patch.target_length).max_length == 1024


@pytest.mark.parametrize("method", ["none", "linear", "yarn", "dynamic_ntk", "dynamic_yarn"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_its_rolling_loglikelihood_is_our_protocol_disjoint(
    model: PreTrainedModel, method: str, batch_size: int
) -> None:
    patch = rx.patch_model(model, rx.encoding("none")) if method == "none" else rx.extend(model, 1024, method)
    with patch:
        lm = harness(model, batch_size=batch_size, max_length=patch.target_length)
        (theirs,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT,)), disable_tqdm=True)
        ids = torch.tensor([lm.prefix_token_id, *lm.tok_encode(TEXT)])
        assert len(ids) > 2 * lm.max_length
        found = rx.perplexity(
            model, [Document("text", ids)], [lm.max_length], protocol="disjoint", progress=False
        )
    assert found.document_terms[lm.max_length] == [len(ids) - 1]
    assert -theirs / (len(ids) - 1) == pytest.approx(
        found.document_nll[lm.max_length][0] / (len(ids) - 1), abs=1e-5
    )


@pytest.mark.parametrize("method", ["yarn", "dynamic_yarn"])
def test_batches_of_unequal_requests_are_scored_like_single_ones(model: PreTrainedModel, method: str) -> None:
    """Multiple choice, within the trained window and beyond it, padded together."""
    contexts = (TEXT[:200], TEXT[:1200], TEXT[:2400])
    pairs = [(context, ending) for context in contexts for ending in (" import", "\n\n")]
    with rx.extend(model, 1024, method) as patch:
        lm = harness(model, batch_size=6, max_length=patch.target_length)
        theirs = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        for (context, ending), (score, greedy) in zip(pairs, theirs, strict=True):
            read, more = lm._encode_pair(context, ending)
            with torch.no_grad():
                logits = model(torch.tensor([read + more])).logits[0].double()
            predicted = logits[len(read) - 1 : -1].log_softmax(-1)
            expected = sum(predicted[n, token].item() for n, token in enumerate(more))
            assert score == pytest.approx(expected, abs=1e-4)
            assert greedy == (predicted.argmax(-1).tolist() == more)


@pytest.mark.usefixtures("private_cache")
def test_the_example_shows_two_equal_figures(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    shown = subprocess.run(
        [sys.executable, "examples/lm_eval_harness.py", str(MODEL_DIR), "1k", str(tmp_path / "text.txt")],
        check=True, capture_output=True, text=True, cwd=ROOT,
    ).stdout  # fmt: skip
    assert "yarn(factor=4), windows of 1024 tokens" in shown
    theirs, ours = (float(value) for value in re.findall(r"([\d.]+) nats per byte", shown))
    assert theirs == pytest.approx(ours, abs=1e-5)
