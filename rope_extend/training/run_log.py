"""Log lines at the start of a fine-tuning run: what is trained, and on what."""

from __future__ import annotations

import logging

from rope_extend.data.choices import RESTART
from rope_extend.data.sampled_positions import SAMPLERS, Coverage
from rope_extend.patching import Patch
from rope_extend.training.loop import TrainingRun
from rope_extend.training.recipe import Recipe
from rope_extend.training.training_data import source_names

logger = logging.getLogger(__name__)

_MANY_EPOCHS = 4
"""Up to this number of epochs, repeated text teaches about as much as new text (2305.16264)."""


def log_run(run: TrainingRun, patch: Patch, share: float, coverage: Coverage | None) -> None:
    """Log the extension, the trained parameters and the data of a run.

    Args:
        run: the run, before its first step.
        patch: the patch of its model.
        share: share of the training tokens beyond the pretrained window.
        coverage: the distances that sampled positions show, if positions are sampled.
    """
    window = patch.shape.trained_length
    trained = sum(parameter.numel() for parameter in run.parameters)
    total = sum(parameter.numel() for parameter in run.model.parameters())
    logger.info(
        "%s: %d -> %d tokens, factor %g", patch.encoding, window, patch.target_length,
        patch.target_length / window,
    )  # fmt: skip
    _log_defaults(run.recipe)
    logger.info(
        "trainable parameters: %s of %s (%.2f %%)", f"{trained:,}", f"{total:,}", 100 * trained / total
    )
    logger.info(
        "data: %s; %s tokens per step, %.1f %% of them beyond the pretrained window",
        run.data.blocks, f"{run.tokens_per_step:,}", 100 * share,
    )  # fmt: skip
    if names := source_names(run.recipe):
        epochs = run.data.blocks.epochs(run.recipe.steps, run.sequences_per_step)
        logger.info(
            "epochs by the last step: %s",
            ", ".join(f"{times:.2f} of {name}" for name, times in zip(names, epochs, strict=True)),
        )
        if run.recipe.mixed_windows and max(epochs) > _MANY_EPOCHS:
            logger.warning(
                "mixed_windows: the %s are read %.1f times by the last step; add texts, or lower steps",
                names[epochs.index(max(epochs))], max(epochs),
            )  # fmt: skip
    if run.recipe.shifted_sparse is not None:
        logger.info(
            "training uses shifted sparse attention (2309.12307), an approximation: a token attends to the "
            "%d tokens of its group only; evaluations and the saved model use full attention",
            run.recipe.shifted_sparse,
        )
    if run.data.blocks.at(run.recipe.steps - 1).length < run.recipe.length:
        logger.warning(
            "curriculum: the run ends after %d steps, before any block of %d tokens",
            run.recipe.steps, run.recipe.length,
        )  # fmt: skip
    if share == 0 and run.recipe.packing == RESTART:
        logger.warning(
            "packing restart: no document is longer than the pretrained window, so the run teaches nothing "
            "about positions beyond it; add longer texts"
        )
    if coverage is not None:
        logger.info(
            "positions %s (%s): %.1f %% of the query-key pairs are further apart than the pretrained window; "
            "they cover %.1f %% of the distances from there to %d", coverage.sampler,
            SAMPLERS[coverage.sampler].paper, 100 * coverage.pairs_beyond, 100 * coverage.seen_beyond,
            coverage.target_length,
        )  # fmt: skip


def _log_defaults(recipe: Recipe) -> None:
    """Log which fields have the method's default, and which the recipe sets itself."""
    defaults = recipe.computed_defaults()
    changed = {name: getattr(recipe, name) for name in defaults if getattr(recipe, name) != defaults[name]}
    unchanged = {name: value for name, value in defaults.items() if name not in changed}
    groups = [(f"defaults for {recipe.method}", unchanged), ("set by the recipe", changed)]
    logger.info("%s", "; ".join(f"{title}: {_listed(values)}" for title, values in groups if values))


def _listed(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
