"""Settings of `rope_extend.evaluate`, `retrieve` and `compare_methods`, from YAML, flags or Python.

The module imports neither torch nor transformers, so that `--help` and errors in arguments come quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from typing import Annotated, Any, ClassVar, cast

from rope_extend.checks import FLAG, Kind, choice, number, or_word, require
from rope_extend.config import (
    AUTO,
    COUNT,
    DURATION,
    LENGTH,
    LENGTHS,
    MODEL,
    PATH,
    POSITIVE_COUNT,
    SOURCES,
    TEXT,
    Config,
    items,
    list_of,
    method_item,
    method_items,
    or_auto,
)
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.prompts import CHAT, Prompts, depths_from
from rope_extend.evaluation.protocols import CONTROL_BLOCKS, WindowSettings, protocol_named
from rope_extend.evaluation.tasks import TASKS
from rope_extend.method_names import check_method_name
from rope_extend.models.load_choices import ATTENTION, DEVICE_MAPS, DTYPES, QUANTIZED
from rope_extend.models.locating import check_path
from rope_extend.units import memory_size

AS_IS = "as-is"
"""The row that keeps the encoding of the checkpoint's config."""

PLAIN = "none"
"""The row with plain RoPE, with which every other row is compared."""


def _names(value: Any) -> tuple[str, ...]:
    """Names or paths, each once; an empty list is allowed, and text is split at commas."""
    if isinstance(value, list | tuple) and not value:
        return ()
    named = [name.strip() for name in value.split(",")] if isinstance(value, str) else items(value)
    return tuple(dict.fromkeys(map(PATH.parse, named)))


def _methods(value: Any) -> tuple[str, ...]:
    return _names(method_items(value) if isinstance(value, str) else value)


def _tasks(value: Any) -> tuple[str, ...]:
    """Names of tasks; `none` and an empty list are no tasks."""
    if value == "none" or (isinstance(value, list | tuple) and not value):
        return ()
    return tuple(dict.fromkeys(map(choice(*TASKS).parse, items(value))))


def _chat(value: Any) -> str:
    if isinstance(value, bool):  # YAML 1.1 reads on and off as true and false
        value = "on" if value else "off"
    require(value in CHAT)
    return str(value)


def _depths(value: Any) -> int | tuple[float, ...]:
    if isinstance(value, int):
        return int(POSITIVE_COUNT.parse(value))
    return tuple(sorted({*_EXACT_DEPTHS.parse(value)}))


_NAMES = Kind("a list of names or paths", _names, plain=True)
_METHODS = Kind("a list of methods", _methods, plain=True, item=method_item)
_REPEATED_SOURCES = replace(SOURCES, repeated=True)
_MEMORY = Kind("a size with its unit, such as 24GB", memory_size, plain=True)
_EXACT_DEPTHS = list_of(number(0, 1), "a list of depths between 0 and 1")
DEPTHS_KIND = Kind(f"a number of depths, or {_EXACT_DEPTHS.expected}", _depths, item=float)
CHAT_KIND = Kind(f"one of {', '.join(CHAT)}", _chat, plain=True, choices=CHAT)
_TASKS = Kind(f"a list of {', '.join(TASKS)}, or none", _tasks, plain=True, item=choice(*TASKS).parse)


TrainedLength = Annotated[
    int | None, LENGTH, "pretrained window in tokens, if the config has none or a wrong one"
]
TextColumn = Annotated[str, TEXT, "column of the text, in tabular data"]
Split = Annotated[str, TEXT, "split of a hub dataset"]
Device = Annotated[str | None, TEXT, "device, such as cuda:1 (default: the GPU, if any)"]
Dtype = Annotated[
    str | None,
    choice(*DTYPES),
    "dtype of the weights (default: bfloat16 on a GPU that supports it, else float32)",
]
Attention = Annotated[str | None, choice(*ATTENTION), "attention implementation (default: sdpa)"]
LOADING = "loading the model"
"""Heading of the fields of `LoadOptions` in help."""

_BLOCKS = "blocks of targets that the cropped control scores beyond its window; each costs a window"
DEPTHS, TRIALS = 5, 4
"""Depths of the passkeys of an evaluation, and by default the number at each."""


