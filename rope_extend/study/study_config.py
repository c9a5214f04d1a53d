"""Settings of `rope_extend.report`, from YAML, flags or Python.

The module imports neither torch nor transformers, so that `--help` and errors in arguments come quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from rope_extend.config import (
    COUNT,
    DURATION,
    FLAG,
    LENGTH,
    LENGTHS,
    POSITIVE_COUNT,
    Kind,
    choice,
    items,
    optional,
)
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import (
    CHAT_KIND,
    DEPTHS_KIND,
    PLAIN,
    ModelConfig,
    Prompts,
    Wanted,
)
from rope_extend.evaluation.prompts import PromptOptions, depths_from
from rope_extend.evaluation.tasks import TASKS

METHODS = ("none", "yarn", "dynamic_yarn", "dynamic_ntk", "self_extend", "rerope")
"""The untrained rows of a report, if none are named."""

SHORTEST = 8
"""By default the shortest measured length is the target divided by this."""


def _tasks(value: Any) -> tuple[str, ...]:
    """Names of tasks; `none` and an empty list are no tasks."""
    if value == "none" or (isinstance(value, list | tuple) and not value):
        return ()
    return tuple(dict.fromkeys(map(choice(*TASKS).parse, items(value))))


_TASKS = Kind(f"a list of {', '.join(TASKS)}, or none", _tasks, plain=True)


@dataclass(frozen=True)
class StudyConfig(ModelConfig):
    """Settings of a report on one model: `rope_extend.report` and `rope-extend report`.

    Raises:
        RopeExtendError: a value of the wrong type or outside its range, or nothing to measure.
    """

    target_length: Annotated[
        int | None, optional(LENGTH), "the window to reach, in tokens; every method extends the model to it"
    ] = None
    max_documents: Annotated[int, POSITIVE_COUNT, "number of documents; none is a success below 5"] = 8
    tasks: Annotated[
        tuple[str, ...], _TASKS, f"retrieval tasks, of {', '.join(TASKS)}; none for no tasks"
    ] = ("passkey",)
    task_lengths: Annotated[
        tuple[int, ...] | None, optional(LENGTHS), "lengths of the tasks (default: target_length)"
    ] = None
    depths: Annotated[
        int | tuple[float, ...], DEPTHS_KIND, "number of depths, evenly spread, or a list such as 0,0.5,1"
    ] = 5
    trials: Annotated[int, POSITIVE_COUNT, "prompts at each depth"] = 2
    chat: Annotated[
        str, CHAT_KIND, "whether to use the tokenizer's chat template; auto uses it if it exists"
    ] = "auto"
    seed: Annotated[int, COUNT, "random seed of the prompts"] = 0
    cropped: Annotated[
        bool, FLAG, "control rows: plain RoPE with its context cropped to the trained window (default: yes)"
    ] = True
    budget: Annotated[
        float | None,
        optional(DURATION),
        "time to stop after, such as 2h; what was not measured by then is listed, and the same command "
        "with --resume measures it",
    ] = None

    command: ClassVar[str] = "report"
    label: ClassVar[str] = "report"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "retrieval": ("tasks", "task_lengths", "depths", "trials", "chat", "seed"),
    }
    examples: ClassVar[str] = "configs/results/"

    def check_early(self) -> None:
        """Check the lengths against the target.

        Raises:
            RopeExtendError: no target, or a length beyond it.
        """
        super().check_early()
        if self.target_length is None:
            raise RopeExtendError(
                "report: missing target_length; add to the YAML file, or give --target-length"
            )
        for name in ("lengths", "task_lengths"):
            given = getattr(self, name)
            if given and given[-1] > self.target_length:
                raise RopeExtendError(
                    f"report: {name} must be at most target_length, {self.target_length}; got {list(given)}"
                )

    def computed_defaults(self) -> Mapping[str, Any]:
        """Without other values: some untrained methods, and lengths that double up to the target."""
        assert self.target_length is not None
        lengths, length = [], self.target_length
        while length >= max(2, self.target_length // SHORTEST):
            lengths.append(length)
            length //= 2
        return {
            **super().computed_defaults(),
            "methods": (PLAIN,) if self.adapters else METHODS,
            "lengths": tuple(sorted(lengths)),
            "task_lengths": (self.target_length,),
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.lengths is not None
        if self.lengths[-1] != self.target_length:
            object.__setattr__(self, "lengths", (*self.lengths, self.target_length))

    @property
    def prompt_options(self) -> PromptOptions:
        """How the prompts are written."""
        return PromptOptions(depths_from(self.depths), self.trials, self.seed, self.chat)

    @property
    def time_limit(self) -> float | None:
        """As `budget`."""
        return self.budget

    def wanted(self, lengths: Sequence[int], trained: int, *, controls: bool, documents: int) -> Wanted:
        """Perplexity, and prompts of the task lengths."""
        prompts = Prompts()
        if self.tasks:
            assert self.task_lengths is not None
            prompts = Prompts(self.tasks, self.task_lengths, self.prompt_options)
        return Wanted(prompts, cropped=self.cropped, planned_maps=False)
