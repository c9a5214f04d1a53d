"""transformers' `Trainer` for long runs: whole checkpoints, a clean stop, and no step that is not finite.

The command, a recipe and `scripts/finetune.py` all train with it.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from rope_extend.attention.split_window import current_split
from rope_extend.checkpoint.callback import SaveEncodingCallback, write_spread
from rope_extend.data.documents import fingerprint
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.evaluation.loss_computer import RunOptions, peak_memory_bytes
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.statistics import plain
from rope_extend.files import write_text
from rope_extend.models.loading import one_error
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import (
    PARTIAL,
    RunState,
    checkpoints,
    newest_intact,
    publish_checkpoint,
    read_state,
)
from rope_extend.training.training_data import RunData

logger = logging.getLogger(__name__)

MAX_SKIPPED = 3
"""Number of consecutive steps that may be skipped, because their loss or gradient is not finite."""


class FinetuneInterrupted(SystemExit):
    """A signal ended the run after a step and a checkpoint. Exits with 128 + the number of the signal.

    Attributes:
        checkpoint: the checkpoint from which the run can be resumed.
    """

    def __init__(self, signum: int, checkpoint: Path) -> None:
        super().__init__(128 + signum)
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class Run:
    """What a recipe adds to `Trainer`.

    Attributes:
        recipe: its warm-up and its directory.
        data: its documents to evaluate on.
        dtype: dtype of the frozen weights.
        chunk_size: tokens that an evaluation processes at a time; None for all.
        base_model: name of the base model, for the record.
    """

    recipe: Recipe
    data: RunData
    dtype: torch.dtype
    chunk_size: int | None = None
    base_model: str | None = None

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Trained weights are float32 on a bfloat16 base; autocast computes with them in bfloat16."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


class RopeTrainer(Trainer):  # type: ignore[misc]
    """transformers' `Trainer` for an extended model, with the same arguments.

    It trains what `Trainer` trains, to the bit. In addition:

    - A checkpoint is complete or not there. It has a manifest, and the record of the encoding.
      `train(resume_from_checkpoint=True)` continues from the newest intact one, or begins if there is none.
    - Ctrl-C and SIGTERM end `train` by `FinetuneInterrupted`, after the current step and a checkpoint.
    - A step whose loss or gradient is not finite changes no weight, and too many in a row end the run.
    - `metrics.jsonl` in the output directory has the loss, tokens per second and memory of each logged step.

    Args:
        model: the extended model, with or without PEFT.
        args: as for `Trainer`.
        run: what a recipe adds; by default nothing.
        state: the progress of the run; by default that of the checkpoint.
        options: further arguments of `Trainer`.

    Attributes:
        progress: the steps and tokens so far, over all sessions.

    Raises:
        RopeExtendError: an argument that needs checkpoints in their final place while they are written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrainingArguments,
        *,
        run: Run | None = None,
        state: RunState | None = None,
        **options: Any,
    ) -> None:
        best = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        refuse_if(
            args.push_to_hub or best,
            "push_to_hub, load_best_model_at_end and save_strategy best do not work with RopeTrainer, which "
            "gives checkpoints their names when they are whole; use transformers' Trainer with "
            "SaveEncodingCallback for them",
        )
        given = options.pop("callbacks", None) or ()
        args.data_seed = args.seed if args.data_seed is None else args.data_seed  # of the processes alike
        self.steps = _StepCallback(self)
        callbacks = [SaveEncodingCallback(run.base_model if run else None), *given, self.steps]
        super().__init__(model, args, callbacks=callbacks, **options)
        if self.pop_callback(ProgressCallback):
            self.add_callback(_Progress)
        self.run = run
        self.progress = state or RunState()
        self._metrics_path = Path(run.recipe.output_dir if run else args.output_dir, "metrics.jsonl")
        self._evaluated = "" if run is None else fingerprint(run.data.held_out)
        self.loss = self.norm = math.nan

    def train(self, resume_from_checkpoint: bool | str | None = None, **options: Any) -> Any:
        """As `Trainer.train`; True resumes from the newest intact checkpoint, or begins if there is none.

        Raises:
            RopeExtendError: all checkpoints are damaged; one cannot be written; the output directory has
                those of another run; or the loss or gradient is not finite in too many consecutive steps.
            FinetuneInterrupted: Ctrl-C or SIGTERM, after the current step and a checkpoint.
        """
        output, checkpoint = Path(self.args.output_dir), cast(Any, resume_from_checkpoint or None)
        if checkpoint is True:
            checkpoint = newest_intact(output)
        if (there := checkpoints(output)) and self.args.save_strategy != SaveStrategy.NO:
            refuse_if(
                checkpoint is None or Path(checkpoint).resolve().parent != output.resolve(),
                f"{output} has {there[-1].name} of another run, which this one would replace; give "
                "resume_from_checkpoint=True to continue that run, or another output_dir",
            )
        if self.run is None:  # otherwise finetune has read the state
            self.progress = RunState() if checkpoint is None else read_state(Path(checkpoint))
        done, steps, saved = self.progress.step, self.args.max_steps, Path(str(checkpoint))
        refuse_if(0 < steps < done, f"cannot resume: {done} steps are done, and not {steps}; raise steps")
        refuse_if(
            checkpoint is not None and not [*saved.glob("optimizer*"), *saved.glob("global_step*")],
            f"{checkpoint} has no optimizer, which save_only_model leaves out; begin a new run",
        )
        try:
            result = super().train(resume_from_checkpoint=checkpoint and str(checkpoint), **options)
        finally:
            self.steps.release()
        signum, done, steps = self.steps.agreed, self.state.global_step, self.state.max_steps
        if signum and done < steps:
            saved = checkpoints(output)[-1]
            logger.warning(
                "%s: stopped after step %d of %d and saved %s. To resume, run the same command with --resume "
                "(resume=True)", signal.Signals(signum).name, done, steps, saved,
            )  # fmt: skip
            raise FinetuneInterrupted(signum, saved)
        return result

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write a checkpoint under another name, which becomes its own when it is complete and on disk."""
        args, step = self.args, self.state.global_step
        output, keep = args.output_dir, args.save_total_limit
        final = Path(output, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        partial = final.with_name(f"{PARTIAL}{step}")
        try:
            if args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            args.output_dir, args.save_total_limit = str(partial), None
            try:
                super()._save_checkpoint(model, trial)
            finally:
                args.output_dir, args.save_total_limit = output, keep
            write_spread(partial / final.name, self.model, writes=args.should_save)
            self.accelerator.wait_for_everyone()
            if args.should_save:
                publish_checkpoint(partial / final.name, final, self.progress, keep=keep)
        except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch.save
            if args.should_save:
                shutil.rmtree(partial, ignore_errors=True)
            raise RopeExtendError(
                f"cannot write the checkpoint {final}: {error}. Earlier checkpoints are intact; make room on "
                "the disk, then resume the run"
            ) from error
        self.accelerator.wait_for_everyone()

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        """As in `Trainer`; processes that share each window get the same batches."""
        if (split := current_split(self.model)) is not None:
            split.same_batches(self)
        return super()._get_dataloader(*args, **options)

    @property
    def sequences(self) -> int:
        """Number of sequences of a step, in all processes."""
        split = current_split(self.model)
        count: int = self.get_total_train_batch_size(self.args)
        return count if split is None else count // split.processes.size

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """As in `Trainer`; a step begins here, unless the run that is resumed has done its last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        self._started = time.perf_counter()
        self._total: torch.Tensor | float = 0.0
        batches, items = super().get_batch_samples(*args, **options)
        self._tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
        return batches, items

    def autocast_smart_context_manager(self, *args: Any, **options: Any) -> AbstractContextManager[Any]:
        """Autocast as the recipe needs it; without a recipe, accelerate does what the arguments say."""
        return self.run.autocast(self.args.device) if self.run else nullcontext()

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """As in `Trainer`; a loss that is not finite does not spoil the mean of the others."""
        loss: torch.Tensor = super().training_step(*args, **options)
        self._total = self._total + loss
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """As in `Trainer`; without a finite loss and norm, there is no gradient, so no weight changes."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        own = torch.tensor([float(self._total), self._tokens], device=self.args.device)
        self.loss, tokens = self.accelerator.reduce(own, "mean").tolist()
        own_sequences = self._train_batch_size * self.args.gradient_accumulation_steps
        self._step_tokens = round(tokens * self.sequences / own_sequences)
        if not self._finite:
            model.zero_grad()
        return self.norm

    @property
    def _finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def step_ended(self) -> None:
        """Count a step.

        Raises:
            RopeExtendError: too many consecutive steps were skipped.
        """
        before, finite, seconds = self.progress, self._finite, time.perf_counter() - self._started
        self.speed = self._step_tokens / seconds
        state = self.progress = replace(
            before,
            step=self.state.global_step,
            tokens=before.tokens + self._step_tokens,
            seconds=before.seconds + seconds,
            skipped=before.skipped + (not finite),
            skipped_in_a_row=0 if finite else before.skipped_in_a_row + 1,
        )
        if finite:
            return
        problem = f"step {state.step}: the loss is {self.loss} and the norm of the gradient is {self.norm}"
        refuse_if(
            state.skipped_in_a_row > MAX_SKIPPED,
            f"{problem}; {state.skipped_in_a_row} consecutive steps were skipped. Use a lower learning_rate, "
            f"more warmup_steps or dtype float32 in a new run; checkpoints are in {self.args.output_dir}",
        )
        logger.warning("%s; the step is skipped and changes no weight (%d so far)", problem, state.skipped)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """As in `Trainer`, with more numbers of a step, which `metrics.jsonl` gets too."""
        state, of_step = self.progress, "loss" in logs
        if of_step and self._finite:
            logs = {
                "loss": self.loss,
                "lr": logs["learning_rate"],
                "grad_norm": self.norm,
                "tokens": state.tokens,
                "tokens_per_second": round(self.speed, 1),
                "peak_memory_bytes": peak_memory_bytes(self.args.device),
                "seconds": round(state.seconds, 3),
            }
        elif of_step:
            logs = {"skipped": state.skipped, "tokens": state.tokens}
        elif self.run is not None:  # a recipe's trackers do not get the sums of a whole run
            return
        super().log(logs, start_time)
        if of_step:
            self._write_metrics()

    def _write_metrics(self) -> None:
        """Write the history of the run, which its checkpoints have too, so a resumed run repeats no line."""
        history = self.state.log_history  # a checkpoint has the names of a line in this order
        lines = [{name: line[name] for name in sorted(line) if name != "epoch"} for line in history]
        text = "".join(f"{json.dumps(plain(line), allow_nan=False)}\n" for line in lines)
        if self.is_world_process_zero():
            with one_error("cannot write the metrics", "Make room, then resume from the last checkpoint"):
                write_text(self._metrics_path, text)

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Perplexity by length on the documents of the recipe, in every process; or as in `Trainer`."""
        if self.run is None:
            return dict(super().evaluate(*args, **options))
        data, main, step = self.run.data, self.is_world_process_zero(), self.progress.step
        chunks, model = RunOptions(chunk=self.run.chunk_size), self.model.eval()
        model.measure = partial(perplexity, model, data.held_out, data.lengths, options=chunks, progress=main)
        register_fsdp_forward_method(model, "measure")  # FSDP gathers outer weights only in such a method
        try:
            with self.autocast_smart_context_manager(), torch.no_grad():
                result = model.measure()
        finally:
            del model.measure
        for module in model.modules():
            if isinstance(module, FSDPModule):  # FSDP keeps weights of some for a backward pass
                module.reshard()
        model.train()
        if self.args.device.type == "cuda":  # the next measurements are of training steps alone
            torch.cuda.reset_peak_memory_stats(self.args.device)
        if main:
            curve = ", ".join(f"{value:.2f} at {length}" for length, value in result.ppl.items())
            logger.info("step %d: perplexity %s", step, curve)
        values = {f"perplexity/{length}": value for length, value in result.ppl.items()}
        super().log(values)  # trackers take single numbers
        evaluated = {"fingerprint": self._evaluated, "trained_on": data.trained_on}
        self.state.log_history[-1] = {"step": step, "perplexity": result.ppl, "eval_data": evaluated}
        self._write_metrics()
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, values)
        return values

    def perplexity_after(self, step: int) -> dict[int, float]:
        """Perplexity after a step by length, of the text on which this run evaluates, as far as measured."""
        lengths = self.run.data.lengths if self.run else ()
        return {
            int(length): value
            for line in self.state.log_history
            if line["step"] == step and line.get("eval_data", {}).get("fingerprint") == self._evaluated
            for length, value in line["perplexity"].items()
            if int(length) in lengths  # as text, of a checkpoint
        }


