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
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint import save, undone_on_failure
from rope_extend.checkpoint.card import add_card
from rope_extend.data import Document, load_documents
from rope_extend.encodings import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.plan import format_bytes
from rope_extend.hardware import Hardware
from rope_extend.patching import Patch, current_patch
from rope_extend.pretrained import default_dtype, empty_model, one_error, pretrained
from rope_extend.training.annealing import announce_adaptation
from rope_extend.training.data import load_training_data
from rope_extend.training.launch import check_launch, check_variables
from rope_extend.training.levers import Levers, expand_segments, pull
from rope_extend.training.loop import (
    FinetuneInterrupted,
    RunData,
    TrainingRun,
    extended,
    lora_config,
)
from rope_extend.training.packing import RESTART, UNPACKED, check_packing
from rope_extend.training.plan import TrainingPlan, continued, default_levers, plan_training
from rope_extend.training.positions import SAMPLERS, Coverage, PositionCollator, check_meaning
from rope_extend.training.recipe import CONSECUTIVE, Recipe, add_recipe_arguments, recipe_from_arguments
from rope_extend.training.report import add_training_report
from rope_extend.training.resume import (
    RunState,
    check_continues,
    checkpoints,
    damage,
    newest_intact,
    prune,
    read_state,
    step_of,
)
from rope_extend.training.sharding import Sharding
from rope_extend.training.shifted_sparse import check_shifted_sparse
from rope_extend.training.tracking import check_trackers

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
    limit_memory: int | None = None,
) -> FinetuneResult:
    """Extend a model as the recipe says, train LoRA on it, and write adapter, record and metrics.

    Checked in this order, and so before any work is lost: the output directory, the method on the model's
    config, the memory that a step and an evaluation take, the data; then the weights are loaded. Memory
    levers that the recipe leaves open are chosen so that a step fits, and kept by the run when it goes on.
    Runs on what `accelerate` finds: one device, or several under `torchrun` or `accelerate launch`, which
    then share a file system. Seeds python's, numpy's and torch's global generators.

    Args:
        recipe: the run.
        model: a base model that is already loaded, without patch or adapter; by default `recipe.model` is.
            It is changed in place; if the run fails or is interrupted, it is as it was before.
        tokenizer: by default `recipe.model`'s.
        resume: True goes on from the newest checkpoint of `recipe.output_dir` that is whole, a path from that
            checkpoint. On a CPU the weights then end bit for bit as without the interruption, whenever that
            was: a process that is killed, also while it saves, leaves the checkpoints before as they were.
        overwrite: remove a run that is already in `recipe.output_dir`.
        limit_memory: bytes of the device to plan with; by default what is free.

    Raises:
        RopeExtendError: whatever of the above does not hold; a disk that is full; or more steps in a row
            than `recipe.max_skipped` whose loss or gradient is not finite. Also a launch that came apart into
            processes which do not know of each other.
        FinetuneInterrupted: Ctrl-C or SIGTERM, after the step at hand and a checkpoint.
    """
    expand_segments(recipe.expandable_segments)
    directory = Path(recipe.output_dir)
    checkpoint = _starting_point(directory, recipe, resume, overwrite)
    accelerator = _accelerator(recipe, directory)
    dtype = _dtype(recipe, accelerator.device)
    sharding = Sharding.of(accelerator)
    shape = _check_model(recipe, model, dtype, sharding)
    hardware = Hardware(
        str(accelerator.device), dtype=dtype, quantize=recipe.quantize, limit_memory=limit_memory
    )
    evaluated = _evaluated(recipe, shape)
    levers, at_once = _memory(recipe, model, evaluated, hardware, accelerator, sharding, checkpoint)
    if tokenizer is None:
        tokenizer = pretrained(AutoTokenizer, recipe.model)
    with accelerator.main_process_first():  # the others then find the tokens in the cache
        blocks, content = load_training_data(recipe, tokenizer, sharding.replicas)
        data = RunData(blocks, _held_out(recipe, tokenizer, evaluated), evaluated, at_once)
    state = _first_state(recipe, content, sharding, checkpoint)
    state = replace(state, levers=asdict(levers))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _prepare_directory(directory, recipe, state.step, fresh=resume is False)
    accelerator.wait_for_everyone()

    if model is None and recipe.quantize is not None:
        model = cast(Any, hardware.load(recipe.model))
    elif model is None:
        model = pretrained(AutoModelForCausalLM, recipe.model, dtype=dtype)
    config = copy.deepcopy(model.config)
    coverage = _coverage(recipe, shape, sharding.replicas)
    share = data.blocks.share_beyond(shape.trained_length, recipe.steps)
    if coverage is not None:
        share = coverage.tokens_beyond
    with undone_on_failure(model):
        patch = extended(model, recipe)
        try:
            run = TrainingRun(recipe, model, data, state, accelerator)
            if accelerator.is_main_process:
                _announce(run, patch, share, coverage)
            with pull(model, levers):
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


def plan(recipe: Recipe, *, limit_memory: int | None = None) -> TrainingPlan:
    """What a run's steps, with each of the levers, and evaluations take in memory, before anything is loaded.

    Args:
        recipe: the run.
        limit_memory: bytes of the device to plan with; by default what is free. Where there is no GPU, those
            of a GPU that the run will have, and then an `auto` dtype is bfloat16.

    Raises:
        RopeExtendError: the recipe does not go with its model, or the model's family cannot be rehearsed.
    """
    place = Hardware().place
    elsewhere = torch.device("cuda") if limit_memory is not None and place.type == "cpu" else None
    dtype = torch.bfloat16 if elsewhere and recipe.dtype == "auto" else _dtype(recipe, place)
    shape = _check_model(recipe, None, dtype, Sharding())
    hardware = Hardware(dtype=dtype, quantize=recipe.quantize, limit_memory=limit_memory)
    evaluated = _evaluated(recipe, shape)
    found = plan_training(recipe, hardware=hardware, every=True, place=elsewhere, evaluated=evaluated)
    if found is None:
        raise RopeExtendError(
            f"what a step of {recipe.model!r} takes cannot be foretold: its family needs values to run"
        )
    return found


