"""LoRA fine-tuning for a longer window: from a recipe to an adapter and its record.

The loop uses `accelerate` for devices and processes, `peft` for LoRA, and `torch` for everything else. It
adds what long runs need: everything is checked before the weights are loaded, an interrupted run resumes bit
for bit, and the adapter is saved with the encoding that it was trained with.
"""

from __future__ import annotations

import copy
import logging
import math
import shlex
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast_object_list
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.attention.shifted_sparse import check_shifted_sparse
from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.publishing import open_repository, push_to_hub
from rope_extend.checkpoint.restoring import undone_on_failure
from rope_extend.checkpoint.saving import save
from rope_extend.checkpoint.staging import refuse_base_model
from rope_extend.data.choices import CONSECUTIVE, UNPACKED
from rope_extend.data.mixed_windows import check_mixed_windows
from rope_extend.data.packing import check_packing
from rope_extend.data.sampled_positions import SAMPLERS, Coverage, PositionCollator, check_meaning
from rope_extend.encodings import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.files import check_creatable, expand_home, was_begun, write_text
from rope_extend.journal import only_writer
from rope_extend.loss import causal_lm
from rope_extend.memory.budget import expand_segments
from rope_extend.models.families import adapter_for
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import default_dtype, empty_model, one_error, pretrained
from rope_extend.models.processes import PATIENCE, is_main_process
from rope_extend.models.view import layer_types_except_full_attention, window_of
from rope_extend.patching import Patch, current_patch
from rope_extend.report.tables import is_private
from rope_extend.training.launch import check_launch, check_variables
from rope_extend.training.loop import FinetuneInterrupted, RunData, TrainingRun
from rope_extend.training.lora import extended, left_out, lora_config
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options
from rope_extend.training.option_choice import default_memory_options, resumed_options
from rope_extend.training.recipe import Recipe, add_recipe_arguments, recipe_from_arguments
from rope_extend.training.resume import (
    RunState,
    check_continues,
    damage,
    newest_intact,
    read_state,
)
from rope_extend.training.run_log import log_run
from rope_extend.training.run_report import add_training_report
from rope_extend.training.sharding import Sharding
from rope_extend.training.step_plan import TrainingPlan, plan_training
from rope_extend.training.text_reach import TextReach, text_reach
from rope_extend.training.tracking import check_trackers
from rope_extend.training.training_data import check_split, load_held_out, load_training_data, trained_on
from rope_extend.units import format_bytes

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
"""The files of a run; `overwrite` removes these and nothing else."""

_COUNTED = 8192
"""Number of sequences whose distances are counted: enough for the plot, and takes seconds."""


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        output_dir: directory with the adapter, its record, the recipe and the metrics.
        steps: optimizer steps done, over all sessions.
        tokens: tokens trained on.
        seconds: time spent in training steps.
        loss: mean next-token loss of the last step that was not skipped, in nats.
        perplexity: perplexity at the end, by length in tokens; empty if the recipe has no `eval_data`.
        share_beyond: share of the training tokens at positions beyond the pretrained window.
        skipped: steps that changed no weight, because loss or gradient was not finite.
        model: the patched model with its adapter, in evaluation mode. Under FSDP its weights are spread over
            the processes; to use the result, load it by `rope_extend.load(output_dir)`.
        patch: the active patch of the model.
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
    """Extend a model as the recipe says, train LoRA, and write adapter, record and metrics.

    Before the weights are loaded, these are checked in this order: the output directory, the method on the
    model's config, the memory of a step and of an evaluation, and the data. Memory options that the recipe
    leaves open are chosen so that a step fits; a resumed run keeps them. Runs on the devices that
    `accelerate` finds: one device, or several under `torchrun` or `accelerate launch`, with a shared file
    system. Seeds the global generators of Python, numpy and torch.

    Args:
        recipe: the run.
        model: a loaded base model, without patch or adapter; by default `recipe.model` is loaded. It is
            changed in place; if the run fails or is interrupted, it is restored.
        tokenizer: that of `recipe.model` by default.
        resume: True resumes from the newest intact checkpoint of `recipe.output_dir`, a path from that
            checkpoint. On a CPU, the weights at the end are then bit for bit those of an uninterrupted run.
            A process that is killed, also while it saves, leaves earlier checkpoints intact.
        overwrite: remove an earlier run from `recipe.output_dir`.
        limit_memory: bytes of the device to plan with; by default what is free.

    Raises:
        RopeExtendError: one of the checks fails, or the hub does not take the result, which is saved then;
            the disk is full; the loss or gradient is not finite in more
            consecutive steps than `recipe.max_skipped`; or the launched processes do not find each other.
        FinetuneInterrupted: Ctrl-C or SIGTERM, after the current step and a checkpoint.
    """
    expand_segments(recipe.expandable_segments)
    _check_publishable(recipe, model)
    directory = Path(recipe.output_dir)
    refuse_base_model(directory, recipe.model if model is None else model.name_or_path)
    checkpoint = _starting_point(directory, recipe, resume, overwrite)
    check_creatable(directory)
    prepare = checkpoint is None or not directory.exists()
    with only_writer(directory, "run") if is_main_process() else nullcontext():
        return _finetune(
            recipe, model, tokenizer, checkpoint, limit_memory, prepare=prepare, fresh=resume is False
        )