@dataclass(frozen=True)
class ModelConfig(Config):
    """Settings that all measurements share: the model, the rows to compare, and how the model is loaded."""

    model: Annotated[str, MODEL, "directory or hub id of the checkpoint"]
    adapters: Annotated[tuple[str, ...], _NAMES, "directories of adapters of this model, one row each"] = ()
    methods: Annotated[
        tuple[str, ...] | None,
        _METHODS,
        "untrained rows: methods by name, such as yarn or yarn(factor=2), none for plain RoPE, as-is for the "
        "checkpoint's own encoding",
    ] = None
    lengths: Annotated[
        tuple[int, ...] | None,
        LENGTHS,
        "lengths in tokens, such as 4k,8k,32k",
    ] = None
    data: Annotated[
        str | tuple[str, ...] | None,
        _REPEATED_SOURCES,
        "long documents: a directory, glob, file or hub id; may be given several times",
    ] = None
    output: Annotated[str | None, PATH, "directory of the report"] = None
    trained_length: TrainedLength = None
    max_documents: Annotated[
        int | None, or_word(POSITIVE_COUNT, None), "number of documents to use; null uses all"
    ] = 16
    text_column: TextColumn = "text"
    split: Split = "train"
    device: Device = None
    device_map: Annotated[
        str | None,
        choice(*DEVICE_MAPS),
        "strategy that spreads the model over all GPUs, then over host memory and disk: "
        f"{', '.join(DEVICE_MAPS)}",
    ] = None
    dtype: Dtype = None
    attention: Attention = None
    quantize: Annotated[
        str | None, choice(*QUANTIZED), "quantization of the weights on load, by bitsandbytes"
    ] = None
    limit_memory: Annotated[
        int | None, _MEMORY, "upper limit of the memory used on a device, such as 20GB"
    ] = None

    budget: Annotated[
        float | None,
        DURATION,
        "time to stop after, such as 2h; what was not measured by then is listed, and the same command "
        "with --resume measures it",
    ] = None

    cropped: Annotated[
        bool, FLAG, "control row: plain RoPE with its context cropped to the trained window (default: yes)"
    ] = True

    # What not all measurements have as a setting.
    documents = True
    protocol = "prefix"
    control_blocks = CONTROL_BLOCKS
    split_window = 1
    chunk = max_tokens = cast("int | None", None)

    default_texts: ClassVar[Mapping[str, str]] = {
        "methods": f"{AS_IS}, or no such row if there are adapters",
        "lengths": "the trained window and its doublings up to 8x, or to the window of an adapter",
    }
    """What help says of defaults that are computed."""
    command: ClassVar[str] = "evaluate"
    """The command that has these settings."""
    examples: ClassVar[str] = "configs/evaluation/"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        LOADING: ("device", "device_map", "dtype", "attention", "quantize", "limit_memory"),
    }
    flags: ClassVar[Mapping[str, str]] = {"attention": "--attn", "max_documents": "--documents"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.model)
        for method in self.methods or ():
            if method != AS_IS:
                check_method_name(method)
        if not self.methods and not self.adapters:
            raise RopeExtendError(
                f"{self.label}: nothing to measure, because methods and adapters are both empty; name a "
                f"method, such as {AS_IS}, or give an adapter"
            )

    def prompts(self, lengths: Sequence[int], trained: int, *, extended: bool) -> Prompts:
        """The prompts that each row answers; `extended` says whether some row is extended."""
        raise NotImplementedError

    @property
    def window_settings(self) -> WindowSettings:
        """The settings of the protocol that were given."""
        return {}

    def computed_defaults(self) -> Mapping[str, Any]:
        """Without `methods`, the checkpoint's own encoding is measured, unless there are adapters."""
        return {"methods": () if self.adapters else (AS_IS,)}

    @classmethod
    def default_text(cls, item: Field[Any]) -> str | None:
        """The default of a field for help; booleans and empty lists need none."""
        plain = None if item.default == () or isinstance(item.default, bool) else super().default_text(item)
        return cls.default_texts.get(item.name, plain)


