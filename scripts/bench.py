"""Speed and memory against named peers, measured side by side in one run; ratios, not absolute times.

Each row prints ours, the peer's, and ours / peer. Times are the minimum of interleaved repetitions, or their
median where a row says so; FLOPs, bytes, and counts of operations and graphs are deterministic.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_extend as rx
from rope_extend.data import Document
from rope_extend.encodings import ModelShape, RopeEncoding
from rope_extend.evaluation import perplexity
from rope_extend.evaluation.memory import LiveBytes
from rope_extend.evaluation.plan import operations_of
from rope_extend.hardware import Hardware
from rope_extend.loss import NextTokenLoss, next_token_loss
from rope_extend.plots import plot_by_step
from rope_extend.training.levers import TILE, Levers, expand_segments, pull
from rope_extend.training.loop import adapted
from rope_extend.training.packing import apart_without_mask, document_inputs, packed
from rope_extend.training.plan import plan_training
from rope_extend.training.recipe import Recipe
from rope_extend.training.report import RunLog

Row = dict[str, Any]


def model(vocabulary: int = 4096, window: int = 256, layers: int = 6, width: int = 192) -> LlamaForCausalLM:
    """A random Llama of about three million parameters, if nothing else is asked; on the GPU if any."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=window,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def document(tokens: int, vocabulary: int) -> Document:
    """Random tokens."""
    return Document(
        "random", torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    )


def timed(
    *functions: Callable[[], object], repetitions: int, summary: Callable[[list[float]], float] = min
) -> list[float]:
    """The time of each function in seconds, by default the shortest, over interleaved repetitions."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(repetitions + 1):  # the first round warms up
        # Every other round runs backwards, so that none always follows the same neighbour.
        for index in range(len(functions))[:: -1 if turn % 2 else 1]:
            started = time.perf_counter()
            functions[index]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[index].append(time.perf_counter() - started)
    return [summary(taken) for taken in times]


def row(
    name: str, peer: str, unit: str, ours: float | None, theirs: float | None, target: float | None = None
) -> Row:
    """One comparison; `target` is the most that the ratio may be.

    Ours is None where it was not measured, theirs where there is nothing to compare with.
    """
    ratio = None if ours is None or theirs is None else ours / theirs
    return {
        "name": name, "peer": peer, "unit": unit, "ours": ours, "theirs": theirs, "ratio": ratio,
        "target": target,
    }  # fmt: skip


def evaluator_memory(
    repetitions: int,
    cases: Sequence[tuple[int, int, int, float]] = ((2**15, 1024, 4096, 1 / 10), (2**17, 256, 1024, 1 / 20)),
) -> Iterator[Row]:
    """Growth of peak memory per token, and time, against computing all logits at once.

    `cases`: tokens in the vocabulary, two lengths, and the target of the growth.
    """
    for vocabulary, short, long, target in cases:
        lm = model(vocabulary)
        text = document(long, vocabulary)

        def ours(length: int, lm: LlamaForCausalLM = lm, text: Document = text) -> None:
            perplexity(lm, [text], [length], progress=False)

        @torch.no_grad()
        def naive(length: int, lm: LlamaForCausalLM = lm, text: Document = text) -> None:
            ids = text.input_ids[None, :length].to(lm.device)
            lm(ids, labels=ids, use_cache=False)

        def growth(run: Callable[[int], None], short: int = short, long: int = long) -> float:
            peaks = []
            for length in (short, long):
                with LiveBytes() as counter:
                    run(length)
                peaks.append(counter.peak)
            return (peaks[1] - peaks[0]) / (long - short)

        peer, size = "model(input_ids, labels=...)", f"{vocabulary // 1024}k vocabulary"
        grown = growth(ours), growth(naive)
        yield row(f"evaluator: peak bytes per further token, {size}", peer, "B", *grown, target)
        times = timed(lambda: ours(long), lambda: naive(long), repetitions=repetitions)  # noqa: B023
        yield row(f"evaluator: time at {long} tokens, {size}", peer, "s", *times, 1.0)


def evaluator_agreement(repetitions: int, vocabulary: int = 32_768, length: int = 1024) -> Iterator[Row]:
    """The greatest difference of a token's loss from the naive loop's, which has all logits in float32."""
    lm, text = model(vocabulary), document(length, vocabulary)
    ids = text.input_ids.to(lm.device)
    with torch.no_grad():
        logits = lm(ids[None], use_cache=False).logits[0, :-1].float()
        naive = F.cross_entropy(logits, ids[1:], reduction="none").cpu().numpy()
    for how, chunk in (("whole", None), ("in pieces", length // 4)):
        result = perplexity(lm, [text], [length], chunk=chunk, save_losses=True, progress=False)
        gap = float(abs(result.losses[length][0] - naive).max())
        yield row(f"evaluator: difference of a token's loss, {how}", "the target", "nat", gap, 1e-5, 1.0)


def whole_curve(repetitions: int, window: int = 64, count: int = 64, reach: int = 32) -> Iterator[Row]:
    """The perplexity curve up to 32x the window, against one forward per length, and the longest alone."""
    lm = model(window=window)
    lengths = [window * reach * step // count for step in range(1, count + 1)]
    text = document(lengths[-1], 4096)

    def ours() -> None:
        perplexity(lm, [text], lengths, progress=False)

    def loop() -> None:
        for length in lengths:
            perplexity(lm, [text], [length], progress=False)

    def longest() -> None:
        perplexity(lm, [text], lengths[-1:], progress=False)

    flops = []
    for run in (ours, loop):
        with FlopCounterMode(display=False) as counter:
            run()
        flops.append(float(counter.get_total_flops()))
    peer, what = "one forward per length", f"curve of {count} lengths to {reach}x the window"
    yield row(f"{what}: FLOPs", peer, "FLOP", *flops, 1 / 20)
    few = max(1, repetitions // 3)  # the loop takes long, and the ratio is far from the target
    yield row(f"{what}: time", peer, "s", *timed(ours, loop, repetitions=few), 1 / 15)
    alone = timed(ours, longest, repetitions=max(repetitions, 7))
    yield row(f"{what}: time", "the longest alone", "s", *alone, 1.05)


EIGHT_BILLION = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500_000.0,
)  # fmt: skip
"""Llama 3's shape."""
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Operations per second in bfloat16 without sparsity, by the makers' data sheets."""