def _memory(
    recipe: Recipe, model: Any | None, evaluated: Sequence[int], hardware: Hardware, accelerator: Accelerator,
    sharding: Sharding, checkpoint: Path | None,
) -> tuple[Levers, int | None]:  # fmt: skip
    """The levers of the run, those it had or those that its steps need; and how many tokens its evaluations
    read at a time, if that is known.
    """
    before = None if checkpoint is None else continued(recipe, read_state(checkpoint))
    count = accelerator.num_processes
    found = None
    if not sharding.weights and sharding.parts == 1:  # else a process has a share that depends on the others
        found = plan_training(
            recipe, hardware=hardware, model=model, levers=before, processes=count, evaluated=evaluated
        )
    at_once = None
    if found is not None:
        found.check()
        levers = found.chosen.levers
        logger.info(
            "memory: about %s of %s on %s; levers: %s", format_bytes(found.total),
            format_bytes(found.available), found.place, levers,
        )  # fmt: skip
        at_once = found.evaluation.at_once if found.evaluation else None
    else:
        empty = empty_model(recipe.model) if model is None else model
        levers = before or default_levers(recipe, empty, hardware.place)
        logger.info("memory: levers: %s", levers)
    if count > 1:  # free memory differs between devices, and all take the same steps
        levers = broadcast_object_list([levers])[0]
    return levers, at_once


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
    announce_adaptation(run.recipe)
    logger.info(
        "trainable parameters: %s of %s (%.2f %%)", f"{trained:,}", f"{total:,}", 100 * trained / total
    )
    logger.info(
        "data: %s; %s tokens per step, %.1f %% of them beyond the pretrained window",
        run.data.blocks, f"{run.tokens_per_step:,}", 100 * share,
    )  # fmt: skip
    if run.recipe.data_weights is not None:
        epochs = run.data.blocks.epochs(run.recipe.steps, run.sequences_per_step)
        logger.info(
            "epochs by the last step: %s",
            ", ".join(f"{times:.2f} of {name}" for name, times in zip(run.recipe.data, epochs, strict=True)),
        )
    if run.recipe.shifted_sparse is not None:
        logger.info(
            "shifted sparse attention (2309.12307) while it trains, an approximation: no token sees more "
            "than the %d of its group directly; evaluation and what is saved attend to all",
            run.recipe.shifted_sparse,
        )
    if run.data.blocks.at(run.recipe.steps - 1).length < run.recipe.length:
        logger.warning(
            "curriculum: the run ends after %d steps, before any block of %d tokens",
            run.recipe.steps, run.recipe.length,
        )  # fmt: skip
    if share == 0 and run.recipe.packing == RESTART:
        logger.warning(
            "packing restart: no document reaches beyond the pretrained window, so nothing is taught about "
            "what lies there; add longer texts"
        )
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
    elif recipe.quantize is not None:
        raise RopeExtendError(
            "recipe: quantize acts while weights are read, and this model is loaded already; leave the model "
            "out, or give one that was loaded with a quantization_config and leave quantize out"
        )
    elif model.dtype != dtype and (recipe.dtype != "auto" or model.dtype == torch.float16):
        raise RopeExtendError(f"the model is in {model.dtype}; load it with dtype={dtype}")
    lora_config(model, recipe)
    with extended(model, recipe) as patch:
        if recipe.anneal_steps:
            patch.mix(0.5)
        if recipe.positions != CONSECUTIVE:
            check_meaning(SAMPLERS[recipe.positions], patch.encoding, patch.shape)
        if recipe.packing != UNPACKED:
            check_packing(recipe.packing, patch.encoding, patch.shape, model.config)
        if recipe.shifted_sparse is not None:
            check_shifted_sparse(model, patch.encoding)
        masks = recipe.packing != UNPACKED or recipe.shifted_sparse is not None
        for length in [length for length, _ in recipe.curriculum or ()] + [recipe.length]:
            sharding.check(
                patch, model, length=length, sampled=recipe.positions != CONSECUTIVE, masks=masks,
                trains_base=recipe.train_norm_embed,
            )  # fmt: skip
        return patch.shape


def _evaluated(recipe: Recipe, shape: RopeShape) -> Sequence[int]:
    """The windows that the run evaluates at, in tokens; none without `eval_data`."""
    if recipe.eval_data is None:
        return ()
    if recipe.eval_lengths is not None:
        return recipe.eval_lengths
    doublings = math.ceil(math.log2(recipe.target_length / shape.trained_length))
    return (*(shape.trained_length * 2**i for i in range(doublings)), recipe.target_length)


def _held_out(recipe: Recipe, tokenizer: Any, lengths: Sequence[int]) -> list[Document]:
    """Documents to evaluate on, long enough for every window."""
    if recipe.eval_data is None:
        return []
    longest = max(lengths)
    return load_documents(
        recipe.eval_data,
        tokenizer,
        text_column=recipe.text_column,
        split=recipe.eval_split,
        min_tokens=longest,
        max_documents=recipe.eval_documents,
        max_tokens=longest,
    )


def _first_state(recipe: Recipe, content: str, sharding: Sharding, checkpoint: Path | None) -> RunState:
    """Where the run starts: step 0, or the checkpoint's state, if data and processes are still the same."""
    state = RunState(0, 0, 0.0, content, sharding.ranks, recipe.to_dict(), parts=sharding.parts)
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
