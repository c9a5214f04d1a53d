"""The single description of a fine-tuning run, from YAML or flags, checked whole before anything loads."""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from rope_extend.data import parse_length
from rope_extend.encodings import REPLACED, Adaptation, encodings, method_named
from rope_extend.errors import RopeExtendError
from rope_extend.training.packing import PACKINGS, UNPACKED
from rope_extend.training.positions import SAMPLERS

AUTO = "auto"
"""Of a memory lever: it is pulled where the step would not fit without."""

CONSECUTIVE = "consecutive"
"""The value of `positions` that samples none: 0, 1, 2, …"""


class _Kind(NamedTuple):
    """What values a field takes: said in words, and checked by a function that raises ValueError."""

    expected: str
    parse: Callable[[Any], Any]
    plain: bool = False  # text from the command line is the value itself, not YAML


def _check(ok: bool) -> None:
    if not ok:
        raise ValueError


def _text(value: Any) -> str:
    _check(isinstance(value, str | PathLike) and bool(str(value).strip()))
    return str(value)


def _flag(value: Any) -> bool:
    _check(isinstance(value, bool))
    return bool(value)


def _whole(minimum: int, maximum: int | None = None) -> _Kind:
    def parse(value: Any) -> int:
        _check(isinstance(value, Integral) and not isinstance(value, bool))
        _check(int(value) >= minimum and (maximum is None or int(value) <= maximum))
        return int(value)

    bound = f"at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
    return _Kind(f"a whole number, {bound}", parse)


def _number(minimum: float, *, above: bool = False, below: float = math.inf) -> _Kind:
    def parse(value: Any) -> float:
        if isinstance(value, str):  # YAML 1.1 reads 2e-4, without a dot, as text
            value = float(value)
        _check(isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value))
        _check(minimum <= value < below and not (above and value == minimum))
        return float(value)

    bound = f"{'above' if above else 'at least'} {minimum:g}"
    bound += f" and below {below:g}" if below < math.inf else ""
    return _Kind(f"a number {bound}", parse)


def _choice(*names: str) -> _Kind:
    def parse(value: Any) -> str:
        _check(isinstance(value, str) and value in names)
        return str(value)

    return _Kind("one of " + ", ".join(names), parse, plain=True)


def _or_auto(kind: _Kind) -> _Kind:
    return _Kind(f"{AUTO}, or {kind.expected}", lambda value: value if value == AUTO else kind.parse(value))


def _optional(kind: _Kind) -> _Kind:
    return _Kind(
        f"{kind.expected}, or null", lambda value: None if value is None else kind.parse(value), kind.plain
    )