def in_bfloat16(config: LlamaConfig, device: str) -> LlamaForCausalLM:
    """A model of random weights, made where it is used."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def evaluator_8b(
    repetitions: int, config: LlamaConfig = EIGHT_BILLION, lengths: tuple[int, int] = (131_072, 1_048_576),
    device: str | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A model of 8 billion random weights in bfloat16: a whole curve, and a window of a million tokens.

    On a GPU. The attention kernels are those that a user gets.
    """
    device = device or ("cuda" if torch.cuda.is_available() else None)
    first, second = lengths
    curve = [first * step // 64 for step in range(1, 65)]
    name = f"{'8B' if config is EIGHT_BILLION else 'small'} model, bfloat16: %s at {first:,} tokens"
    million = f"{name.partition(':')[0]}: time at {second:,} tokens"
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).to(torch.bfloat16)
    flops = operations_of(empty).of(first)
    if device is None:
        for what, target, unit, limit in (
            (name % "time of a curve of 64 lengths", "16 s", "s", 16.0),
            (name % "peak memory beside the weights", "20 GB", "B", 20e9),
            (million, "finishes", "s", None),
        ):
            yield row(what, target, unit, None, limit, limit and 1.0)
        return
    lm = in_bfloat16(config, device)
    weights = sum(parameter.nbytes for parameter in lm.parameters())
    text = document(second, config.vocab_size)

    def run(lengths: list[int]) -> tuple[float, float]:
        """Seconds, and peak bytes beside the weights."""
        if device == "cuda":
            result = perplexity(lm, [text], lengths, progress=False)
            return result.seconds, result.peak_memory_bytes - weights
        memory = LiveBytes()
        for parameter in lm.parameters():
            memory.add(parameter)
        with memory:
            result = perplexity(lm, [text], lengths, progress=False)
        return result.seconds, memory.peak - weights

    runs = [run(curve) for _ in range(max(2, min(repetitions, 3)))]  # the first one warms up
    seconds, memory = min(taken for taken, _ in runs[1:]), max(held for _, held in runs)
    yield row(name % "time of a curve of 64 lengths", "16 s", "s", seconds, 16.0, 1.0)
    peak = next((rate for gpu, rate in PEAK.items() if gpu in _device_name()), None)
    if peak is not None:
        share = "40 % of the device's peak FLOP/s"
        yield row(name % "time of a curve of 64 lengths", share, "s", seconds, flops / (0.4 * peak), 1.0)
    yield row(name % "peak memory beside the weights", "20 GB", "B", memory, 20e9, 1.0)
    yield row(million, "finishes", "s", run([second])[0], None)


