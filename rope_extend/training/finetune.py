"""Fine-tuning for a longer window: from a recipe to an adapter or a model, and its record.

A recipe becomes the arguments of transformers' `Trainer`. Before that, everything is checked without weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, set_seed
from transformers import AutoTokenizer, TrainingArguments, default_data_collator

from rope_extend.attention.packed import check_packed_attention, packed_attention
from rope_extend.attention.split_window import split_window
from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.peft_models import fingerprint_without_held
from rope_extend.checkpoint.record import Record
from rope_extend.checkpoint.saving import save, stock_save
from rope_extend.checkpoint.staging import refuse_base_model
from rope_extend.data.choices import CONSECUTIVE, RESTART
from rope_extend.data.sampled_positions import PositionCollator
from rope_extend.data.sources import check_outside
from rope_extend.evaluation.identity import model_identity
from rope_extend.files import check_creatable
from rope_extend.journal import only_writer
from rope_extend.memory.budget import expand_segments
from rope_extend.models.launch import check_launch
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import empty_model, one_error, pretrained
from rope_extend.models.processes import PATIENCE, is_main_process
from rope_extend.patching import Patch
from rope_extend.report.versions import package_version
from rope_extend.training.chunked_loss import chunked_loss
from rope_extend.training.lora import TextReach, adapted, extended
from rope_extend.training.memory_options import MemoryOptions, apply_memory_options
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import (
    CHECKPOINTS,
    VERSION,
    RunState,
    check_continues,
    enter_directory,
    read_state,
    starting_point,
)
from rope_extend.training.sharding import Sharding
from rope_extend.training.step_plan import (
    candidate_options,
    check_recipe,
    check_trackers,
    evaluation_lengths,
    plan_training,
    weights_dtype,
)
from rope_extend.training.trainer import FinetuneInterrupted, RopeTrainer, Run
from rope_extend.training.training_data import TrainerBlocks, load_data
from rope_extend.units import format_bytes

__all__ = ["FinetuneInterrupted", "FinetuneResult", "Recipe", "finetune"]

logger = logging.getLogger(__name__)

_COUNTED = 8192
"""Number of sequences whose sampled positions are counted; takes a second."""
_MANY_EPOCHS = 4
"""Up to this number of epochs, repeated text teaches about as much as new text (2305.16264)."""


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
        output_dir: directory with the adapter or model, its record, the recipe and the metrics.
        steps: optimizer steps done, over all sessions.
        tokens: tokens trained on.
        seconds: time spent in training steps.
        loss: mean next-token loss of the last step that was not skipped, in nats.
        perplexity: perplexity at the end, by length in tokens; empty if the recipe has no `eval_data`.
        share_beyond: share of the training tokens at positions beyond the pretrained window.
        skipped: steps that changed no weight, because loss or gradient was not finite.
        model: the patched and trained model, in evaluation mode. Under FSDP its weights are spread over
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
    model: Any
    patch: Patch


def finetune(
    recipe: Recipe, *, resume: bool = False, overwrite: bool = False, limit_memory: int | None = None
) -> FinetuneResult:
    """Extend a model as the recipe says, train LoRA or all weights, and write the result and its metrics.

    Before the weights are loaded, these are checked in this order: the output directory, the method on the
    model's config, the memory of a step and of an evaluation, and the data. Memory options that the recipe
    leaves open are chosen so that a step fits; a resumed run keeps them. Runs on the devices that
    `accelerate` finds: one device, or several under `torchrun` or `accelerate launch`, with a shared file
    system. Seeds the global generators of Python, numpy and torch.

    Args:
        recipe: the run.
        resume: resume from the newest intact checkpoint of `recipe.output_dir`, or start at step 0 if there
            is none. On a CPU, the weights at the end are then bit for bit those of an uninterrupted run. A
            process that is killed, also while it saves, leaves earlier checkpoints intact.
        overwrite: remove an earlier run, or another checkpoint, from `recipe.output_dir`.
        limit_memory: bytes of the device to plan with; by default what is free.

    Raises:
        RopeExtendError: one of the checks fails; the disk is full; the loss or gradient is not finite in
            four consecutive steps; or the launched processes do not find each other.
        FinetuneInterrupted: Ctrl-C or SIGTERM, after the current step and a checkpoint.
    """
    expand_segments()
    directory = Path(recipe.output_dir)
    check_creatable(directory)
    for source in (recipe.data, recipe.eval_data):
        check_outside(directory, source)
    refuse_base_model(directory, recipe.model)
    checkpoint = starting_point(directory, recipe, resume, overwrite)
    with only_writer(directory, "run") if is_main_process() else nullcontext():
        return _finetune(recipe, checkpoint, limit_memory, fresh=not resume)


def _finetune(
    recipe: Recipe, checkpoint: Path | None, limit_memory: int | None, *, fresh: bool
) -> FinetuneResult:
    """As `finetune`, in a directory that no other process writes to; `fresh` removes an earlier run in it."""
    directory = Path(recipe.output_dir)
    accelerator = _accelerator(recipe)
    main = accelerator.is_main_process
    dtype = weights_dtype(recipe, accelerator.device)
    sharding = Sharding.of(accelerator, recipe.split_window)
    shape, reach = check_recipe(recipe, sharding)
    load_options = LoadOptions(
        str(accelerator.device), dtype=dtype, quantize=recipe.quantize, limit_memory=limit_memory
    )
    lengths = evaluation_lengths(recipe, shape)
    before = None if checkpoint is None else read_state(checkpoint)
    memory_options, chunk_size = _memory_options(recipe, lengths, load_options, sharding, before, reach)
    tokenizer = pretrained(AutoTokenizer, recipe.model)
    with accelerator.main_process_first():  # the other processes then read the tokens from the cache
        data = load_data(recipe, tokenizer, lengths, shape.trained_length)
    if data.trained_on and main:
        logger.warning(
            "%d of the %d documents of eval_data are also training data, so their perplexity does not show "
            "how the model does on new text; give other documents as eval_data",
            data.trained_on, len(data.held_out),
        )  # fmt: skip
    parts = {"processes": sharding.ranks, "parts of a sequence": sharding.parts}
    state = RunState(recipe=recipe.to_dict(), identity={"documents": data.fingerprint, **parts})
    if before is not None:
        check_continues(before, state)
        state = replace(before, recipe=state.recipe)
    state = replace(state, memory_options=asdict(memory_options))

    # FSDP distributes what is in host memory.
    loaded_by = replace(load_options, device="cpu") if sharding.weights else load_options
    model: Any = loaded_by.load(recipe.model)
    share, collator = data.blocks.share_beyond(shape.trained_length), None
    if recipe.positions != CONSECUTIVE:
        collator = PositionCollator(recipe.positions, recipe.target_length, seed=recipe.seed)
        share = collator.share_beyond(shape.trained_length, recipe.length, _COUNTED)
    patch = extended(model, recipe)
    if main:  # another process may hold no weights yet
        identity = {**model_identity(model), VERSION: package_version("transformers")}
        state = replace(state, identity={**state.identity, **identity})
        if before is not None:
            check_continues(before, state)
    set_seed(recipe.seed)
    trained = adapted(model, recipe, reach)
    record = Record.of(trained, model.config.name_or_path or recipe.model)
    if sharding.weights and main and not recipe.full:  # later the base weights are spread
        with TemporaryDirectory() as written:
            stock_save(trained)(trained, written)
            known = fingerprint_without_held(trained, record.base_fingerprint, Path(written))
        record = replace(record, base_fingerprint=known)
    run = Run(recipe, data, dtype, chunk_size, record.base_model)
    with ExitStack() as stack:
        stack.callback(setattr, model.config, "use_cache", getattr(model.config, "use_cache", False))
        stack.enter_context(chunked_loss(model))
        if recipe.packs:
            stack.enter_context(packed_attention(model))
            if main or not sharding.loaded_once:
                with run.autocast(accelerator.device):
                    check_packed_attention(model)
        if recipe.split_window > 1:
            connected: Any = torch.distributed  # new_subgroups has no types
            stack.enter_context(split_window(model, connected.new_subgroups(sharding.parts)[0]))
        stack.enter_context(apply_memory_options(model, memory_options))
        per_step = recipe.batch_size * recipe.gradient_accumulation * sharding.replicas
        blocks = TrainerBlocks(data.blocks, collator, recipe.steps * per_step)
        accelerator.wait_for_everyone()  # none reads what is removed
        if main:
            enter_directory(directory, recipe, state.step, fresh=fresh)
        accelerator.wait_for_everyone()
        trainer = _trainer(trained, run, state, blocks, accelerator)
        if main:
            _log_start(trainer, run, share)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    progress, history = trainer.progress, trainer.state.log_history
    loss = next((line["loss"] for line in reversed(history) if "loss" in line), math.nan)
    perplexity = trainer.perplexity_after(progress.step)
    state_dict = _state_dict(trained, accelerator) if sharding.weights else None
    named = trained.named_parameters() if state_dict is None else state_dict.items()
    for name, value in named:
        if recipe.full or "modules_to_save" in name:  # the dtype of the base model
            value.data = value.data.to(dtype)
    trained.eval()
    if main:
        kept = tokenizer if recipe.full else None
        save(trained, directory, kept, overwrite=True, record=record, state=state_dict)
        before_training = trainer.perplexity_after(0)
        add_card(directory, perplexity=perplexity, before=before_training, trained_on=data.trained_on)
        logger.info("saved the %s and its record in %s", "model" if recipe.full else "adapter", directory)
    accelerator.wait_for_everyone()
    return FinetuneResult(
        directory, progress.step, progress.tokens, progress.seconds, loss, perplexity, share,
        progress.skipped, trained, patch,
    )  # fmt: skip


def _state_dict(model: Any, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """The weights that FSDP spreads over the processes, in host memory of the first; tied ones once."""
    state: dict[str, torch.Tensor] = accelerator.get_state_dict(model)
    first: dict[torch.Tensor, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = first.setdefault(parameter, state[name])
    return state


def _trainer(
    model: Any, run: Run, state: RunState, blocks: TrainerBlocks, accelerator: Accelerator
) -> RopeTrainer:
    """The trainer of a recipe."""
    recipe, directory = run.recipe, Path(run.recipe.output_dir)
    arguments = TrainingArguments(
        str(directory / CHECKPOINTS),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.gradient_accumulation,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,  # linear from a tenth, then constant (2306.15595, section 3.1)
        lr_scheduler_type="warmup_stable_decay",
        # -1: a run of more steps resumes with the rate in the last checkpoint, which must not have decayed.
        lr_scheduler_kwargs={"min_lr_ratio": 0.1, "num_decay_steps": -1},
        adam_beta2=0.95,  # with no weight decay, and the norm clipped to 1, which are Trainer's defaults
        optim=recipe.optim,
        seed=recipe.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,  # RopeTrainer has its own
        save_steps=recipe.save_every or 10**9,  # the last step is saved and evaluated anyway
        save_total_limit=recipe.keep_checkpoints,
        eval_strategy="steps" if run.data.held_out else "no",
        eval_steps=recipe.eval_every or 10**9,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=accelerator.device.type == "cuda",
        report_to=list(recipe.trackers),
        run_name=directory.resolve().name,
        ddp_find_unused_parameters=False,
        accelerator_config={"use_configured_state": True},
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # otherwise Trainer uses all GPUs from one process
    return RopeTrainer(
        model, arguments, run=run, state=state, train_dataset=blocks, eval_dataset=run.data.held_out,
        data_collator=default_data_collator,
    )  # fmt: skip


def _memory_options(
    recipe: Recipe,
    lengths: Sequence[int],
    load_options: LoadOptions,
    sharding: Sharding,
    before: RunState | None,
    reach: TextReach,
) -> tuple[MemoryOptions, int | None]:
    """The memory options that the steps of a run need, and the chunk size of its evaluations, if known.

    A resumed run keeps its tiles, because others round differently; the other options change no bit.
    """
    if before is not None:
        recipe = replace(recipe, mlp_tiles=before.memory_options["mlp_tiles"])
    plan, chunk_size = None, None
    if recipe.split_window > 1 or sharding.parts == 1:  # the share under ring attention is not estimated
        plan = plan_training(
            recipe, load_options=load_options, sharding=sharding, evaluation_lengths=lengths, reach=reach
        )
    if plan is None:
        candidates = candidate_options(recipe, empty_model(recipe.model), load_options.torch_device)
        recomputing = (options for options in candidates if options.gradient_checkpointing)
        memory_options = next(recomputing, candidates[0])
    else:
        plan.check()
        memory_options = plan.chosen.memory_options
        chunk_size = plan.evaluation.chunk_size if plan.evaluation else None
        needed, available = format_bytes(plan.total), format_bytes(plan.budget.available)
        logger.info("memory: about %s of %s on %s", needed, available, plan.budget.device)
    logger.info("memory options: %s", memory_options)
    # Free memory differs between devices; all processes use the same options.
    chosen: tuple[MemoryOptions, int | None] = broadcast_object_list([(memory_options, chunk_size)])[0]
    return chosen


def _accelerator(recipe: Recipe) -> Accelerator:
    check_trackers(recipe.trackers)
    with one_error("accelerate does not start as it was launched"):
        accelerator = Accelerator(
            mixed_precision="no",  # a run casts itself, for training and evaluation alike
            # The other processes wait while the first one tokenises.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
    check_launch(accelerator.num_processes)
    return accelerator


def _log_start(trainer: RopeTrainer, run: Run, share: float) -> None:
    """Log the trained parameters and the data of a run; `share` is that of `share_beyond`."""
    recipe, data, sequences = run.recipe, run.data.blocks, trainer.sequences
    trained = trainer.get_num_trainable_parameters()
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    logger.info("trainable parameters: %s (%.2f %%)", f"{trained:,} of {total:,}", 100 * trained / total)
    logger.info(
        "data: %s; %s tokens per step, %.1f %% of them beyond the pretrained window",
        data, f"{sequences * recipe.length:,}", 100 * share,
    )  # fmt: skip
    if 2 * (warmup := recipe.warmup_steps) >= recipe.steps:
        logger.warning("the %d warmup_steps are much of the %d steps; use fewer", warmup, recipe.steps)
    epochs = data.epochs(recipe.steps * sequences)
    if recipe.mixed_windows and max(epochs) > _MANY_EPOCHS:
        logger.warning(
            "mixed_windows: the %s blocks are read %.1f times by the last step; add texts, or lower steps",
            "long" if epochs[0] > epochs[1] else "short", max(epochs),
        )  # fmt: skip
    if share == 0 and recipe.packing == RESTART:
        logger.warning(
            "packing restart: no document is longer than the pretrained window, so the run teaches nothing "
            "about positions beyond it; add longer texts"
        )
