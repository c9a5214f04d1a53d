"""A forward pass with a static method patched in: operations, graphs and time."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

import torch
from measuring import Row, document, model, row, timed
from transformers import LlamaForCausalLM

import rope_extend as rx
from rope_extend.encodings import RopeEncoding
from rope_extend.memory.live_bytes import LiveBytes


@torch.no_grad()
def hidden_states(lm: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """A forward without the head, which no patch changes."""
    return lm.model(ids, use_cache=False).last_hidden_state


def operations(lm: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """The number of operations that a forward dispatches."""
    with LiveBytes() as counter:
        hidden_states(lm, ids)
    return float(counter.operations)


def graphs(lm: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """The number of graphs that `torch.compile` makes of a forward: 1 without a graph break."""
    torch._dynamo.reset()
    explained = torch._dynamo.explain(hidden_states)(lm, ids)
    torch._dynamo.reset()
    return float(explained.graph_break_count + 1)


def static_methods() -> list[str]:
    """The methods that are one static table: they act in the rotary module only."""
    names = []
    for name in rx.encoding_names(RopeEncoding):
        with contextlib.suppress(rx.RopeExtendError):  # needs more than a length
            patch = rx.extend(model(layers=1), 2048, name)
            if not patch.encoding.why_not_one_table(patch.shape):
                names.append(name)
    return names


def patched_forward(repetitions: int) -> Iterator[Row]:
    """A forward with a static method patched in, compared with the unpatched model and with stock YaRN."""
    long, short = (document(length, 4096).input_ids[None] for length in (4096, 64))
    models = [model(layers=layers) for layers in (1, 2)]
    ids = short.to(models[0].device)
    names, peer = static_methods(), "unpatched"
    before = [operations(lm, ids) for lm in models]
    layer, rest = {}, {}
    for name in names:
        after = []
        for lm in models:
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
