"""Checkpoints of a run in progress: everything that decides its next step, written whole or not at all.

A checkpoint is a directory `checkpoint-N` that appears by one rename, once it is complete and on disk. Later
damage, by a disk or in a copy, is found by its manifest, which has the SHA-256 of every file; then the
checkpoint before it is used. It holds what `Trainer` writes, the record of the encoding, and `state.json`.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rope_extend.checkpoint.staging import checkpoint_files
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.files import publish_directory, sha256, write_text
from rope_extend.journal import Identity, differences
from rope_extend.training.recipe import Recipe

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
CHECKPOINTS = "checkpoints"
"""The directory of the checkpoints of a run, in that of the run."""
PARTIAL = ".partial-"
"""The names of directories of unfinished checkpoints begin like this."""
_RUN_FILES = ("recipe.yaml", "metrics.jsonl", CHECKPOINTS)
"""The files of a run; `overwrite` removes these, and those of a checkpoint."""

MAY_CHANGE = frozenset({
    "steps", "save_every", "keep_checkpoints", "eval_every", "eval_data", "eval_lengths", "eval_documents",
    "eval_split", "trackers", "output_dir", "gradient_checkpointing", "offload_checkpoints", "dtype", "model",
})  # fmt: skip
"""Fields of the recipe that may change when a run resumes: they do not change what a step computes.

A base model may have moved: its weights and dtype are compared.
"""
VERSION = "transformers"
"""The name of transformers' version in `RunState.identity`."""