class _StepCallback(TrainerCallback):  # type: ignore[misc]
    """Counts steps, and ends the run after one in which any process got Ctrl-C or SIGTERM.

    A second signal acts at once, as usual.
    """

    def __init__(self, trainer: RopeTrainer) -> None:
        self.trainer = trainer
        self.received = self.agreed = 0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count intervals as the arguments say, which may have changed since the checkpoint."""
        state.compute_steps(args, state.max_steps)
        self.received = self.agreed = 0
        run, step = self.trainer.run, state.global_step
        if step:  # without the lines after the checkpoint
            self.trainer._write_metrics()
        if run is not None and run.data.held_out:  # before the first step, or if no step will evaluate
            missing = len(self.trainer.perplexity_after(step)) < len(run.data.lengths)
            args.eval_on_start = step == 0 or (step == state.max_steps and missing)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to record signals, after an evaluation that comes before the first step."""
        if state.global_step == 0:
            set_seed(args.seed, device_specific=True)  # dropout differs between processes
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other thread
            for signum in {signal.SIGINT, signal.SIGTERM} - self._before.keys():
                self._before[signum] = signal.signal(signum, self._note) or signal.SIG_DFL

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, and stop after it if a process got a signal."""
        self.trainer.step_ended()
        last, skipped = state.global_step >= state.max_steps, self.trainer.progress.skipped_in_a_row
        control.should_log |= last or skipped > 0
        signals = torch.tensor([self.received], device=args.device)
        self.agreed = int(self.trainer.accelerator.gather(signals).max())
        if self.agreed:
            control.should_training_stop = control.should_save = True

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        signal.signal(signum, self._before[signum])

    def release(self) -> None:
        """Let signals act as they did before."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()


class _Progress(ProgressCallback):  # type: ignore[misc]
    """The bar of `Trainer`, with loss and speed instead of a line for each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show loss and speed."""
        if self.training_bar is not None and "loss" in logs:
            said = f"loss {logs['loss']:.3f}, {logs['tokens_per_second']:,.0f} tokens/s"
            self.training_bar.set_postfix_str(said, refresh=False)
