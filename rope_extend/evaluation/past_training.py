"""What the files beside an adapter say of its training, and why a comparison may show nothing."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import Any, NamedTuple

import yaml

from rope_extend.data.sources import Source, dataset_of, source_files
from rope_extend.errors import RopeExtendError
from rope_extend.files import expand_home

SAME_TRAINING = ("learning_rate", "lora_rank", "lora_alpha", "lora_targets", "optim")
"""Settings that a fair control has too."""
TRAIN_THE_SHORTER = "train the shorter longer"
LEVEL = 0.02
"""Nats by which a loss may fall over a quarter of the steps and still be called level."""


def reason_for_doubt(
    model: str | Path, control: str | Path | None, data: Source | None, split: str = "train"
) -> str:
    """Why a comparison of a trained model with its control shows nothing, as far as their files say.

    The training of one is not finished, or was on some of these texts; or they were not trained alike: on
    other numbers of tokens, or with other settings. `rope-extend finetune` writes what it reads, and so does
    scripts/finetune.py. Other trainers do not, and merging keeps no note of it. Files are compared by their
    real paths, as seen from the working directory, and datasets of the hub by name and split.

    Args:
        model: its directory, or one of its checkpoints.
        control: an adapter of plain RoPE with the same training; None if the control was not trained.
        data: texts as for `load_documents`; None for none.
        split: the split, if `data` is a dataset.

    Returns:
        A clause that says what to do; empty if there is no reason.
    """
    runs = {"it": model} if control is None else {"it": model, "its control": control}
    for it, run in runs.items():
        if stopped := unfinished(run):
            return f"the training of {'its adapter' if run is model else it} {stopped}"
        if _was_trained_on(run, data, split):
            return f"{it} was trained on these texts: measure others, which it has not seen"
    return "" if control is None else difference(model, control)


def difference(model: str | Path, control: str | Path) -> str:
    """How the training of a control differs from that of a model; empty if no file says that it does."""
    tokens, other = (progress_of(each).tokens for each in (model, control))
    if tokens and other and abs(tokens / other - 1) > 0.02:
        return f"its control was trained on {other:,} tokens: {TRAIN_THE_SHORTER}"
    own, its = (
        settings_of(each, "recipe.yaml") or settings_of(each, "settings.json") for each in (model, control)
    )
    names = [name for name in SAME_TRAINING if {name} <= own.keys() & its.keys() and own[name] != its[name]]
    return f"its control was trained with another {', '.join(names)}" if names else ""


class Ending(NamedTuple):
    """The mean loss in the third quarter of the steps and in the last, and whether it fell.

    It fell, or is level, by two standard errors; None if the losses are too noisy to say.
    """

    third: float
    last: float
    fell: bool | None


@dataclass(frozen=True)
class Progress:
    """What the metrics of a run say: steps, tokens, and the losses that were logged."""

    steps: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def ending(self) -> Ending | None:
        """How the losses end; None if they are too few."""
        if (part := len(self.losses) // 4) < 5:
            return None
        third, last = self.losses[-2 * part : -part], self.losses[-part:]
        fall, two = fmean(third) - fmean(last), 2 * math.sqrt((variance(third) + variance(last)) / part)
        return Ending(
            fmean(third), fmean(last), True if fall > two else False if fall + two < LEVEL else None
        )


def progress_of(run: str | Path) -> Progress:
    """How far a run has been trained; nothing if no metrics say it."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        text = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        steps, tokens = (max(int(line.get(name, 0)) for line in lines) for name in ("step", "tokens"))
        return Progress(steps, tokens, [float(line["loss"]) for line in lines if "loss" in line])
    return Progress()


def unfinished(run: str | Path) -> str:
    """That a run was resumed with more steps and stopped, so its adapter is an earlier one; else empty."""
    done, steps = progress_of(run).steps, settings_of(run, "recipe.yaml").get("steps")
    if isinstance(steps, int) and 0 < done < steps:
        return f"stopped at step {done} of {steps}, and what is measured is older: finish it with --resume"
    return ""


def _was_trained_on(model: str | Path, data: Source | None, split: str) -> bool:
    """Whether a model was trained on some of these texts."""
    directory = Path(expand_home(model)).absolute()
    if directory.name.startswith("checkpoint-"):
        directory = directory.parents[directory.parent.name == "checkpoints"]
    for name in ("settings.json", "recipe.yaml"):
        known = settings_of(directory, name)
        trained = _texts(known.get("data"), known.get("split") or "train")
        if trained and not trained.isdisjoint(_texts(data, split)):
            return True
    return False


def settings_of(run: str | Path, name: str) -> dict[str, Any]:
    """What a YAML or JSON file of a run says; empty if its directory has none, or a damaged one."""
    with suppress(OSError, ValueError, TypeError, yaml.YAMLError):
        return dict(yaml.safe_load((Path(run) / name).read_text(encoding="utf-8")))
    return {}


def _texts(source: Any, split: Any) -> set[Path | tuple[str, str]]:
    """The files of a source; what has none, such as a dataset, by its name and split."""
    found = set[Path | tuple[str, str]]()
    for entry in source if isinstance(source, list | tuple) else [source]:
        if isinstance(entry, str | Path):
            files = {}
            with suppress(RopeExtendError):
                files = source_files(entry)
            named = dataset_of(entry) or str(entry)
            part = (named.partition(":")[0], str(split).partition("[")[0])
            found.update({path.resolve() for path in files} or {part})
    return found
