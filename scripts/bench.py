"""Speed and memory against named peers, measured side by side in one run; ratios, not absolute times.

Each row prints ours, the peer's, and ours / peer. Times are the minimum of interleaved repetitions; FLOPs,
bytes and operation counts are deterministic.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import rope_extend as rx
from rope_extend.data import Document
from rope_extend.evaluation import perplexity

Row = dict[str, Any]


class Counter(TorchDispatchMode):
    """Counts dispatched operations and the most bytes that their results held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.live = self.peak = 0
        self.held: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held:
                    self.held.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return out

    def _forget(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.live -= size


def model(vocabulary: int = 4096, window: int = 256) -> LlamaForCausalLM:
    """A random Llama of about three million parameters, on the GPU where there is one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=192, intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=window,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def document(tokens: int, vocabulary: int) -> Document:
    """Random tokens."""
    return Document(
        "random", torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    )


def timed(*functions: Callable[[], object], repetitions: int) -> list[float]:
    """The shortest time of each function in seconds, over interleaved repetitions."""
    best = [float("inf")] * len(functions)
    for _ in range(repetitions + 1):  # the first round warms up
        for index, function in enumerate(functions):
            started = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[index] = min(best[index], time.perf_counter() - started) if _ else best[index]
    return best


def row(name: str, peer: str, unit: str, ours: float, theirs: float) -> Row:
    """One comparison."""
    return {"name": name, "peer": peer, "unit": unit, "ours": ours, "theirs": theirs, "ratio": ours / theirs}


def evaluator_memory(repetitions: int) -> Iterator[Row]:
    """Growth of peak memory per token, against computing all logits at once."""
    vocabulary, short, long = 32_768, 1024, 4096
    lm = model(vocabulary)
    text = document(long, vocabulary)

    def ours(length: int) -> None:
        perplexity(lm, [text], [length], progress=False)

    @torch.no_grad()
    def naive(length: int) -> None:
        ids = text.input_ids[None, :length].to(lm.device)
        lm(ids, labels=ids, use_cache=False)

    def growth(run: Callable[[int], None]) -> float:
        peaks = []
        for length in (short, long):
            with Counter() as counter:
                run(length)
            peaks.append(counter.peak)
        return (peaks[1] - peaks[0]) / (long - short)

    peer = "model(input_ids, labels=...)"
    yield row(
        "evaluator: peak bytes per further token, 32k vocabulary", peer, "B", growth(ours), growth(naive)
    )
    times = timed(lambda: ours(long), lambda: naive(long), repetitions=repetitions)
    yield row("evaluator: time at 4k tokens, 32k vocabulary", peer, "s", *times)


def whole_curve(repetitions: int) -> Iterator[Row]:
    """The perplexity curve at 32 lengths up to 8x the window, against one forward for each length."""
    lm, lengths = model(), [64 * step for step in range(1, 33)]
    text = document(lengths[-1], 4096)

    def ours() -> None:
        perplexity(lm, [text], lengths, progress=False)

    def loop() -> None:
        for length in lengths:
            perplexity(lm, [text], [length], progress=False)

    flops = []
    for run in (ours, loop):
        with FlopCounterMode(display=False) as counter:
            run()
        flops.append(float(counter.get_total_flops()))
    peer = "one forward per length"
    yield row("curve of 32 lengths: FLOPs", peer, "FLOP", *flops)
    yield row("curve of 32 lengths: time", peer, "s", *timed(ours, loop, repetitions=repetitions))


def patched_forward(repetitions: int) -> Iterator[Row]:
    """A forward with YaRN patched in, against the same model with stock transformers' own YaRN."""
    patched, stock = model(), model()
    rx.extend(patched, 2048)
    stock.config.rope_parameters = dict(patched.config.rope_parameters)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(stock.config)
    ids = document(2048, 4096).input_ids[None].to(patched.device)

    @torch.no_grad()
    def forward(lm: LlamaForCausalLM) -> torch.Tensor:
        return lm.model(ids, use_cache=False).last_hidden_state

    torch.testing.assert_close(forward(patched), forward(stock), rtol=0, atol=1e-3)
    operations = []
    for lm in (patched, stock):
        with Counter() as counter:
            forward(lm)
        operations.append(float(counter.operations))
    yield row("patched forward: dispatched operations", "stock yarn", "ops", *operations)
    times = timed(lambda: forward(patched), lambda: forward(stock), repetitions=repetitions)
    yield row("patched forward: time at 2k tokens", "stock yarn", "s", *times)


BENCHMARKS = {
    "evaluator-memory": evaluator_memory,
    "whole-curve": whole_curve,
    "patched-forward": patched_forward,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="timed repetitions of each side (default: 7)"
    )
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON lines file")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if arguments.output and arguments.output.exists():
        parser.error(f"{arguments.output} exists; give another file")
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"{device}, torch {torch.__version__}", file=sys.stderr)
    print(f"{'benchmark':<58} {'ours':>12} {'peer':>12}  ratio  peer")
    for name in arguments.names or BENCHMARKS:
        for result in BENCHMARKS[name](arguments.repetitions):
            print(
                f"{result['name']:<58} {result['ours']:>12.4g} {result['theirs']:>12.4g} "
                f"{result['ratio']:>6.3f}  {result['peer']} ({result['unit']})"
            )
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps({**result, "device": device, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