@dataclass(frozen=True)
class RunState:
    """The progress of a run.

    Attributes:
        step: optimizer steps done; with the seed, it determines the position in the data.
        tokens: tokens trained on.
        seconds: time spent in training steps, over all sessions of the run.
        recipe: the recipe as a dictionary.
        identity: what else the run depends on: the documents, how processes share the work, the version of
            transformers under `VERSION`, and the base model with the encoding, as `model_identity` has it.
        skipped: steps that changed no weight, because loss or gradient was not finite.
        skipped_in_a_row: number of consecutive skipped steps at the end.
        memory_options: the memory options of the run.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)
    identity: Identity = field(default_factory=dict)
    skipped: int = 0
    skipped_in_a_row: int = 0
    memory_options: dict[str, Any] = field(default_factory=dict)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest step first."""
    paths = directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((path for path in paths if re.fullmatch(r"\w+-\d+", path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was saved after."""
    return int(checkpoint.name.rpartition("-")[2])


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, by its manifest; None if they are intact.

    Reads every file once. A file that is there and cannot be read, as on a network file system for a while,
    is no damage, but an error: the run would go on from an earlier checkpoint, and replace this one.
    """
    try:
        listed = json.loads((checkpoint / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
        for name, expected in listed.items():
            if sha256(checkpoint / name) != expected:
                return f"{name} has changed since it was written (another SHA-256)"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"
    except OSError as error:
        raise RopeExtendError(
            f"cannot read the checkpoint {checkpoint}: {error}. It may be intact: try again. To resume from "
            "an earlier one, move it away"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST_NAME} is not a manifest"
    return None


def newest_intact(directory: Path) -> Path | None:
    """The newest intact checkpoint in a directory; None if there is no checkpoint.

    Logs which newer ones are damaged.

    Raises:
        RopeExtendError: all are damaged, or one is there and cannot be read.
    """
    reasons: list[str] = []
    for checkpoint in reversed(checkpoints(directory)):
        reason = damage(checkpoint)
        if reason is None:
            for text in reasons:
                logger.warning("%s; resuming from %s instead", text, checkpoint.name)
            return checkpoint
        reasons.append(f"the checkpoint {checkpoint} is damaged: {reason}")
    if reasons:
        raise RopeExtendError(
            f"nothing to resume: {'; '.join(reasons)}. Restore one of them, or start a new run in another "
            "directory"
        )
    return None


def starting_point(directory: Path, recipe: Recipe, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to resume from; None for a run that starts at step 0.

    Raises:
        RopeExtendError: there is a run in the directory that shall neither be resumed nor replaced, all of
            its checkpoints are damaged, or the recipe describes another run.
    """
    refuse_if(resume and overwrite, "resume and overwrite contradict each other; choose one of them")
    # A run would also replace another model there.
    finished = checkpoint_files(directory)
    present = [name for name in _RUN_FILES if (directory / name).exists()] + finished
    if not resume:
        for name in [] if overwrite else present:
            raise RopeExtendError(
                f"{directory} already holds a run or a checkpoint ({name}); resume=True continues it, "
                "overwrite=True replaces it, or choose another directory"
            )
        return None
    checkpoint = newest_intact(directory / CHECKPOINTS)
    if checkpoint is not None:
        check_continues(read_state(checkpoint), RunState(recipe=recipe.to_dict()))
    elif finished:  # such as the adapter of a run whose checkpoints were deleted
        raise RopeExtendError(
            f"nothing to resume: {directory} holds {finished[0]}, but no step of a run, so training would "
            "start at step 0 and replace it; choose another directory, or use overwrite=True"
        )
    else:  # killed before its first checkpoint, or before its directory was there
        logger.warning("there is no checkpoint in %s to resume from; the run starts at step 0", directory)
    return checkpoint


def enter_directory(directory: Path, recipe: Recipe, step: int = 0, *, fresh: bool = False) -> None:
    """Write the recipe of a run, and remove what is left of a killed save; call it once nothing can refuse.

    Checkpoints after `step` stay until the run has saved one. With `fresh`, an earlier run goes first.

    Raises:
        RopeExtendError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        earlier = {*_RUN_FILES, *checkpoint_files(directory)} if fresh else ()
        for path in [*map(directory.joinpath, earlier), *directory.glob(".metrics.jsonl.*")]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        prune(directory / CHECKPOINTS, recipe.keep_checkpoints, step)
        write_text(directory / "recipe.yaml", recipe.to_yaml())
    except OSError as error:
        raise RopeExtendError(f"cannot write to {directory}: {error}") from error


def publish_checkpoint(written: Path, final: Path, state: RunState, *, keep: int | None) -> None:
    """Complete a checkpoint that `Trainer` wrote, give it its name, and remove the others except `keep`.

    Those of later steps go: a run that was resumed from an earlier step has replaced them.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are intact.
    """
    (written / "training_args.bin").unlink(missing_ok=True)  # a pickle with local paths, which nothing reads
    (written / STATE_NAME).write_text(json.dumps(asdict(state), indent=2))
    paths = sorted(path for path in written.rglob("*") if path.is_file())
    files = {str(path.relative_to(written)): sha256(path) for path in paths}
    (written / MANIFEST_NAME).write_text(json.dumps({"files": files}, indent=2), encoding="utf-8")
    publish_directory(written, final)  # an older run may have left a checkpoint of this step
    for later in checkpoints(final.parent):
        if step_of(later) > state.step:
            shutil.rmtree(later)
    prune(final.parent, keep, state.step)


def prune(directory: Path, keep: int | None, step: int) -> None:
    """Remove checkpoints up to `step`, except the newest `keep`, and all incomplete ones."""
    up_to_step = [checkpoint for checkpoint in checkpoints(directory) if step_of(checkpoint) <= step]
    for old in [*(up_to_step[:-keep] if keep else ()), *directory.glob(f"{PARTIAL}*")]:
        shutil.rmtree(old)


def read_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint, without its weights.

    Raises:
        RopeExtendError: not a checkpoint of a run.
    """
    try:
        return RunState(**json.loads((checkpoint / STATE_NAME).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RopeExtendError(
            f"{checkpoint} is not a checkpoint of a run ({error}); move it away, and resume from the one "
            "before it"
        ) from error


def check_continues(before: RunState, now: RunState) -> None:
    """Refuse to resume a run as another one. Of the identity, what `now` has is compared.

    The configs of models are compared if the version of transformers is the same: another may have other
    defaults.

    Raises:
        RopeExtendError: names all that differs, with both values.
    """
    updated = before.identity.get(VERSION) != now.identity.get(VERSION)
    names = [name for name in now.identity if not (updated and name in (VERSION, "config"))]

    def compared(state: RunState) -> Identity:
        values = {name: value for name, value in state.recipe.items() if name not in MAY_CHANGE}
        return values | {name: state.identity.get(name) for name in names}

    if changed := differences(compared(before), compared(now)):
        raise RopeExtendError(
            f"cannot resume: what is given differs from that of the run in {changed}. Restore it, and launch "
            "as many processes with the same cp_size or split_window, or start a new run in another "
            f"directory. Of the recipe, only these fields may change: {', '.join(sorted(MAY_CHANGE))}"
        )
    done, steps = before.step, now.recipe["steps"]
    refuse_if(steps < done, f"cannot resume: {done} steps are done, and not {steps}; raise steps")
