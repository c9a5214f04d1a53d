"""How a run is shared out over processes: each with all of it, with a part of the weights, or of each text.

=====================  ==============================================  ====================================
way                    what a process holds                            asked for by
=====================  ==============================================  ====================================
data parallel (DDP)    all weights, its own sequences                  several processes
FSDP2                  a part of the weights, its own sequences        `fsdp_version: 2`
context parallel       a part of the weights, a part of each sequence  FSDP2 with `cp_size`: ring attention
Ulysses                a part of each sequence, outside attention      DeepSpeed with `sp_size`
=====================  ==============================================  ====================================

A part of a sequence is read at the positions that it has in the whole, and its targets are shifted before the
sequence is cut, so that no token is left without the one that it predicts.
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
from rope_extend.inspection import kinds_beside_full_attention
from rope_extend.loss import IGNORED, NextTokenLoss, causal_lm
from rope_extend.patching import Patch


@dataclass(frozen=True)
class Sharding:
    """What of a run each process has.

    Attributes:
        weights: whether the weights are spread over the processes (FSDP2).
        context: over how many processes each sequence is spread, for ring attention (`cp_size`).
        ulysses: the same for Ulysses (`sp_size`).
        loaded_once: whether only the first process reads the weights, and the others get them from it.
        ranks: how many processes there are.
        rank: which of them this one is.
    """

    weights: bool = False
    context: int = 1
    ulysses: int = 1
    loaded_once: bool = False
    ranks: int = 1
    rank: int = 0

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """What `accelerate` was configured to do.

        Raises:
            RopeExtendError: it is none of the above, or what was asked for is not what came of it.
        """
        kind, config = accelerator.distributed_type, getattr(accelerator, "parallelism_config", None)
        if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and not accelerator.is_fsdp2:
            if kind == DistributedType.FSDP:
                raise RopeExtendError(
                    "FSDP is asked for in its first version; set fsdp_version: 2, as in "
                    "configs/accelerate/fsdp2.yaml"
                )
            raise RopeExtendError(
                f"FSDP is asked for, and accelerate runs without it ({kind.value}): it shards weights over "
                "GPUs. Launch it on several GPUs, or leave the config out"
            )
        if kind == DistributedType.MEGATRON_LM:
            raise RopeExtendError(
                f"fine-tuning does not run under {kind.value}; it runs on one device, and under DDP, FSDP2, "
                "context parallelism and Ulysses"
            )
        context, ulysses, tensor = (
            (config.cp_size, getattr(config, "sp_size", 1), config.tp_size) if config else (1, 1, 1)
        )
        if tensor > 1:
            raise RopeExtendError(
                "fine-tuning does not run tensor parallel; shard weights with FSDP2 instead"
            )
        if kind == DistributedType.DEEPSPEED and ulysses == 1:
            raise RopeExtendError(
                "DeepSpeed is for sequences that are spread over GPUs (sp_size above 1); to spread weights "
                "alone, use FSDP2: configs/accelerate/fsdp2.yaml"
            )
        if context > 1 and not accelerator.is_fsdp2:
            raise RopeExtendError("cp_size needs FSDP2 on GPUs: see configs/accelerate/context_parallel.yaml")
        if ulysses > 1 and kind != DistributedType.DEEPSPEED:
            raise RopeExtendError("sp_size needs DeepSpeed on GPUs: see configs/accelerate/ulysses.yaml")
        if ulysses > 1 and accelerator.state.deepspeed_plugin.zero_stage:
            raise RopeExtendError(
                "with sp_size each process has all weights: set zero_stage: 0, as in "
                "configs/accelerate/ulysses.yaml; a model that is too large for one GPU trains with cp_size"
            )
        groups = config.dp_replicate_size * config.dp_shard_size if config else 1
        if ulysses > 1 and groups * ulysses != accelerator.num_processes:
            raise RopeExtendError(
                f"{accelerator.num_processes} processes are not {groups} groups (dp_replicate_size) of "
                f"{ulysses} (sp_size); their product has to be the number of processes"
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
        """Into how many parts each sequence is cut."""
        return self.context * self.ulysses

    @property
    def replicas(self) -> int:
        """How many groups of processes read sequences of their own."""
        return self.ranks // self.parts

    @property
    def replica(self) -> int:
        """Which group this process is in: those that share a sequence have ranks that follow each other."""
        return self.rank // self.parts

    def check(
        self, patch: Patch, model: nn.Module, *, length: int, sampled: bool, masks: bool = False,
        trains_base: bool = False,
    ) -> None:  # fmt: skip
        """Refuse what does not work so, most of it on a part of a sequence; needs no weights.

        Args:
            patch: the model's.
            model: patched, and also as it stands on the meta device.
            length: tokens per sequence.
            sampled: whether positions are sampled.
            masks: whether attention is kept within documents or groups of tokens.
            trains_base: whether weights of the base model are trained beside the adapter.

        Raises:
            RopeExtendError: with the reason, and what works.
        """
        if self.loaded_once and trains_base:
            raise RopeExtendError(
                "train_norm_embed does not go with fsdp_cpu_ram_efficient_loading, which tears apart a "
                "trained embedding and the head that is tied to it; set it to false in accelerate's config"
            )
        if self.parts == 1:
            return
        way = f"cp_size {self.context}" if self.context > 1 else f"sp_size {self.ulysses}"
        if reason := _needs_the_whole(patch.encoding, patch.shape):
            raise RopeExtendError(
                f"{patch.encoding} does not run on parts of a sequence ({way}): {reason}. Rotary methods "
                "with one table do, such as yarn; or train on shorter blocks without it"
            )
        if sampled:
            raise RopeExtendError(
                f"sampled positions make short blocks stand for long ones, which need not be cut: leave "
                f"{way} or positions out"
            )
        if masks:
            raise RopeExtendError(
                "packing and shifted_sparse keep attention within a part of each row by a function of their "
                f"own, in whose place ring attention or Ulysses stand: leave {way} or them out"
            )
        config = causal_lm(model).config.get_text_config(decoder=True)
        if config._attn_implementation != "sdpa":
            raise RopeExtendError(
                f"attention over parts ({way}) stands in for sdpa, and this model attends by "
                f"{config._attn_implementation}; load it with sdpa"
            )
        if kinds := kinds_beside_full_attention(config):
            raise RopeExtendError(
                f"this model has layers of {', '.join(sorted(kinds))}, which would be trained as if each "
                f"part were a text of its own, or as full attention ({way}); only full attention can be cut"
            )
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
        if heads[0] % self.ulysses or (heads[1] % self.ulysses and self.ulysses % heads[1]):
            raise RopeExtendError(
                f"Ulysses gives each process some of the heads, and {heads[0]} heads with {heads[1]} of keys "
                f"do not divide by {way}; choose one that they divide by, or cp_size"
            )
        # Ring attention gives each process one piece from the front and one from the back, for equal work.
        pieces = self.parts * (2 if self.context > 1 else 1)
        if length % pieces:
            raise RopeExtendError(
                f"sequences of {length} tokens do not cut into {pieces} equal pieces ({way}); set "
                f"block_length to a multiple of {pieces}, such as {length // pieces * pieces or pieces}"
            )

    def prepare(self, accelerator: Accelerator, *, batch_size: int) -> None:
        """Tell DeepSpeed what else it would learn from a data loader; nothing to tell the others."""
        if self.ulysses > 1:
            accelerator.state.deepspeed_plugin.deepspeed_config.update(
                train_micro_batch_size_per_gpu=batch_size,
                gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
                gradient_clipping=0.0,  # see Clipping
            )

    @contextmanager
    def cut(self, accelerator: Accelerator, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        """This process's part of a batch, for the forward and backward pass within.

        Args:
            accelerator: of the run.
            batch: `input_ids` and `labels`, `[B, T]`, the same on all processes that share the sequences.

        Returns:
            `input_ids`, `shift_labels`, `position_ids` and `num_items_in_batch`, or the batch itself
            where it is not cut. The mean of all parts' losses is that of the whole.
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
        mine = {name: value.chunk(self.parts, 1)[part].contiguous() for name, value in text.items()}
        yield {**mine, "num_items_in_batch": scored / self.parts}