@torch.no_grad()
def hidden_states(lm: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """A forward without the head, which no patch touches."""
    return lm.model(ids, use_cache=False).last_hidden_state


def operations(lm: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Dispatched operations of a forward."""
    with LiveBytes() as counter:
        hidden_states(lm, ids)
    return float(counter.operations)


def graphs(lm: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Into how many graphs `torch.compile` cuts a forward: 1 without a break."""
    torch._dynamo.reset()
    explained = torch._dynamo.explain(hidden_states)(lm, ids)
    torch._dynamo.reset()
    return float(explained.graph_break_count + 1)


def static_methods() -> list[str]:
    """The methods that are no more than another table: they act in the rotary module and nowhere else."""
    names = []
    for name in rx.encodings(RopeEncoding):
        try:
            patch = rx.extend(model(layers=1), 2048, name)
        except rx.RopeExtendError:  # needs more than a length
            continue
        encoding, one = patch.encoding, torch.arange(1)
        assert isinstance(encoding, RopeEncoding)
        inside = encoding.rotates_in_attention or encoding.logit_scale(patch.shape, one) is not None
        if not inside and not encoding.depends_on_length:
            names.append(name)
    return names


def patched_forward(repetitions: int) -> Iterator[Row]:
    """A forward with a static method patched in, against the model unpatched and against stock YaRN."""
    long, short = (document(length, 4096).input_ids[None] for length in (4096, 64))
    plain = [model(layers=layers) for layers in (1, 2)]
    ids = short.to(plain[0].device)
    names, peer = static_methods(), "unpatched"
    before = [operations(lm, ids) for lm in plain]
    layer, rest = {}, {}
    for name in names:
        after = []
        for lm in plain:
            with rx.extend(lm, 2048, name):
                after.append(operations(lm, ids))
        layer[name] = after[1] - after[0]
        rest[name] = after[0] - layer[name]
    stock_layer = before[1] - before[0]
    worst = max(layer.values(), key=lambda count: abs(count - stock_layer))
    every = f"the furthest of {len(names)} static methods"
    yield row(f"patched forward: operations per layer, {every}", peer, "ops", worst, stock_layer)
    yield row(
        f"patched forward: operations outside the layers, {every}", peer, "ops",
        max(rest.values()), before[0] - stock_layer,
    )  # fmt: skip

    unpatched, patched, stock = (model(width=384, layers=2) for _ in range(3))
    rx.extend(patched, 4096)
    stock.config.rope_parameters = dict(patched.config.rope_parameters)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(stock.config).to(stock.device)
    ids = long.to(patched.device)
    torch.testing.assert_close(hidden_states(patched, ids), hidden_states(stock, ids), rtol=0, atol=2e-3)
    yield row(
        "patched forward: graphs under torch.compile", peer, "graphs", graphs(patched, ids),
        graphs(unpatched, ids),
    )  # fmt: skip
    ours, theirs, yarn = timed(
        *(lambda lm=lm: hidden_states(lm, ids) for lm in (patched, unpatched, stock)),
        repetitions=max(repetitions, 7),
        summary=statistics.median,
    )
    yield row("patched forward: median time at 4k tokens", peer, "s", ours, theirs)
    yield row("patched forward: median time at 4k tokens", "stock yarn", "s", ours, yarn)


def tensors_of(cache: Cache) -> float:
    """Bytes of every tensor that a cache object and its layers hold."""
    storages = {}
    for owner in (cache, *cache.layers):
        for tensor in tree_leaves(list(vars(owner).values())):
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return float(sum(storages.values()))


CONTEXTS = (512, 2048, 8192)
STEPS = 8


def dynamic_cache(repetitions: int) -> Iterator[Row]:
    """Decoding with keys cached unrotated and rotated when they are read, against the model unpatched.

    From a cache of the context, in steps of one token. The smallest context is the trained window: its first
    token reads by another table than those before.
    """
    window, target = CONTEXTS[0], 2 * CONTEXTS[-1]
    stock = model(window=window, width=384, layers=4)
    text = document(CONTEXTS[-1] + STEPS, 4096).input_ids[None].to(stock.device)

    @torch.no_grad()
    def decode(lm: LlamaForCausalLM, cache: Cache, context: int) -> torch.Tensor:
        """Logits of STEPS tokens after the context, which the cache holds before and after."""
        steps = [
            lm(text[:, at, None], past_key_values=cache, use_cache=True).logits
            for at in range(context, context + STEPS)
        ]
        cache.crop(-STEPS)
        return torch.cat(steps, dim=1)

    @torch.no_grad()
    def prefill(lm: LlamaForCausalLM, context: int) -> Cache:
        return lm(text[:, :context], use_cache=True, logits_to_keep=1).past_key_values

    def peak(lm: LlamaForCausalLM, cache: Cache, context: int) -> float:
        with LiveBytes() as counter:
            decode(lm, cache, context)
        return float(counter.peak)

    # Per method, with a model of its own: the cache of one cannot be read under another.
    for method in ("dynamic_ntk", "short_original(yarn)"):
        lm = model(window=window, width=384, layers=4)
        rx.extend(lm, target, method)
        for context in CONTEXTS:
            ours, theirs = prefill(lm, context), prefill(stock, context)
            where, peer = f"{method}: %s at {context} tokens", "stock cache, unpatched"
            yield row(where % "cache", peer, "B", tensors_of(ours), tensors_of(theirs))
            if context < CONTEXTS[-1]:  # what is timed is right: as one forward over the whole text
                with torch.no_grad():
                    whole = lm(text[:, : context + STEPS], use_cache=False, logits_to_keep=STEPS).logits
                torch.testing.assert_close(decode(lm, ours, context), whole, rtol=0, atol=1e-3)
            yield row(
                where % "peak of a step", peer, "B", peak(lm, ours, context), peak(stock, theirs, context)
            )
            times = timed(
                lambda lm=lm, ours=ours, context=context: decode(lm, ours, context),
                lambda theirs=theirs, context=context: decode(stock, theirs, context),
                repetitions=max(repetitions, 7),
                summary=statistics.median,
            )
            yield row(where % "median time of a token", peer, "s", *(taken / STEPS for taken in times))
        times = timed(
            lambda lm=lm: prefill(lm, CONTEXTS[1]),
            lambda: prefill(stock, CONTEXTS[1]),
            repetitions=repetitions,
        )
        yield row(f"{method}: time to prefill {CONTEXTS[1]} tokens", peer, "s", *times)


def training_loss(repetitions: int) -> Iterator[Row]:
    """The loss of a window and its gradient, against all logits at once and against TRL's loss in tiles.

    On a model without layers, so that little else is measured; what it trains is its last norm, which wants
    the gradient of the hidden states as LoRA does, or its head too. Bytes are those of tensors that exist
    beside the weights. Of a trained head its gradient is the most of ours, so what it is to all logits
    depends on the tokens for each channel: here 5 at 128k vocabulary, as an 8B Llama has at 22k tokens.
    """
    has_trl = importlib.util.find_spec("trl") is not None
    if not has_trl:
        print("training loss: TRL is not installed, so there are no rows against it", file=sys.stderr)
    for vocabulary in (2**15, 2**17):
        tokens = 2**27 // vocabulary
        for trained in ("norm", "norm, lm_head"):
            lm = model(vocabulary, layers=0, width=192)
            lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())  # not tied
            for name, parameter in lm.named_parameters():
                parameter.requires_grad_(name.split(".")[-2] in trained)
            ids = document(tokens, vocabulary).input_ids[None].to(lm.device)
            losses: dict[str, Callable[[], torch.Tensor]] = {
                "ours": lambda lm=lm, ids=ids: next_token_loss(lm, ids),
                "model(input_ids, labels=...)": lambda lm=lm, ids=ids: lm(ids, labels=ids).loss,
            }
            if has_trl:
                from trl.trainer.utils import add_fused_lm_head

                tiled = model(vocabulary, layers=0, width=192)  # of its own: TRL exchanges its forward
                tiled.model.embed_tokens, tiled.model.norm = lm.model.embed_tokens, lm.model.norm
                tiled.lm_head = lm.lm_head
                add_fused_lm_head(tiled)
                losses["TRL"] = lambda tiled=tiled, ids=ids: tiled(ids, labels=ids, fused_lm_head=True).loss

            def step(loss: Callable[[], torch.Tensor], lm: LlamaForCausalLM = lm) -> dict[str, torch.Tensor]:
                value = loss()
                value.backward()
                found = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
                lm.zero_grad()
                return {"loss": value.detach(), **found}

            def peak(loss: Callable[[], torch.Tensor], lm: LlamaForCausalLM = lm) -> float:
                with LiveBytes() as counter:
                    for parameter in lm.parameters():
                        counter.add(parameter)
                    before = counter.live
                    step(loss)
                return float(counter.peak - before)

            expected = step(losses["model(input_ids, labels=...)"])
            for name in ("ours", *(["TRL"] if has_trl else [])):
                for key, value in step(losses[name]).items():
                    torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
            head = "trained" if "lm_head" in trained else "frozen"
            where = f"loss and gradient, {head} head, {tokens} tokens, {vocabulary // 1024}k vocabulary"
            peaks = {name: peak(loss) for name, loss in losses.items()}
            times = timed(
                *(lambda loss=loss: step(loss) for loss in losses.values()), repetitions=repetitions
            )
            for (name, bytes_held), seconds in list(zip(peaks.items(), times, strict=True))[1:]:
                most, longest = (0.7, 1.0) if name == "TRL" else (0.2, None)
                yield row(f"{where}: peak", name, "B", peaks["ours"], bytes_held, most)
                yield row(f"{where}: time", name, "s", times[0], seconds, longest)


NO_LEVERS = Levers()
PLAN = Recipe("model", "data", "runs/bench", 1024, lora_targets="all-linear", method="none")
"""Of the training benchmarks: LoRA of rank 16 on all linear layers; no extension, for the peers have none."""


class Trained:
    """Steps of one model: LoRA as `finetune` trains it or as `Trainer` and peft do, or all weights."""

    def __init__(self, lm: LlamaForCausalLM, *, full: bool = False, targets: str = PLAN.lora_targets) -> None:
        self.lm, self.dtype = lm, lm.dtype
        self.model = (lm if full else adapted(lm, replace(PLAN, lora_targets=targets))).train()
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.objective = NextTokenLoss(self.model)
        self.trainer: Trainer | None = None

    def ours(self, ids: torch.Tensor) -> torch.Tensor:
        return self.objective(ids)

    def theirs(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss as Trainer computes it."""
        if self.trainer is None:
            with tempfile.TemporaryDirectory() as directory:
                arguments = TrainingArguments(directory, report_to="none", use_cpu=ids.device.type == "cpu")
                self.trainer = Trainer(self.model, arguments)
        return self.trainer.compute_loss(self.model, {"input_ids": ids, "labels": ids})

    def loss(self, how: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return how(ids)

    def step(
        self, ids: torch.Tensor, levers: Levers = NO_LEVERS,
        how: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        with pull(self.lm, levers):
            self.loss(how or self.ours, ids).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self, how: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, levers: Levers) -> float:
        """Bytes for each token that exist at the end of the forward pass beside the weights."""
        with pull(self.lm, levers), LiveBytes() as memory:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                memory.add(tensor)
            before = memory.live
            loss = self.loss(how, ids)
            kept = memory.live - before
        del loss
        return kept / ids.numel()

    def peak(self, how: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, levers: Levers) -> float:
        """The most bytes in a step, the weights included; infinite where there are not so many."""
        if ids.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                self.step(ids, levers, how)
            except torch.OutOfMemoryError:
                self.optimizer.zero_grad()
                return math.inf
            return float(torch.cuda.max_memory_allocated())
        with LiveBytes() as memory:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                memory.add(tensor)
            self.step(ids, levers, how)
        return float(memory.peak)


def training_step(repetitions: int, tokens: int = 1024, layers: int = 2, width: int = 1536) -> Iterator[Row]:
    """A step of LoRA against one of all weights, and what it keeps against Trainer with peft.

    LoRA's matrices of rank 16 weigh less beside wider ones, so the times are those of a wide model: three
    quarters of a 1B Llama's width.
    """
    ids = document(tokens, 4096).input_ids[None].to(model().device)
    cases = {
        "LoRA on attention": Trained(model(layers=layers, width=width), targets="attention"),
        "LoRA on all-linear": Trained(model(layers=layers, width=width)),
        "all weights": Trained(model(layers=layers, width=width), full=True),
    }
    for levers in (Levers(), Levers(True)):
        *ours, theirs_of_all = timed(
            *(lambda case=case, levers=levers: case.step(ids, levers) for case in cases.values()),
            repetitions=repetitions,
        )
        how = "gradient checkpointing" if levers.gradient_checkpointing else "no levers"
        for name, seconds in zip(cases, ours, strict=False):
            yield row(
                f"training: time of a step, {name}, {how}", "all weights", "s", seconds, theirs_of_all, 0.8
            )
    cases.clear()
    lora = Trained(model(width=384))
    torch.testing.assert_close(lora.ours(ids), lora.theirs(ids), rtol=1e-5, atol=1e-5)
    peer = "Trainer + peft"
    theirs = lora.kept(lora.theirs, ids, Levers()), lora.peak(lora.theirs, ids, Levers())
    for levers in (Levers(), Levers(True), Levers(True, 128)):
        ours = lora.kept(lora.ours, ids, levers), lora.peak(lora.ours, ids, levers)
        name = f"training: %s, {levers if levers != Levers() else 'no levers'}"
        yield row(
            name % "bytes kept for backward per token", peer, "B", ours[0], theirs[0],
            1 / 4 if levers.mlp_tiles else None,
        )  # fmt: skip
        yield row(name % "peak of a step", peer, "B", ours[1], theirs[1])
    times = timed(
        lambda: lora.step(ids, Levers(True, 128)), lambda: lora.step(ids, Levers(True)),
        repetitions=repetitions,
    )  # fmt: skip
    yield row("training: time of a step, MLP in tiles", "checkpointing alone", "s", *times)


def packed_documents(repetitions: int, tokens: int = 4096, count: int = 8) -> Iterator[Row]:
    """Loss and gradient of a block of documents laid side by side, against the same under a mask."""
    lm = model().train()
    size = tokens // count
    block = packed(list(torch.split(document(tokens, 4096).input_ids, size)))
    ids, labels, places = (block[name][None].to(lm.device) for name in ("input_ids", "labels", "places"))

    def step(way: AbstractContextManager[None]) -> float:
        with way:
            loss = next_token_loss(lm, ids, labels, **document_inputs(lm, places, restarts=True))
        loss.backward()
        lm.zero_grad()
        return loss.item()

    ways: list[Callable[[], AbstractContextManager[None]]] = [lambda: apart_without_mask(lm), nullcontext]
    ours, theirs = (step(way()) for way in ways)
    assert math.isclose(ours, theirs, rel_tol=1e-5)
    peaks = []
    for way in ways:
        with LiveBytes() as memory:
            for parameter in lm.parameters():
                memory.add(parameter)
            before = memory.live
            step(way())
        peaks.append(memory.peak - before)
    name, peer = f"{count} documents in a block of {tokens} tokens: %s", "transformers' mask"
    times = timed(*(lambda way=way: step(way()) for way in ways), repetitions=repetitions)
    yield row(name % "time of loss and gradient", peer, "s", *times)
    yield row(name % "peak", peer, "B", *peaks)


def training_8b(
    repetitions: int, config: LlamaConfig = EIGHT_BILLION, tokens: int = 32_768, device: str | None = None,
    limit: float = math.inf, tile: int = TILE,
) -> Iterator[Row]:  # fmt: skip
    """LoRA of a model of 8 billion random weights in bfloat16: the longest window, and what offloading costs.

    On a GPU. The peer's longest window is searched; ours is looked for from where the plan has it, downwards.

    Args:
        repetitions: of the timed steps.
        config: of the model.
        tokens: where offloading is timed.
        device: by default the GPU.
        limit: bytes to be had where the device is a CPU.
        tile: tokens in a tile of an MLP.
    """
    device = device or ("cuda" if torch.cuda.is_available() else None)
    name = f"{'8B' if config is EIGHT_BILLION else 'small'} model, bfloat16 LoRA: "
    longest, peer = name + "longest window that trains", "transformers + peft"
    overhead = name + f"time of a step of {tokens:,} tokens, checkpoints offloaded"
    if device is None:
        yield row(longest, peer, "tokens", None, None)
        yield row(overhead, "not offloaded", "s", None, None, 1.03)
        return
    expand_segments("auto")
    case = Trained(in_bfloat16(config, device))

    def fits(length: int, how: Callable[[torch.Tensor], torch.Tensor], levers: Levers) -> bool:
        ids = document(length, config.vocab_size).input_ids[None].to(device)
        return case.peak(how, ids, levers) < limit

    theirs, step, every = 0, tile, Levers(True, tile, True)
    while fits(theirs + step, case.theirs, Levers()):  # to powers of two
        theirs, step = theirs + step, theirs + step
    while step > tile // 4:  # and between the last two
        step //= 2
        theirs += step * fits(theirs + step, case.theirs, Levers())
    hardware = Hardware(device, dtype=torch.bfloat16, limit_memory=None if limit == math.inf else int(limit))
    foretold = plan_training(
        replace(PLAN, target_length=2**22), hardware=hardware, model=case.lm, levers=every
    )
    assert foretold is not None
    assert foretold.most
    ours = foretold.most
    while ours > tile and not fits(ours, case.ours, every):
        ours -= max(64, ours // 32)
    yield row(longest, peer, "tokens", float(ours), float(theirs))
    yield row(longest, "the plan", "tokens", float(ours), float(foretold.most))
    ids = document(tokens, config.vocab_size).input_ids[None].to(device)
    times = timed(
        lambda: case.step(ids, every), lambda: case.step(ids, replace(every, offload_checkpoints=False)),
        repetitions=max(2, min(repetitions, 3)) if device == "cuda" else repetitions,
    )  # fmt: skip
    yield row(overhead, "not offloaded", "s", *times, 1.03)


class Biased:
    """One layer's attention with a bias: ours, plain causal, and with a dense bias as papers compute it."""

    def __init__(self, method: str, length: int, window: int) -> None:
        lm = model(window=window, layers=1, width=384)
        self.layer, self.implementation = lm.model.layers[0].self_attn, lm.config._attn_implementation
        generator = torch.Generator().manual_seed(0)
        self.tensors = [
            torch.randn(1, heads, length, 64, generator=generator).to(lm.device).requires_grad_()
            for heads in (6, 3, 3)
        ]
        self.positions = torch.arange(length, device=lm.device)[None]
        self.lm, self.patch = lm, rx.patch_model(lm, rx.encoding(method))
        self.learned = {} if self.patch.learned is None else self.patch.learned.of(0)

    def ours(self) -> torch.Tensor:
        self.lm.model.rotary_emb(self.tensors[0], self.positions)
        return self._attend(self.lm.config._attn_implementation)

    def causal(self) -> torch.Tensor:
        return self._attend(self.implementation)

    def _attend(self, name: str) -> torch.Tensor:
        return ALL_ATTENTION_FUNCTIONS[name](
            self.layer, *self.tensors, None, scaling=0.125, position_ids=self.positions
        )[0]

    def dense(self) -> torch.Tensor:
        q, k, v = self.tensors
        query, key = self.positions[0, :, None].float(), self.positions[0].float()
        far = (query - key).clamp(min=0)
        bias = self._dense_bias(far, query).masked_fill(key > query, -torch.inf)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=0.125).transpose(1, 2)

    def _dense_bias(self, far: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """`[heads, T, T]`, by the code of the paper."""
        encoding, learned = self.patch.encoding, self.learned
        if encoding.name == "t5_bias":
            return learned["table"][encoding.bucket(far.long())].movedim(-1, 0)
        if encoding.name == "kerple":
            r1, r2 = (learned[name].exp()[:, None, None] for name in ("r1", "r2"))
            return -r1 * torch.log1p(r2 * far)
        if encoding.name == "fire":
            reach = torch.maximum(query, learned["share"].abs() * self.patch.shape.trained_length)
            c = learned["c"].abs()
            share = torch.log1p(c * far) / (torch.log1p(c * reach) + 1e-6)
            hidden = torch.relu(share[..., None] * learned["weight1"] + learned["bias1"])
            return (hidden @ learned["weight2"].T + learned["bias2"]).movedim(-1, 0)
        return -encoding.slopes(ModelShape(6, 384, 1)).to(far)[:, None, None] * far

    def backward(self, run: Callable[[], torch.Tensor]) -> None:
        run().square().sum().backward()
        self.learned = {} if self.patch.learned is None else self.patch.learned.of(0)


def attention_biases(repetitions: int) -> Iterator[Row]:
    """Attention with a bias on its logits, against none, and against one that is dense, `[heads, T, T]`."""
    for method in ("alibi", "t5_bias", "kerple", "fire"):
        # FIRE's far queries, beyond the trained window, are its hard case.
        long, short = (Biased(method, length, window=512) for length in (4096, 2048))
        with torch.no_grad():
            torch.testing.assert_close(short.ours(), short.dense(), rtol=0, atol=1e-5)
        peers = {"plain causal": "causal", "dense bias": "dense"}
        for peer, name in peers.items():
            for case, length, what in ((long, "4k", "forward"), (short, "2k", "forward and backward")):
                runs = []
                for each in ("ours", name):
                    run = getattr(case, each)
                    runs.append(
                        torch.no_grad()(run)
                        if case is long
                        else lambda case=case, run=run: case.backward(run)
                    )
                times = timed(*runs, repetitions=repetitions)
                yield row(f"{method}: {what} at {length} tokens", peer, "s", *times)
        exponents = []
        for name, lengths in (("ours", (1024, 4096)), ("dense", (512, 2048))):
            peaks = []
            for length in lengths:
                case = Biased(method, length, window=512)
                with LiveBytes() as counter:
                    case.backward(getattr(case, name))
                peaks.append(counter.peak)
            exponents.append(math.log(peaks[1] / peaks[0], 4))
        yield row(f"{method}: exponent of peak bytes in the length, both ways", "dense bias", "", *exponents)


def linear_attention(repetitions: int) -> Iterator[Row]:
    """Decoding with a state in place of keys: the same time and bytes however long the text."""
    lm = model(layers=2)
    rx.patch_model(lm, rx.encoding("linear_attention"))
    caches, lengths = [], (1024, 65_536)
    text = document(lengths[-1] + 1, 4096).input_ids[None].to(lm.device)

    @torch.no_grad()
    def read(ids: torch.Tensor, cache: Cache | None = None) -> Cache:
        return lm(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    for length in lengths:
        caches.append(read(text[:, :length]))
    held = [
        float(
            sum(each.nbytes for layer in cache.layers for each in layer.state)
            + cache.rope_extend_positions.nbytes
        )
        for cache in (read(text[:, -1:], cache) for cache in caches)
    ]
    yield row("linear attention: cache after 64k tokens", "after 1k", "B", held[1], held[0])
    times = timed(
        *(lambda cache=cache: [read(text[:, -1:], cache) for _ in range(STEPS)] for cache in caches),
        repetitions=max(repetitions, 7),
        summary=statistics.median,
    )
    yield row(
        "linear attention: median time of a token after 64k", "after 1k", "s",
        *(taken / STEPS for taken in reversed(times)),
    )  # fmt: skip
    long, short = timed(
        lambda: read(text[:, :16_384]), lambda: read(text[:, :4096]), repetitions=min(repetitions, 3)
    )
    yield row("linear attention: time to read a token of 16k", "of 4k", "s", long / 16_384, short / 4096)


def interpolation_curve(
    repetitions: int, steps: int | None = None, pictures: Path | None = None, **changes: Any
) -> Iterator[Row]:
    """Position interpolation at 4x the window by step, and the same training without it (2306.15595).

    Runs configs/demo_1k_linear.yaml twice; `changes` are to its fields. Draws both into `pictures`.
    """
    config = Path(__file__).parent.parent / "configs" / "demo_1k_linear.yaml"
    changes |= {"steps": steps} if steps else {}
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        for method in ("linear", "none"):
            output = f"{directory}/{method}"
            recipe = rx.Recipe.from_yaml(config, {**changes, "method": method, "output_dir": output})
            rx.finetune(recipe)
            curves[method] = RunLog.read(Path(output) / "metrics.jsonl").curves
    inside, beyond = recipe.eval_lengths or ()
    base = curves["none"][0][inside]
    ours, direct = ({step: at[beyond] for step, at in found.items()} for found in curves.values())
    last = max(ours)
    name, peer = f"interpolation: perplexity at {beyond}", f"the base model's at its {inside}"
    yield row(f"{name} after {last} steps", peer, "ppl", ours[last], base, 1.0)
    below = min((step for step, value in ours.items() if value < base), default=math.inf)
    yield row("interpolation: steps until then", "the target", "steps", below, 200, 1.0)
    peer = "the same training without it"
    yield row(f"{name} before training", peer, "ppl", ours[0], direct[0])
    yield row(f"{name} after {last} steps", peer, "ppl", ours[last], direct[last], 1.0)
    if pictures:
        plot_by_step(
            {"interpolated": ours, "direct": direct},
            (f"the base model at {inside}: {base:.1f}", base),
            pictures / "interpolation_curve.png",
            title=f"Perplexity at {beyond} tokens by step",
            subtitle=f"LoRA on blocks of {beyond}, with and without position interpolation",
        )


BENCHMARKS = {
    "evaluator-memory": evaluator_memory,
    "evaluator-agreement": evaluator_agreement,
    "evaluator-8b": evaluator_8b,
    "whole-curve": whole_curve,
    "training-loss": training_loss,
    "training-step": training_step,
    "packed-documents": packed_documents,
    "training-8b": training_8b,
    "patched-forward": patched_forward,
    "dynamic-cache": dynamic_cache,
    "attention-biases": attention_biases,
    "linear-attention": linear_attention,
    "interpolation-curve": interpolation_curve,
}
DRAWN = {"interpolation-curve"}
"""Those of them that draw what they found."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="timed repetitions of each side (default: 7)"
    )
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON lines file")
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help=f"draw the curves of {', '.join(DRAWN)} into this directory",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if arguments.output and arguments.output.exists():
        parser.error(f"{arguments.output} exists; give another file")
    logging.getLogger("rope_extend").setLevel(logging.ERROR)  # what a patch tells a user is no news here
    device = _device_name()
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}", file=sys.stderr)
    print(f"{'benchmark':<84} {'ours':>12} {'peer':>12}  ratio  target  peer")
    for name in arguments.names or BENCHMARKS:
        options = {"pictures": arguments.pictures} if name in DRAWN else {}
        for result in BENCHMARKS[name](arguments.repetitions, **options):
            print(line(result), flush=True)
            if arguments.output:
                versions = {"torch": torch.__version__, "transformers": transformers.__version__}
                with arguments.output.open("a") as file:
                    file.write(json.dumps({**result, "device": device, **versions}) + "\n")


def line(result: Row) -> str:
    """A comparison as the table has it."""
    ours = "not measured" if result["ours"] is None else f"{result['ours']:.4g}"
    ratio = "yet" if result["ours"] is None else _or_dash(result["ratio"], ".3f")
    return (
        f"{result['name']:<84} {ours:>12} {_or_dash(result['theirs'], '.4g'):>12} {ratio:>6}  "
        f"{_or_dash(result['target'], '.3g'):>6}  {result['peer']} ({result['unit']})"
    )


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
