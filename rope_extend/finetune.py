"""LoRA fine-tuning on a longer window: one recipe in, an adapter and its record out.

The loop is plain: `accelerate` for devices and processes, `peft` for LoRA, `torch` for the rest. What it
adds is what long runs need: everything is checked before the weights are loaded, a run that is interrupted
goes on bit for bit, and the adapter is saved with the encoding that it was trained under.
"""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint import save, undone_on_failure
from rope_extend.checkpoint.card import add_card
from rope_extend.data import Document, blocks, fingerprint, load_documents
from rope_extend.encodings import RopeShape, encoding
from rope_extend.errors import RopeExtendError
from rope_extend.launch import check_launch, check_variables
from rope_extend.patching import Patch, current_patch, extend, patch_model
from rope_extend.positions import SAMPLERS, Coverage, PositionCollator, check_meaning
from rope_extend.pretrained import default_dtype, empty_model, one_error, pretrained
from rope_extend.recipe import CONSECUTIVE, Recipe, add_recipe_arguments, recipe_from_arguments
from rope_extend.resume import (
    RunState,
    check_continues,
    checkpoints,
    damage,
    newest_intact,
    prune,
    read_state,
    step_of,
)
from rope_extend.sharding import Sharding
from rope_extend.tracking import check_trackers
from rope_extend.training import (
    FinetuneInterrupted,
    RunData,
    TrainingRun,
    lora_config,
    set_gradient_checkpointing,
)
from rope_extend.training_report import add_training_report

__all__ = [
    "FinetuneInterrupted",
    "FinetuneResult",
    "Recipe",
    "add_recipe_arguments",
    "finetune",
    "recipe_from_arguments",
]

logger = logging.getLogger(__name__)

_RUN_FILES = (
    "recipe.yaml", "metrics.jsonl", "checkpoints", "tensorboard", "adapter_model.safetensors",
    "positions.json", "positions.png", "report",
)  # fmt: skip
"""What makes a directory that of a run; `overwrite` removes these and leaves all else."""

_COUNTED = 8192
"""Of how many sequences of a run the distances are counted: enough for the picture, in seconds."""


@dataclass(frozen=True)
class FinetuneResult:
    """What a run came to.

    Attributes:
        output_dir: where the adapter, its record, the recipe and the metrics are.
        steps: optimizer steps done, over all sessions.
        tokens: tokens trained on.
        seconds: time spent in training steps.
        loss: mean next-token loss of the last step that was not skipped, in nats.
        perplexity: at the end, by length in tokens; empty where the recipe has no `eval_data`.
        share_beyond: share of the training tokens that lie beyond the pretrained window.
        skipped: steps that changed no weight, because loss or gradient was not finite.
        model: the patched model with its adapter, in evaluation mode; under FSDP with weights that are
            spread over the processes, for which `rope_extend.load(output_dir)` is the way to read with it.
        patch: the patch that is active on it.
    """

    output_dir: Path
    steps: int
    tokens: int
    seconds: float
    loss: float
    perplexity: dict[int, float]
    share_beyond: float
    skipped: int
    model: PeftModel
    patch: Patch


