"""Models, documents, times and rows that all benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rope_extend.data.documents import Document
from rope_extend.memory.live_bytes import LiveBytes

Row = dict[str, Any]

DEVICE = "cpu"
"""Where models and documents are; `run_benchmarks.py --device` sets it."""


def model(
    vocabulary: int = 4096, window: int = 256, layers: int = 6, width: int = 192, heads: int = 6
) -> LlamaForCausalLM:
    """A random Llama, by default of about three million parameters, on the device of the run."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=3, max_position_embeddings=window,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE)


def document(tokens: int, vocabulary: int) -> Document:
    """A document of random tokens, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return Document("random", torch.randint(0, vocabulary, (tokens,), generator=generator))


def timed(
    *functions: Callable[[], object],
    repetitions: int,
    summary: Callable[[list[float]], float] = min,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """The time of each function in seconds, by default the shortest of several interleaved repetitions."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repetitions + 1):  # the first round warms up
        # Every other round runs backwards, so that no function always follows the same other.
        for index in range(len(functions))[:: -1 if turn % 2 else 1]:
            started = clock()
            functions[index]()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[index].append(clock() - started)
    return [summary(taken) for taken in times]


class Memory(LiveBytes):
    """Bytes of tensors while a block runs: of those that it makes, and of those that are `held` before."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        for tensor in held:
            self.add(tensor)
        self.before = self.live

    @property
    def grown(self) -> float:
        """The most bytes besides those that were held before."""
        return float(self.peak - self.before)


def peak_bytes(run: Callable[[], object], held: Iterable[Tensor] = ()) -> float:
    """The most bytes of tensors during a run, besides those that are held before."""
    with Memory(held) as memory:
        run()
    return memory.grown


def clock_of_steps() -> Callable[[], float]:
    """The clock for steps of a few milliseconds: on one CPU thread, its CPU time.

    Other programs on the machine change that less than the time on the wall.
    """
    alone = torch.get_num_threads() == 1 and DEVICE == "cpu"
    return time.thread_time if alone else time.perf_counter


def row(
    name: str, peer: str, unit: str, ours: float | None, theirs: float | None, target: float | None = None
) -> Row:
    """One comparison; `target` is the highest ratio that is accepted.

    `ours` is None if it was not measured, `theirs` if there is nothing to compare with.
    """
    ratio = None if ours is None or theirs is None else ours / theirs
    return {
        "name": name, "peer": peer, "unit": unit, "ours": ours, "theirs": theirs, "ratio": ratio,
        "target": target,
    }  # fmt: skip


EIGHT_BILLION = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
)  # fmt: skip
"""The shape of Llama 3 8B."""


def in_bfloat16(config: LlamaConfig, device: str) -> LlamaForCausalLM:
    """A model of random bfloat16 weights, created on its device."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def device_name() -> str:
    """The name of the GPU, or the number of CPU threads."""
    if DEVICE == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"
