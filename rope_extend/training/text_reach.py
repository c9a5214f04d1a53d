"""Which parts of a model text reaches: only these can be trained on text.

A part that text does not reach gets no gradient. If it is trained anyway, it is dead weight in the adapter,
and DistributedDataParallel fails because it waits for the gradient. Examples are encoders of images, the
layers that project their output, cross-attention to images, and indexers that choose keys without a gradient.

This is measured, not listed by family: a few tokens go forward and backward through a copy of the model on
the meta device.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_extend.loss import next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import META

logger = logging.getLogger(__name__)

_TOKENS = 16
"""Number of tokens of the dry run: enough for any number of experts per token."""


@dataclass(frozen=True)
class TextReach:
    """What of a model can be trained on text.

    Attributes:
        weights: names of the parameters that get a gradient.
        layers: paths of the linear layers that LoRA can train. Others get no gradient, return several
            tensors, or a fused kernel uses their weight without calling them.
    """

    weights: frozenset[str]
    layers: frozenset[str]


def text_reach(model: PreTrainedModel) -> TextReach:
    """What of a causal language model can be trained on text.

    Only its class and its config matter, and it is not run. Of a family that does not run on the meta device,
    it is all, and a log line says so.
    """
    try:
        weights, layers = _dry_run(model)
    except Exception as error:  # any error: a family may need values, which the meta device does not have
        logger.info("cannot tell which parts of %s text reaches (%r)", model.config.model_type, error)
        weights = {name for name, _ in model.named_parameters()}
        layers = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    return TextReach(
        frozenset(weights), frozenset(name for name in layers if not _in_fused_kernel(model, name))
    )


def _in_fused_kernel(model: nn.Module, name: str) -> bool:
    """Whether a layer is the last product of a Mamba mixer: its kernel takes the weight, without a call."""
    path, _, leaf = name.rpartition(".")
    mixer = model.get_submodule(path)
    return leaf == "out_proj" and all(hasattr(mixer, part) for part in ("A_log", "D", "conv1d"))


def _dry_run(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Names of the weights with a gradient, and paths of those linear layers that return a tensor."""
    config: Any = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"  # not that of a patch
    with torch.device(META):
        empty = type(model)(config).train()
    linear = {name: part for name, part in empty.named_modules() if isinstance(part, nn.Linear)}
    called = set[str]()
    for name, part in linear.items():
        part.register_forward_hook(
            lambda _module, _args, out, name=name: called.add(name) if isinstance(out, Tensor) else None
        )
    with LiveBytes(scored=_TOKENS):
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=META)
        next_token_loss(empty, ids).backward()  # type: ignore[no-untyped-call]
    return (
        {name for name, weight in empty.named_parameters() if weight.grad is not None},
        {name for name in called if linear[name].weight.grad is not None},
    )
