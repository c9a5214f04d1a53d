"""Annealing: the first steps of a run gradually blend a model's own RoPE into another encoding.

The patch does the blending (`Patch.mix`); this module says when. The share of the encoding is a function of
the step alone, so that a resumed run needs no state for it.
"""

from __future__ import annotations

import logging

from torch import nn

from rope_extend.patching import current_patch
from rope_extend.training.recipe import Recipe

logger = logging.getLogger(__name__)


def share_at(step: int, anneal_steps: int) -> float:
    """The share of the encoding in the step that follows `step` finished ones; 1 from `anneal_steps` on.

    The shares of the steps before are evenly spaced between 0 and 1, without either end. So no step trains
    the unchanged model, and the encoding's learned parameters have a gradient in each.
    """
    return min(1.0, (step + 1) / (anneal_steps + 1))


def mix_for_step(model: nn.Module, recipe: Recipe, step: int) -> None:
    """Set the patch of a model to the share of the step that follows `step` finished ones."""
    patch = current_patch(model)
    if recipe.anneal_steps and patch is not None:
        patch.mix(share_at(step, recipe.anneal_steps))


def log_defaults(recipe: Recipe) -> None:
    """Log which fields have the method's default, which the recipe sets itself, and the annealing steps."""
    defaults = recipe.computed_defaults()
    changed = {name: getattr(recipe, name) for name in defaults if getattr(recipe, name) != defaults[name]}
    unchanged = {name: value for name, value in defaults.items() if name not in changed}
    groups = [(f"defaults for {recipe.method}", unchanged), ("set by the recipe", changed)]
    logger.info("%s", "; ".join(f"{title}: {_listed(values)}" for title, values in groups if values))
    if recipe.anneal_steps:
        logger.info(
            "the first %d steps anneal from the model's own RoPE to %s; evaluations use %s alone",
            recipe.anneal_steps, recipe.method, recipe.method,
        )  # fmt: skip


def _listed(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