def _finetune(
    recipe: Recipe,
    model: Any | None,
    tokenizer: Any | None,
    checkpoint: Path | None,
    limit_memory: int | None,
    *,
    prepare: bool,
    fresh: bool,
) -> FinetuneResult:
    """As `finetune`, in a directory that no other process writes to; `prepare` it if the run begins in it."""
    directory = Path(recipe.output_dir)
    accelerator = _accelerator(recipe, directory)
    dtype = _dtype(recipe, accelerator.device)
    sharding = Sharding.of(accelerator)
    shape, reach = _check_model(recipe, model, dtype, sharding)
    load_options = LoadOptions(
        str(accelerator.device), dtype=dtype, quantize=recipe.quantize, limit_memory=limit_memory
    )
    lengths = _evaluation_lengths(recipe, shape)
    memory_options, chunk_size = _choose_memory_options(
        recipe, model, lengths, load_options, accelerator, sharding, checkpoint, reach
    )
    if tokenizer is None:
        tokenizer = pretrained(AutoTokenizer, recipe.model)
    with accelerator.main_process_first():  # the other processes then read the tokens from the cache
        training = load_training_data(recipe, tokenizer, sharding.replicas, shape.trained_length)
        held_out = load_held_out(recipe, tokenizer, lengths)
        known = trained_on(recipe, held_out, training, tokenizer, lengths)
    data = RunData(training.blocks, held_out, lengths, chunk_size, known)
    if data.trained_on and accelerator.is_main_process:
        logger.warning(
            "%d of the %d documents of eval_data are also training data, so their perplexity does not show "
            "how the model does on new text; give other documents as eval_data",
            data.trained_on, len(held_out),
        )  # fmt: skip
    state = _first_state(recipe, training.fingerprint, sharding, checkpoint)
    state = replace(state, memory_options=asdict(memory_options))
    if recipe.hub_model_id is not None and accelerator.is_main_process:  # rather now than after the run
        open_repository(recipe.hub_model_id, private=recipe.hub_private_repo or None)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and prepare:
        _prepare_directory(directory, recipe, fresh=fresh)
    accelerator.wait_for_everyone()

    if model is None and sharding.weights:  # FSDP distributes what is in host memory
        model = pretrained(AutoModelForCausalLM, recipe.model, dtype=dtype)
    elif model is None:
        model = cast(Any, load_options.load(recipe.model))
    config = copy.deepcopy(model.config)
    coverage = _coverage(recipe, shape, sharding.replicas)
    share = data.blocks.share_beyond(shape.trained_length, recipe.steps)
    if coverage is not None:
        share = coverage.tokens_beyond
    with undone_on_failure(model):
        patch = extended(model, recipe)
        try:
            run = TrainingRun(recipe, model, data, state, accelerator, reach)
            if accelerator.is_main_process:
                log_run(run, patch, share, coverage)
            with apply_memory_options(model, memory_options):
                run.train(checkpoint)
            trained = run.to_save(config)
            if accelerator.is_main_process:
                save(trained, directory, overwrite=True, record=run.record)
                if coverage is not None:
                    _report_positions(coverage, directory)
                add_card(
                    directory, perplexity=run.metrics.perplexity, before=run.metrics.before,
                    trained_on=data.trained_on,
                )  # fmt: skip
                if data.held_out:
                    add_training_report(directory, trained_length=shape.trained_length)
                logger.info("saved the adapter and its record in %s", directory)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                _publish(recipe, directory)
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


