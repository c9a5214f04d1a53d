"""Annealing: a run that goes over from a model's own rotation to another encoding by degrees.

What is mixed, and how, is the patch's (`Patch.mix`); here is when. The share of the encoding is a function of
the step alone, so that a run which goes on needs to know nothing else.
"""

from __future__ import annotations

import logging

from torch import nn

from rope_extend.patching import current_patch
from rope_extend.training.recipe import Recipe

logger = logging.getLogger(__name__)


def share_at(step: int, anneal_steps: int) -> float:
    """The share of the encoding in the step that follows `step` done ones: from `anneal_steps` on, 1.

    The steps before are evenly spaced between 0 and 1, without either: none is spent on the model as it was,
    and whatever the encoding learns has a gradient in each.
    """
    return min(1.0, (step + 1) / (anneal_steps + 1))


def mix_for_step(model: nn.Module, recipe: Recipe, step: int) -> None:
    """Set the patch of a model to the share of the step that follows `step` done ones."""
    patch = current_patch(model)
    if recipe.anneal_steps and patch is not None:
        patch.mix(share_at(step, recipe.anneal_steps))


def announce_adaptation(recipe: Recipe) -> None:
    """Log which fields are as the method's default recipe has them, and which are the recipe's own."""
    default = recipe.default
    own = {name: getattr(recipe, name) for name in default if getattr(recipe, name) != default[name]}
    taken = {name: value for name, value in default.items() if name not in own}
    listed = [(f"as by default for {recipe.method}", taken), ("the recipe's own", own)]
    logger.info("%s", "; ".join(f"{what}: {_listed(values)}" for what, values in listed if values))
    if recipe.anneal_steps:
        logger.info(
            "the first %d steps go over from the model's own rotation to %s; evaluation is with %s alone",
            recipe.anneal_steps, recipe.method, recipe.method,
        )  # fmt: skip


def _listed(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
