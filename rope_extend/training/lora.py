"""What is trained: LoRA adapters, with their target modules and their configuration, or all weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn

from rope_extend.encodings import encoding
from rope_extend.errors import RopeExtendError
from rope_extend.method_names import CURRENT
from rope_extend.models.current_table import current_table
from rope_extend.models.parameters import train_learned
from rope_extend.patching import Patch, extend, patch_model
from rope_extend.training.recipe import Recipe
from rope_extend.training.text_reach import TextReach, norms_and_embedding, text_reach


def lora_config(model: Any, recipe: Recipe, reach: TextReach | None = None) -> LoraConfig:
    """The peft configuration of a recipe, with the module names of this model's family.

    Args:
        model: a model without an adapter.
        recipe: the run.
        reach: which parts of the model cannot be trained on text, and are left out; `text_reach(model)` if
            not given.

    Raises:
        RopeExtendError: `lora_targets` names a layer that the model does not have, or that cannot be trained
            on text.
    """
    reach = reach or text_reach(model)
    targets, chosen, left_out = _layers(model, recipe.lora_targets, reach)
    extra: dict[str, Any] = {}
    if excluded := _patterns(chosen, left_out, reach.below):
        extra["exclude_modules"] = f"({'|'.join(excluded)})"
    if recipe.train_norm_embed:
        saved = set(norms_and_embedding(model)) - reach.unreached
        extra["modules_to_save"] = _to_save(model, saved)
        # A head that is tied to the embedding must stay tied.
        embedding = model.get_input_embeddings()
        extra["ensure_weight_tying"] = embedding.weight is model.get_output_embeddings().weight
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        target_modules=targets,
        **extra,
    )


def left_out(model: Any, recipe: Recipe, reach: TextReach) -> list[str]:
    """What the recipe would train, but `lora_config` leaves out, because it cannot be trained on text.

    Returns:
        Paths, sorted, with `*` for numbers; of encoders of images and sound only their own path.
    """
    paths = set(reach.unreached) if recipe.full else _layers(model, recipe.lora_targets, reach)[2]
    if recipe.train_norm_embed:
        paths |= reach.unreached.intersection(norms_and_embedding(model))
    named = {next((part for part in reach.encoders if path.startswith(f"{part}.")), path) for path in paths}
    return sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in named})


def adapted(model: Any, recipe: Recipe, reach: TextReach | None = None) -> Any:
    """What a recipe trains, in float32: the model with an adapter and its encoding, or all of its weights.

    The arguments are those of `lora_config`.

    Returns:
        A `PeftModel`; for `lora_targets: none` the model itself.

    Raises:
        RopeExtendError: as `lora_config`.
    """
    if recipe.full:
        unreached = (reach or text_reach(model)).unreached
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(path not in unreached)
        trained = model
    else:
        trained = get_peft_model(model, lora_config(model, recipe, reach))
    train_learned(model)
    for parameter in trained.parameters():
        if parameter.requires_grad:  # the 8 bits of bfloat16 would lose steps of 1e-4
            parameter.data = parameter.data.float()
    return trained


def extended(model: nn.Module, recipe: Recipe) -> Patch:
    """Patch the model with the recipe's method.

    Raises:
        RopeExtendError: as `extend`.
    """
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


def _layers(
    model: Any, targets: str | Sequence[str], reach: TextReach
) -> tuple[str | list[str], set[str], set[str]]:
    """The linear layers that `lora_targets` means.

    Returns:
        What peft gets, `all-linear` or ends of paths; the paths of the layers with LoRA; and those of layers
        that peft would adapt too, but that cannot be trained on text.

    Raises:
        RopeExtendError: as `lora_config`.
    """
    head = model.get_output_embeddings()
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    trainable = linear - reach.unreached - reach.unsupported
    names: str | list[str] = list(targets)
    if targets == "all-linear":
        # Not a list of paths: for some families, peft adapts stacked experts too.
        names, meant = targets, {name for name in linear if model.get_submodule(name) is not head}
    elif targets == "attention":
        linear = {name for name in linear if not name.startswith(reach.below)}
        meant = {name for name in linear if _is_attention(_user_of(model, name))}
        if any(_leaf(name) == "gate_up_proj" for name, _ in model.named_parameters()):
            # In models with such experts, peft takes every `gate_proj` for a part of them, and refuses it.
            meant = {name for name in meant if _leaf(name) != "gate_proj"}
        names = _ends(meant, lambda end: any(_named(other, end) for other in linear - meant))
    else:
        meant = set()
        for target in targets:
            found = {name for name in linear if _named(name, target)}
            if not found & trainable:  # peft would silently ignore a target that is not there
                reason = (
                    "LoRA cannot train on text in this model; choose among"
                    if found
                    else "this model does not have; its linear layers are"
                )
                leaves = ", ".join(sorted({_leaf(name) for name in (trainable if found else linear)}))
                raise RopeExtendError(f"recipe: lora_targets has {target!r}, which {reason} {leaves}")
            meant |= found
    return names, meant & trainable, meant - trainable


def _named(path: str, end: str) -> bool:
    """Whether peft takes the end of a path, or the whole path, for the name of this target."""
    return f".{path}".endswith(f".{end}")


def _ends(paths: Iterable[str], ambiguous: Callable[[str], bool]) -> list[str]:
    """The shortest end of each path, in whole names, that is not ambiguous; the path if all are."""

    def end(path: str) -> str:
        names = path.split(".")
        ends = (".".join(names[start:]) for start in range(len(names) - 1, 0, -1))
        return next((end for end in ends if not ambiguous(end)), path)

    return sorted(set(map(end, paths)))


def _to_save(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Names of modules for `modules_to_save`, which peft compares with the last characters of all paths."""
    wanted = {f"base_model.model.{path}" for path in paths}
    others = {f"base_model.model.{path}" for path, _ in model.named_modules()} - wanted
    return _ends(wanted, lambda end: any(other.endswith(end) for other in others))


def _patterns(chosen: set[str], left_out: set[str], below: tuple[str, ...]) -> list[str]:
    """Patterns of the paths that peft leaves out, with one pattern for all layers where that is possible."""
    patterns = {rf"{re.escape(path)}.*" for path in below}
    for path in left_out:
        if path.startswith(below):
            continue
        names = path.split(".")
        pattern = r"\.".join(r"\d+" if name.isdigit() else re.escape(name) for name in names)
        every = not any(re.fullmatch(pattern, name) for name in chosen)
        patterns.add(pattern if every else re.escape(path))
    return sorted(patterns)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
