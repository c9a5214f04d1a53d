"""Training: loss, steps, packed documents, and the longest window of an 8B model."""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain

import measuring
import torch
from measuring import EIGHT_BILLION, Memory, Row, document, in_bfloat16, model, peak_bytes, row, timed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from rope_extend.attention.packed import document_inputs, packed_attention
from rope_extend.data.blocks import pack
from rope_extend.loss import next_token_loss
from rope_extend.memory.budget import available_memory, is_out_of_memory
from rope_extend.models.load_options import LoadOptions
from rope_extend.training.lora import adapted
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options
from rope_extend.training.recipe import Recipe
from rope_extend.training.step_plan import GPU_TILE, plan_training


def training_loss(repetitions: int) -> Iterator[Row]:
    """The loss of a window and its gradient, compared with all logits at once and with TRL's tiled loss.

    The model has no layers, so that little else is measured. It trains its last norm, which needs the
    gradient of the hidden states as LoRA does, or also its head. Bytes count tensors besides the weights.
    With a trained head, most of our bytes are the head's gradient. The ratio to all logits then depends on
    the tokens per channel: here 5 at 128k vocabulary, as in an 8B Llama at 22k tokens.
    """
    has_trl = importlib.util.find_spec("trl") is not None
    if not has_trl:
        print(
            "training loss: TRL is not installed, so rows that compare with it are missing", file=sys.stderr
        )
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

                tiled = model(vocabulary, layers=0, width=192)  # of its own: TRL replaces its forward
                tiled.model.embed_tokens, tiled.model.norm = lm.model.embed_tokens, lm.model.norm
                tiled.lm_head = lm.lm_head
                add_fused_lm_head(tiled)
                losses["TRL"] = lambda tiled=tiled, ids=ids: tiled(ids, labels=ids, fused_lm_head=True).loss

            def step(loss: Callable[[], torch.Tensor], lm: LlamaForCausalLM = lm) -> dict[str, torch.Tensor]:
                value = loss()
                value.backward()
                gradients = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
                lm.zero_grad()
                return {"loss": value.detach(), **gradients}

            expected = step(losses["model(input_ids, labels=...)"])
            for name in ("ours", *(["TRL"] if has_trl else [])):
                for key, value in step(losses[name]).items():
                    torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
            head = "trained" if "lm_head" in trained else "frozen"
            where = f"loss and gradient, {head} head, {tokens} tokens, {vocabulary // 1024}k vocabulary"
            peaks = {name: peak_bytes(partial(step, loss), lm.parameters()) for name, loss in losses.items()}
            times = timed(*(partial(step, loss) for loss in losses.values()), repetitions=repetitions)
            for (name, bytes_held), seconds in list(zip(peaks.items(), times, strict=True))[1:]:
                most, longest = (0.7, 1.0) if name == "TRL" else (0.2, None)
                yield row(f"{where}: peak", name, "B", peaks["ours"], bytes_held, most)
                yield row(f"{where}: time", name, "s", times[0], seconds, longest)


NO_OPTIONS = MemoryOptions()


PLAN = Recipe("model", "data", "runs/bench", 1024, lora_targets="all-linear", method="none")
"""The recipe of the training benchmarks: LoRA of rank 16 on all linear layers; as in peers, no extension."""


