"""What an evaluation needs on a GPU, shown without one: memory, recovery, and dtypes."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import tiny_llama
from peft import LoraConfig, get_peft_model
from test_retrieval import TOKENIZER, Oracle, measured
from transformers import AutoModelForCausalLM

import rope_extend as rx
from rope_extend import RopeExtendError
from rope_extend.attention.registry import without_cudnn
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.evaluation import chunked_forward
from rope_extend.evaluation.answering import generate
from rope_extend.evaluation.candidates import cast_adapter
from rope_extend.memory.budget import available_memory, is_out_of_memory
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import default_dtype


def test_what_torch_keeps_cached_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second plan in one process is that of the first, once what it measured is freed."""
    memory = {"free": 80, "reserved": 0, "allocated": 0}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (memory["free"], 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: memory["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: memory["allocated"])
    options = LoadOptions("cuda:0", dtype=torch.bfloat16)
    assert available_memory(options) == 80
    memory.update(free=5, reserved=75, allocated=16)
    assert available_memory(options) == 80 - 16


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA ran out of memory outside PyTorch's allocator. Consider calling "
                      "set_per_process_memory_fraction to leave memory available for cuDNN."), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_memory_runs_out_under_several_names(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_halved_batch_of_prompts_starts_with_free_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failed call held is freed before the next one. A prompt that never fits is an error."""
    gc.freeze()  # collections then look at this test's own objects
    most, original, held = 2, Oracle.generate, []

    def small_only(self: Oracle, input_ids: Any, **more: Any) -> Any:
        gc.collect()
        assert not any(reference() is not None for reference in held)
        if len(input_ids) > most:
            cache = torch.zeros(3)
            held.append(weakref.ref(cache))
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return original(self, input_ids, **more)

    expected = measured(Oracle())
    monkeypatch.setattr(Oracle, "generate", small_only)
    assert measured(Oracle()).cells == expected.cells
    assert held
    assert "out of memory" in caplog.text
    most = 0
    with pytest.raises(RopeExtendError, match="256 tokens does not fit"):
        measured(Oracle())


def test_bfloat16_is_the_default_only_with_hardware_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 or V100 emulates it, without tensor cores and without flash attention."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert default_dtype(torch.device("cuda")) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert default_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(("method", "rows"), [(None, 1), ("dynamic_ntk", 2), ("alibi", 1)])
@torch.no_grad()
def test_long_prompts_are_processed_in_chunks(
    method: str | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the answer is generated from their cache: the same tokens, and a fraction of the activations."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()
    patch = rx.extend(model, 512, method) if method else nullcontext()
    make = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 200, (300,), generator=make).tolist() for _ in range(rows)]
    answers, widths = [], []
    forward = model.model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", noted)
    with patch:
        for most in (10**6, 64):
            monkeypatch.setattr(chunked_forward, "MAX_WHOLE", most)
            monkeypatch.setattr(chunked_forward, "MAX_CHUNK", 70)
            widths.clear()
            answers.append(generate(model, TOKENIZER, prompts, 10))
            whole = max(widths)
    assert answers[0] == answers[1]
    assert whole == 70
    assert 1 in widths


def test_decoding_builds_no_plan_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN builds one for each number of keys; the prompt, which is long, may go to it."""
    seen, original = [], Oracle.generate

    def observed(self: Oracle, input_ids: Any, stopping_criteria: Any, **more: Any) -> Any:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        stopping_criteria(input_ids, None)
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(self, input_ids, stopping_criteria, **more)

    monkeypatch.setattr(Oracle, "generate", observed)
    measured(Oracle())
    assert seen == [True, False] * (len(seen) // 2)
    blocks = [without_cudnn(), without_cudnn()]
    for block in blocks:
        block.__enter__()
    for block in blocks:  # of two threads, which do not end in the order of a stack
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        block.__exit__(None, None, None)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("use_dora", [False, True])
@torch.no_grad()
def test_an_adapter_is_evaluated_in_the_dtype_of_its_model(use_dora: bool) -> None:
    """Bit for bit as autocast in training; float32 states as wide as an MLP's do not exist. DoRA is kept."""
    model = tiny_llama(intermediate_size=512).to(torch.bfloat16)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=use_dora)
    tuned = get_peft_model(model, config).eval()
    ids = torch.randint(3, 60, (1, 256), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        expected = tuned(ids).logits
    peaks, found = [], []
    for _ in range(2):
        with LiveBytes() as memory:
            found.append(tuned(ids).logits)
        peaks.append(memory.peak)
        cast_adapter(tuned)
    assert torch.equal(found[1], expected) or use_dora
    assert (peaks[0] - peaks[1] >= 256 * 512 * 4) != use_dora
    assert torch.equal(found[0], found[1]) == use_dora
    dtypes = {weight.dtype for name, weight in tuned.named_parameters() if "lora_" in name}
    assert dtypes == {torch.float32 if use_dora else torch.bfloat16}


@pytest.mark.parametrize("matrices", ["bfloat16", "float32"])
def test_trained_norms_and_embeddings_do_not_bring_back_the_mask(matrices: str) -> None:
    """They are float32, but autocast computes attention in the dtype of the matrices."""
    model = tiny_llama()
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(getattr(torch, matrices))
    assert model.dtype == torch.float32
    chunked = chunked_forward.ChunkedForward(model, torch.device("cuda"))
    assert chunked.maskless == (matrices == "bfloat16")
    assert chunked.default_chunk(2**18) == (16_384 if chunked.maskless else 2**28 // 2**18)
