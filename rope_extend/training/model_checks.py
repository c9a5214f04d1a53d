"""Tries a recipe on its model without weights: refusals come before anything is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from rope_extend.data.choices import CONSECUTIVE, UNPACKED
from rope_extend.data.mixed_windows import check_mixed_windows
from rope_extend.data.packing import check_packing
from rope_extend.data.sampled_positions import check_sampled
from rope_extend.encodings import RopeShape
from rope_extend.errors import refuse_if
from rope_extend.models.loading import default_dtype, empty_model
from rope_extend.models.processes import is_main_process
from rope_extend.training.chunked_loss import chunked_loss
from rope_extend.training.lora import TextReach, extended, left_out, lora_config, text_reach
from rope_extend.training.recipe import Recipe
from rope_extend.training.sharding import Sharding

logger = logging.getLogger(__name__)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        RopeExtendError: says what to install; for an unknown name, lists the known ones.
    """
    known, installed = INTEGRATION_TO_CALLBACK, integration_utils.get_available_reporting_integrations()
    for name in names:
        refuse_if(name not in known, f"no tracker is named {name!r}; use one of {', '.join(sorted(known))}")
        package = name.replace("_", "-")
        refuse_if(
            name not in installed,
            f"recipe: the package of the tracker {name} is missing; pip install {package}",
        )


def weights_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype of the frozen weights on a device."""
    return default_dtype(device) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)


def check_recipe(recipe: Recipe, sharding: Sharding) -> tuple[RopeShape, TextReach]:
    """The rotary shape of a recipe's model, and which of its parts text reaches.

    Raises:
        RopeExtendError: the model, the encoding, the data and the sharding do not go together.
    """
    model: Any = empty_model(recipe.model)
    reach = text_reach(model)
    if not recipe.full:
        lora_config(model, recipe, reach)
    chunked_loss(model).remove()
    if is_main_process() and (paths := left_out(model, recipe, reach)):
        logger.info("left out, because it cannot be trained on text: %s", ", ".join(paths))
    with extended(model, recipe) as patch:
        if recipe.positions != CONSECUTIVE:
            positions, target = recipe.positions, recipe.target_length
            check_sampled(positions, patch.encoding, patch.shape, model.config, target)
        if recipe.packing != UNPACKED:
            check_packing(patch.encoding, model.config)
        if recipe.mixed_windows:
            check_mixed_windows(recipe.length, patch.encoding, patch.shape, model.config)
        sharding.check(patch, model, recipe)
        return patch.shape, reach


def evaluation_lengths(recipe: Recipe, shape: RopeShape) -> Sequence[int]:
    """The windows that the run evaluates at, in tokens; empty without `eval_data`."""
    if recipe.eval_data is None:
        return ()
    if recipe.eval_lengths is not None:
        return recipe.eval_lengths
    doublings = math.ceil(math.log2(recipe.target_length / shape.trained_length))
    return (*(shape.trained_length * 2**i for i in range(doublings)), recipe.target_length)
