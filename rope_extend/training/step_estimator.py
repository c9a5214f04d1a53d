"""Counts the bytes of a training step: adapter, loss, backward pass and optimizer, on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_extend.attention.functions import acts_inside
from rope_extend.attention.packed import takes_no_mask
from rope_extend.data.choices import CONSECUTIVE
from rope_extend.loss import default_chunk_bytes, next_token_loss
from rope_extend.memory.budget import quantized_savings
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import META, DirectKernelCalls, quiet_patching
from rope_extend.memory.plan import Need, counter_of, dry_run
from rope_extend.models.decoders import decoder_layers
from rope_extend.models.planned_device import device_of
from rope_extend.training.lora import adapted, extended
from rope_extend.training.memory_options import HostOffload, MemoryOptions, apply_memory_options
from rope_extend.training.recipe import Recipe
from rope_extend.training.text_reach import TextReach

DEPTH = 2
"""Number of layers of a dry run, if all layers are equal; one more layer shows what each adds."""


@dataclass(frozen=True, kw_only=True)
class Step(Need):
    """The memory that one step needs: its peak has states of layers, logits of a chunk, and gradients.

    Attributes:
        memory_options: the options of the step; with offloaded checkpoints, `host` has them.
        quantized: whether the frozen weights have 4 bits.
    """

    memory_options: MemoryOptions
    quantized: bool

    @property
    def options(self) -> str:
        """All that is done to need less memory, as a phrase."""
        return f"{self.memory_options}, weights in 4 bits" if self.quantized else str(self.memory_options)


class StepEstimator:
    """Runs steps on a model without weights, and counts bytes. Use it as a context manager.

    Attention of the model is replaced within the context, and restored at its end.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        weights: int,
        device: torch.device,
        processes: int,
        reach: TextReach,
    ) -> None:
        self.reach = reach
        self.recipe, self.base, self.weights = recipe, model, weights
        self.device, self.quantized, self.processes = device, recipe.quantize is not None, processes
        self.dtype = model.dtype
        self.quantized_savings = quantized_savings(model, "4bit")
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.scored = 3 * max(1, default_chunk_bytes(device) // (4 * vocabulary))  # tokens of three chunks

    def __enter__(self) -> Self:
        model, packed = self.base, self.recipe.packs
        with DirectKernelCalls(), LiveBytes(scored=2):
            self.masked = packed and not takes_no_mask(model)
        config = model.config.get_text_config(decoder=True)
        flash = "flash" in config._attn_implementation
        with ExitStack() as stack:
            stack.enter_context(dry_run(model, self.device))
            with quiet_patching():
                stack.enter_context(extended(model, self.recipe))
            # Encodings that act inside attention need a mask, unless the kernel is flash attention.
            self.masked |= packed and acts_inside(model) and not flash
            loaded = sum(value.nbytes for value in model.parameters())
            self.model = adapted(model, self.recipe, self.reach).train()
            if self.recipe.full:  # what is trained is counted as such
                frozen = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
                self.weights -= loaded - frozen
            self._context = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def step(self, memory_options: MemoryOptions, tokens: int) -> Step:
        """The memory of a step after the first, when the optimizer has its moments."""
        applied = memory_options
        if self.device.type == "cpu":  # all memory is host memory
            applied = replace(memory_options, offload_checkpoints=False)
        trained, forward, backward, host = self._count(applied, tokens)
        return Step(
            weights=self.weights, trained=trained, peak=max(forward, backward), host=host,
            memory_options=memory_options, quantized=self.quantized,
        )  # fmt: skip

    def _count(self, memory_options: MemoryOptions, tokens: int) -> list[int]:
        """Bytes of what is trained; the peaks of the forward pass and after it, in addition to that and the
        weights; and bytes in host memory.

        If all layers are equal, each adds the same, so a few layers are enough.
        """
        decoder = decoder_layers(self.base)
        if decoder is None or not decoder.complete:
            return self._step(memory_options, tokens)
        parent, name, layers, _ = decoder
        # The embeddings, and the inputs of the two latest layers, are still on the device while a layer runs.
        if len(layers) <= 2 * DEPTH or not _equal_layers(self.base, layers):
            return self._step(memory_options, tokens)
        counts = []
        for depth in (DEPTH, DEPTH + 1):
            setattr(parent, name, layers[:depth])
            try:
                counts.append(self._step(memory_options, tokens))
            finally:
                setattr(parent, name, layers)
        return [few + (len(layers) - DEPTH) * (more - few) for few, more in zip(*counts, strict=True)]

    def _step(self, memory_options: MemoryOptions, tokens: int) -> list[int]:
        recipe = self.recipe
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        optimizer: Any = Moments(self.model, eight_bits=recipe.optim == "adamw_8bit")
        if recipe.optim == "adamw_torch":
            optimizer = torch.optim.AdamW(self.parameters, foreach=self.device.type == "cuda")
        counter = counter_of(self.model, self.scored)
        trainable = sum(parameter.nbytes for parameter in self.parameters)
        frozen = counter.live - trainable
        batch: dict[str, Any] = {
            "input_ids": torch.zeros(recipe.batch_size, tokens, dtype=torch.int64, device=META)
        }
        if recipe.positions != CONSECUTIVE:
            batch["position_ids"] = torch.zeros_like(batch["input_ids"])
        buckets = self.processes > 1  # those of DistributedDataParallel hold a second copy of every gradient
        offload = HostOffload()
        with (
            # Before tiles, which take over a layer's forward.
            casting_as_autocast(self.model, self.dtype) as cast,
            apply_memory_options(self.base, memory_options, offload),
            counter,
        ):
            self._gradients()
            optimizer.step()
            optimizer.zero_grad()
            held = counter.live
            if self.masked:
                _mask = torch.empty(recipe.batch_size, tokens, tokens, dtype=torch.bool, device=META)
            if recipe.gradient_accumulation > 1 or buckets:
                self._gradients()
            counter.peak = counter.live
            loss = next_token_loss(self.model, **batch)
            cast.clear()
            forward = counter.peak - held
            counter.peak = counter.live
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.parameters, recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            backward = counter.peak - held
        return [held - frozen + trainable * buckets, forward, backward, offload.host_bytes]

    def _gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)