class Trained:
    """Training steps of one model: LoRA as in `finetune`, LoRA as in `Trainer` with peft, or all weights."""

    def __init__(self, lm: LlamaForCausalLM, *, full: bool = False, targets: str = PLAN.lora_targets) -> None:
        self.lm, self.dtype = lm, lm.dtype
        self.model = (lm if full else adapted(lm, replace(PLAN, lora_targets=targets))).train()
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.trainer: Trainer | None = None

    def ours(self, ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.model, ids)

    def theirs(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss as Trainer computes it."""
        if self.trainer is None:
            with tempfile.TemporaryDirectory() as directory:
                arguments = TrainingArguments(directory, report_to="none", use_cpu=ids.device.type == "cpu")
                self.trainer = Trainer(self.model, arguments)
        return self.trainer.compute_loss(self.model, {"input_ids": ids, "labels": ids})

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(self.model.parameters(), self.model.buffers())

    def loss(self, how: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return how(ids)

    def step(
        self, ids: torch.Tensor, memory_options: MemoryOptions = NO_OPTIONS,
        how: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        with apply_memory_options(self.lm, memory_options):
            self.loss(how or self.ours, ids).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(
        self, how: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, memory_options: MemoryOptions
    ) -> float:
        """Bytes per token at the end of the forward pass, besides the weights."""
        with apply_memory_options(self.lm, memory_options), Memory(self.tensors()) as memory:
            loss = self.loss(how, ids)
            kept = memory.live - memory.before
        del loss
        return kept / ids.numel()

    def peak(
        self, how: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, memory_options: MemoryOptions
    ) -> float:
        """Peak bytes of a step, weights included; infinite if memory runs out."""
        if ids.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                self.step(ids, memory_options, how)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.optimizer.zero_grad()
                return math.inf
            return float(torch.cuda.max_memory_allocated())
        with Memory(self.tensors()) as memory:
            self.step(ids, memory_options, how)
        return float(memory.peak)


def training_step(repetitions: int, tokens: int = 1024, layers: int = 2, width: int = 1536) -> Iterator[Row]:
    """A step of LoRA compared with one of all weights, and its memory compared with Trainer and peft.

    Matrices of rank 16 cost relatively less next to wide ones. The times are therefore those of a wide
    model: three quarters of a 1B Llama's width.
    """
    ids = document(tokens, 4096).input_ids[None].to(model().device)
    cases = {
        "LoRA on attention": Trained(model(layers=layers, width=width), targets="attention"),
        "LoRA on all-linear": Trained(model(layers=layers, width=width)),
        "all weights": Trained(model(layers=layers, width=width), full=True),
    }
    for memory_options in (MemoryOptions(), MemoryOptions(True)):
        *ours, theirs_of_all = timed(
            *(
                lambda case=case, memory_options=memory_options: case.step(ids, memory_options)
                for case in cases.values()
            ),
            repetitions=repetitions,
        )
        how = "gradient checkpointing" if memory_options.gradient_checkpointing else "no memory options"
        for name, seconds in zip(cases, ours, strict=False):
            yield row(
                f"training: time of a step, {name}, {how}", "all weights", "s", seconds, theirs_of_all, 0.8
            )
    cases.clear()
    lora = Trained(model(width=384))
    torch.testing.assert_close(lora.ours(ids), lora.theirs(ids), rtol=1e-5, atol=1e-5)
    peer = "Trainer + peft"
    theirs = lora.kept(lora.theirs, ids, MemoryOptions()), lora.peak(lora.theirs, ids, MemoryOptions())
    for memory_options in (MemoryOptions(), MemoryOptions(True), MemoryOptions(True, 128)):
        ours = lora.kept(lora.ours, ids, memory_options), lora.peak(lora.ours, ids, memory_options)
        name = f"training: %s, {memory_options if memory_options != MemoryOptions() else 'no memory options'}"
        yield row(
            name % "bytes kept for backward per token", peer, "B", ours[0], theirs[0],
            1 / 4 if memory_options.mlp_tiles else None,
        )  # fmt: skip
        yield row(name % "peak of a step", peer, "B", ours[1], theirs[1])
    times = timed(
        lambda: lora.step(ids, MemoryOptions(True, 128)), lambda: lora.step(ids, MemoryOptions(True)),
        repetitions=repetitions,
    )  # fmt: skip
    yield row("training: time of a step, MLP in tiles", "checkpointing alone", "s", *times)


def packed_documents(repetitions: int, tokens: int = 4096, count: int = 8) -> Iterator[Row]:
    """Loss and gradient of a block of packed documents, compared with the same block under a mask."""
    lm = model().train()
    size = tokens // count
    block = pack(torch.split(document(tokens, 4096).input_ids, size))
    ids, labels, positions = (
        block[name][None].to(lm.device) for name in ("input_ids", "labels", "position_ids")
    )

    def step(way: AbstractContextManager[None]) -> float:
        with way:
            loss = next_token_loss(lm, ids, labels, **document_inputs(lm, positions))
        loss.backward()
        lm.zero_grad()
        return loss.item()

    ways: list[Callable[[], AbstractContextManager[None]]] = [lambda: packed_attention(lm), nullcontext]
    ours, theirs = (step(way()) for way in ways)
    assert math.isclose(ours, theirs, rel_tol=1e-5)
    peaks = []
    for way in ways:
        peaks.append(peak_bytes(lambda way=way: step(way()), lm.parameters()))
    name, peer = f"{count} documents in a block of {tokens} tokens: %s", "transformers' mask"
    times = timed(*(lambda way=way: step(way()) for way in ways), repetitions=repetitions)
    yield row(name % "time of loss and gradient", peer, "s", *times)
    yield row(name % "peak", peer, "B", *peaks)


CARD = 24e9
"""Bytes that a GPU of 24 GB has. What a larger one has in addition is taken before the benchmark."""
OF_PLAN = 0.97
"""Share of the plan's longest window that is trained."""


def training_8b(
    repetitions: int, config: LlamaConfig = EIGHT_BILLION, tokens: int = 32_768, device: str | None = None,
    limit: float = CARD, tile: int = GPU_TILE,
) -> Iterator[Row]:  # fmt: skip
    """LoRA of a model of 8 billion random weights in bfloat16: longest window, and cost of offloading.

    Runs on a GPU. The peer's longest window is found by bisection. Ours is `OF_PLAN` of the estimate of the
    plan, tried by one step, because a step takes minutes; it counts as 0 tokens if memory runs out.

    Args:
        repetitions: number of timed steps.
        config: shape of the model.
        tokens: window at which offloading is timed.
        device: device of the model; by default the GPU.
        limit: available bytes, weights included.
        tile: tokens in a tile of an MLP.
    """
    device = device or ("cuda" if measuring.DEVICE == "cuda" else None)
    name = f"{'8B' if config is EIGHT_BILLION else 'small'} model, bfloat16 LoRA: "
    longest, peer = name + "longest window that trains", "transformers + peft"
    overhead = name + f"time of a step of {tokens:,} tokens, checkpoints offloaded"
    if device is None:
        yield row(longest, peer, "tokens", None, None)
        yield row(overhead, "not offloaded", "s", None, None, 1.03)
        return
    load_options = LoadOptions(device, dtype=torch.bfloat16)
    surplus = int(available_memory(load_options) - limit) if device == "cuda" else 0
    ballast = torch.empty(max(0, surplus), dtype=torch.uint8, device=device)
    taken = ballast.nbytes
    all_options = MemoryOptions(True, tile, True)
    with tempfile.TemporaryDirectory() as shape:
        config.save_pretrained(shape)
        plan = plan_training(  # before the peer has filled what torch keeps cached
            replace(PLAN, model=shape, target_length=2**22, **asdict(all_options)),
            load_options=replace(load_options, limit_memory=int(limit)),
        )
    assert plan is not None
    case = Trained(in_bfloat16(config, device))
    assert plan.longest_block
    grain = min(128, tile)  # kernels have trouble with odd lengths
    ours = int(OF_PLAN * plan.longest_block) // grain * grain

    def fits(length: int, how: Callable[[torch.Tensor], torch.Tensor], memory_options: MemoryOptions) -> bool:
        ids = document(length, config.vocab_size).input_ids[None].to(device)
        return case.peak(how, ids, memory_options) - taken < limit

    theirs, step = 0, grain
    while fits(theirs + step, case.theirs, MemoryOptions()):  # by powers of two
        theirs, step = theirs + step, theirs + step
    while step > grain:  # then between the last two
        step //= 2
        theirs += step * fits(theirs + step, case.theirs, MemoryOptions())
    ours *= fits(ours, case.ours, all_options)
    yield row(longest, peer, "tokens", float(ours), float(theirs))
    yield row(longest, "the plan", "tokens", float(ours), float(plan.longest_block))
    del ballast  # without offloading, the timed window may need more than the limit
    ids = document(tokens, config.vocab_size).input_ids[None].to(device)
    times = timed(
        lambda: case.step(ids, all_options),
        lambda: case.step(ids, replace(all_options, offload_checkpoints=False)),
        repetitions=max(2, min(repetitions, 3)) if device == "cuda" else repetitions,
    )  # fmt: skip
    yield row(overhead, "not offloaded", "s", *times, 1.03)
