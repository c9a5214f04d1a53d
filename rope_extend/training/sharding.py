"""How a run is distributed over processes: by sequences, by weights, or by parts of each sequence.

docs/training.md has a table of the ways. `Trainer` and accelerate do the work; here is what they do not
check.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from rope_extend.attention.foreign_splits import ring_refusal
from rope_extend.attention.split_window import check_split
from rope_extend.data.choices import CONSECUTIVE
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.loss import causal_lm
from rope_extend.models.config_facts import layer_types_except_full_attention
from rope_extend.patching import Patch
from rope_extend.training.recipe import Recipe


@dataclass(frozen=True)
class Sharding:
    """The share of a run that each process has.

    Attributes:
        weights: whether the weights are spread over the processes (FSDP2).
        parts: number of processes that share each sequence, by ring attention (`cp_size`) or `split_window`.
        loaded_once: whether only the first process reads the weights and sends them to the others.
        ranks: number of processes.
    """

    weights: bool = False
    parts: int = 1
    loaded_once: bool = False
    ranks: int = 1

    @classmethod
    def of(cls, accelerator: Accelerator, window: int = 1) -> Self:
        """The sharding that `accelerate` is configured for; `window` is `split_window` of the recipe.

        Raises:
            RopeExtendError: it is none of the above, or accelerate runs with another configuration.
        """
        kind, config = accelerator.distributed_type, getattr(accelerator, "parallelism_config", None)
        fsdp2 = accelerator.is_fsdp2
        parts, tensor = (config.cp_size, config.tp_size) if config else (1, 1)
        configured = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        other = f"tensor parallelism (tp_size {tensor})" if tensor > 1 else kind.value
        see = "see configs/accelerate"
        refusals = {
            f"FSDP is configured, but does not run as FSDP2 ({kind.value}); set fsdp_version: 2, and launch "
            f"it on several GPUs ({see}/fsdp2.yaml), or leave the config out": configured and not fsdp2,
            f"fine-tuning does not support {other}; use DDP or FSDP2, or cp_size to share sequences: {see}": (
                tensor > 1 or kind in (DistributedType.MEGATRON_LM, DistributedType.DEEPSPEED)
            ),
            f"cp_size needs FSDP2 on GPUs: {see}/context_parallel.yaml": parts > 1 and not fsdp2,
            f"split_window {window} and cp_size {parts} both share sequences; leave one of the two out": (
                window > 1 and parts > 1
            ),
        }
        for problem, wrong in refusals.items():
            refuse_if(wrong, problem)
        return cls(
            weights=bool(fsdp2),
            parts=max(parts, window),
            loaded_once=fsdp2 and bool(accelerator.state.fsdp_plugin.cpu_ram_efficient_loading),
            ranks=accelerator.num_processes,
        )

    @property
    def replicas(self) -> int:
        """Number of groups of processes with different sequences."""
        return self.ranks // self.parts

    def check(self, patch: Patch, model: nn.Module, recipe: Recipe) -> None:
        """Refuse what does not work with this sharding; the patched `model` may be on the meta device.

        Raises:
            RopeExtendError: gives the reason, and what to do instead.
        """
        window = recipe.split_window
        refuse_if(
            self.ranks % window != 0,
            f"split_window {window} needs {window} processes, or a multiple, not {self.ranks}; start "
            f"torchrun --nproc-per-node {window} -m rope_extend finetune ...",
        )
        refuse_if(
            self.loaded_once and recipe.train_norm_embed,
            "train_norm_embed cannot be combined with fsdp_cpu_ram_efficient_loading, which separates a "
            "trained embedding from the head that is tied to it; set it to false in accelerate's config",
        )
        refuse_if(
            self.weights and recipe.quantize is not None,
            "quantize cannot be combined with FSDP, which shares weights as they are; leave one of them out",
        )
        if window > 1:
            check_split(model, self.parts)
        if window > 1 or self.parts == 1:
            return
        config = causal_lm(model).config.get_text_config(decoder=True)
        kinds = ", ".join(sorted(layer_types_except_full_attention(config)))
        # Ring attention gives each process one piece of the front and one of the back, for equal work.
        pieces = 2 * self.parts
        refusals = {
            ring_refusal(patch.encoding): bool(ring_refusal(patch.encoding)),
            "packed documents and sampled positions need whole sequences": (
                recipe.packs or recipe.positions != CONSECUTIVE
            ),
            f"it replaces sdpa, but this model uses {config._attn_implementation}": (
                config._attn_implementation != "sdpa"
            ),
            f"this model has layers of type {kinds}, and only full attention can be cut": kinds != "",
            f"{recipe.length} tokens cannot be cut into {pieces} equal pieces": recipe.length % pieces != 0,
        }
        if (reason := next((reason for reason, wrong in refusals.items() if wrong), None)) is None:
            return
        instead = f"Use split_window {self.parts} instead, which shares a block under every method"
        try:
            check_split(model, self.parts)
        except RopeExtendError as error:
            instead = f"Nor does split_window: {error}"
        raise RopeExtendError(f"ring attention (cp_size {self.parts}) does not work: {reason}. {instead}")