def _check_publishable(recipe: Recipe, model: Any | None) -> None:
    """Refuse a loaded model whose adapter could not be uploaded; the recipe itself checks its own `model`.

    Raises:
        RopeExtendError: the model was loaded from a local path, which the adapter would name as its base.
    """
    if recipe.hub_model_id is None or model is None:
        return
    for name in (model.config.name_or_path, model.name_or_path):
        if name and (is_private(name) or Path(name).exists()):
            raise RopeExtendError(
                "push_to_hub needs a base model that others can load, and this model was loaded from "
                f"{name!r}, a local path; load it by its hub id, or leave push_to_hub out"
            )


def _publish(recipe: Recipe, directory: Path) -> None:
    """Upload a finished run, if the recipe says so.

    Raises:
        RopeExtendError: the hub does not take it; the run is saved.
    """
    if recipe.hub_model_id is None:
        return
    private = ["--private"] if recipe.hub_private_repo else []
    push = shlex.join(["rope-extend", "push", str(directory), recipe.hub_model_id, *private])
    saved = f"the run is finished and saved in {directory}"
    try:
        address = push_to_hub(directory, recipe.hub_model_id, private=recipe.hub_private_repo or None)
    except RopeExtendError as error:
        raise RopeExtendError(f"{saved}, but it is not on the hub: {error}. Push it: {push}") from error
    except KeyboardInterrupt:
        logger.warning("%s, but the upload was interrupted. Push it: %s", saved, push)
        raise
    logger.info("uploaded: %s", address)


def plan(recipe: Recipe, *, limit_memory: int | None = None, elsewhere: bool = False) -> TrainingPlan:
    """Estimate the memory of a run's steps, with each memory option, and of its evaluations; loads nothing.

    Args:
        recipe: the run.
        limit_memory: bytes of the device to plan with; by default what is free. On a machine without a GPU,
            the memory of the GPU that the run will use; an `auto` dtype is then bfloat16.
        elsewhere: the run will use a GPU of another machine, even if this one has a GPU.

    Raises:
        RopeExtendError: the recipe does not work with its model, the package of a tracker is missing on the
            machine that is planned for, or the model's family does not run on the meta device.
    """
    expand_segments(recipe.expandable_segments)  # as the run does, before anything asks the device
    device = LoadOptions().torch_device
    absent = limit_memory is not None and (elsewhere or device.type == "cpu")
    if not absent:
        check_trackers(recipe.tracked_by)
    planned_gpu = torch.device("cuda") if absent else None  # it has no index, unlike those of this machine
    dtype = torch.bfloat16 if planned_gpu and recipe.dtype == "auto" else _dtype(recipe, device)
    shape, reach = _check_model(recipe, None, dtype, Sharding())
    load_options = LoadOptions(dtype=dtype, quantize=recipe.quantize, limit_memory=limit_memory)
    estimate = plan_training(
        recipe, load_options=load_options, all_options=True, device=planned_gpu,
        evaluation_lengths=_evaluation_lengths(recipe, shape), reach=reach,
    )  # fmt: skip
    if estimate is None:
        raise RopeExtendError(
            f"cannot estimate the memory of a step of {recipe.model!r}: its family does not run on the meta "
            "device. Run a few steps instead, and read peak_memory_bytes in metrics.jsonl"
        )
    return estimate


def _choose_memory_options(
    recipe: Recipe,
    model: Any | None,
    lengths: Sequence[int],
    load_options: LoadOptions,
    accelerator: Accelerator,
    sharding: Sharding,
    checkpoint: Path | None,
    reach: TextReach,
) -> tuple[MemoryOptions, int | None]:
    """The memory options of a run, and the chunk size of its evaluations, if that is known.

    A resumed run keeps its options; another gets those that its steps need.
    """
    before = None if checkpoint is None else resumed_options(recipe, read_state(checkpoint))
    estimate = None
    if not sharding.weights and sharding.parts == 1:  # otherwise the share of a process is not estimated
        estimate = plan_training(
            recipe,
            load_options=load_options,
            model=model,
            memory_options=before,
            processes=accelerator.num_processes,
            evaluation_lengths=lengths,
            reach=reach,
        )
    chunk_size = None
    if estimate is not None:
        estimate.check()
        memory_options = estimate.chosen.memory_options
        logger.info(
            "memory: about %s of %s on %s; memory options: %s", format_bytes(estimate.total),
            format_bytes(estimate.budget.available), estimate.budget.device, memory_options,
        )  # fmt: skip
        chunk_size = estimate.evaluation.chunk_size if estimate.evaluation else None
    else:
        empty = empty_model(recipe.model) if model is None else model
        memory_options = before or default_memory_options(recipe, empty, load_options.torch_device)
        logger.info("memory options: %s", memory_options)
    if accelerator.num_processes > 1:  # free memory differs between devices; all use the same options
        memory_options = broadcast_object_list([memory_options])[0]
    return memory_options, chunk_size


