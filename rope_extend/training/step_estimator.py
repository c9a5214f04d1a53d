"""Counts the bytes of a training step: adapter, loss, backward pass and optimizer, on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_extend.attention.functions import acts_inside
from rope_extend.attention.packed import takes_no_mask
from rope_extend.attention.split_window import current_split
from rope_extend.data.choices import CONSECUTIVE
from rope_extend.evaluation.forward_plan import planned_split
from rope_extend.loss import IGNORED, default_chunk_bytes, hidden_states, mean_loss, next_token_loss, shifted
from rope_extend.memory.budget import quantized_savings
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import META, DirectKernelCalls, dry_run, of_all_layers, quiet_patching
from rope_extend.memory.plan import MemoryEstimate, counter_of
from rope_extend.models.planned_device import device_of
from rope_extend.training.lora import TextReach, adapted, extended
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options, replaced
from rope_extend.training.recipe import Recipe
from rope_extend.training.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class StepEstimate(MemoryEstimate):
    """The memory that one step needs: its peak has states of layers, logits of a chunk, and gradients.

    `host` has offloaded checkpoints.
    """

    memory_options: MemoryOptions
    quantized: bool

    @property
    def parts(self) -> list[str]:
        """All that is done to need less memory, in words."""
        return self.memory_options.parts + ["quantize: 4bit"] * self.quantized

    @property
    def options(self) -> str:
        """The parts as a phrase."""
        return ", ".join(self.parts) or "none needed"


class StepEstimator:
    """Runs steps on a model without weights, and counts bytes of one process.

    It replaces attention of the model until `stack` is closed.
    """

    def __init__(
        self, stack: ExitStack, recipe: Recipe, model: Any, weights: int, device: torch.device,
        sharding: Sharding, reach: TextReach,
    ) -> None:  # fmt: skip
        self.recipe, self.base, self.weights, self.device = recipe, model, weights, device
        self.sharding, self.reach, self.dtype = sharding, reach, model.dtype
        self.quantized_savings = quantized_savings(model, "4bit")
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self.scored = 3 * max(1, default_chunk_bytes(device) // (4 * vocabulary))  # tokens of three chunks
        with DirectKernelCalls(), LiveBytes(scored=2):
            masked = recipe.packs and not takes_no_mask(model)
        config = model.config.get_text_config(decoder=True)
        stack.enter_context(dry_run(model, device))
        with quiet_patching():
            stack.enter_context(extended(model, recipe))
        # Encodings that act inside attention need a mask, unless the kernel is flash attention.
        masked |= acts_inside(model) and "flash" not in config._attn_implementation
        self.masked = recipe.packs and masked
        loaded = sum(value.nbytes for value in model.parameters())
        self.model = adapted(model, recipe, reach).train()
        if recipe.full:  # what is trained is counted as such
            frozen = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
            self.weights -= loaded - frozen
        stack.enter_context(planned_split(model, recipe.split_window))

    def step(self, memory_options: MemoryOptions, tokens: int) -> StepEstimate:
        """The memory of a step after the first, when the optimizer has its moments."""
        applied = memory_options
        if self.device.type == "cpu":  # all memory is host memory
            applied = replace(memory_options, offload_checkpoints=False)
        # Bytes of what is trained, with its moments; the peaks of forward pass, backward pass and update, in
        # addition to that and the weights; and bytes in host memory.
        trained, forward, backward, update, host = of_all_layers(
            self.base, partial(self._step, applied, tokens)
        )
        step = StepEstimate(
            weights=self.weights, trained=trained, peak=max(forward, backward, update), host=host,
            memory_options=memory_options, quantized=self.recipe.quantize is not None,
        )  # fmt: skip
        if not self.sharding.weights:
            return step

        def share(size: int) -> int:
            return -(-size // self.sharding.ranks)

        peak = max(max(forward, backward) + self.gathered(gradients=True), share(update))
        return replace(step, weights=share(step.weights), trained=share(trained), peak=peak)

    def gathered(self, *, gradients: bool) -> int:
        """Bytes that FSDP2 gathers at a time: weights outside the layers, and those of two layers.

        While a layer computes, the next is gathered; its gradients are whole until they are averaged.
        """
        layers = [part for part in self.model.modules() if type(part).__name__ in self.base._no_split_modules]
        inside = [[*layer.parameters()] for layer in layers]
        outside = set(self.model.parameters()).difference(*inside)
        sizes = [
            sum(each.nbytes * (2 if gradients and each.requires_grad else 1) for each in layer)
            for layer in inside
        ]
        return sum(each.nbytes for each in outside) + 2 * max(sizes, default=0)

    def _step(self, memory_options: MemoryOptions, tokens: int) -> list[int]:
        recipe, sharding, pinned = self.recipe, self.sharding, _PinnedBytes()
        optimizer, hooks = _Optimizer(self.model, recipe, self.device), ExitStack()
        shares: dict[Tensor, Tensor] = {}
        counter = counter_of(self.model, self.scored)
        size = sum(parameter.nbytes for parameter in optimizer.parameters)
        frozen = counter.live - size
        buckets = sharding.ranks > 1 and not sharding.weights  # DDP's hold a second copy of every gradient

        def keep_share(parameter: Tensor) -> None:
            """What FSDP2 does with a gradient."""
            parameter.grad = None
            if parameter not in shares:
                shares[parameter] = parameter.new_empty(-(-parameter.numel() // sharding.ranks))

        with (
            hooks,
            # Before tiles, which take over a layer's forward.
            casting_as_autocast(self.model, self.dtype) as casts,
            apply_memory_options(self.base, memory_options, lambda pin_memory: pinned),
            counter,
        ):
            for _ in range(2):  # the first update makes the moments
                counter.peak = counter.live
                optimizer.make_gradients()
                optimizer.update()
                self.model.zero_grad()
            held = counter.live
            updating = counter.peak - held
            if self.masked:
                _mask = torch.empty(recipe.batch_size, tokens, tokens, dtype=torch.bool, device=META)
            if buckets or recipe.gradient_accumulation > 1:
                optimizer.make_gradients()
            for parameter in optimizer.parameters if sharding.weights else ():
                hooks.callback(parameter.register_post_accumulate_grad_hook(keep_share).remove)  # type: ignore[no-untyped-call]
                if parameter.grad is not None:
                    keep_share(parameter)
            counter.peak = counter.live
            ids = torch.zeros(recipe.batch_size, tokens, dtype=torch.int64, device=META)
            loss = self._loss(ids)
            casts.clear()
            forward = counter.peak - held
            counter.peak = counter.live
            loss.backward()  # type: ignore[no-untyped-call]
            backward = counter.peak - held
            self.model.zero_grad()
            shares.clear()
        return [held - frozen + size * buckets, forward, backward, updating, pinned.count]

    def _loss(self, ids: Tensor) -> Tensor:
        """The loss of a batch; of a split window, that of the tokens of this process."""
        sampled = self.recipe.positions != CONSECUTIVE
        inputs: dict[str, Any] = {"position_ids": torch.zeros_like(ids)} if sampled else {}
        split = current_split(self.base)
        if split is None:
            return next_token_loss(self.model, ids, **inputs)
        with split.own_share() as processes:
            hidden = hidden_states(self.model, ids, **inputs)
        return mean_loss(self.model, hidden, processes.own(shifted(ids), fill=IGNORED))


class _Optimizer:
    """AdamW with its gradients. Torch's fused kernel and bitsandbytes need no memory besides the moments."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: torch.device) -> None:
        self.parameters = [value for value in model.parameters() if value.requires_grad]
        self.moments, self.small = list[Tensor](), recipe.optim == "adamw_8bit"
        self.own = None
        if recipe.optim == "adamw_torch":
            self.own = torch.optim.AdamW(self.parameters, foreach=device.type == "cuda")
        self.embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}

    def make_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def update(self) -> None:
        """Clip the gradients, and make a step."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if self.own is not None:
            self.own.step()
        elif not self.moments:
            sizes = [2 * self._moment(value) for value in self.parameters]
            self.moments = [torch.empty(size, dtype=torch.uint8, device=META) for size in sizes]

    def _moment(self, value: Tensor) -> int:
        """Bytes of a moment. bitsandbytes has 8 bits with a scale for each 256, except for some tensors."""
        size = value.numel()
        small = self.small and size >= 4096 and value not in self.embeddings
        return size + 4 * -(-size // 256) if small else 4 * size


class _PinnedBytes:
    """`save_on_cpu` of a dry run: counts pinned memory. Torch rounds each tensor up to a power of two."""

    count = 0

    def pack_hook(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.count += 1 << (tensor.nbytes - 1).bit_length()
        return tensor.shape, tensor.dtype

    def unpack_hook(self, kept: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(kept[0], dtype=kept[1], device=META)


@contextmanager
def casting_as_autocast(model: nn.Module, dtype: torch.dtype) -> Iterator[dict[nn.Module, Tensor]]:
    """Make the layers of a bfloat16 model cast as under autocast, which the meta device lacks.

    Yields:
        The trained weights that were cast, by module; autocast keeps them until it ends.
    """
    casts: dict[nn.Module, Tensor] = {}
    layers = [part for part in model.modules() if isinstance(part, nn.Linear | nn.LayerNorm)]
    forwards: dict[nn.Module, Callable[..., Tensor]] = {
        part: partial(_multiply, part, casts) if isinstance(part, nn.Linear) else partial(_normalise, part)
        for part in layers
    }
    with replaced("forward", forwards if dtype == torch.bfloat16 else {}):
        yield casts


def _normalise(module: nn.LayerNorm, states: Tensor) -> Tensor:
    """A layer norm; on a GPU, autocast computes it in float32 and returns that."""
    if device_of(states).type != "cuda":
        return nn.LayerNorm.forward(module, states)
    weight, bias = (None if value is None else value.float() for value in (module.weight, module.bias))
    return F.layer_norm(states.float(), module.normalized_shape, weight, bias, module.eps)


def _multiply(module: nn.Linear, casts: dict[nn.Module, Tensor], states: Tensor) -> Tensor:
    bias = None if module.bias is None else module.bias.bfloat16()
    weight = casts.get(module, module.weight).bfloat16()
    if module.weight.requires_grad:
        casts[module] = weight
    return F.linear(states.bfloat16(), weight, bias)
