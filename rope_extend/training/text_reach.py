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
import re
from dataclasses import dataclass, replace
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
    """Modules of a model, by path, that cannot be trained on text.

    Attributes:
        unreached: modules whose own weights get no gradient from text.
        unsupported: linear layers that LoRA cannot wrap: their forward returns several tensors, or a fused
            kernel uses their weight without calling them.
        encoders: encoders of images and sound; all of their modules are in `unreached`.
    """

    unreached: frozenset[str]
    unsupported: frozenset[str]
    encoders: tuple[str, ...]

    @property
    def below(self) -> tuple[str, ...]:
        """What the paths of all modules in `encoders` begin with."""
        return tuple(f"{path}." for path in self.encoders)


def text_reach(model: PreTrainedModel) -> TextReach:
    """Which modules of a causal language model cannot be trained on text.

    Args:
        model: a transformers model, on any device. Only its class and its config matter, and it is not run.

    Returns:
        The modules. For a family that does not run on the meta device, only the encoders count as unreached;
        a log line says so.
    """
    paths = dict(model.named_modules())
    encoders = tuple(
        name
        for name, part in paths.items()
        if isinstance(part, PreTrainedModel) and re.search("Audio|Vision", type(part.config).__name__)
    )
    found, several = set[str](), set[str]()
    try:
        found, several = _dry_run(model)
    except Exception as error:  # any error: a family may need values, which the meta device does not have
        logger.info("cannot tell which parts of %s text reaches (%r)", model.config.model_type, error)
    several |= {name for name in paths if _in_fused_kernel(model, name)}
    reach = TextReach(frozenset(found), frozenset(several), encoders)
    inside = {name for name in paths if f"{name}.".startswith(reach.below)}
    return replace(reach, unreached=reach.unreached | inside)


def norms_and_embedding(model: PreTrainedModel) -> list[str]:
    """Paths of a model's norms, as far as they have weights, and of the embedding of its tokens."""
    embedding = model.get_input_embeddings()
    return [
        name
        for name, part in model.named_modules()
        if part is embedding or ("Norm" in type(part).__name__ and any(True for _ in part.parameters(False)))
    ]


def _in_fused_kernel(model: nn.Module, name: str) -> bool:
    """Whether a layer is the last product of a Mamba mixer: its kernel takes the weight, without a call."""
    path, _, leaf = name.rpartition(".")
    mixer = model.get_submodule(path)
    return leaf == "out_proj" and all(hasattr(mixer, part) for part in ("A_log", "D", "conv1d"))


def _dry_run(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Paths of modules without a gradient, and of linear layers whose forward returns several tensors."""
    config: Any = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"  # not that of a patch
    with torch.device(META):
        empty = type(model)(config).train().requires_grad_(False)
    linear = {name: part for name, part in empty.named_modules() if isinstance(part, nn.Linear)}
    several, called = set[str](), set[str]()

    def note(name: str, out: Any) -> None:
        (called if isinstance(out, Tensor) else several).add(name)

    for name, part in linear.items():
        part.register_forward_hook(lambda _module, _args, out, name=name: note(name, out))
    tried = linear | {name: empty.get_submodule(name) for name in norms_and_embedding(empty)}
    for part in tried.values():
        for weight in part.parameters(recurse=False):
            weight.requires_grad_(True)
    with LiveBytes(scored=_TOKENS):
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=META)
        next_token_loss(empty, ids).backward()  # type: ignore[no-untyped-call]

    found = {name for name, part in tried.items() if any(w.grad is not None for w in part.parameters(False))}
    # A layer whose weight is used without a call cannot be wrapped.
    reached = {_any_expert(name) for name in found - (linear.keys() - called) | several}
    return {name for name in tried if _any_expert(name) not in reached}, several


def _any_expert(name: str) -> str:
    """A path without the numbers after that of the layer: in a dry run all tokens choose the same expert."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    start = layer.end() if layer else len(name)
    return name[:start] + re.sub(r"\.\d+(?=\.|$)", ".*", name[start:])