@dataclass(frozen=True)
class EvaluationConfig(ModelConfig):
    """Settings of a perplexity evaluation: `rope_extend.evaluate` and `rope-extend evaluate`."""

    protocol: Annotated[str, TEXT, "how perplexity is measured, see below"] = "prefix"
    window: Annotated[int | None, LENGTH, "tokens of context, for the protocol cropped"] = None
    control_blocks: Annotated[int, POSITIVE_COUNT, _BLOCKS] = CONTROL_BLOCKS
    stride: Annotated[
        int | None, LENGTH, "tokens between the starts of windows, for protocols with a stride"
    ] = None
    last: Annotated[int | None, LENGTH, "scored tokens per document, for the protocol last-k"] = None
    max_tokens: Annotated[
        int | None, LENGTH, "tokens to use of each document, for protocols that use whole documents"
    ] = None
    chunk: Annotated[
        int | None,
        LENGTH,
        "tokens of a window that are processed at a time, layer by layer (default: automatic above 128k "
        "tokens or when memory is low)",
    ] = None
    split_window: Annotated[
        int,
        POSITIVE_COUNT,
        "number of processes that share each window of a document, for windows that do not fit one GPU "
        "(default: each process measures its share of the documents)",
    ] = 1
    retrieval: Annotated[
        int | str,
        or_auto(COUNT),
        "control: passkeys at each of 5 depths within the trained window, before and after extension; 0 for "
        "none; auto is 4, and 0 if no row is extended",
    ] = AUTO
    retrieval_lengths: Annotated[
        tuple[int, ...] | None,
        LENGTHS,
        "lengths of passkeys in addition to the trained window, at most the longest of the lengths (default: "
        "none)",
    ] = None

    label: ClassVar[str] = "evaluation"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "how it is measured": (
            "protocol", "window", "control_blocks", "stride", "last", "max_tokens", "chunk", "split_window",
            "retrieval", "retrieval_lengths",
        ),
        **ModelConfig.groups,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        protocol_named(self.protocol).check_settings(self.window_settings, self.lengths or ())
        if self.retrieval_lengths and self.retrieval == 0:
            raise RopeExtendError(
                f"{self.label}: retrieval is 0, so there are no passkeys at retrieval_lengths "
                f"{list(self.retrieval_lengths)}; raise one, or leave the other out"
            )

    def prompts(self, lengths: Sequence[int], trained: int, *, extended: bool) -> Prompts:
        """Passkeys within the trained window, and those of `retrieval_lengths`."""
        more = self.retrieval_lengths or ()
        if more and max(more) > lengths[-1]:
            raise RopeExtendError(
                f"{self.label}: retrieval_lengths must be at most the longest of the lengths, "
                f"{lengths[-1]:,}, to which methods extend the model; got {list(more)}"
            )
        trials = self.retrieval
        if trials == AUTO:  # within the trained window alone, passkeys show what an extension costs
            trials = TRIALS if more or extended else 0
        if not trials:
            return Prompts()
        optional, lengths = None if trained in more else trained, tuple(sorted({trained, *more}))
        return Prompts(("passkey",), lengths, *depths_from(DEPTHS), int(trials), optional_length=optional)

    @property
    def window_settings(self) -> WindowSettings:
        """The settings of the protocol that were given."""
        blocks = self.control_blocks if "blocks" in protocol_named(self.protocol).settings else None
        values = {"window": self.window, "blocks": blocks, "stride": self.stride, "last": self.last}
        return WindowSettings(**{name: value for name, value in values.items() if value is not None})  # type: ignore[typeddict-item]


