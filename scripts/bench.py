"""Speed and memory against named peers, measured side by side in one run; ratios, not absolute times.

Each row prints ours, the peer's, and ours / peer. Times are the minimum of interleaved repetitions, or their
median where a row says so; FLOPs, bytes, and counts of operations and graphs are deterministic.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_extend as rx
from rope_extend.data import Document
from rope_extend.encodings import ModelShape
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


@torch.no_grad()
def hidden_states(lm: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """A forward without the head, which no patch touches."""
    return lm.model(ids, use_cache=False).last_hidden_state


def operations(lm: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Dispatched operations of a forward."""
    with Counter() as counter:
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
    for name in rx.encodings():
        try:
            patch = rx.extend(model(layers=1), 2048, name)
        except rx.RopeExtendError:  # not rotary, or needs more than a length
            continue
        encoding, one = patch.encoding, torch.arange(1)
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
        with Counter() as counter:
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
        return scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=0.125).transpose(1, 2)

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
                with Counter() as counter:
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


BENCHMARKS = {
    "linear-attention": linear_attention,
    "attention-biases": attention_biases,
    "evaluator-memory": evaluator_memory,
    "whole-curve": whole_curve,
    "patched-forward": patched_forward,
    "dynamic-cache": dynamic_cache,
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
    logging.getLogger("rope_extend").setLevel(logging.ERROR)  # what a patch tells a user is no news here
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"{device}, torch {torch.__version__}", file=sys.stderr)
    print(f"{'benchmark':<84} {'ours':>12} {'peer':>12}  ratio  peer")
    for name in arguments.names or BENCHMARKS:
        for result in BENCHMARKS[name](arguments.repetitions):
            print(
                f"{result['name']:<84} {result['ours']:>12.4g} {result['theirs']:>12.4g} "
                f"{result['ratio']:>6.3f}  {result['peer']} ({result['unit']})"
            )
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(json.dumps({**result, "device": device, "torch": torch.__version__}) + "\n")


if __name__ == "__main__":
    main()