def _items(value: Any) -> list[Any]:
    """A list that is not empty; text is split at commas, and one item is a list of one."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    items = list(value) if isinstance(value, list | tuple) else [value]
    _check(bool(items))
    return items


def _lengths(value: Any) -> tuple[int, ...]:
    return tuple(sorted({parse_length(item) for item in _items(value)}))


def _betas(value: Any) -> tuple[float, float]:
    beta = _number(0, below=1)
    first, second = _items(value)  # ValueError where there are not two
    return beta.parse(first), beta.parse(second)


def _weights(value: Any) -> tuple[float, ...]:
    return tuple(_number(0, above=True).parse(item) for item in _items(value))


def _stages(value: Any) -> tuple[tuple[int, int], ...]:
    pairs = [(parse_length(length), _whole(1).parse(steps)) for length, steps in value]
    _check(bool(pairs))
    return tuple(pairs)


def _sources(value: Any) -> str | tuple[str, ...]:
    return _text(value) if isinstance(value, str | PathLike) else tuple(map(_text, _items(value)))


def _trackers(value: Any) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(map(_text, _items(value)))) if value else ()
    _check(all(name in LOGGER_TYPE_TO_CLASS for name in names))
    return names


def _targets(value: Any) -> str | tuple[str, ...]:
    if value in ("attention", "all-linear"):
        return str(value)
    return tuple(dict.fromkeys(map(_text, _items(value))))


def _parameters(value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # beta_fast=32,beta_slow=1 on the command line
        pairs = (pair.split("=") for pair in value.split(","))
        value = {name.strip(): yaml.safe_load(text) for name, text in pairs}
    _check(isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    return copy.deepcopy(dict(value))


_TEXT = _Kind("text", _text, plain=True)
_FLAG = _Kind("true or false", _flag)
_AUTO_FLAG = _or_auto(_FLAG)
_COUNT = _whole(0)
_POSITIVE_COUNT = _whole(1)
_LENGTH = _Kind("a number of tokens, such as 32768 or 32k", parse_length)
_LENGTHS = _Kind("a list of token counts, such as [4k, 8k]", _lengths)
_BETAS = _Kind("two numbers, each at least 0 and below 1", _betas)
_SOURCES = _Kind("a path, a glob, a hub id, or a list of these", _sources, plain=True)
_WEIGHTS = _Kind("a list of numbers above 0, such as [0.7, 0.3]", _weights)
_STAGES = _Kind("a list of block lengths and steps, such as [[8k, 100], [16k, 100]]", _stages)
_TARGETS = _Kind("attention, all-linear, or a list of module names", _targets)
_PARAMETERS = _Kind("a mapping of the method's parameters, such as {beta_fast: 32}", _parameters)
_AUTO_COUNT = _or_auto(_COUNT)
_DTYPE = _choice("auto", "float32", "bfloat16")
_TRACKERS = _Kind(f"a list of trackers, of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}", _trackers)
_POSITIONS = _choice(CONSECUTIVE, *SAMPLERS)
_PACKING = _choice(*PACKINGS)

BY_METHOD: Any = None
"""The default of fields that the method's `Adaptation` gives; in a recipe that is made, none has it."""


