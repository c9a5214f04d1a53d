"""Attention with a bias on its logits: time and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Row, model, peak_bytes, row, timed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rope_extend as rx
from rope_extend.encodings import ModelShape


class Biased:
    """One layer's attention with a bias: ours, without bias, and with a dense bias as in the papers."""

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
        return self._attend(self.layer.config._attn_implementation)

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
        """`[heads, T, T]`, as in the code of the paper."""
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
    """Attention with a bias on its logits, compared with no bias and with a dense bias `[heads, T, T]`."""
    for method in ("alibi", "t5_bias", "kerple", "fire"):
        # FIRE is most expensive for queries beyond the trained window.
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
                peaks.append(peak_bytes(partial(case.backward, getattr(case, name))))
            exponents.append(math.log(peaks[1] / peaks[0], 4))
        yield row(f"{method}: exponent of peak bytes in the length, both ways", "dense bias", "", *exponents)