def finetune(
    recipe: Recipe,
    *,
    model: Any | None = None,
    tokenizer: Any | None = None,
    resume: bool | str | PathLike[str] = False,
    overwrite: bool = False,
) -> FinetuneResult:
    """Extend a model as the recipe says, train LoRA on it, and write adapter, record and metrics.

    Checked in this order, and so before any work is lost: the output directory, the method on the model's
    config, the data; then the weights are loaded. Runs on what `accelerate` finds: one device, or several
    under `torchrun` or `accelerate launch`, which then share a file system. Seeds python's, numpy's and
    torch's global generators.

    Args:
        recipe: the run.
        model: a base model that is already loaded, without patch or adapter; by default `recipe.model` is.
            It is changed in place; if the run fails or is interrupted, it is as it was before.
        tokenizer: by default `recipe.model`'s.
        resume: True goes on from the newest checkpoint of `recipe.output_dir` that is whole, a path from that
            checkpoint. On a CPU the weights then end bit for bit as without the interruption, whenever that
            was: a process that is killed, also while it saves, leaves the checkpoints before as they were.
        overwrite: remove a run that is already in `recipe.output_dir`.

    Raises:
        RopeExtendError: whatever of the above does not hold; a disk that is full; or more steps in a row
            than `recipe.max_skipped` whose loss or gradient is not finite. Also a launch that came apart into
            processes which do not know of each other.
        FinetuneInterrupted: Ctrl-C or SIGTERM, after the step at hand and a checkpoint.
    """
    directory = Path(recipe.output_dir)
    checkpoint = _starting_point(directory, recipe, resume, overwrite)
    accelerator = _accelerator(recipe, directory)
    dtype = _dtype(recipe, accelerator.device)
    sharding = Sharding.of(accelerator)
    shape = _check_model(recipe, model, dtype, sharding)
    if tokenizer is None:
        tokenizer = pretrained(AutoTokenizer, recipe.model)
    with accelerator.main_process_first():  # the others then find the tokens in the cache
        documents = load_documents(
            recipe.data,
            tokenizer,
            text_column=recipe.text_column,
            split=recipe.split,
            min_tokens=recipe.length,
            max_documents=recipe.max_documents,
            max_tokens=recipe.max_tokens,
        )
        data = RunData(blocks(documents, recipe.length, shuffle=False), *_held_out(recipe, tokenizer, shape))
    state = _first_state(recipe, documents, sharding, checkpoint)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _prepare_directory(directory, recipe, state.step, fresh=resume is False)
    accelerator.wait_for_everyone()

    if model is None:
        model = pretrained(AutoModelForCausalLM, recipe.model, dtype=dtype)
    config = copy.deepcopy(model.config)
    coverage = _coverage(recipe, shape, sharding.replicas)
    share = data.blocks.share_beyond(shape.trained_length) if coverage is None else coverage.tokens_beyond
    with undone_on_failure(model):
        patch = _extend(model, recipe)
        try:
            run = TrainingRun(recipe, model, data, state, accelerator)
            if accelerator.is_main_process:
                _announce(run, patch, share, coverage)
            run.train(checkpoint)
            trained = run.to_save(config)
            if accelerator.is_main_process:
                save(trained, directory, overwrite=True, record=run.record)
                if coverage is not None:
                    _report_positions(coverage, directory)
                add_card(directory, perplexity=run.metrics.perplexity, before=run.metrics.before)
                if data.held_out:
                    add_training_report(directory, trained_length=shape.trained_length)
                logger.info("saved the adapter and its record in %s", directory)
            accelerator.wait_for_everyone()
        except BaseException:
            patch.remove()
            raise
        finally:
            set_gradient_checkpointing(model, False)
    return FinetuneResult(
        directory,
        run.state.step,
        run.state.tokens,
        run.state.seconds,
        run.metrics.loss,
        run.metrics.perplexity,
        share,
        run.state.skipped,
        run.model,
        patch,
    )


def _coverage(recipe: Recipe, shape: RopeShape, replicas: int) -> Coverage | None:
    """Which distances the run will have seen; None if positions are not sampled."""
    if recipe.positions == CONSECUTIVE:
        return None
    sequences = recipe.steps * recipe.batch_size * recipe.gradient_accumulation * replicas
    return Coverage.of(
        PositionCollator(recipe.positions, recipe.target_length, seed=recipe.seed),
        recipe.length,
        min(sequences, _COUNTED),
        trained_length=shape.trained_length,
    )


def _report_positions(coverage: Coverage, directory: Path) -> None:
    """`positions.json` and `positions.png`; the run is done, so what goes wrong is logged and not raised."""
    from rope_extend.plots import plot_distances

    try:
        coverage.write(directory / "positions.json")
        plot_distances(directory / "positions.json", directory / "positions.png")
    except OSError as error:
        logger.warning("no report on the positions: %s", error)


def _announce(run: TrainingRun, patch: Patch, share: float, coverage: Coverage | None) -> None:
    window = patch.shape.trained_length
    trained = sum(parameter.numel() for parameter in run.parameters)
    total = sum(parameter.numel() for parameter in run.model.parameters())
    logger.info(
        "%s: %d -> %d tokens, factor %g", patch.encoding, window, patch.target_length,
        patch.target_length / window,
    )  # fmt: skip
    logger.info(
        "trainable parameters: %s of %s (%.2f %%)", f"{trained:,}", f"{total:,}", 100 * trained / total
    )
    logger.info(
        "data: %s; %s tokens per step, %.1f %% of them beyond the pretrained window",
        run.data.blocks, f"{run.tokens_per_step:,}", 100 * share,
    )  # fmt: skip
    if coverage is not None:
        logger.info(
            "positions by %s (%s): %.1f %% of the query-key pairs are further apart than the pretrained "
            "window, at %.1f %% of the distances from there to %d", coverage.sampler,
            SAMPLERS[coverage.sampler].paper, 100 * coverage.pairs_beyond, 100 * coverage.seen_beyond,
            coverage.target_length,
        )  # fmt: skip


def _starting_point(
    directory: Path, recipe: Recipe, resume: bool | str | PathLike[str], overwrite: bool
) -> Path | None:
    """The checkpoint to go on from; None for a run that starts at step 0."""
    present = [name for name in _RUN_FILES if (directory / name).exists()]
    if resume is not False and overwrite:
        raise RopeExtendError("resume and overwrite contradict each other; choose one")
    if resume is False:
        if present and not overwrite:
            raise RopeExtendError(
                f"{directory} already holds a run ({present[0]}); resume it, overwrite it, or choose another "
                "output_dir"
            )
        return None
    if resume is not True:
        checkpoint = Path(resume)
        if present and checkpoint.resolve().parent.parent != directory.resolve():
            raise RopeExtendError(
                f"{directory} already holds a run ({present[0]}), and {checkpoint} is of another one; choose "
                "another output_dir"
            )
        read_state(checkpoint)  # says so where it is no checkpoint at all
        if reason := damage(checkpoint):
            raise RopeExtendError(
                f"the checkpoint {checkpoint} is damaged: {reason}. resume=True (--resume) goes on from the "
                "newest that is whole"
            )
    elif found := newest_intact(directory):
        checkpoint = found
    elif present:
        logger.warning("%s holds no checkpoint yet: the run starts again at step 0", directory)
        return None
    else:
        raise RopeExtendError(f"nothing to resume in {directory}; leave resume out to start a run there")
    check_continues(read_state(checkpoint), recipe)
    return checkpoint


