"""Fine-tuning for longer windows: a recipe, the loop that follows it, and what keeps long runs whole."""

from rope_extend.training.finetune import finetune
from rope_extend.training.positions import PositionCollator
from rope_extend.training.recipe import Recipe

__all__ = ["PositionCollator", "Recipe", "finetune"]
