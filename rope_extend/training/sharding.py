"""How a run is distributed over processes: by sequences, by weights, or by parts of each sequence.

=====================  ==============================================  ====================================
name                   what a process holds                            turned on by
=====================  ==============================================  ====================================
data parallel (DDP)    all weights, other sequences                    several processes
FSDP2                  a part of the weights, other sequences          `fsdp_version: 2`
context parallel       a part of the weights, a part of each sequence  FSDP2 with `cp_size`: ring attention
Ulysses                a part of each sequence, outside attention      DeepSpeed with `sp_size`
=====================  ==============================================  ====================================

A part of a sequence keeps its positions in the whole sequence. Targets are shifted before the sequence is
cut, so that the last token of a part still predicts the first of the next.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from rope_extend.encodings import RopeEncoding, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.loss import IGNORED, NextTokenLoss, causal_lm
from rope_extend.models.view import layer_types_except_full_attention
from rope_extend.patching import Patch


@dataclass(frozen=True)
class Sharding:
    """The share of a run that each process has.

    Attributes:
        weights: whether the weights are spread over the processes (FSDP2).
        context: number of processes that share each sequence by ring attention (`cp_size`).
        ulysses: number of processes that share each sequence by Ulysses (`sp_size`).
        loaded_once: whether only the first process reads the weights and sends them to the others.
        ranks: number of processes.
        rank: number of this process.
    """

    weights: bool = False
    context: int = 1
    ulysses: int = 1
    loaded_once: bool = False
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """The sharding that `accelerate` is configured for.

        Raises:
            RopeExtendError: it is none of the above, or accelerate runs with another configuration.
        """
        kind, config = accelerator.distributed_type, getattr(accelerator, "parallelism_config", None)
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not accelerator.is_fsdp2:
            if kind == DistributedType.FSDP:
                raise RopeExtendError(
                    "FSDP is configured in version 1, which is not supported; set fsdp_version: 2, as in "
                    "configs/accelerate/fsdp2.yaml"
                )
            raise RopeExtendError(
                f"FSDP is configured, but accelerate runs without it ({kind.value}), because it shards "
                "weights over GPUs. Launch it on several GPUs, or leave the config out"
            )
        if kind == DistributedType.MEGATRON_LM:
            raise RopeExtendError(
                f"fine-tuning does not support {kind.value}; use one device, DDP, FSDP2, context parallelism "
                "or Ulysses"
            )
        context, ulysses, tensor = (
            (config.cp_size, getattr(config, "sp_size", 1), config.tp_size) if config else (1, 1, 1)
        )
        if tensor > 1:
            raise RopeExtendError(
                f"fine-tuning does not support tensor parallelism (tp_size {tensor}); shard weights with "
                "FSDP2"
            )
        if kind == DistributedType.DEEPSPEED and ulysses == 1:
            raise RopeExtendError(
                "DeepSpeed is supported only for sequences that are spread over GPUs (sp_size above 1); to "
                "spread weights alone, use FSDP2: configs/accelerate/fsdp2.yaml"
            )
        if context > 1 and not accelerator.is_fsdp2:
            raise RopeExtendError("cp_size needs FSDP2 on GPUs: see configs/accelerate/context_parallel.yaml")
        if ulysses > 1 and kind != DistributedType.DEEPSPEED:
            raise RopeExtendError("sp_size needs DeepSpeed on GPUs: see configs/accelerate/ulysses.yaml")
        if ulysses > 1 and accelerator.state.deepspeed_plugin.zero_stage:
            raise RopeExtendError(
                "with sp_size each process holds all weights: set zero_stage: 0, as in "
                "configs/accelerate/ulysses.yaml; for a model that is too large for one GPU, use cp_size"
            )
        groups = config.dp_replicate_size * config.dp_shard_size if config else 1
        if ulysses > 1 and groups * ulysses != accelerator.num_processes:
            raise RopeExtendError(
                f"dp_replicate_size {groups} times sp_size {ulysses} is not the number of processes, which "
                f"is {accelerator.num_processes}; change one of the three"
            )
        return cls(
            weights=bool(accelerator.is_fsdp2),
            context=context,
            ulysses=ulysses,
            loaded_once=accelerator.is_fsdp2
            and bool(accelerator.state.fsdp_plugin.cpu_ram_efficient_loading),
            ranks=accelerator.num_processes,
            rank=accelerator.process_index,
        )

    @property
    def parts(self) -> int:
        """Number of parts into which each sequence is cut."""
        return self.context * self.ulysses

    @property
    def replicas(self) -> int:
        """Number of groups of processes with different sequences."""
        return self.ranks // self.parts

    @property
    def replica(self) -> int:
        """The group of this process; processes that share a sequence have consecutive ranks."""
        return self.rank // self.parts

    def check(
        self, patch: Patch, model: nn.Module, *, length: int, sampled: bool, masks: bool = False,
        trains_base: bool = False,
    ) -> None:  # fmt: skip
        """Refuse what does not work with this sharding, most of it with parts of a sequence.

        Args:
            patch: the patch of the model.
            model: the patched model; it may be on the meta device.
            length: tokens per sequence.
            sampled: whether positions are sampled.
            masks: whether attention is limited to documents or groups of tokens.
            trains_base: whether weights of the base model are trained, too.

        Raises:
            RopeExtendError: gives the reason, and what to do instead.
        """
        if self.loaded_once and trains_base:
            raise RopeExtendError(
                "train_norm_embed cannot be combined with fsdp_cpu_ram_efficient_loading, which separates a "
                "trained embedding from the head that is tied to it; set it to false in accelerate's config"
            )
        if self.parts == 1:
            return
        setting = f"cp_size {self.context}" if self.context > 1 else f"sp_size {self.ulysses}"
        if reason := _reason_against_parts(patch.encoding, patch.shape):
            raise RopeExtendError(
                f"{patch.encoding} cannot be computed on parts of a sequence ({setting}): {reason}. Use a "
                f"rotary method with one table, such as yarn, or train on shorter blocks without {setting}"
            )
        if sampled:
            raise RopeExtendError(
                "sampled positions make short blocks stand for long ones, which need not be cut: leave "
                f"{setting} or positions out"
            )
        if masks:
            raise RopeExtendError(
                "packing and shifted_sparse use their own attention functions, which ring attention and "
                f"Ulysses would replace: leave {setting} or them out"
            )
        config = causal_lm(model).config.get_text_config(decoder=True)
        if config._attn_implementation != "sdpa":
            raise RopeExtendError(
                f"attention over parts ({setting}) replaces sdpa, but this model uses "
                f"{config._attn_implementation}; load it with sdpa"
            )
        if kinds := layer_types_except_full_attention(config):
            raise RopeExtendError(
                f"this model has layers of type {', '.join(sorted(kinds))}, which cannot be cut into parts: "
                f"only full attention can. Train without {setting}"
            )
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        if heads[0] % self.ulysses or (heads[1] % self.ulysses and self.ulysses % heads[1]):
            raise RopeExtendError(
                f"Ulysses distributes the heads over processes, but {heads[0]} heads with {heads[1]} "
                f"key-value heads are not divisible by {setting}; use a divisor of both, or cp_size"
            )
        # Ring attention gives each process one piece of the front and one of the back, for equal work.
        pieces = self.parts * (2 if self.context > 1 else 1)
        if length % pieces:
            raise RopeExtendError(
                f"sequences of {length} tokens cannot be cut into {pieces} equal pieces ({setting}); set "
                f"block_length to a multiple of {pieces}, such as {length // pieces * pieces or pieces}"
            )

    def prepare(self, accelerator: Accelerator, *, batch_size: int) -> None:
        """Give DeepSpeed the settings that it would take from a data loader; does nothing for others."""
        if self.ulysses > 1:
            accelerator.state.deepspeed_plugin.deepspeed_config.update(
                train_micro_batch_size_per_gpu=batch_size,
                gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
                gradient_clipping=0.0,  # see Clipping
            )

    @contextmanager
    def cut(self, accelerator: Accelerator, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        """The part of a batch for this process, for the forward and backward pass in the context.

        Args:
            accelerator: the accelerator of the run.
            batch: `input_ids` and `labels`, `[B, T]`, equal on all processes that share the sequences.

        Yields:
            `input_ids`, `shift_labels`, `position_ids` and `num_items_in_batch`; the batch itself if it is
            not cut. The mean of the losses of all parts is the loss of the whole.
        """
        if self.parts == 1:
            yield dict(batch)
            return
        text = global_inputs(batch["input_ids"], batch["labels"])
        scored = (text["shift_labels"] != IGNORED).sum().clamp(min=1)
        if self.context > 1:
            buffers = list(text.values())
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
            ):
                yield {**text, "num_items_in_batch": scored / self.parts}
            return
        part = self.rank % self.parts
        inputs = {name: value.chunk(self.parts, 1)[part].contiguous() for name, value in text.items()}
        yield {**inputs, "num_items_in_batch": scored / self.parts}


def global_inputs(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Inputs that can be cut anywhere: tokens, their positions and their targets, all int64 `[B, T]`."""
    return {
        "input_ids": input_ids.clone(),
        "position_ids": torch.arange(input_ids.shape[1], device=input_ids.device).repeat(len(input_ids), 1),
        "shift_labels": F.pad(labels[:, 1:], (0, 1), value=IGNORED),
    }