def _coverage(recipe: Recipe, shape: RopeShape, replicas: int) -> Coverage | None:
    """The distances that the run will show the model; None if positions are not sampled."""
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
    """Write `positions.json` and `positions.png`; an error is logged, not raised, because the run is done."""
    from rope_extend.plots.training_curves import plot_distances

    try:
        coverage.write(directory / "positions.json")
        plot_distances(directory / "positions.json", directory / "positions.png")
    except OSError as error:
        logger.warning("cannot write the report on positions: %s", error)


def _starting_point(
    directory: Path, recipe: Recipe, resume: bool | str | PathLike[str], overwrite: bool
) -> Path | None:
    """The checkpoint to resume from; None for a run that starts at step 0."""
    present = [name for name in _RUN_FILES if (directory / name).exists()]
    if resume is not False and overwrite:
        raise RopeExtendError("resume and overwrite contradict each other; choose one of them")
    if resume is False:
        if present and not overwrite:
            raise RopeExtendError(
                f"{directory} already holds a run ({present[0]}); resume=True continues it, overwrite=True "
                "replaces it, or choose another output_dir"
            )
        return None
    if resume is not True:
        checkpoint = Path(expand_home(resume))
        if present and checkpoint.resolve().parent.parent != directory.resolve():
            raise RopeExtendError(
                f"{directory} already holds a run ({present[0]}), and {checkpoint} belongs to another; "
                "choose another output_dir"
            )
        read_state(checkpoint)  # refuses what is not a checkpoint
        if reason := damage(checkpoint):
            raise RopeExtendError(
                f"the checkpoint {checkpoint} is damaged: {reason}. To resume from the newest intact one, "
                "use resume=True (--resume)"
            )
    elif intact := newest_intact(directory):
        checkpoint = intact
    elif present or was_begun(directory / "recipe.yaml"):
        logger.warning("%s holds no checkpoint yet; the run starts at step 0", directory)
        return None
    else:
        raise RopeExtendError(f"nothing to resume in {directory}; leave resume=True out to start a run there")
    check_continues(read_state(checkpoint), recipe)
    return checkpoint


