"""What is trained: LoRA adapters, with their target modules and their configuration, or all weights.

Only parts that text reaches are trained. Another gets no gradient, so it would be dead weight in the adapter,
and DistributedDataParallel would fail because it waits for the gradient. Examples are encoders of images, the
layers that project their output, cross-attention to images, and indexers that choose keys without a gradient.
This is measured, not listed by family: a few tokens go forward and backward through a copy of the model on
the meta device.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_extend.encodings import encoding
from rope_extend.errors import RopeExtendError
from rope_extend.loss import next_token_loss
from rope_extend.memory.live_bytes import LiveBytes
from rope_extend.memory.meta_device import META
from rope_extend.method_names import CURRENT
from rope_extend.models.current_table import current_table
from rope_extend.models.parameters import train_learned
from rope_extend.patching import Patch, extend, patch_model
from rope_extend.training.recipe import Recipe

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


def lora_config(model: Any, recipe: Recipe, reach: TextReach | None = None) -> LoraConfig:
    """The peft configuration of a recipe, with the module names of this model's family.

    Args:
        model: a model without an adapter.
        recipe: the run.
        reach: what of the model can be trained on text, the rest is left out; by default `text_reach(model)`.

    Raises:
        RopeExtendError: `lora_targets` names a layer that the model does not have, or that cannot be trained
            on text.
    """
    reach = reach or text_reach(model)
    meant, extra = _meant(model, recipe.lora_targets, reach), dict[str, Any]()
    targets: Any = sorted(meant & reach.layers)  # peft shortens a long list of paths
    if recipe.lora_targets == "all-linear":  # no list, because peft then adapts stacked experts, too
        targets, extra["exclude_modules"] = "all-linear", sorted(meant - reach.layers) or None
    if recipe.train_norm_embed:
        extra["modules_to_save"] = _to_save(model, _norms_and_embedding(model, reach))
        # A head that is tied to the embedding must stay tied.
        embedding = model.get_input_embeddings()
        extra["ensure_weight_tying"] = embedding.weight is model.get_output_embeddings().weight
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=targets,
        **extra,
    )


def adapted(model: Any, recipe: Recipe, reach: TextReach | None = None) -> Any:
    """What a recipe trains, in float32: the model with an adapter and its encoding, or all of its weights.

    Arguments and errors are those of `lora_config`. It returns a `PeftModel`; with `lora_targets: none`, the
    model itself.
    """
    if recipe.full:
        weights = (reach or text_reach(model)).weights
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in weights)
        trained = model
    else:
        trained = get_peft_model(model, lora_config(model, recipe, reach))
    train_learned(model)
    for parameter in trained.parameters():
        if parameter.requires_grad:  # the 8 bits of bfloat16 would lose steps of 1e-4
            parameter.data = parameter.data.float()
    return trained


def extended(model: nn.Module, recipe: Recipe) -> Patch:
    """Patch the model with the recipe's method; refuses what `extend` refuses."""
    if recipe.method != "none":
        start = {"start": recipe.start, "current_length": recipe.current_length}
        how = {"trained_length": recipe.trained_length, **start, **recipe.method_parameters}
        return extend(model, recipe.target_length, recipe.method, **how)
    # The control: the same run without an extension.
    unchanged, trained_length = encoding("none"), recipe.trained_length
    if recipe.start == CURRENT:
        now = current_table(model, recipe.trained_length, recipe.current_length)
        unchanged = now.with_table(now.shape.inv_freq(), now.attention_factor, recipe.target_length)
        trained_length = now.pretrained.trained_length
    return patch_model(model, unchanged, trained_length=trained_length, target_length=recipe.target_length)


def _is_attention(module: nn.Module) -> bool:
    """Whether the module is self-attention over text."""
    name = type(module).__name__
    return ("Attention" in name or name.endswith("MLA")) and "CrossAttention" not in name


def _user_of(model: nn.Module, name: str) -> nn.Module:
    """The module that uses a linear layer; Moshi and ZAYA hold the layer in a wrapper."""
    path = name.rpartition(".")[0]
    while re.search("(Linear|Projection)$", type(model.get_submodule(path)).__name__):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)


def _meant(model: Any, targets: str | Sequence[str], reach: TextReach) -> set[str]:
    """The paths of the linear layers that `lora_targets` means, with those that text does not reach."""
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    if targets == "all-linear":
        head = model.get_output_embeddings()
        return {name for name, part in linear.items() if part is not head}
    if targets == "attention":
        meant = {name for name in linear if _is_attention(_user_of(model, name))}
        if any(_leaf(name) == "gate_up_proj" for name, _ in model.named_parameters()):
            # In models with such experts, peft takes every `gate_proj` for a part of them, and refuses it.
            meant = {name for name in meant if _leaf(name) != "gate_proj"}
        return meant
    meant = set()
    for target in targets:
        found = {name for name in linear if f".{name}".endswith(f".{target}")}
        if not found & reach.layers:  # peft would silently ignore a target that is not there
            reason = "this model does not have; its linear layers are"
            if found:
                reason = "LoRA cannot train on text in this model; choose among"
            leaves = ", ".join(sorted(set(map(_leaf, reach.layers if found else linear))))
            raise RopeExtendError(f"recipe: lora_targets has {target!r}, which {reason} {leaves}")
        meant |= found
    return meant


def _norms_and_embedding(model: Any, reach: TextReach) -> set[str]:
    """Paths of the norms with weights and of the embedding of tokens that text reaches."""
    return {
        path
        for path, part in model.named_modules()
        if (part is model.get_input_embeddings() or "Norm" in type(part).__name__)
        and reach.weights & {f"{path}.{name}" for name, _ in part.named_parameters(recurse=False)}
    }


def _to_save(model: nn.Module, wanted: set[str]) -> list[str]:
    """Names of modules for `modules_to_save`, which peft compares with the last characters of all paths.

    That is the last name of a path, or all of it where another module ends like that.
    """
    others = {path for path, _ in model.named_modules()} - wanted
    return sorted(
        {
            f"base_model.model.{path}" if any(each.endswith(_leaf(path)) for each in others) else _leaf(path)
            for path in wanted
        }
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
