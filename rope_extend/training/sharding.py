"""How a run is distributed over processes: by sequences, by weights, or by parts of each sequence.

=====================  ==============================================  ====================================
name                   what a process holds                            turned on by
=====================  ==============================================  ====================================
data parallel (DDP)    all weights, other sequences                    several processes
FSDP2                  a part of the weights, other sequences          `fsdp_version: 2`
context parallel       a part of the weights, a part of each sequence  FSDP2 with `cp_size`: ring attention
=====================  ==============================================  ====================================

A part of a sequence keeps its positions in the whole sequence. Targets are shifted before the sequence is
cut, so that the last token of a part still predicts the first of the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from rope_extend.attention.foreign_splits import ring_refusal
from rope_extend.data.choices import CONSECUTIVE
from rope_extend.errors import refuse_if
from rope_extend.loss import IGNORED, NextTokenLoss, causal_lm, shifted
from rope_extend.models.view import layer_types_except_full_attention
from rope_extend.patching import Patch
from rope_extend.training.recipe import Recipe


@dataclass(frozen=True)
class Sharding:
    """The share of a run that each process has.

    Attributes:
        weights: whether the weights are spread over the processes (FSDP2).
        parts: number of processes that share each sequence by ring attention (`cp_size`).
        loaded_once: whether only the first process reads the weights and sends them to the others.
        ranks: number of processes.
        rank: number of this process.
    """

    weights: bool = False
    parts: int = 1
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
        fsdp2 = accelerator.is_fsdp2
        parts, tensor = (config.cp_size, config.tp_size) if config else (1, 1)
        unused = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not fsdp2
        see = "see configs/accelerate"
        refusals = {
            f"FSDP in version 1 is not supported; set fsdp_version: 2, {see}/fsdp2.yaml": (
                unused and kind == DistributedType.FSDP
            ),
            f"FSDP is configured, but accelerate runs without it ({kind.value}), because it shards weights "
            "over GPUs. Launch it on several GPUs, or leave the config out": unused,
            f"fine-tuning does not support {kind.value}; use DDP or FSDP2, with cp_size to share sequences: "
            f"{see}": kind in (DistributedType.MEGATRON_LM, DistributedType.DEEPSPEED),
            f"fine-tuning does not support tensor parallelism (tp_size {tensor}); use FSDP2": tensor > 1,
            f"cp_size needs FSDP2 on GPUs: {see}/context_parallel.yaml": parts > 1 and not fsdp2,
        }
        for problem, wrong in refusals.items():
            refuse_if(wrong, problem)
        return cls(
            weights=bool(fsdp2),
            parts=parts,
            loaded_once=fsdp2 and bool(accelerator.state.fsdp_plugin.cpu_ram_efficient_loading),
            ranks=accelerator.num_processes,
            rank=accelerator.process_index,
        )

    @property
    def replicas(self) -> int:
        """Number of groups of processes with different sequences."""
        return self.ranks // self.parts

    @property
    def replica(self) -> int:
        """The group of this process; processes that share a sequence have consecutive ranks."""
        return self.rank // self.parts

    def check(self, patch: Patch, model: nn.Module, recipe: Recipe) -> None:
        """Refuse what does not work with this sharding, most of it with parts of a sequence.

        Args:
            patch: the patch of the model.
            model: the patched model; it may be on the meta device.
            recipe: the run.

        Raises:
            RopeExtendError: gives the reason, and what to do instead.
        """
        refuse_if(
            self.loaded_once and recipe.train_norm_embed,
            "train_norm_embed cannot be combined with fsdp_cpu_ram_efficient_loading, which separates a "
            "trained embedding from the head that is tied to it; set it to false in accelerate's config",
        )
        if self.parts == 1:
            return
        setting = f"cp_size {self.parts}"
        config = causal_lm(model).config.get_text_config(decoder=True)
        reason = ring_refusal(patch.encoding)
        kinds = ", ".join(sorted(layer_types_except_full_attention(config)))
        # Ring attention gives each process one piece of the front and one of the back, for equal work.
        pieces, length = 2 * self.parts, recipe.length
        refusals = {
            f"parts of a sequence ({setting}) do not work: {reason}. Use a rotary method with one table, "
            f"such as yarn, or train on shorter blocks without {setting}": (bool(reason)),
            "sampled positions make short blocks stand for long ones, which need not be cut: leave "
            f"{setting} or positions out": recipe.positions != CONSECUTIVE,
            "packing uses its own attention functions, which ring attention would replace: leave "
            f"{setting} or packing out": recipe.packs,
            f"attention over parts ({setting}) replaces sdpa, but this model uses "
            f"{config._attn_implementation}; load it with sdpa": config._attn_implementation != "sdpa",
            f"this model has layers of type {kinds}, which cannot be cut into parts: only full attention "
            f"can. Train without {setting}": kinds != "",
            f"sequences of {length} tokens cannot be cut into {pieces} equal pieces ({setting}); set "
            f"block_length to a multiple of {pieces}, such as {length // pieces * pieces or pieces}": (
                length % pieces != 0
            ),
        }
        for problem, wrong in refusals.items():
            refuse_if(wrong, problem)

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
        buffers = list(text.values())
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            yield {**text, "num_items_in_batch": scored / self.parts}


def global_inputs(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Inputs that can be cut anywhere: tokens, their positions and their targets, all int64 `[B, T]`."""
    return {
        "input_ids": input_ids.clone(),
        "position_ids": torch.arange(input_ids.shape[1], device=input_ids.device).repeat(len(input_ids), 1),
        "shift_labels": shifted(labels),
    }


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
