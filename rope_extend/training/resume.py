"""Checkpoints of a run in progress: all that decides its next step, written so that none is half there.

A checkpoint is a directory `step-N` that appears in one rename once it is complete and on disk. What happens
to it later, to a disk or in a copy, its manifest shows, and then the one before it serves:

=======================  =========================================================================
`trainable.safetensors`  the weights that are trained, by parameter name
`optimizer.pt`           the state of the optimizer
`rng-R.pt`               the state of every random generator of process R
`state.json`             step, tokens, seconds, recipe, and a fingerprint of the data
`manifest.json`          the size and SHA-256 of each of these files
=======================  =========================================================================
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from rope_extend.errors import RopeExtendError
from rope_extend.files import flush
from rope_extend.training.recipe import Recipe
from rope_extend.training.sharding import fill, spread_state, whole

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"

MAY_CHANGE = frozenset({
    "steps", "log_every", "save_every", "keep_checkpoints", "max_skipped", "eval_every", "eval_data",
    "eval_lengths", "eval_documents", "eval_split", "tensorboard", "trackers", "peak_flops",
    "output_dir", "gradient_checkpointing", "offload_checkpoints", "expandable_segments",
})  # fmt: skip
"""Fields of the recipe that do not change what a step computes, and so may differ when a run goes on."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: optimizer steps done; with the seed it gives the position in the data.
        tokens: tokens trained on.
        seconds: time spent in training steps, over all sessions of the run.
        data: fingerprint of the documents.
        processes: how many processes share each step.
        recipe: the recipe as a dictionary.
        skipped: steps that changed no weight, because loss or gradient was not finite.
        skipped_in_a_row: how many of them were the last ones.
        parts: how many processes share each sequence.
        stream: where streamed data go on; None where all were loaded before.
        levers: the memory levers of the run; None in a checkpoint from before they were chosen.
    """

    step: int
    tokens: int
    seconds: float
    data: str
    processes: int
    recipe: dict[str, Any]
    skipped: int = 0
    skipped_in_a_row: int = 0
    parts: int = 1
    stream: dict[str, Any] | None = None
    levers: dict[str, Any] | None = None


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints below a run's directory, oldest step first."""
    found = [
        path for path in (directory / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was saved after."""
    return int(checkpoint.name.removeprefix("step-"))


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, by its manifest; None if nothing is.

    Reads every file once.
    """
    try:
        listed = json.loads((checkpoint / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
        for name, expected in listed.items():
            path = checkpoint / name
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes and was written with {expected['bytes']:,}"
            if _sha256(path) != expected["sha256"]:
                return f"{name} is not what was written: another SHA-256"
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_NAME} is no manifest"
    return None


def newest_intact(directory: Path) -> Path | None:
    """The newest checkpoint below a run's directory whose files are whole; None if it has no checkpoint.

    Says which newer ones are damaged.

    Raises:
        RopeExtendError: all are damaged.
    """
    reasons: list[str] = []
    for checkpoint in reversed(checkpoints(directory)):
        reason = damage(checkpoint)
        if reason is None:
            for text in reasons:
                logger.warning("%s; going on from %s instead", text, checkpoint.name)
            return checkpoint
        reasons.append(f"the checkpoint {checkpoint} is damaged: {reason}")
    if reasons:
        raise RopeExtendError(
            f"nothing to resume: {'; '.join(reasons)}. Restore one of them, or start anew in another "
            "output_dir"
        )
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(
    directory: Path,
    state: RunState,
    module: nn.Module,
    optimizer: Optimizer,
    accelerator: Accelerator,
    *,
    keep: int,
) -> Path:
    """Write `directory/checkpoints/step-N` and remove all but the newest `keep`; every process calls this.

    Raises:
        RopeExtendError: the disk is full or cannot be written to; earlier checkpoints are untouched.
    """
    final = directory / "checkpoints" / f"step-{state.step}"
    partial = final.with_name(f".{final.name}.partial")
    weights, moments = whole((dict(_trainable(module)), optimizer.state_dict()))
    try:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(weights, partial / "trainable.safetensors")
            torch.save(moments, partial / "optimizer.pt")
            (partial / "state.json").write_text(json.dumps(asdict(state), indent=2))
        accelerator.wait_for_everyone()
        torch.save(_random_state(), partial / f"rng-{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            files = {
                path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
                for path in sorted(partial.iterdir())
            }
            (partial / MANIFEST_NAME).write_text(json.dumps({"files": files}, indent=2), encoding="utf-8")
            _publish(partial, final)
            prune(directory, keep)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save has a RuntimeError for a full disk
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        raise RopeExtendError(
            f"cannot write the checkpoint {final}: {error}. Earlier checkpoints are intact; make room, then "
            "resume the run"
        ) from error
    accelerator.wait_for_everyone()
    return final


def prune(directory: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what a killed process left half-written."""
    for old in [*checkpoints(directory)[:-keep], *(directory / "checkpoints").glob(".step-*.partial")]:
        shutil.rmtree(old)


def _publish(partial: Path, final: Path) -> None:
    """Make a directory appear under its name, whole and on disk, or not at all."""
    for path in (*partial.iterdir(), partial):
        flush(path)
    if final.exists():  # the run went on from an earlier step and has come by here again
        shutil.rmtree(final)
    os.replace(partial, final)
    flush(final.parent)


def read_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint, without its weights.

    Raises:
        RopeExtendError: not a checkpoint of a run.
    """
    try:
        return RunState(**json.loads((checkpoint / "state.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RopeExtendError(
            f"{checkpoint} is not a checkpoint of a run ({error}); give a directory such as "
            "OUTPUT_DIR/checkpoints/step-100, or resume=True for the newest that is whole"
        ) from error


def check_continues(state: RunState, recipe: Recipe) -> None:
    """Refuse to go on under a recipe that would have made another run.

    Raises:
        RopeExtendError: naming every field that differs, with both values.
    """
    # A checkpoint from before a field existed was made with what is now its default.
    now, then = recipe.to_dict(), Recipe.from_dict(state.recipe).to_dict()
    changed = [name for name in now if name not in MAY_CHANGE and now[name] != then[name]]
    if changed:
        listed = "; ".join(f"{name} was {then[name]!r} and is {now[name]!r}" for name in changed)
        raise RopeExtendError(
            f"cannot resume: {listed}. Restore these fields, or start anew in another output_dir; what may "
            f"change is {', '.join(sorted(MAY_CHANGE))}"
        )
    if recipe.steps < state.step:
        raise RopeExtendError(
            f"cannot resume: {state.step} steps are done and the recipe asks for {recipe.steps}; raise steps"
        )


def load_checkpoint(
    checkpoint: Path,
    module: nn.Module,
    optimizer: Optimizer,
    accelerator: Accelerator,
) -> None:
    """Put weights, optimizer and random generators back to where `save_checkpoint` left them.

    Raises:
        RopeExtendError: a file is missing or damaged, or the weights are those of another model.
    """
    try:
        weights = load_file(checkpoint / "trainable.safetensors")
        state = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        generators = torch.load(
            checkpoint / f"rng-{accelerator.process_index}.pt", map_location="cpu", weights_only=True
        )
        parameters = _trainable(module)
        if parameters.keys() != weights.keys():
            different = sorted(parameters.keys() ^ weights.keys())
            raise RopeExtendError(
                f"its weights are of another model; {different[0]} is only in one of the two"
            )
        for name, parameter in parameters.items():
            fill(parameter, weights[name])
        optimizer.load_state_dict(state)
        spread_state(optimizer)
    except Exception as error:  # each reader has its own kinds of error for a damaged file
        raise RopeExtendError(
            f"cannot read the checkpoint {checkpoint}: {error}. Resume from the one before it, by its path"
        ) from error
    _restore_random_state(generators)


def _trainable(module: nn.Module) -> Mapping[str, nn.Parameter]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def _random_state() -> dict[str, Any]:
    """The state of python's, numpy's and torch's generators, in types that torch loads without pickle."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