@dataclass(frozen=True)
class PromptConfig(ModelConfig):
    """Settings that all measurements share whose prompts are chosen freely."""

    tasks: Annotated[tuple[str, ...], _TASKS, f"retrieval tasks, of {', '.join(TASKS)}, or none"] = (
        "passkey",
    )
    depths: Annotated[
        int | tuple[float, ...],
        DEPTHS_KIND,
        "number of equal parts of a prompt, in each of which every trial draws its depth, or a list of exact "
        "depths such as 0,0.5,1",
    ] = 5
    trials: Annotated[int, POSITIVE_COUNT, "prompts at each depth"] = 10
    chat: Annotated[
        str, CHAT_KIND, "whether to use the tokenizer's chat template; auto uses it if it exists"
    ] = "auto"
    seed: Annotated[int, COUNT, "random seed of the prompts"] = 0

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prompts": ("tasks", "task_lengths", "depths", "trials", "chat", "seed"),
        **ModelConfig.groups,
    }

    def prompts_at(self, lengths: Iterable[int], trained: int, asked: Iterable[int] | None) -> Prompts:
        """The prompts of these lengths, and with controls of the trained window, which may not be `asked`."""
        lengths = sorted({*lengths, trained} if self.cropped else lengths)
        how = (*depths_from(self.depths), self.trials, self.seed, self.chat)
        optional_length = None if trained in (asked or ()) else trained
        return Prompts(self.tasks, tuple(lengths), *how, optional_length) if self.tasks else Prompts()


@dataclass(frozen=True)
class RetrievalConfig(PromptConfig):
    """Settings of a retrieval evaluation: `rope_extend.retrieve` and `rope-extend retrieve`."""

    documents = False

    command: ClassVar[str] = "retrieve"
    label: ClassVar[str] = "retrieval"

    def check_early(self) -> None:
        """Check that there is a task."""
        if not self.tasks:
            raise RopeExtendError(f"retrieval: tasks is empty; name one of {', '.join(TASKS)}")

    def prompts(self, lengths: Sequence[int], trained: int, *, extended: bool) -> Prompts:
        """Prompts of the lengths, and with controls of the trained window."""
        return self.prompts_at(lengths, trained, self.lengths)


METHODS = ("none", "yarn", "dynamic_yarn", "jet_long", "self_extend", "rerope")
"""The untrained rows of a report, if none are named.

`yarn` is what most engines run. `dynamic_yarn` and `jet_long` leave short texts as they were, and `jet_long`
has the lowest perplexity. `self_extend` and `rerope` find the most passkeys.
"""


@dataclass(frozen=True)
class StudyConfig(PromptConfig):
    """Settings of a report on one model: `rope_extend.compare_methods` and `rope-extend report`."""

    target_length: Annotated[
        int | None, LENGTH, "the window to reach, in tokens; every method extends the model to it"
    ] = None
    max_documents: Annotated[int, POSITIVE_COUNT, "number of documents; none is a success below 5"] = 8
    task_lengths: Annotated[
        tuple[int, ...] | None,
        LENGTHS,
        "lengths of the tasks in addition to the trained window (default: target_length)",
    ] = None
    trials: Annotated[int, POSITIVE_COUNT, "prompts at each depth"] = 2
    control_blocks: Annotated[int, POSITIVE_COUNT, _BLOCKS] = CONTROL_BLOCKS

    default_texts: ClassVar[Mapping[str, str]] = {
        "methods": f"{', '.join(METHODS)}; with adapters, {PLAIN} alone",
        "lengths": "target_length and three halvings of it",
    }
    command: ClassVar[str] = "report"
    label: ClassVar[str] = "report"
    examples: ClassVar[str] = "configs/results/"

    def check_early(self) -> None:
        """Check the lengths against the target."""
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
        """Without other values: some untrained methods, and the target with three halvings of it."""
        assert self.target_length is not None
        lengths = [self.target_length >> halvings for halvings in (3, 2, 1, 0)]
        return {
            "methods": (PLAIN,) if self.adapters else METHODS,
            "lengths": tuple(length for length in lengths if length >= 2),
            "task_lengths": (self.target_length,),
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.lengths is not None
        if self.lengths[-1] != self.target_length:
            object.__setattr__(self, "lengths", (*self.lengths, self.target_length))

    def prompts(self, lengths: Sequence[int], trained: int, *, extended: bool) -> Prompts:
        """Prompts of the task lengths, and with controls of the trained window, if that is exceeded."""
        asked = self.task_lengths or ()
        return self.prompts_at(asked, min(trained, max(asked)), asked)