def _accelerator(recipe: Recipe, directory: Path) -> Accelerator:
    check_trackers(recipe.tracked_by)
    if not torch.distributed.is_initialized():
        check_variables()
    with one_error("accelerate does not start as it was launched"):
        accelerator = Accelerator(
            mixed_precision="no",  # the loop casts, in the same way for training and for evaluation
            gradient_accumulation_steps=recipe.gradient_accumulation,
            project_config=ProjectConfiguration(str(directory), logging_dir=str(directory)),
        )
    check_launch(accelerator.num_processes)
    # A launcher's variables go before what the constructor is given.
    accelerator.gradient_accumulation_steps = recipe.gradient_accumulation
    return accelerator


def _dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    if recipe.dtype == "auto":
        return default_dtype(device)
    return torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32


def _check_model(recipe: Recipe, model: Any | None, dtype: torch.dtype, sharding: Sharding) -> RopeShape:
    """Try the recipe on the model, or on one without weights that has the config of `recipe.model`."""
    if model is None:
        model = empty_model(recipe.model)
    elif isinstance(model, PeftModel) or current_patch(model) is not None:
        raise RopeExtendError(
            "finetune takes a base model without patch or adapter, because it applies the recipe's own; call "
            "patch.remove() and model.unload() first"
        )
    elif model.dtype != dtype and (recipe.dtype != "auto" or model.dtype == torch.float16):
        raise RopeExtendError(f"the model is in {model.dtype}; load it with dtype={dtype}")
    lora_config(model, recipe)
    with _extend(model, recipe) as patch:
        if recipe.positions != CONSECUTIVE:
            check_meaning(SAMPLERS[recipe.positions], patch.encoding, patch.shape)
        sharding.check(
            patch, model, length=recipe.length, sampled=recipe.positions != CONSECUTIVE,
            trains_base=recipe.train_norm_embed,
        )  # fmt: skip
        return patch.shape


def _extend(model: nn.Module, recipe: Recipe) -> Patch:
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


def _held_out(recipe: Recipe, tokenizer: Any, shape: RopeShape) -> tuple[list[Document], Sequence[int]]:
    """Documents to evaluate on, long enough for every window, and the windows."""
    if recipe.eval_data is None:
        return [], ()
    lengths = recipe.eval_lengths
    if lengths is None:
        doublings = math.ceil(math.log2(recipe.target_length / shape.trained_length))
        lengths = (*(shape.trained_length * 2**i for i in range(doublings)), recipe.target_length)
    longest = max(lengths)
    documents = load_documents(
        recipe.eval_data,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.eval_split,
        min_tokens=longest,
        max_documents=recipe.eval_documents,
        max_tokens=longest,
    )
    return documents, lengths


def _first_state(
    recipe: Recipe, documents: Sequence[Document], sharding: Sharding, checkpoint: Path | None
) -> RunState:
    """Where the run starts: step 0, or the checkpoint's state, if data and processes are still the same."""
    state = RunState(
        0, 0, 0.0, fingerprint(documents), sharding.ranks, recipe.to_dict(), parts=sharding.parts
    )
    if checkpoint is None:
        return state
    saved = read_state(checkpoint)
    if saved.data != state.data:
        raise RopeExtendError(
            f"cannot resume: the documents of {recipe.data!r} are not those of {checkpoint}; restore them, "
            "or start anew in another output_dir"
        )
    if saved.processes != state.processes:
        raise RopeExtendError(
            f"cannot resume: {checkpoint} is of {saved.processes} processes and this is a run of "
            f"{state.processes}; launch {saved.processes}"
        )
    if saved.parts != state.parts:
        raise RopeExtendError(
            f"cannot resume: the sequences of {checkpoint} were cut into {saved.parts} parts and would "
            f"now be into {state.parts}; launch it with the same cp_size or sp_size"
        )
    return replace(saved, recipe=state.recipe)


def _prepare_directory(directory: Path, recipe: Recipe, step: int, *, fresh: bool) -> None:
    """Leave nothing in the directory that the coming steps will write again."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _RUN_FILES if fresh else ():
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for later in checkpoints(directory):
            if step_of(later) > step:
                shutil.rmtree(later)
        prune(directory, recipe.keep_checkpoints)
        (directory / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise RopeExtendError(f"cannot write to the output_dir {directory}: {error}") from error