def _accelerator(recipe: Recipe, directory: Path) -> Accelerator:
    check_trackers(recipe.tracked_by)
    if not torch.distributed.is_initialized():
        check_variables()
    with one_error("accelerate does not start as it was launched"):
        accelerator = Accelerator(
            mixed_precision="no",  # the loop casts itself, for training and evaluation alike
            gradient_accumulation_steps=recipe.gradient_accumulation,
            project_config=ProjectConfiguration(str(directory), logging_dir=str(directory)),
            # The other processes wait while the first one tokenises.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
    check_launch(accelerator.num_processes)
    # The variables of a launcher override the argument of the constructor.
    accelerator.gradient_accumulation_steps = recipe.gradient_accumulation
    return accelerator


def _dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    if recipe.dtype == "auto":
        return default_dtype(device)
    return torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32


def _check_model(
    recipe: Recipe, model: Any | None, dtype: torch.dtype, sharding: Sharding
) -> tuple[RopeShape, TextReach]:
    """Try the recipe on the model, or on `recipe.model` without weights."""
    check_split(recipe)
    if model is None:
        model = empty_model(recipe.model)
    elif isinstance(model, PeftModel) or current_patch(model) is not None:
        raise RopeExtendError(
            "the model has a patch or an adapter already, but finetune applies those of the recipe; leave "
            "model out, so that the recipe's is loaded. To train on from an adapter, merge it first "
            "(rope-extend merge), and name the merged checkpoint in the recipe"
        )
    elif recipe.quantize is not None:
        raise RopeExtendError(
            "recipe: quantize is applied while weights are loaded, but this model is loaded already; leave "
            "the model out, or load it with a quantization_config and leave quantize out"
        )
    elif model.dtype != dtype and (recipe.dtype != "auto" or model.dtype == torch.float16):
        raise RopeExtendError(f"the model is in {model.dtype}; load it with dtype={dtype}")
    reach = text_reach(model)
    lora_config(model, recipe, reach)
    if sharding.rank == 0 and (paths := left_out(model, recipe, reach)):
        logger.info("left out of the adapter, because it cannot be trained on text: %s", ", ".join(paths))
    with extended(model, recipe) as patch:
        if recipe.positions != CONSECUTIVE:
            check_meaning(SAMPLERS[recipe.positions], patch.encoding, patch.shape)
            _check_sampled(recipe, model)
        if recipe.packing != UNPACKED:
            check_packing(recipe.packing, patch.encoding, patch.shape, model.config)
        if recipe.mixed_windows:
            check_mixed_windows(recipe.length, patch.encoding, patch.shape, model.config)
        if recipe.shifted_sparse is not None:
            check_shifted_sparse(model, patch.encoding)
        masks = recipe.packs or recipe.shifted_sparse is not None
        for length in [length for length, _ in recipe.curriculum or ()] + [recipe.length]:
            sharding.check(
                patch, model, length=length, sampled=recipe.positions != CONSECUTIVE, masks=masks,
                trains_base=recipe.train_norm_embed,
            )  # fmt: skip
        return patch.shape, reach


def _check_sampled(recipe: Recipe, model: Any) -> None:
    """Refuse sampled positions for a model that counts tokens instead, as windows of attention do.

    Raises:
        RopeExtendError: some layers attend to fewer tokens than `target_length`, or ignore the positions.
    """
    config = causal_lm(model).config.get_text_config(decoder=True)
    for kind in sorted(layer_types_except_full_attention(config)):
        size = window_of(config, kind)
        if size is not None and size < recipe.target_length:
            raise RopeExtendError(
                f"positions {recipe.positions} cannot be combined with {config.model_type}: its layers of "
                f"type {kind} attend to {size} tokens, whatever their positions. So in training they would "
                f"see distances that never occur in use; leave positions out, train on long blocks"
            )
    model_type = causal_lm(model).config.model_type
    if counts := adapter_for(model_type).counts:
        raise RopeExtendError(
            f"positions {recipe.positions} cannot be combined with {model_type}: {counts}, whatever their "
            "positions; leave positions out, train on long blocks"
        )


def _evaluation_lengths(recipe: Recipe, shape: RopeShape) -> Sequence[int]:
    """The windows that the run evaluates at, in tokens; empty without `eval_data`."""
    if recipe.eval_data is None:
        return ()
    if recipe.eval_lengths is not None:
        return recipe.eval_lengths
    doublings = math.ceil(math.log2(recipe.target_length / shape.trained_length))
    return (*(shape.trained_length * 2**i for i in range(doublings)), recipe.target_length)


def _first_state(recipe: Recipe, content: str, sharding: Sharding, checkpoint: Path | None) -> RunState:
    """The state at the start: step 0, or that of the checkpoint, if data and processes are the same."""
    state = RunState(0, 0, 0.0, content, sharding.ranks, recipe.to_dict(), parts=sharding.parts)
    if checkpoint is None:
        return state
    saved = read_state(checkpoint)
    if saved.data != state.data:
        raise RopeExtendError(
            f"cannot resume: the documents of {recipe.data!r} are not those of {checkpoint}; restore them, "
            "or start a new run in another output_dir"
        )
    if saved.processes != state.processes:
        raise RopeExtendError(
            f"cannot resume: {checkpoint} was written by {saved.processes} processes, and this run has "
            f"{state.processes}; launch {saved.processes}"
        )
    if saved.parts != state.parts:
        raise RopeExtendError(
            f"cannot resume: {checkpoint} was written with sequences in {saved.parts} parts, and this run "
            f"has {state.parts}; launch it with the same cp_size or sp_size"
        )
    return replace(saved, recipe=state.recipe)


def _prepare_directory(directory: Path, recipe: Recipe, *, fresh: bool) -> None:
    """Write the recipe of a run that starts at step 0; if it is fresh, first remove an earlier run."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _RUN_FILES if fresh else ():
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        write_text(directory / "recipe.yaml", recipe.to_yaml())
    except OSError as error:
        raise RopeExtendError(f"cannot write to the output_dir {directory}: {error}") from error