def _reason_against_parts(encoding: Any, shape: RopeShape) -> str | None:
    """Why an encoding cannot be computed on a part of a text; None if it can."""
    if not isinstance(encoding, RopeEncoding):
        return "it acts inside attention or on embeddings, and a process has only those of its part"
    if encoding.depends_on_length:
        return "its table depends on the length of the text, and each process would use that of its part"
    if encoding.rotates_in_attention or encoding.decay(shape) is not None:
        return "it rotates or scales inside attention, which ring attention and Ulysses replace"
    if encoding.scales_logits(shape):
        return "it scales attention by the number of visible tokens; ring attention and Ulysses do not"
    return None


class Clipping:
    """Clips gradients when an optimizer steps, and removes them if they are not finite.

    For DeepSpeed, which updates the weights in the backward pass, does not report the norm of the gradient,
    and would use a gradient that is not finite.

    Attributes:
        norm: norm of the last gradient, before it was clipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self.max_norm = max_norm
        self.norm = math.nan
        optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        self.norm = float(nn.utils.clip_grad_norm_(parameters, self.max_norm))
        if not math.isfinite(self.norm):
            for parameter in parameters:
                parameter.grad = None


class Objective(NextTokenLoss):
    """The loss, and any other function of the model that needs gathered weights.

    FSDP gathers the weights of a module only in the forward of the module that it wraps.
    """

    def forward(self, *args: Any, within: Callable[[nn.Module], Any] | None = None, **inputs: Any) -> Any:
        """Return the loss; or the result of `within` for the model, if given."""
        return super().forward(*args, **inputs) if within is None else within(self.model)


def whole(values: Any) -> Any:
    """A structure with all sharded tensors gathered on the CPU; every process calls this."""
    return tree_map_only(DTensor, lambda value: value.full_tensor().cpu(), values)


def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy values into a parameter, of which this process may hold a shard."""
    with torch.no_grad():
        parameter.copy_(_like(value, parameter))


def spread_state(optimizer: Any) -> None:
    """Replace an optimizer's complete state by the shards of this process."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = _like(value, parameter)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
