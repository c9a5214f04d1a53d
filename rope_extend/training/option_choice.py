"""Which memory options a run may use: those that its recipe leaves open, the cheapest first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rope_extend.config import AUTO
from rope_extend.training.memory_options import MemoryOptions, default_tile, recomputes, tileable
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import RunState


def candidate_options(
    recipe: Recipe, model: Any, device: torch.device
) -> tuple[list[MemoryOptions], list[str]]:
    """The combinations of memory options that a run may use, each with one more than the one before.

    The cheapest option comes first. Weights of 4 bits are not among them: they change what is trained.

    Returns:
        The combinations, and remarks on options that the model does not support.
    """
    automatic = {
        name
        for name in ("gradient_checkpointing", "mlp_tiles", "offload_checkpoints")
        if getattr(recipe, name) == AUTO
    }
    remarks = []
    memory_options = MemoryOptions(
        gradient_checkpointing=recipe.gradient_checkpointing is True or recipe.offload_checkpoints is True,
        mlp_tiles=0 if recipe.mlp_tiles == AUTO else int(recipe.mlp_tiles),
        offload_checkpoints=recipe.offload_checkpoints is True,
    )
    candidates = [memory_options]
    if "gradient_checkpointing" in automatic and not memory_options.gradient_checkpointing:
        if recomputes(model):
            memory_options = replace(memory_options, gradient_checkpointing=True)
            candidates.append(memory_options)
        else:
            remarks.append(f"{type(model).__name__} does not support gradient checkpointing")
    if recipe.mlp_tiles != 0:
        mlps = tileable(model)
        if mlps.reasons:
            which = "some MLPs do not" if mlps.modules else "no MLP can"
            remarks.append(f"{which} run in tiles: {'; '.join(mlps.reasons)}")
        tokens = recipe.length * recipe.batch_size
        tile = default_tile(tokens, device)
        if "mlp_tiles" in automatic and mlps.modules and tokens > tile:
            memory_options = replace(memory_options, mlp_tiles=tile)
            candidates.append(memory_options)
    if "offload_checkpoints" in automatic and memory_options.gradient_checkpointing and device.type == "cuda":
        candidates.append(replace(memory_options, offload_checkpoints=True))
    return candidates, remarks


def default_memory_options(recipe: Recipe, model: Any, device: torch.device) -> MemoryOptions:
    """The options of a run whose memory cannot be estimated: the recipe's, with gradient checkpointing."""
    candidates, _ = candidate_options(recipe, model, device)
    return next((options for options in candidates if options.gradient_checkpointing), candidates[0])


def resumed_options(recipe: Recipe, state: RunState) -> MemoryOptions:
    """The options of a resumed run: those it had, except those set by the recipe that change no result."""
    if state.memory_options is not None:
        memory_options = MemoryOptions(**state.memory_options)
    else:  # a checkpoint from before options were chosen
        memory_options = MemoryOptions(
            gradient_checkpointing=state.recipe.get("gradient_checkpointing", True) is True
        )
    changes = {
        name: value
        for name in ("gradient_checkpointing", "offload_checkpoints")
        if (value := getattr(recipe, name)) != AUTO
    }
    if changes.get("gradient_checkpointing") is False:
        changes["offload_checkpoints"] = False
    elif changes.get("offload_checkpoints"):
        changes["gradient_checkpointing"] = True
    return replace(memory_options, **changes)