class Moments:
    """An AdamW whose steps need no memory besides its moments: torch's fused kernel, and bitsandbytes.

    Args:
        model: its trained parameters have moments.
        eight_bits: moments of 8 bits with a scale for each 256, except of embeddings and small tensors.
    """

    def __init__(self, model: nn.Module, *, eight_bits: bool) -> None:
        self._parameters = [value for value in model.parameters() if value.requires_grad]
        whole = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        self._small = {value for value in self._parameters if eight_bits and value not in whole}
        self._held: list[Tensor] = []

    def step(self) -> None:
        """Make the moments, at the first step."""
        for value in self._parameters if not self._held else ():
            size, eight = value.numel(), value in self._small and value.numel() >= 4096
            bytes_each = size + 4 * -(-size // 256) if eight else 4 * size
            self._held += [torch.empty(bytes_each, dtype=torch.uint8, device=META) for _ in range(2)]

    def zero_grad(self) -> None:
        """Free the gradients."""
        for value in self._parameters:
            value.grad = None


def _equal_layers(model: Any, layers: nn.ModuleList) -> bool:
    """Whether all layers of a model need the same memory."""
    if len(set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())) > 1:
        return False
    kinds = {
        tuple((name, type(part), *(tuple(value.shape) for value in part.parameters(recurse=False)))
              for name, part in layer.named_modules())
        for layer in layers
    }  # fmt: skip
    return len(kinds) == 1


@contextmanager
def casting_as_autocast(model: nn.Module, dtype: torch.dtype) -> Iterator[dict[nn.Module, Tensor]]:
    """Make the layers of a bfloat16 model cast as under autocast, which the meta device lacks.

    Yields:
        The trained weights that were cast, by module; autocast keeps them until it ends.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
    casts: dict[nn.Module, Tensor] = {}
    for module in layers if dtype == torch.bfloat16 else ():
        forward: Callable[[Tensor], Tensor] = (
            partial(_multiply, module, dtype, casts)
            if isinstance(module, nn.Linear)
            else partial(_normalise, module)
        )
        module.__dict__["forward"] = forward
    try:
        yield casts
    finally:
        for module in layers:
            module.__dict__.pop("forward", None)


def _normalise(module: nn.LayerNorm, states: Tensor) -> Tensor:
    """A layer norm; on a GPU, autocast computes it in float32 and returns that."""
    if device_of(states).type != "cuda":
        return nn.LayerNorm.forward(module, states)
    weight, bias = (None if value is None else value.float() for value in (module.weight, module.bias))
    return F.layer_norm(states.float(), module.normalized_shape, weight, bias, module.eps)


def _multiply(
    module: nn.Linear, dtype: torch.dtype, casts: dict[nn.Module, Tensor], states: Tensor
) -> Tensor:
    bias = None if module.bias is None else module.bias.to(dtype)
    weight = casts.get(module, module.weight).to(dtype)
    if module.weight.requires_grad:
        casts[module] = weight
    return F.linear(states.to(dtype), weight, bias)
