"""LoRA adapters: their target modules and their configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from rope_extend.encodings import encoding
from rope_extend.errors import RopeExtendError
from rope_extend.models.parameters import learned_parameters
from rope_extend.patching import Patch, extend, patch_model
from rope_extend.training.recipe import Recipe


def lora_config(model: Any, recipe: Recipe) -> LoraConfig:
    """The peft configuration of a recipe, with the module names of this model's family.

    Raises:
        RopeExtendError: `lora_targets` names a layer that the model does not have.
    """
    extra: dict[str, Any] = {}
    encoders = _media_encoders(model)
    if encoders:  # peft matches the ends of names, and an image encoder may have layers of the same name
        extra["exclude_modules"] = rf"({'|'.join(re.escape(name) for name in encoders)})\..*"
    if recipe.train_norm_embed:
        embedding = model.get_input_embeddings()
        chosen = [
            name for name, part in model.named_modules() if part is embedding or "Norm" in type(part).__name__
        ]
        extra["modules_to_save"] = sorted({_leaf(name) for name in chosen})
        # A head that is tied to the embedding must stay tied.
        extra["ensure_weight_tying"] = embedding.weight is model.get_output_embeddings().weight
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        target_modules=_lora_targets(model, recipe.lora_targets, encoders),
        **extra,
    )


def adapted(model: Any, recipe: Recipe) -> PeftModel:
    """Add the recipe's adapter to the model. Only the adapter and the encoding are trained, in float32.

    Raises:
        RopeExtendError: as `lora_config`.
    """
    adapter = get_peft_model(model, lora_config(model, recipe))
    for parameter in learned_parameters(model).values():  # peft froze everything but the adapter
        parameter.requires_grad_(True)
    for parameter in adapter.parameters():
        if parameter.requires_grad:  # the 8 bits of bfloat16 would lose steps of 1e-4
            parameter.data = parameter.data.float()
    return adapter


def extended(model: nn.Module, recipe: Recipe) -> Patch:
    """Patch the model with the recipe's method.

    Raises:
        RopeExtendError: as `extend`.
    """
    if recipe.method == "none":  # the control: the same run without an extension
        return patch_model(
            model, encoding("none"), trained_length=recipe.trained_length, target_length=recipe.target_length
        )
    return extend(
        model,
        recipe.target_length,
        recipe.method,
        trained_length=recipe.trained_length,
        **recipe.method_parameters,
    )


def _media_encoders(model: Any) -> list[str]:
    """Paths of the encoders of images and sound, which get no gradient from text."""
    return [
        name
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and re.search("Audio|Vision", type(part.config).__name__)
    ]


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


def _lora_targets(model: nn.Module, targets: str | Sequence[str], encoders: Sequence[str]) -> str | list[str]:
    """Module names in the form that peft matches: the ends of paths."""
    if targets == "all-linear":
        return targets
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(name.startswith(f"{part}.") for part in encoders)
    ]
    if targets == "attention":
        inside = {name for name in linear if _is_attention(_user_of(model, name))}
        if any(_leaf(name) == "gate_up_proj" for name, _ in model.named_parameters()):
            # In models with such experts, peft takes every `gate_proj` for a part of them, and refuses it.
            inside = {name for name in inside if _leaf(name) != "gate_proj"}
        elsewhere = {_leaf(name) for name in linear if name not in inside}
        # If other layers have the same name, such as "dense", the name of the parent is needed too.
        parts = {name: 2 if _leaf(name) in elsewhere else 1 for name in inside}
        return sorted({".".join(name.split(".")[-count:]) for name, count in parts.items()})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            # peft would silently ignore this target.
            leaves = ", ".join(sorted({_leaf(name) for name in linear}))
            raise RopeExtendError(
                f"recipe: lora_targets has {target!r}, which this model does not have; its linear layers are "
                f"{leaves}"
            )
    return list(targets)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
