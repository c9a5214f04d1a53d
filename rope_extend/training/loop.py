"""The training loop: LoRA steps, metrics, evaluation, checkpoints, and a clean stop on a signal."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import get_peft_model
from torch import nn
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from rope_extend.attention.packed import check_packed_attention, document_inputs, packed_attention
from rope_extend.checkpoint.record import Record
from rope_extend.data.choices import CONSECUTIVE
from rope_extend.data.documents import fingerprint
from rope_extend.data.packing import scored
from rope_extend.data.sampled_positions import PositionCollator
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.loss_computer import RunOptions, peak_memory_bytes
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.results import PerplexityResult
from rope_extend.loss import causal_lm
from rope_extend.patching import current_patch, patch_model
from rope_extend.report.versions import package_version
from rope_extend.training.lora import adapted, lora_config
from rope_extend.training.metrics import Metrics, start_trackers
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import (
    VERSION,
    RunState,
    check_model,
    load_checkpoint,
    save_checkpoint,
    take_over,
)
from rope_extend.training.sharding import Objective, Sharding, whole
from rope_extend.training.text_reach import TextReach
from rope_extend.training.training_data import RunData, source_names

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class FinetuneInterrupted(SystemExit):
    """A signal ended the run after a step and a checkpoint. Exits with 128 + the number of the signal.

    Attributes:
        checkpoint: the checkpoint from which the run can be resumed.
    """

    def __init__(self, signum: int, checkpoint: Path) -> None:
        super().__init__(128 + signum)
        self.checkpoint = checkpoint


class TrainingRun:
    """One session of a run: the model with its new adapter, the optimizer, and the loop over steps.

    Attributes:
        model: the `PeftModel`.
        state: progress of the run.
        metrics: the latest measurements, and the file of all.
        record: the encoding of the adapter, and the base model that it belongs to.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        data: RunData,
        state: RunState,
        accelerator: Accelerator,
        reach: TextReach,
        chunk_size: int | None,
    ) -> None:
        self.recipe, self.data, self.state, self.accelerator = recipe, data, state, accelerator
        self.reach, self.chunk_size = reach, chunk_size
        self.sharding = Sharding.of(accelerator)
        self.directory = Path(recipe.output_dir)
        self.dtype = model.dtype
        if accelerator.is_main_process:  # another process may hold no weights yet
            identity = {**model_identity(model), VERSION: package_version("transformers")}
            check_model(state, identity)
            self.state = replace(state, model=identity)

        set_seed(recipe.seed)
        self.model = adapted(model, recipe, reach)
        self.record = Record.of(self.model, model.config.name_or_path or recipe.model)
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        # The loss is inside the wrapped module: DistributedDataParallel synchronises in its own forward only.
        self.objective, self.optimizer = accelerator.prepare(Objective(self.model), optimizer)
        # FSDP has replaced the parameters by shards.
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        self.evaluated = {"fingerprint": fingerprint(data.held_out), "trained_on": data.trained_on}
        self.metrics = Metrics(self.directory / "metrics.jsonl", accelerator, state.step, self.evaluated)
        start_trackers(accelerator, recipe.trackers, self.directory, recipe.to_dict(), state.step)

    def _clip(self) -> float:
        """Clip the gradients, and return their norm before that."""
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.recipe.max_grad_norm)
        return float(whole(norm))

    def _rate(self) -> float:
        """Learning rate of this step: linear from a tenth, then constant (2306.15595, section 3.1)."""
        step, warmup = self.state.step, self.recipe.warmup_steps
        return self.recipe.learning_rate * (1.0 if step >= warmup else 0.1 + 0.9 * step / warmup)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all processes."""
        return self.sequences_per_step * self.recipe.length

    @property
    def sequences_per_step(self) -> int:
        """Blocks of `block_length` in one optimizer step, over all processes, or the equivalent in tokens."""
        recipe = self.recipe
        return recipe.batch_size * recipe.gradient_accumulation * self.sharding.replicas

    def train(self, checkpoint: Path | None) -> None:
        """Train to the recipe's last step, from `checkpoint` if given, and prepare the model for saving.

        Raises:
            RopeExtendError: the loss or gradient is not finite in more consecutive steps than the recipe
                allows, the disk is full, or the model's attention does not support the recipe.
            FinetuneInterrupted: Ctrl-C or SIGTERM, after the current step and a checkpoint.
        """
        with self._attention():
            self._train(checkpoint)
        for name, parameter in self.model.named_parameters():
            # The dtype after loading the adapter onto this base. FSDP keeps the dtype of its shards.
            if "modules_to_save" in name and not self.sharding.weights:
                parameter.data = parameter.data.to(self.dtype)
        self.model.eval()
        self._close_trackers()

    def _train(self, checkpoint: Path | None) -> None:
        recipe, accelerator = self.recipe, self.accelerator
        if checkpoint is None:
            self._evaluate()
            set_seed(recipe.seed, device_specific=True)  # dropout differs between processes
        else:
            load_checkpoint(checkpoint, self.model, self.optimizer, accelerator)
            if accelerator.is_main_process:
                take_over(self.directory, recipe, self.state.step)
            measured = set(self.data.lengths) <= self.metrics.perplexity.keys()
            if self.state.step == recipe.steps and not measured:  # no step will lead to an evaluation
                self._evaluate()
        self.objective.train()
        bar = tqdm(
            total=recipe.steps, initial=self.state.step, unit="step", disable=not accelerator.is_main_process
        )
        with bar, _Signals() as signals:
            while self.state.step < recipe.steps:
                self._step(bar)
                last = self.state.step == recipe.steps
                if last or _due(self.state.step, recipe.eval_every):
                    self._evaluate()
                stop = self._agreed(signals.received)
                if last or stop or _due(self.state.step, recipe.save_every):
                    saved = self._save()
                if stop and not last:
                    bar.close()
                    self._interrupt(stop, saved)

    def to_save(self, config: Any) -> Any:
        """The model with all trained weights, for the main process to save; every process calls this.

        If the weights are sharded, it is a copy without the base weights, which an adapter does not need.

        Args:
            config: the model's config before the patch.
        """
        if not self.sharding.weights:
            return self.model
        named = self.model.named_parameters(remove_duplicate=False)  # a tied head under both names
        trained = whole({name: value for name, value in named if value.requires_grad})
        with torch.device("meta"):
            base = type(causal_lm(self.model))(config)
        patch: Any = current_patch(self.model)
        patch_model(
            base, patch.encoding, trained_length=patch.shape.trained_length, target_length=patch.target_length
        )
        model = get_peft_model(base, lora_config(base, self.recipe, self.reach))
        for name, value in trained.items():
            parent, _, leaf = name.rpartition(".")
            dtype = self.dtype if "modules_to_save" in name else value.dtype
            model.get_submodule(parent)._parameters[leaf] = nn.Parameter(value.to(dtype))
        return model

    def _sequences(self, forward: int) -> tuple[int, list[dict[str, torch.Tensor]]]:
        """The sequences of this process in a forward pass of this step, and the number of the first."""
        rows = self.recipe.batch_size
        forwards = self.state.step * self.recipe.gradient_accumulation + forward
        first = (forwards * self.sharding.replicas + self.sharding.replica) * rows
        return first, [self.data.blocks[position] for position in range(first, first + rows)]

    def _batch(self, forward: int) -> Mapping[str, Any]:
        """The inputs of the model in one forward pass of the current step, each `[rows, length]`."""
        recipe, accelerator = self.recipe, self.accelerator
        first, chosen = self._sequences(forward)
        collate: Callable[..., Mapping[str, torch.Tensor]] = default_collate
        if recipe.positions != CONSECUTIVE:
            collate = PositionCollator(recipe.positions, recipe.target_length, seed=recipe.seed, drawn=first)
        batch = {name: value.to(accelerator.device) for name, value in collate(chosen).items()}
        if not recipe.packs:
            return batch
        return {**batch, **document_inputs(self.model, batch["position_ids"])}

    def _divisor(self) -> torch.Tensor | None:
        """The divisor of the sum of losses of each forward pass; None for the number of tokens it predicts.

        Packed blocks predict different numbers of tokens, and each token has the same weight.
        """
        recipe, accelerator = self.recipe, self.accelerator
        if not recipe.packs:
            return None
        passes = range(recipe.gradient_accumulation)
        count = sum(scored(self._sequences(forward)[1]) for forward in passes)
        mean = torch.tensor(count / len(passes), device=accelerator.device)
        return accelerator.reduce(mean, "mean").clamp(min=1)

    def _autocast(self) -> AbstractContextManager[None]:
        # Trained weights are float32 on a bfloat16 base; autocast multiplies and saves them in bfloat16.
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=enabled)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Attention within documents if blocks are packed; tested on a few tokens."""
        with ExitStack() as stack:
            if self.recipe.packs:
                with self._autocast():
                    stack.enter_context(packed_attention(self.model, self._with_weights))
                    self._with_weights(check_packed_attention)
            yield

    def _with_weights(self, function: Callable[[Any], _Result]) -> _Result:
        """Call a function with the model while its weights are gathered."""
        if not self.sharding.weights:
            return function(self.model)
        with torch.no_grad():
            result: _Result = self.objective(within=function)
        self.objective.reshard()  # FSDP keeps the weights of the outermost module for a backward pass
        return result

    def _step(self, bar: Any) -> None:
        """One optimizer step, and its line of metrics."""
        recipe, accelerator = self.recipe, self.accelerator
        started = time.perf_counter()
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=accelerator.device)
        divisor = self._divisor()
        for forward in range(recipe.gradient_accumulation):
            batch = self._batch(forward)
            with accelerator.accumulate(self.objective), self.sharding.cut(accelerator, batch) as part:
                with self._autocast():
                    loss = self.objective(**{"num_items_in_batch": divisor, **part})
                accelerator.backward(loss)
            total += loss.detach() / recipe.gradient_accumulation
        norm = self._clip()
        mean = float(accelerator.reduce(total, "mean"))
        finite = math.isfinite(mean) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - started

        before = self.state
        state = self.state = replace(
            before,
            step=before.step + 1,
            tokens=before.tokens + self.tokens_per_step,
            seconds=before.seconds + seconds,
            skipped=before.skipped + (not finite),
            skipped_in_a_row=0 if finite else before.skipped_in_a_row + 1,
        )
        bar.update()
        if not finite:
            self._skipped(mean, norm)
            return
        speed = self.tokens_per_step / seconds
        bar.set_postfix_str(f"loss {mean:.3f}, {speed:,.0f} tokens/s", refresh=False)
        self.metrics.loss = mean
        if _due(state.step, recipe.log_every) or state.step == recipe.steps:
            self.metrics.write(
                step=state.step,
                loss=mean,
                lr=rate,
                grad_norm=norm,
                tokens=state.tokens,
                tokens_per_second=round(speed, 1),
                peak_memory_bytes=peak_memory_bytes(accelerator.device),
                seconds=round(state.seconds, 3),
                **self._epochs(),
            )

    def _epochs(self) -> dict[str, float]:
        """How often each of several sources was read."""
        times = self.data.blocks.epochs(self.state.step * self.sequences_per_step)
        named = zip(source_names(self.recipe), times, strict=False)  # one source has no name
        return {f"epochs/{name}": round(count, 3) for name, count in named}

    def _skipped(self, loss: float, norm: float) -> None:
        """Log a skipped step, and end the run if too many were skipped in a row."""
        state, limit = self.state, self.recipe.max_skipped
        problem = f"step {state.step}: the loss is {loss} and the norm of the gradient is {norm}"
        if state.skipped_in_a_row > limit:
            raise RopeExtendError(
                f"{problem}; {state.skipped_in_a_row} consecutive steps were skipped, and max_skipped is "
                f"{limit}. Use a lower learning_rate, more warmup_steps or dtype float32 in a new run; "
                f"checkpoints are in {self.directory / 'checkpoints'}"
            )
        logger.warning("%s; the step is skipped and changes no weight (%d so far)", problem, state.skipped)
        self.metrics.write(step=state.step, skipped=state.skipped, tokens=state.tokens)

    def _evaluate(self) -> None:
        """Measure perplexity by length on the held-out documents; all processes compute it, one writes it."""
        if not self.data.held_out:
            return
        main = self.accelerator.is_main_process
        self.model.eval()

        def measure(model: Any) -> PerplexityResult:
            options = RunOptions(chunk=self.chunk_size)
            return perplexity(model, self.data.held_out, self.data.lengths, options=options, progress=main)

        with self._autocast():
            result = self._with_weights(measure)
        self.model.train()
        if self.accelerator.device.type == "cuda":  # the next measurements are of training steps alone
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        self.metrics.perplexity = result.ppl
        if not self.state.step:
            self.metrics.before = result.ppl
        self.metrics.write(step=self.state.step, perplexity=result.ppl, eval_data=self.evaluated)
        if main:
            curve = ", ".join(f"{value:.2f} at {length}" for length, value in result.ppl.items())
            logger.info("step %d: perplexity %s", self.state.step, curve)

    def _agreed(self, received: int) -> int:
        """The signal that any process received, so that all stop after the same step; 0 for none."""
        if self.accelerator.num_processes == 1:
            return received
        signals = torch.tensor([received], device=self.accelerator.device)
        return int(self.accelerator.gather(signals).max())

    def _save(self) -> Path:
        keep = self.recipe.keep_checkpoints
        return save_checkpoint(
            self.directory, self.state, self.model, self.optimizer, self.accelerator, keep=keep
        )

    def _close_trackers(self) -> None:
        # Not `end_training`, which also ends the process group that a second run in this program would need.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _interrupt(self, signum: int, checkpoint: Path) -> None:
        logger.warning(
            "%s: stopped after step %d of %d and saved %s. To resume, run the same command with --resume "
            "(resume=True)", signal.Signals(signum).name, self.state.step, self.recipe.steps, checkpoint,
        )  # fmt: skip
        self._close_trackers()
        raise FinetuneInterrupted(signum, checkpoint)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Signals:
    """Records Ctrl-C and SIGTERM until the end of the step; a second one acts at once, as usual."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        signal.signal(signum, self._before[signum])

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other thread
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