@dataclass(frozen=True)
class Recipe:
    """One LoRA run for a longer window: what is trained, on what, for how long, and what is written down.

    The defaults are those of position interpolation (2306.15595, section 3.1): AdamW with betas 0.9 and
    0.95, no weight decay, 20 steps of linear warm-up from a tenth of the learning rate, then constant.
    Two differ. The paper updates all weights at 2e-5; the default here is ten times that, because a LoRA
    update is the product of two small matrices of which one starts at zero, and trains best at about ten
    times the rate of full fine-tuning. And the paper's batch is 64 sequences on 32 GPUs; here it is
    `batch_size * gradient_accumulation` = 8 per device.

    An encoding that is put in the place of rotation asks for more: what is trained, how long and at which
    rate is filled in by what its class says (`Encoding.adaptation`) where it is not given, or null.

    Lengths are in tokens and take `32k` for 32,768. Every value is checked when the recipe is made.

    Raises:
        RopeExtendError: a value of the wrong type or range, an unknown method or method parameter, or two
            fields that contradict each other.
    """

    model: Annotated[str, _TEXT, "pretrained model: a local directory or a hub id"]
    data: Annotated[
        str | tuple[str, ...], _SOURCES, "long documents: a directory, glob, file, hub id, or a list of these"
    ]
    output_dir: Annotated[str, _TEXT, "directory of the run: adapter, record, recipe, metrics, checkpoints"]
    target_length: Annotated[int, _LENGTH, "the window to reach, in tokens; everything else follows from it"]
    method: Annotated[str, _TEXT, "position encoding; none trains without an extension"] = "yarn"
    method_parameters: Annotated[
        dict[str, Any], _PARAMETERS, "the method's own; never factor, which follows from the lengths"
    ] = field(default_factory=dict)
    trained_length: Annotated[
        int | None, _optional(_LENGTH), "the pretrained window, in tokens, where the model's config is wrong"
    ] = None
    block_length: Annotated[
        int | None, _optional(_LENGTH), "tokens per training sequence; target_length if not given"
    ] = None
    curriculum: Annotated[
        tuple[tuple[int, int], ...] | None,
        _optional(_STAGES),
        "shorter blocks to begin with, each length for so many steps, as in [[8k, 100], [16k, 100]]; "
        "block_length after that; with as many tokens in each step",
    ] = None
    positions: Annotated[
        str,
        _POSITIONS,
        "of a block's tokens; pose (2309.10400), cream (2406.07138) and random (2305.16843) spread a short "
        "block over target_length, as in a 2k block_length for a 32k target",
    ] = CONSECUTIVE
    packing: Annotated[
        str,
        _PACKING,
        "of short documents into one block, where none sees another: positions restart in each, or continue "
        "through the block; none drops what is shorter than a block",
    ] = UNPACKED
    steps: Annotated[int, _POSITIVE_COUNT, "optimizer steps"] = BY_METHOD
    anneal_steps: Annotated[
        int,
        _COUNT,
        "first steps, in which the model goes over from its own rotation to the encoding by degrees; it is "
        "evaluated, and saved, with the encoding alone",
    ] = 0
    batch_size: Annotated[int, _POSITIVE_COUNT, "sequences per device in one forward pass"] = 1
    gradient_accumulation: Annotated[int, _POSITIVE_COUNT, "forward passes per optimizer step"] = 8
    learning_rate: Annotated[float, _number(0, above=True), "after warm-up, constant"] = BY_METHOD
    warmup_steps: Annotated[int, _COUNT, "linear warm-up from a tenth of the learning rate, in steps"] = 20
    weight_decay: Annotated[float, _number(0), "AdamW's decoupled weight decay"] = 0.0
    betas: Annotated[tuple[float, float], _BETAS, "AdamW's decay rates of the two moments"] = (0.9, 0.95)
    max_grad_norm: Annotated[float, _number(0, above=True), "gradients are clipped to this norm"] = 1.0
    lora_rank: Annotated[int, _POSITIVE_COUNT, "rank of the LoRA matrices"] = 16
    lora_alpha: Annotated[float, _number(0, above=True), "LoRA updates are scaled by alpha / rank"] = 32.0
    rslora: Annotated[
        bool,
        _FLAG,
        "scale by alpha / sqrt(rank) instead, for which high ranks need no other rate (2312.03732)",
    ] = False
    dora: Annotated[
        bool, _FLAG, "train the length of each weight's rows apart from their direction (2402.09353); slower"
    ] = False
    lora_dropout: Annotated[float, _number(0, below=1), "dropout on the input of the LoRA matrices"] = 0.0
    lora_targets: Annotated[
        str | tuple[str, ...], _TARGETS, "layers with LoRA: attention, all-linear, or module names"
    ] = BY_METHOD
    train_norm_embed: Annotated[
        bool, _FLAG, "also train norms and embeddings, which helps beyond about 4x (2309.12307)"
    ] = BY_METHOD
    shifted_sparse: Annotated[
        int | None,
        _optional(_LENGTH),
        "train with attention within groups of so many tokens, shifted in half of the heads: cheaper, and an "
        "approximation (2309.12307, there a quarter of block_length); evaluation and what is saved attend to "
        "all",
    ] = None
    dtype: Annotated[
        str, _DTYPE, "of the frozen weights; auto is bfloat16 on a GPU that has it, and float32 elsewhere"
    ] = "auto"
    seed: Annotated[int, _whole(0, 2**31), "of the LoRA matrices, the data's order, and dropout"] = 0
    eval_data: Annotated[
        str | tuple[str, ...] | None, _optional(_SOURCES), "documents to evaluate on during the run"
    ] = None
    eval_lengths: Annotated[
        tuple[int, ...] | None,
        _optional(_LENGTHS),
        "windows to evaluate at; the trained window and its doublings up to target_length if not given",
    ] = None
    eval_every: Annotated[int, _COUNT, "steps between evaluations; 0 for only before and after"] = 0
    eval_documents: Annotated[int, _POSITIVE_COUNT, "how many documents of eval_data to use"] = 16
    save_every: Annotated[int, _COUNT, "steps between checkpoints; 0 for only the last"] = 100
    keep_checkpoints: Annotated[
        int, _POSITIVE_COUNT, "how many checkpoints are kept; the older serve where the newest is damaged"
    ] = 2
    max_skipped: Annotated[
        int,
        _COUNT,
        "steps in a row that are skipped for a loss or gradient that is not finite, before an end",
    ] = 3
    log_every: Annotated[int, _POSITIVE_COUNT, "steps between lines of metrics"] = 1
    gradient_checkpointing: Annotated[
        bool | str,
        _AUTO_FLAG,
        "recompute each layer in the backward pass: far less memory, about 1/3 slower; auto where the step "
        "does not fit without",
    ] = AUTO
    mlp_tiles: Annotated[
        int | str,
        _AUTO_COUNT,
        "tokens that an MLP takes at a time, 0 for all: less memory in long blocks; auto where they do not "
        "fit without",
    ] = AUTO
    offload_checkpoints: Annotated[
        bool | str,
        _AUTO_FLAG,
        "keep the inputs of recomputed layers in host memory; auto on a GPU where the step does not fit "
        "without",
    ] = AUTO
    quantize: Annotated[
        str | None, _optional(_choice("4bit")), "the frozen weights as they are read (NF4, by bitsandbytes)"
    ] = None
    expandable_segments: Annotated[
        bool | str, _AUTO_FLAG, "let the CUDA allocator grow its segments; auto where there is a GPU"
    ] = AUTO
    tensorboard: Annotated[bool, _FLAG, "also log to output_dir/tensorboard"] = False
    trackers: Annotated[
        tuple[str, ...], _TRACKERS, "of accelerate, such as [wandb, mlflow], that also get the metrics"
    ] = ()
    peak_flops: Annotated[
        float | None,
        _optional(_number(0, above=True)),
        "operations per second of one device, of which the metrics give the share; of common GPUs in "
        "bfloat16 it is known",
    ] = None
    text_column: Annotated[str, _TEXT, "column of the text, in tabular data"] = "text"
    split: Annotated[str, _TEXT, "split to train on, of a hub dataset"] = "train"
    eval_split: Annotated[str, _TEXT, "split to evaluate on, of a hub dataset"] = "train"
    data_weights: Annotated[
        tuple[float, ...] | None,
        _optional(_WEIGHTS),
        "how often a block is read from each entry of data, in any unit; by their sizes if not given",
    ] = None
    streaming: Annotated[
        bool,
        _FLAG,
        "read data while training, in its own order, rather than all of it before: for more text than memory "
        "holds",
    ] = False
    max_documents: Annotated[
        int | None,
        _optional(_POSITIVE_COUNT),
        "how many documents of data to use, of each entry where they have weights; all if not given",
    ] = None
    max_tokens: Annotated[
        int | None, _optional(_POSITIVE_COUNT), "tokens to use of each document; all if not given"
    ] = None

    def __post_init__(self) -> None:
        by_method = self.default
        for name, kind in _kinds().items():
            value = getattr(self, name)
            if value is BY_METHOD and name in by_method:
                value = by_method[name]
            try:
                object.__setattr__(self, name, kind.parse(value))
            except (ValueError, TypeError) as error:
                raise RopeExtendError(
                    f"recipe: {name} must be {kind.expected}; got {value!r} ({type(value).__name__})"
                ) from error
        method_named(self.method).shared_out(self.method_parameters)
        if self.anneal_steps >= self.steps:
            raise RopeExtendError(
                f"recipe: anneal_steps {self.anneal_steps} leaves none of {self.steps} steps to train with "
                "the encoding alone, which is what is saved; lower anneal_steps, or raise steps"
            )
        if self.length > self.target_length:
            raise RopeExtendError(
                f"recipe: block_length {self.length} is beyond target_length {self.target_length}; "
                "raise target_length, or leave block_length out"
            )
        if self.positions != CONSECUTIVE:
            shortest = SAMPLERS[self.positions].shortest
            if not shortest <= self.length < self.target_length:
                raise RopeExtendError(
                    f"recipe: positions {self.positions} spreads short blocks over target_length "
                    f"{self.target_length}, and block_length is {self.length}; set block_length to less, "
                    f"such as the pretrained window, and to {shortest} tokens or more"
                )
            if self.packing != UNPACKED:
                raise RopeExtendError(
                    f"recipe: positions {self.positions} and packing {self.packing} do not go together: "
                    "positions are spread over a window that one document is meant to fill; leave one out"
                )
        self._check_groups()
        self._check_stream()
        for length, _ in self.curriculum or ():
            if not 2 <= length < self.length or self.length % length:
                raise RopeExtendError(
                    f"recipe: curriculum has blocks of {length} tokens, and block_length is {self.length}: "
                    "every step has as many tokens, so give lengths that divide it, shorter ones, 2 at least"
                )
        if self.curriculum and self.positions != CONSECUTIVE:
            raise RopeExtendError(
                f"recipe: positions {self.positions} and curriculum do not go together: every sampled block "
                "reaches all of target_length, however short; leave one out"
            )
        if self.data_weights is not None:
            count = 1 if isinstance(self.data, str) else len(self.data)
            if len(self.data_weights) != count or count == 1:
                raise RopeExtendError(
                    f"recipe: data_weights has {len(self.data_weights)} numbers and data {count} entries; "
                    "give a list of two sources or more as data, and one weight for each"
                )
        if self.offload_checkpoints is True and self.gradient_checkpointing is False:
            raise RopeExtendError(
                "recipe: offload_checkpoints keeps the inputs of recomputed layers in host memory, and "
                "gradient_checkpointing is false; set it to true or auto"
            )
        if self.eval_data is None and (self.eval_every or self.eval_lengths):
            given = "eval_every" if self.eval_every else "eval_lengths"
            raise RopeExtendError(f"recipe: {given} needs eval_data; name documents to evaluate on")

    def _check_groups(self) -> None:
        group = self.shifted_sparse
        if group is None:
            return
        if self.packing != UNPACKED:
            raise RopeExtendError(
                f"recipe: shifted_sparse and packing {self.packing} do not go together: groups of tokens "
                "know nothing of documents; leave one out"
            )
        for length in [length for length, _ in self.curriculum or ()] + [self.length]:
            if group % 2 or length % group or group == length:
                raise RopeExtendError(
                    f"recipe: shifted_sparse has groups of {group} tokens for blocks of {length}; give an "
                    "even number that divides every block length and is less, such as a quarter of it"
                )

    def _check_stream(self) -> None:
        reasons = {
            "data_weights": "a stream is one source in its own order",
            "curriculum": "what a stream has read it cannot cut again into longer blocks",
            "max_documents": "a stream is read as far as the steps need",
        }
        for name, reason in reasons.items():
            if self.streaming and getattr(self, name) is not None:
                raise RopeExtendError(
                    f"recipe: streaming and {name} do not go together: {reason}; leave one out"
                )

    @property
    def tracked_by(self) -> tuple[str, ...]:
        """All trackers: `trackers`, and TensorBoard where `tensorboard` asks for it."""
        return tuple(dict.fromkeys((*(["tensorboard"] if self.tensorboard else []), *self.trackers)))

    @property
    def default(self) -> dict[str, Any]:
        """What the method's default recipe says, by field; what most do, for a method that there is not."""
        adaptation = Adaptation()
        with contextlib.suppress(RopeExtendError):
            adaptation = method_named(str(self.method)).adaptation
        return asdict(adaptation)

    @property
    def length(self) -> int:
        """Tokens per training sequence: `block_length`, or else `target_length`."""
        return self.target_length if self.block_length is None else self.block_length

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The recipe of a mapping from field names to values, as YAML gives them.

        Raises:
            RopeExtendError: an unknown key (the message names the nearest field), a missing one, or a value
                that its field does not take.
        """
        if not isinstance(values, Mapping):
            raise RopeExtendError(f"a recipe maps field names to values; got {type(values).__name__}")
        names = [item.name for item in fields(cls)]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise RopeExtendError(f"recipe: unknown key {key!r}.{hint} Known: {', '.join(names)}")
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            flags = ", ".join(map(_flag_name, missing))
            raise RopeExtendError(f"recipe: {', '.join(missing)} not given; add to the YAML file, or {flags}")
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], overrides: Mapping[str, object] | None = None) -> Self:
        """The recipe of a YAML file, with `overrides` in place of what the file says.

        Raises:
            RopeExtendError: no such file, invalid YAML, a key twice, or what `from_dict` refuses.
        """
        file = Path(path)
        try:
            values = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
        except OSError as error:
            raise RopeExtendError(f"cannot read the recipe {file}: {error.strerror}; see configs/") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RopeExtendError(f"{file} is not valid YAML: {error}") from error
        if not isinstance(values, Mapping):
            raise RopeExtendError(f"{file} must hold `key: value` lines, got {type(values).__name__}")
        try:
            return cls.from_dict({**values, **(overrides or {})})
        except RopeExtendError as error:
            raise RopeExtendError(f"{file}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values of JSON and YAML; `from_dict` is the exact inverse."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def to_yaml(self) -> str:
        """All fields as YAML, in the order of the class."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@cache
