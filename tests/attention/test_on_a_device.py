"""The same numbers on a GPU as on the CPU. On the CPU alone, a test can only show that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import LENGTH, tokens
from cases import FACTOR, TARGET, llama
from test_attention_on_a_gpu import INSIDE, cached_logits
from tolerances import assert_same_but_rounding
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.encodings.core.transfers import to_device
from rope_extend.evaluation.answering import answer_batch
from rope_extend.evaluation.prompts import Prompts, make_prompts
from rope_extend.evaluation.tasks import Passkey
from rope_extend.loss import next_token_loss
from rope_extend.models.processes import PATIENCE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("name", INSIDE)
def test_every_kind_of_encoding_with_a_cache(name: str, device: str) -> None:
    ids, model = tokens(1, LENGTH), llama()
    with rx.extend(model, TARGET, name):
        expected = model(ids, use_cache=False).logits.detach()
    with rx.extend(model.to(device), TARGET, name):
        found = torch.cat(cached_logits(model, ids.to(device)), dim=1)
    assert_same_but_rounding(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # float32 goes through a temporary tensor
@pytest.mark.parametrize("count", [64, 2**20])
def test_a_copy_to_a_device_may_outlive_its_source(count: int, dtype: torch.dtype, device: str) -> None:
    """The source changes at once, while the device computes something long."""
    values = torch.arange(count, dtype=torch.float64)
    large = torch.ones(*[8192 if device == "cuda" else 8] * 2, device=device)
    for _ in range(20):
        large @ large
    copy = to_device(values, torch.device(device), dtype)
    if device == "cuda":
        values.fill_(-1).to(dtype)  # may take the memory of the temporary tensor
    assert torch.equal(copy.cpu(), torch.arange(count, dtype=dtype))


@pytest.fixture
def one_process(device: str, tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, with NCCL on a GPU."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=PATIENCE
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_gradients_under_distributed_data_parallel(device: str) -> None:
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, {"losses": [1.5]})
    assert gathered == [{"losses": [1.5]}]
    ids, found = tokens(2, LENGTH).to(device), []
    for wrapped in (True, False):
        model = llama().to(device).train()
        rx.patch_model(model, rx.encoding("yarn", factor=FACTOR))
        if wrapped:
            DistributedDataParallel(model)(ids, labels=ids).loss.backward()
        else:
            next_token_loss(model, ids).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*found, strict=True):
        assert_same_but_rounding(ours.cpu(), theirs.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "dynamic_ntk"])
def test_passkeys_have_the_scores_of_the_cpu(name: str, device: str) -> None:
    tokenizer, task = AutoTokenizer.from_pretrained(MODEL_DIR), Passkey(template="demo")
    options = Prompts(depths=(0.0, 0.5, 1.0), trials=2)
    batches = [make_prompts(task, tokenizer, length, options) for length in (256, 512)]
    scores = []
    for place in ("cpu", device):
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).to(place).eval()
        rx.extend(model, TARGET * 4, name)
        answers = [answer_batch(model, tokenizer, task, prompts)[0] for prompts in batches]
        scores.append([trial["score"] for trials in answers for trial in trials])
    equal = sum(ours == theirs for ours, theirs in zip(*scores, strict=True)) / len(scores[0])
    assert equal >= 0.95  # a tie of two tokens may be resolved otherwise by another order of summation