def global_inputs(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What can be cut anywhere: tokens, where they stand, and what each predicts, all `[B, T]` int64."""
    return {
        "input_ids": input_ids.clone(),
        "position_ids": torch.arange(input_ids.shape[1], device=input_ids.device).repeat(len(input_ids), 1),
        "shift_labels": F.pad(labels[:, 1:], (0, 1), value=IGNORED),
    }


def _needs_the_whole(encoding: Any, shape: RopeShape) -> str | None:
    """Why an encoding cannot be computed on a part of a text; None if it can."""
    if not isinstance(encoding, RopeEncoding):
        return "it acts inside attention or on embeddings, which here are those of a part alone"
    if encoding.depends_on_length:
        return "its table follows the length of the text, and each process sees a part: they would differ"
    if encoding.rotates_in_attention or encoding.decay(shape) is not None:
        return "it rotates or scales inside attention, in the place of which ring attention or Ulysses stand"
    if encoding.logit_scale(shape, torch.arange(1)) is not None:
        return "it sharpens attention by what a query can see, and ring attention or Ulysses do not"
    return None


class Clipping:
    """Clips gradients as an optimizer steps, and lets it change nothing where they are not finite.

    For DeepSpeed, which steps within the backward pass, does not tell the norm of the gradient, and would
    step with one that is not finite.

    Attributes:
        norm: of the last step's gradient, before it was clipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self.max_norm = max_norm
        self.norm = math.nan
        optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.norm = float(nn.utils.clip_grad_norm_(parameters, self.max_norm))
        if not math.isfinite(self.norm):
            for parameter in parameters:
                parameter.grad = None


# ---------------------------------------------------------------------------------------------------------
# Weights that are spread over processes


class Objective(NextTokenLoss):
    """The loss, and whatever else reads the model while its weights are gathered.

    FSDP gathers the weights of the module that it was given in that module's forward, and nowhere else.
    """

    def forward(self, *args: Any, within: Callable[[nn.Module], Any] | None = None, **inputs: Any) -> Any:
        """Return the loss; or, given a function, what it returns for the model."""
        return super().forward(*args, **inputs) if within is None else within(self.model)


def whole(values: Any) -> Any:
    """The same structure with every sharded tensor gathered, on the CPU; every process calls this."""
    return tree_map_only(DTensor, lambda value: value.full_tensor().cpu(), values)


def fill(parameter: Tensor, value: Tensor) -> None:
    """Put values into a parameter, of which this process may have a part."""
    with torch.no_grad():
        parameter.copy_(_like(value, parameter))


def spread_state(optimizer: Any) -> None:
    """Give each process its part of an optimizer's state that was loaded whole."""
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
