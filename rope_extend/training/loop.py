"""The training loop: LoRA steps, metrics, evaluation, checkpoints, and a clean stop on a signal."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import default_collate
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from rope_extend.checkpoint import Record
from rope_extend.data import Document
from rope_extend.encodings import KernelEncoding, encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation import PerplexityResult, perplexity
from rope_extend.evaluation.perplexity import peak_memory_bytes
from rope_extend.learned import learned_parameters
from rope_extend.loss import causal_lm
from rope_extend.patching import Patch, current_patch, extend, patch_model
from rope_extend.training.annealing import mix_for_step
from rope_extend.training.curriculum import Curriculum
from rope_extend.training.packing import (
    RESTART,
    UNPACKED,
    apart_without_mask,
    check_apart,
    document_inputs,
    scored,
)
from rope_extend.training.positions import PositionCollator
from rope_extend.training.recipe import CONSECUTIVE, Recipe
from rope_extend.training.resume import RunState, load_checkpoint, save_checkpoint
from rope_extend.training.sharding import Clipping, Objective, Sharding, whole
from rope_extend.training.shifted_sparse import shifted_sparse
from rope_extend.training.tracking import start_trackers
from rope_extend.training.utilisation import device_peak, training_flops

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class FinetuneInterrupted(SystemExit):
    """A signal ended the run at a step's end, with a checkpoint. Exits with 128 + the signal's number.

    Attributes:
        checkpoint: where the run can go on from.
    """

    def __init__(self, signum: int, checkpoint: Path) -> None:
        super().__init__(128 + signum)
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class RunData:
    """What a run reads.

    Attributes:
        blocks: what it trains on.
        held_out: documents it is evaluated on; may be empty.
        lengths: the windows it is evaluated at, in tokens.
        at_once: how many tokens of those are read at a time; None for as many as usual.
    """

    blocks: Curriculum
    held_out: Sequence[Document]
    lengths: Sequence[int]
    at_once: int | None = None


# ---------------------------------------------------------------------------------------------------------
# What is trained


def lora_config(model: Any, recipe: Recipe) -> LoraConfig:
    """The peft configuration of a recipe, with the module names of this model's family.

    Raises:
        RopeExtendError: `lora_targets` names a layer that the model does not have.
    """
    extra: dict[str, Any] = {}
    senses = _senses(model)
    if senses:  # peft matches the ends of names, and a layer in an image encoder may be called the same
        extra["exclude_modules"] = rf"({'|'.join(re.escape(name) for name in senses)})\..*"
    if recipe.train_norm_embed:
        embedding = model.get_input_embeddings()
        chosen = [
            name for name, part in model.named_modules() if part is embedding or "Norm" in type(part).__name__
        ]
        extra["modules_to_save"] = sorted({_leaf(name) for name in chosen})
        # Where the head is the embedding matrix, it has to stay so, or the two drift apart.
        extra["ensure_weight_tying"] = embedding.weight is model.get_output_embeddings().weight
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        target_modules=_lora_targets(model, recipe.lora_targets, senses),
        **extra,
    )


def adapted(model: Any, recipe: Recipe) -> PeftModel:
    """The model with the recipe's adapter, trained in float32, and with nothing else trained.

    Raises:
        RopeExtendError: as `lora_config`.
    """
    adapter = get_peft_model(model, lora_config(model, recipe))
    for parameter in learned_parameters(model).values():  # peft froze all that is not the adapter's
        parameter.requires_grad_(True)
    for parameter in adapter.parameters():
        if parameter.requires_grad:  # bfloat16's 8 bits would lose steps of 1e-4
            parameter.data = parameter.data.float()
    return adapter


def extended(model: nn.Module, recipe: Recipe) -> Patch:
    """The model patched as the recipe says.

    Raises:
        RopeExtendError: as `extend`.
    """
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


def _senses(model: Any) -> list[str]:
    """Paths of the parts that read images or sound, which text gives no gradient."""
    return [
        name
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and re.search("Audio|Vision", type(part.config).__name__)
    ]


def _is_attention(module: nn.Module) -> bool:
    """Whether the module lets text attend to text."""
    name = type(module).__name__
    return ("Attention" in name or name.endswith("MLA")) and "CrossAttention" not in name


def _user_of(model: nn.Module, name: str) -> nn.Module:
    """The module that a linear layer serves, which may hold it in a wrapper, as Moshi's and ZAYA's do."""
    path = name.rpartition(".")[0]
    while re.search("(Linear|Projection)$", type(model.get_submodule(path)).__name__):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)


def _lora_targets(model: nn.Module, wanted: str | Sequence[str], senses: Sequence[str]) -> str | list[str]:
    """Module names in the form that peft matches: the ends of paths."""
    if wanted == "all-linear":
        return wanted
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not any(name.startswith(f"{part}.") for part in senses)
    ]
    if wanted == "attention":
        inside = {name for name in linear if _is_attention(_user_of(model, name))}
        if any(_leaf(name) == "gate_up_proj" for name, _ in model.named_parameters()):
            # peft takes any `gate_proj` for the half of such experts that went by this name, and refuses it.
            inside = {name for name in inside if _leaf(name) != "gate_proj"}
        elsewhere = {_leaf(name) for name in linear if name not in inside}
        # A name that other layers have too, such as "dense", needs its parent to tell the two apart.
        parts = {name: 2 if _leaf(name) in elsewhere else 1 for name in inside}
        return sorted({".".join(name.split(".")[-count:]) for name, count in parts.items()})
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            # peft would train the other layers and say nothing.
            leaves = ", ".join(sorted({_leaf(name) for name in linear}))
            raise RopeExtendError(
                f"recipe: lora_targets has {target!r}; this model's linear layers are {leaves}"
            )
    return list(wanted)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


# ---------------------------------------------------------------------------------------------------------
# The loop


class TrainingRun:
    """One session of a run: the model with its new adapter, the optimizer, and the loop over steps.

    Attributes:
        model: the `PeftModel`.
        state: where the run stands.
        metrics: what was measured last, and the file it is written to.
        record: what the adapter reads with, and which base model it belongs to.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Any,
        data: RunData,
        state: RunState,
        accelerator: Accelerator,
    ) -> None:
        self.recipe, self.data, self.state, self.accelerator = recipe, data, state, accelerator
        self.sharding = Sharding.of(accelerator)
        self.directory = Path(recipe.output_dir)
        self.dtype = model.dtype

        set_seed(recipe.seed)
        self.model = adapted(model, recipe)
        self.record = Record.of(self.model, model.config.name_or_path or recipe.model)
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        self.peak = recipe.peak_flops or device_peak(accelerator.device, self.dtype)
        self.flops = (
            training_flops(self.model, recipe.length, quadratic=_quadratic(model)) if self.peak else None
        )
        optimizer = torch.optim.AdamW(
            self.parameters, lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        # The loss is part of what is wrapped: DistributedDataParallel synchronises in its own forward only.
        self.sharding.prepare(accelerator, batch_size=recipe.batch_size)
        self.clipping = Clipping(optimizer, recipe.max_grad_norm) if self.sharding.ulysses > 1 else None
        self.objective, self.optimizer = accelerator.prepare(Objective(self.model), optimizer)
        # FSDP has put parts in the place of the parameters.
        self.parameters = [value for value in self.model.parameters() if value.requires_grad]
        self.metrics = Metrics(self.directory / "metrics.jsonl", accelerator, state.step)
        start_trackers(accelerator, recipe.tracked_by, self.directory, recipe.to_dict(), state.step)

    def _clip(self) -> float:
        """Clip the gradients; their norm before that."""
        if self.clipping is not None:
            return self.clipping.norm
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.recipe.max_grad_norm)
        return float(whole(norm))

    def _utilisation(self, speed: float) -> dict[str, float]:
        """The share of all devices' peak that a speed in tokens per second comes to, where it is known."""
        if not self.peak or not self.flops:
            return {}
        return {"mfu": round(speed * self.flops / (self.peak * self.accelerator.num_processes), 4)}

    def _rate(self) -> float:
        """Learning rate of this step: linear from a tenth, then constant (2306.15595, section 3.1)."""
        step, warmup = self.state.step, self.recipe.warmup_steps
        return self.recipe.learning_rate * (1.0 if step >= warmup else 0.1 + 0.9 * step / warmup)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, over all processes."""
        return self.sequences_per_step * self.recipe.length

    @property
    def sequences_per_step(self) -> int:
        """Blocks of `block_length` that one optimizer step sees, or as many tokens, over all processes."""
        recipe = self.recipe
        return recipe.batch_size * recipe.gradient_accumulation * self.sharding.replicas

    def train(self, checkpoint: Path | None) -> None:
        """Run to the recipe's last step, from `checkpoint` if given, and leave the model ready to save.

        Raises:
            RopeExtendError: loss or gradient stayed not finite for more steps than the recipe allows, the
                disk is full, or the model's attention does not do what the recipe asks for.
            FinetuneInterrupted: Ctrl-C or SIGTERM, after the step at hand and a checkpoint.
        """
        with self._attention():
            self._train(checkpoint)
        for name, parameter in self.model.named_parameters():
            # As loading the adapter onto such a base will have it; of parts, FSDP keeps the dtype.
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
            self.data.blocks.restore(self.state.step * self.sequences_per_step, self.state.stream)
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
        """The model with its trained weights whole, for the main process to save; every process calls this.

        Where the weights are spread it is a twin without those of the base, which an adapter does not need.

        Args:
            config: the model's, as it was before the patch.
        """
        if not self.sharding.weights:
            return self.model
        named = self.model.named_parameters(remove_duplicate=False)  # a tied head by its own name as well
        trained = whole({name: value for name, value in named if value.requires_grad})
        with torch.device("meta"):
            base = type(causal_lm(self.model))(config)
        patch: Any = current_patch(self.model)
        patch_model(
            base, patch.encoding, trained_length=patch.shape.trained_length, target_length=patch.target_length
        )
        twin = get_peft_model(base, lora_config(base, self.recipe))
        for name, value in trained.items():
            parent, _, leaf = name.rpartition(".")
            dtype = self.dtype if "modules_to_save" in name else value.dtype
            twin.get_submodule(parent)._parameters[leaf] = nn.Parameter(value.to(dtype))
        return twin

    def _sequences(self, forward: int) -> tuple[int, list[dict[str, torch.Tensor]]]:
        """This process's sequences for one forward pass of the present step, and the number of the first."""
        recipe, step = self.recipe, self.state.step
        stage = self.data.blocks.at(step)
        rows = recipe.batch_size * stage.rows
        forwards = (step - stage.first_step) * recipe.gradient_accumulation + forward
        first = (forwards * self.sharding.replicas + self.sharding.replica) * rows
        return first, [stage.blocks[position] for position in range(first, first + rows)]

    def _batch(self, forward: int) -> Mapping[str, Any]:
        """What the model is given in one forward pass of the present step, each `[rows, length]`."""
        recipe, accelerator = self.recipe, self.accelerator
        first, chosen = self._sequences(forward)
        collate: Callable[..., Mapping[str, torch.Tensor]] = default_collate
        if recipe.positions != CONSECUTIVE:
            collate = PositionCollator(recipe.positions, recipe.target_length, seed=recipe.seed, drawn=first)
        batch = {name: value.to(accelerator.device) for name, value in collate(chosen).items()}
        if recipe.packing == UNPACKED:
            return batch
        places = batch.pop("places")
        return {**batch, **document_inputs(self.model, places, restarts=recipe.packing == RESTART)}

    def _divisor(self) -> torch.Tensor | None:
        """What each forward pass divides its sum of losses by, if not by the number of tokens it predicts.

        Packed blocks predict fewer tokens the more documents they hold, and each token counts the same.
        """
        recipe, accelerator = self.recipe, self.accelerator
        if recipe.packing == UNPACKED:
            return None
        passes = range(recipe.gradient_accumulation)
        count = sum(scored(self._sequences(forward)[1]) for forward in passes)
        mean = torch.tensor(count / len(passes), device=accelerator.device)
        return accelerator.reduce(mean, "mean").clamp(min=1)

    def _autocast(self) -> AbstractContextManager[None]:
        # Trained weights are float32 over a bfloat16 base; this multiplies and keeps them in bfloat16.
        enabled = self.dtype == torch.bfloat16
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=enabled)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Attention within documents, or in groups while the model trains, if the recipe asks for it.

        Either is tried on a few tokens.
        """
        with ExitStack() as stack:
            if self.recipe.packing != UNPACKED:
                with self._autocast():
                    stack.enter_context(apart_without_mask(self.model, self._with_weights))
                    restarts = self.recipe.packing == RESTART
                    self._with_weights(partial(check_apart, restarts=restarts))
            if self.recipe.shifted_sparse is not None:
                with self._autocast():
                    within = shifted_sparse(self.model, self.recipe.shifted_sparse, self._with_weights)
                    stack.enter_context(within)
            yield

    def _with_weights(self, read: Callable[[Any], _Found]) -> _Found:
        """What a function returns for the model, while its weights are whole."""
        if not self.sharding.weights:
            return read(self.model)
        with torch.no_grad():
            found: _Found = self.objective(within=read)
        self.objective.reshard()  # FSDP keeps what the outermost module gathered, for a backward pass
        return found

    def _step(self, bar: Any) -> None:
        """One optimizer step, and its line of metrics."""
        recipe, accelerator = self.recipe, self.accelerator
        mix_for_step(self.model, recipe, self.state.step)
        started = time.perf_counter()
        rate = self._rate()
        for group in self.optimizer.param_groups:  # before the backward pass, in which DeepSpeed steps
            group["lr"] = rate
        total = torch.zeros((), device=accelerator.device)
        divisor = self._divisor()
        for forward in range(recipe.gradient_accumulation):
            batch = self._batch(forward)
            with accelerator.accumulate(self.objective), self.sharding.cut(accelerator, batch) as part:
                with self._autocast():
                    loss = self.objective(**{"num_items_in_batch": divisor, **part})
                # DeepSpeed adds up the gradients of parts where all others take their mean.
                accelerator.backward(loss / self.sharding.ulysses)
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
            stream=self.data.blocks.cursor((before.step + 1) * self.sequences_per_step),
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
                **self._utilisation(speed),
                peak_memory_bytes=peak_memory_bytes(accelerator.device),
                seconds=round(state.seconds, 3),
                **self._reading(state.step),
            )

    def _reading(self, steps: int) -> dict[str, float]:
        """For the metrics: how long blocks are, and how often each of several sources was read so far."""
        values: dict[str, float] = {}
        if self.recipe.curriculum:
            values["block_length"] = self.data.blocks.at(steps - 1).length
        if self.recipe.data_weights:
            epochs = self.data.blocks.epochs(steps, self.sequences_per_step)
            named = zip(self.recipe.data, epochs, strict=True)
            values |= {f"epochs/{name}": round(times, 3) for name, times in named}
        return values

    def _skipped(self, loss: float, norm: float) -> None:
        """Note a step that changed no weight, and end the run where there were too many in a row."""
        state, limit = self.state, self.recipe.max_skipped
        what = f"step {state.step}: the loss is {loss} and the gradient's norm {norm}"
        if state.skipped_in_a_row > limit:
            raise RopeExtendError(
                f"{what}; {state.skipped_in_a_row} steps in a row changed no weight, {limit} are allowed. "
                "Try a lower learning_rate, a longer warmup_steps or dtype float32 in a new run; checkpoints "
                f"are in {self.directory / 'checkpoints'}"
            )
        logger.warning("%s; it is skipped and changes no weight (%d so far)", what, state.skipped)
        self.metrics.write(step=state.step, skipped=state.skipped, tokens=state.tokens)

    def _evaluate(self) -> None:
        """Perplexity by length on the held-out documents; every process computes it, one writes it."""
        if not self.data.held_out:
            return
        main = self.accelerator.is_main_process
        mix_for_step(self.model, self.recipe, self.recipe.steps)  # what is saved is the encoding alone
        self.model.eval()

        def read(model: Any) -> PerplexityResult:
            return perplexity(
                model, self.data.held_out, self.data.lengths, suggested_chunk=self.data.at_once, progress=main
            )

        with self._autocast():
            result = self._with_weights(read)
        self.model.train()
        if self.accelerator.device.type == "cuda":  # what follows is of training steps alone
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        self.metrics.perplexity = result.ppl
        if not self.state.step:
            self.metrics.before = result.ppl
        self.metrics.write(step=self.state.step, perplexity=result.ppl)
        if main:
            curve = ", ".join(f"{value:.2f} at {length}" for length, value in result.ppl.items())
            logger.info("step %d: perplexity %s", self.state.step, curve)

    def _agreed(self, received: int) -> int:
        """The signal that any process received, so that all stop at the same step; 0 for none."""
        if self.accelerator.num_processes == 1:
            return received
        mine = torch.tensor([received], device=self.accelerator.device)
        return int(self.accelerator.gather(mine).max())

    def _save(self) -> Path:
        return save_checkpoint(
            self.directory,
            self.state,
            self.model,
            self.optimizer,
            self.accelerator,
            keep=self.recipe.keep_checkpoints,
        )

    def _close_trackers(self) -> None:
        # Not `end_training`, which also ends the process group, and with it a second run in this program.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _interrupt(self, signum: int, checkpoint: Path) -> None:
        logger.warning(
            "%s: stopped after step %d of %d and saved %s. To go on, run the same again with --resume "
            "(resume=True)", signal.Signals(signum).name, self.state.step, self.recipe.steps, checkpoint,
        )  # fmt: skip
        self._close_trackers()
        raise FinetuneInterrupted(signum, checkpoint)


def _quadratic(model: Any) -> bool:
    """Whether attention compares all pairs of a query and a key."""
    patch = current_patch(model)
    return patch is None or not isinstance(patch.encoding, KernelEncoding)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Metrics:
    """`metrics.jsonl` and the trackers, and what was measured last.

    A run that goes on drops the lines of steps that will come again.

    Attributes:
        loss: of the last step that was not skipped, in nats.
        perplexity: of the last evaluation, by length in tokens.
        before: of the one before the first step.
    """

    def __init__(self, path: Path, accelerator: Accelerator, step: int) -> None:
        self.path, self.accelerator = path, accelerator
        self.loss, self.perplexity, self.before = math.nan, dict[int, float](), dict[int, float]()
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines() if step and path.exists() else []:
            try:
                values = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was killed as it wrote
                continue
            if values["step"] <= step:
                kept.append(line + "\n")
                self.loss = values.get("loss", self.loss)
                curve = values.get("perplexity", self.perplexity)
                self.perplexity = {int(length): value for length, value in curve.items()}
                if not values["step"]:
                    self.before = self.perplexity
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with self._writing():
                partial = path.with_name(f".{path.name}.partial")
                partial.write_text("".join(kept), encoding="utf-8")
                os.replace(partial, path)

    def write(self, step: int, **values: Any) -> None:
        """Add one line, on the main process.

        Raises:
            RopeExtendError: the disk is full.
        """
        if not self.accelerator.is_main_process:
            return
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        curve = {f"perplexity/{length}": value for length, value in values.pop("perplexity", {}).items()}
        self.accelerator.log(values | curve, step=step)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RopeExtendError(
                f"cannot write {self.path}: {error}. Checkpoints are intact; make room, then resume the run"
            ) from error


class _Signals:
    """Notes Ctrl-C and SIGTERM for the end of the step; a second one acts at once, as it would have."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        signal.signal(signum, self._before[signum])

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # python allows handlers nowhere else
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._note) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