def _hints() -> dict[str, tuple[_Kind, str]]:
    """Each field's kind and its line of documentation."""
    hints = get_type_hints(Recipe, include_extras=True)
    return {item.name: hints[item.name].__metadata__ for item in fields(Recipe)}


def _kinds() -> dict[str, _Kind]:
    return {name: kind for name, (kind, _) in _hints().items()}


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe to a command: an optional YAML file as `config`, and one `--flag` per field.

    Every flag defaults to None, which means that it was not given and the file or the default holds.
    """
    parser.add_argument("config", nargs="?", help="YAML file of a recipe, such as those in configs/")
    group = parser.add_argument_group("recipe", "each flag replaces what the file says")
    for item in fields(Recipe):
        kind, text = _hints()[item.name]
        if item.name == "method":
            text += f"; one of {', '.join(encodings())}, or composed, resonance(yarn)"
        usual, replaced = asdict(Adaptation()), asdict(REPLACED)
        if item.name in usual:
            other = f"; {replaced[item.name]} in the place of rotation"
            text += (
                f" (default: {usual[item.name]}{other if usual[item.name] != replaced[item.name] else ''})"
            )
        elif item.default is not MISSING and item.default is not None:
            text += f" (default: {item.default})"
        flag, text = _flag_name(item.name), text.replace("%", "%%")
        if kind in (_FLAG, _AUTO_FLAG):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag, metavar=item.name.split("_")[-1].upper(), help=text)


def recipe_from_arguments(arguments: argparse.Namespace) -> Recipe:
    """The recipe of parsed arguments: the file `arguments.config`, if any, with the given flags in its place.

    Raises:
        RopeExtendError: as `Recipe.from_yaml`.
    """
    given = {name: getattr(arguments, name, None) for name in _hints()}
    overrides = {name: _read(name, value) for name, value in given.items() if value is not None}
    if getattr(arguments, "config", None) is not None:
        return Recipe.from_yaml(arguments.config, overrides)
    return Recipe.from_dict(overrides)


def _read(name: str, value: object) -> object:
    """A flag's text as the value that YAML would have given for it."""
    kind = _kinds()[name]
    if not isinstance(value, str) or kind.plain:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RopeExtendError(f"{_flag_name(name)} must be {kind.expected}; got {value!r}") from error


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key given twice is refused: YAML would keep the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, refusing repeated keys."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)
