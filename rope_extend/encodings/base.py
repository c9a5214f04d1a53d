"""What every position encoding is: its shape, its kinds, and the registry that finds it by name.

An encoding is a frozen dataclass that turns numbers into tensors. It knows no model and does no I/O.
There are five kinds, and one place in a model where each acts:

===================  ==========================================  ===================================
kind                 is                                          acts on
===================  ==========================================  ===================================
`RopeEncoding`       inverse frequencies, attention factor       the rotary module
`BiasEncoding`       a bias on the attention logits              the attention function
`AbsoluteEncoding`   vectors added to the token embeddings       the embedding output
`PositionRemap`      the distance a query-key pair is given      the attention function
`KernelEncoding`     a feature map in place of softmax           the attention function
===================  ==========================================  ===================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rope_extend.errors import RopeExtendError

MAX_FACTOR = 65_536.0
"""The largest extension taken at its word: 256 tokens to 16M. More is a slip of the keyboard."""

STILL = 1e28
"""The divisor that stands for a frequency of zero, where a form knows divisors only: no angle feels it."""

_FINEST_STEP = 1 / 1024
"""The smallest share by which tables of a growing schedule are told apart, short of every token."""

MAX_LENGTH = 2**40
"""The longest window, in tokens, that is taken at its word."""

MAX_DIM = 2**16
"""The most rotated channels of a head that are taken at their word: tables are as long as half of them."""


def check_number(
    owner: str, field: str, value: object, *, minimum: float, maximum: float = math.inf, above: bool = False
) -> float:
    """Return `value` as a float, or raise with what was received and what would work.

    `above=True` excludes `minimum` itself. Booleans and numeric strings are refused: both come from
    configuration files by mistake, and both would silently become numbers.

    Raises:
        RopeExtendError: not a real number, NaN, infinite, or outside the range.
    """
    bound = f"{'above' if above else 'at least'} {minimum:g}"
    if maximum != math.inf:
        bound += f" and at most {maximum:g}"
    wanted = f"{owner}: {field} must be a finite number {bound}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RopeExtendError(f"{wanted} ({type(value).__name__})")
    number = float(value)
    if not math.isfinite(number) or number < minimum or (above and number == minimum) or number > maximum:
        raise RopeExtendError(wanted)
    return number


def check_length(owner: str, field: str, value: object) -> int:
    """Return `value` as an int number of tokens, or raise with what was received and what would work.

    Raises:
        RopeExtendError: not a whole number, or not between 1 and `MAX_LENGTH`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RopeExtendError(
            f"{owner}: {field} must be a whole number of tokens, got {value!r} ({type(value).__name__})"
        )
    length = int(value)
    if not 1 <= length <= MAX_LENGTH:
        raise RopeExtendError(f"{owner}: {field} must be between 1 and {MAX_LENGTH} tokens, got {length}")
    return length


@dataclass(frozen=True)
class RopeShape:
    """The numbers of a model that its rotary tables follow from.

    Attributes:
        dim: rotated channels per head; even. Less than the head's width in partial-rotary families.
        theta: the base b of the frequencies `b^(-2i/dim)`, as the model was pretrained.
        trained_length: the window the model was pretrained on, in tokens.
    """

    dim: int
    theta: float
    trained_length: int

    def __post_init__(self) -> None:
        whole = isinstance(self.dim, Integral) and not isinstance(self.dim, bool)
        if not whole or not 2 <= self.dim <= MAX_DIM or self.dim % 2:
            raise RopeExtendError(
                f"RopeShape: dim must be an even whole number of channels up to {MAX_DIM}, got {self.dim!r}"
            )
        object.__setattr__(self, "dim", int(self.dim))
        object.__setattr__(
            self, "theta", check_number("RopeShape", "theta", self.theta, minimum=1, above=True)
        )
        object.__setattr__(
            self, "trained_length", check_length("RopeShape", "trained_length", self.trained_length)
        )

    @property
    def exponents(self) -> Tensor:
        """`2i/dim` for each channel pair i, `[dim/2]` float64."""
        return torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim

    def inv_freq(self, theta: float | None = None) -> Tensor:
        """Plain RoPE's frequencies `theta^(-2i/dim)`, `[dim/2]` float64, radians per token (2104.09864)."""
        return (self.theta if theta is None else theta) ** -self.exponents


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that encodings other than rotary ones follow from.

    Attributes:
        heads: query heads of a layer.
        hidden_size: channels of a token's embedding.
        trained_length: the window the model was pretrained on, in tokens.
        head_dim: channels of a query and of a key.
        value_dim: channels of a value.
    """

    heads: int
    hidden_size: int
    trained_length: int
    head_dim: int = 64
    value_dim: int = 64

    def __post_init__(self) -> None:
        for field in ("heads", "hidden_size", "head_dim", "value_dim"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise RopeExtendError(f"ModelShape: {field} must be a whole number above 0, got {value!r}")
            object.__setattr__(self, field, int(value))
        object.__setattr__(
            self, "trained_length", check_length("ModelShape", "trained_length", self.trained_length)
        )


def _brief(value: object) -> str:
    """A parameter for logs and legends: numbers short, and a list of one per channel by its ends."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"({_brief(value[0])} .. {_brief(value[-1])})"
    return str(value)


@dataclass(frozen=True)
class Adaptation:
    """What a model needs to get used to an encoding: the fields of a recipe that leaves them open.

    The defaults are for a rotary schedule, which leaves a model most of what it knows. An encoding in the
    place of rotation is `REPLACED` instead.

    Attributes:
        steps: optimizer steps.
        learning_rate: after warm-up.
        lora_targets: layers with LoRA, `attention` or `all-linear`.
        train_norm_embed: whether norms and embeddings are trained as well.
    """

    steps: int = 1000
    learning_rate: float = 2e-4
    lora_targets: str = "attention"
    train_norm_embed: bool = False


REPLACED = Adaptation(steps=2000, lora_targets="all-linear", train_norm_embed=True)
"""For what is put in the place of rotation: the model has to learn anew how to tell places apart.

Not by degrees (a recipe's `anneal_steps`): in the runs of docs/alternatives.md that did not pay.
"""


class Encoding(ABC):
    """A position encoding: frozen, validated when it is made, hashable, and found by name.

    A subclass that sets `name` registers itself; abstract kinds do not. `to_dict` and `from_dict` are
    exact inverses, so an encoding travels through JSON, YAML and `config.json`.
    """

    name: ClassVar[str]
    """Registry key, as the field calls the method."""
    paper: ClassVar[str]
    """Where it comes from: an arXiv id, or the name of the public post it appeared in."""
    _registry: ClassVar[dict[str, type[Encoding]]] = {}
    depends_on_length: bool = False
    """Whether what a token reads changes with the length of its text, as in dynamic NTK."""
    per_row: bool = False
    """Whether every token of a row is read by the row's whole length, later tokens included."""
    adaptation: ClassVar[Adaptation] = Adaptation()
    """The default recipe."""
    per_layer: bool = False
    """Whether each layer has learned parameters of its own, where there are any."""

    def __post_init__(self) -> None:  # noqa: B027  the end of every subclass's chain of checks
        """Check the parameters; each subclass adds its own to its parents'."""

    def _check(self, field: str, *, minimum: float, maximum: float = math.inf, above: bool = False) -> None:
        value = check_number(
            self.name, field, getattr(self, field), minimum=minimum, maximum=maximum, above=above
        )
        object.__setattr__(self, field, value)

    def target_length(self, shape: RopeShape) -> int | None:
        """The window this encoding is meant for, in tokens; None where its parameters do not say."""
        return None

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The encoding of this method that reads `target_length` tokens, from the one dial.

        Raises:
            RopeExtendError: unknown, missing or invalid parameters.
        """
        return cls._made(parameters)

    @classmethod
    def _made(cls, parameters: Mapping[str, Any]) -> Self:
        made = encoding(cls.name, **parameters)
        assert isinstance(made, cls)
        return made

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """What learned parameters start as, float32, by name; empty where nothing is learned.

        The same at every call: nothing is drawn at random that is not drawn from a fixed seed.
        """
        return {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            taken = Encoding._registry.get(cls.name)
            # A dataclass with slots, or a reloaded module, makes the same class twice: that is not a clash.
            if taken is not None and taken.__qualname__ != cls.__qualname__:
                raise TypeError(
                    f"two encodings are named {cls.name!r}: {taken.__qualname__}, {cls.__qualname__}"
                )
            Encoding._registry[cls.name] = cls

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the class's documentation."""
        return (inspect.getdoc(cls) or cls.__name__).splitlines()[0]

    @classmethod
    def _fields(cls) -> tuple[Field[Any], ...]:
        return fields(cls)  # type: ignore[arg-type]  # every concrete encoding is a dataclass

    @classmethod
    def parameters(cls) -> list[str]:
        """The names of the parameters this encoding takes."""
        return [field.name for field in cls._fields()]

    @classmethod
    def required(cls) -> list[str]:
        """The names of the parameters that have no default."""
        missing = (MISSING, MISSING)
        return [field.name for field in cls._fields() if (field.default, field.default_factory) == missing]

    def __str__(self) -> str:
        """`yarn(factor=8)`: the name and what differs from the defaults, for logs and legends."""
        given = [
            f"{field.name}={_brief(value)}"
            for field in self._fields()
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., parameter: value, ...}`; parameters left at None are omitted."""
        values = {key: getattr(self, key) for key in self.parameters()}
        plain = {
            key: value.to_dict()
            if isinstance(value, Encoding)
            else list(value)
            if isinstance(value, tuple)
            else value
            for key, value in values.items()
            if value is not None
        }
        return {"name": self.name, **plain}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Encoding:
        """The encoding that `to_dict` described.

        Raises:
            RopeExtendError: no mapping, no or an unknown name, unknown or invalid parameters.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise RopeExtendError(
                f"an encoding is a mapping such as {{'name': 'linear', 'factor': 8.0}}, got {data!r}"
            )
        return encoding(data["name"], **{key: value for key, value in data.items() if key != "name"})


def encodings(kind: type[Encoding] = Encoding) -> list[str]:
    """The names of all registered encodings (of one kind, if given), sorted."""
    return sorted(name for name, cls in Encoding._registry.items() if issubclass(cls, kind))


def encoding_class(name: str) -> type[Encoding]:
    """The class registered under `name`.

    Raises:
        RopeExtendError: unknown name; the message lists the known ones and the nearest.
    """
    if name in Encoding._registry:
        return Encoding._registry[name]
    near = difflib.get_close_matches(str(name), Encoding._registry, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RopeExtendError(f"no encoding is named {name!r}.{hint} Known: {', '.join(encodings())}")


def check_parameters(cls: type[Encoding], parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that the encoding does not have, naming the ones it has.

    Raises:
        RopeExtendError: an unknown parameter.
    """
    unknown = [key for key in parameters if key not in cls.parameters()]
    if unknown:
        takes = ", ".join(cls.parameters()) or "no parameters"
        raise RopeExtendError(
            f"{cls.name}: unknown parameter {', '.join(map(repr, unknown))}; it takes {takes}"
        )


def encoding(name: str, **parameters: Any) -> Encoding:
    """Make an encoding by name: `encoding("yarn", factor=4.0)`.

    Raises:
        RopeExtendError: unknown name, unknown, missing or invalid parameters.
    """
    cls = encoding_class(name)
    check_parameters(cls, parameters)
    missing = [field for field in cls.required() if field not in parameters]
    if missing:
        raise RopeExtendError(f"{name}: missing {', '.join(missing)}; it takes {', '.join(cls.parameters())}")
    return cls(**parameters)


class RopeEncoding(Encoding):
    """A rotary schedule: which frequency each channel pair turns at, and how cos and sin are scaled."""

    rope_type: ClassVar[str | None] = None
    """The stock `rope_type` with the same formula and the same parameters, if there is one."""
    stock_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Parameters that `config.rope_parameters` calls otherwise: our name to the stock name."""
    start_tokens: int = 0
    """Positions below this keep plain RoPE's angles (LongRoPE's n-hat)."""

    @property
    def rotates_in_attention(self) -> bool:
        """Whether keys are cached unrotated, and rotated together with each query that reads them."""
        return self.depends_on_length and not self.per_row

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The length whose table serves a query that ends a text of `lengths` `[...]` tokens, int64 `[...]`.

        Equal lengths share one table, so the fewer values this has, the fewer times keys are rotated.
        """
        return torch.full_like(lengths, shape.trained_length)

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The factor on a query's logits beside the attention factor, float64, like `position_ids` `[...]`;
        None for 1.
        """
        return None

    def decay(self, shape: RopeShape) -> Tensor | None:
        """`[dim/2]` float64, at most 0: ln of the factor on a query-key product per token between the two;
        None for none.
        """
        return None

    @abstractmethod
    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """`[dim/2]` float64, radians per token, for a sequence of `seq_len` tokens.

        Static schedules ignore `seq_len`; without it a length-dependent one gives its trained-window table.
        """

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """The factor on cos and sin; attention logits grow by its square."""
        return 1.0

    def target_length(self, shape: RopeShape) -> int | None:
        """The window this encoding is meant for, in tokens; None where its parameters do not say."""
        return shape.trained_length

    def max_position_embeddings(self, shape: RopeShape, target_length: int) -> int:
        """What `config.max_position_embeddings` must be for stock loaders to compute the same tables.

        Length-dependent schedules start from the trained length, and stock transformers reads it from this
        field.
        """
        return shape.trained_length if self.depends_on_length else target_length

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """What `config.rope_parameters` gets, so that stock transformers computes the same tables.

        Raises:
            RopeExtendError: stock transformers has no form for it.
        """
        if self.rope_type is not None:
            values = {
                self.stock_names.get(key, key): value
                for key, value in self.to_dict().items()
                if key != "name"
            }
            return {"rope_type": self.rope_type, "rope_theta": shape.theta, **values}
        return self.longrope_parameters(shape)

    def longrope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """The schedule as stock `longrope` with equal short and long lists.

        That form carries any static table, to float32 rounding; a channel that stands still is one slowed
        by `STILL`. Its `factor` changes nothing beside an `attention_factor`; it says which window is meant.

        Raises:
            RopeExtendError: the schedule depends on the length, or does more to attention than a table can.
        """
        table = self.inv_freq(shape)
        beyond_a_table = (
            self.depends_on_length
            or self.rotates_in_attention
            or self.start_tokens > 0
            or self.logit_scale(shape, torch.arange(1)) is not None
            or self.decay(shape) is not None
        )
        if beyond_a_table:
            raise RopeExtendError(f"{self.name} has no form that stock transformers can load")
        factors = torch.where(table > 0, shape.inv_freq() / table, STILL).tolist()
        target = self.target_length(shape)
        return {
            "rope_type": "longrope",
            "rope_theta": shape.theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": self.attention_factor(shape),
            "original_max_position_embeddings": shape.trained_length,
            **({} if target is None else {"factor": max(1.0, target / shape.trained_length)}),
        }

    @staticmethod
    def from_rope_parameters(
        rope_parameters: Mapping[str, Any], max_position_embeddings: int | None = None
    ) -> RopeEncoding | None:
        """The encoding that a stock `config.rope_parameters` describes.

        None for a type without one here, and for Phi-3's form of `longrope`, which takes its factor from the
        config's `max_position_embeddings`, where that is not given.

        Raises:
            RopeExtendError: the parameters are invalid.
        """
        rope_type = rope_parameters.get("rope_type", "default")
        for cls in Encoding._registry.values():
            if issubclass(cls, RopeEncoding) and cls.rope_type == rope_type:
                return cls._from_stock(rope_parameters, max_position_embeddings)
        return None

    @classmethod
    def _from_stock(
        cls, rope_parameters: Mapping[str, Any], max_position_embeddings: int | None
    ) -> RopeEncoding | None:
        given = {key: rope_parameters.get(cls.stock_names.get(key, key)) for key in cls.parameters()}
        return cls._made({key: value for key, value in given.items() if value is not None})


@dataclass(frozen=True)
class ScaledRope(RopeEncoding):
    """A rotary schedule that follows from one number: how many times longer the window becomes.

    Attributes:
        factor: `s = target_length / trained_length`, at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("factor", minimum=1, maximum=MAX_FACTOR)

    def target_length(self, shape: RopeShape) -> int | None:
        """`factor * trained_length`, to the nearest token."""
        return round(self.factor * shape.trained_length)

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The one place where `factor = target_length / trained_length` is computed.

        Raises:
            RopeExtendError: `factor` given beside `target_length`, or a parameter is unknown or invalid.
        """
        if "factor" in parameters:
            raise RopeExtendError(
                f"{cls.name}: factor follows from target_length ({target_length} / {shape.trained_length} = "
                f"{target_length / shape.trained_length:g}); give one of the two. "
                f"For a factor of its own: patch_model(model, encoding({cls.name!r}, factor=...))"
            )
        return cls._made({"factor": target_length / shape.trained_length, **parameters})


@dataclass(frozen=True, kw_only=True)
class LengthDependent(RopeEncoding):
    """A rotary schedule whose table changes with the length.

    The papers give a table for a text of l tokens, and leave open whose text that is while a model reads on.
    Two answers:

    `per="query"` (default): each query is rotated, and sees its keys rotated, by the table of the text that
    it ends. What a token sees then never depends on later tokens, so one forward, a prefill in chunks and
    decoding with a cache agree exactly.

    `per="row"`: every token of a row is rotated by the table of the row's whole length, as the published
    figures were measured. Each new token then changes all that was computed before it, which no cache can
    follow: decoding beyond the trained window is refused unless `use_cache=False`.

    Attributes:
        per: whose length it is, `query` or `row`.
    """

    per: str = "query"

    depends_on_length = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per not in ("query", "row"):
            raise RopeExtendError(f"{self.name}: per must be 'query' or 'row', got {self.per!r}")

    @property
    def per_row(self) -> bool:  # type: ignore[override]
        """Whether `per` is `row`."""
        return self.per == "row"

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """Two tables: one up to and including the trained length, and one beyond."""
        return shape.trained_length + (lengths > shape.trained_length).to(torch.int64)

    def rope_parameters(self, shape: RopeShape) -> dict[str, Any]:
        """The stock form, where there is one, which reads every row by the longest of its batch."""
        ours = ("per", "step")
        return {key: value for key, value in super().rope_parameters(shape).items() if key not in ours}


@dataclass(frozen=True, kw_only=True)
class GrowingRope(LengthDependent):
    """A rotary schedule whose table follows the length beyond the trained window.

    Attributes:
        per: whose length it is, `query` or `row`.
        step: with `per="query"`, by what share a text grows until the next table, which is the one of the
            longest text it serves. 0 follows every token, and costs a rotation of all keys for each.
    """

    step: float = 1 / 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("step", minimum=0, maximum=1)
        if 0 < self.step < _FINEST_STEP:
            raise RopeExtendError(
                f"{self.name}: step must be 0, for each token, or at least {_FINEST_STEP}, got {self.step!r}"
            )

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The trained length within it; beyond, the longest text of the step that a length falls into."""
        if self.step == 0:
            return lengths.clamp(min=shape.trained_length)
        ends = [shape.trained_length]
        while ends[-1] < int(lengths.max()):
            ends.append(max(ends[-1] + 1, int(ends[-1] * (1 + self.step))))
        table = torch.tensor(ends, device=lengths.device)
        return table[torch.searchsorted(table, lengths.contiguous())]


@dataclass(frozen=True)
class ComposedRope(RopeEncoding):
    """A change to another rotary schedule: `resonance(yarn)`, `logn(ntk)`.

    Whatever a subclass does not change is the inner schedule's.

    Attributes:
        inner: the schedule that is changed, an encoding or its `to_dict()`; plain RoPE by default.
    """

    inner: RopeEncoding = dataclasses.field(default_factory=lambda: _rotary(encoding("none")))

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = Encoding.from_dict(self.inner) if isinstance(self.inner, Mapping) else self.inner
        if not isinstance(inner, RopeEncoding):
            raise RopeExtendError(
                f"{self.name}: inner must be a rotary schedule, such as encoding('yarn', factor=8.0), "
                f"got {self.inner!r}"
            )
        object.__setattr__(self, "inner", inner)

    @property
    def depends_on_length(self) -> bool:  # type: ignore[override]
        """As the inner schedule."""
        return self.inner.depends_on_length

    @property
    def per_row(self) -> bool:  # type: ignore[override]
        """As the inner schedule."""
        return self.inner.per_row

    @property
    def start_tokens(self) -> int:  # type: ignore[override]
        """As the inner schedule."""
        return self.inner.start_tokens

    @property
    def rotates_in_attention(self) -> bool:
        """As the inner schedule."""
        return self.inner.rotates_in_attention

    def inv_freq(self, shape: RopeShape, seq_len: int | None = None) -> Tensor:
        """The inner schedule's, `[dim/2]` float64, radians per token."""
        return self.inner.inv_freq(shape, seq_len)

    def attention_factor(self, shape: RopeShape, seq_len: int | None = None) -> float:
        """The inner schedule's."""
        return self.inner.attention_factor(shape, seq_len)

    def table_length(self, shape: RopeShape, lengths: Tensor) -> Tensor:
        """The inner schedule's."""
        return self.inner.table_length(shape, lengths)

    def logit_scale(self, shape: RopeShape, position_ids: Tensor) -> Tensor | None:
        """The inner schedule's."""
        return self.inner.logit_scale(shape, position_ids)

    def decay(self, shape: RopeShape) -> Tensor | None:
        """The inner schedule's."""
        return self.inner.decay(shape)

    def target_length(self, shape: RopeShape) -> int | None:
        """The inner schedule's."""
        return self.inner.target_length(shape)

    def __str__(self) -> str:
        """`resonance(yarn(factor=8))`: the inner schedule, then what differs from the defaults."""
        given = [
            f"{field.name}={_brief(value)}"
            for field in self._fields()
            if field.name != "inner" and (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}({', '.join([str(self.inner), *given])})"


@dataclass(frozen=True)
class RotaryMethod:
    """A rotary method by name, before it knows a model: `yarn`, or composed, `resonance(yarn)`.

    Attributes:
        classes: the schedules, the outermost first.
    """

    classes: tuple[type[RopeEncoding], ...]

    def for_target(self, shape: RopeShape, target_length: int, **parameters: Any) -> RopeEncoding:
        """The encoding that reads `target_length` tokens; a parameter goes to the outermost that has it.

        Raises:
            RopeExtendError: unknown or invalid parameters.
        """
        made: RopeEncoding | None = None
        for cls, values in reversed(list(zip(self.classes, self.shared_out(parameters), strict=True))):
            inside = {} if made is None else {"inner": made}
            made = cls.for_target(shape, target_length, **values, **inside)
        assert made is not None
        return made

    @property
    def adaptation(self) -> Adaptation:
        """The default recipe: the innermost's, which says what is left of rotation."""
        return self.classes[-1].adaptation

    def shared_out(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Parameters by the schedule that they go to, the outermost that has them.

        Raises:
            RopeExtendError: none has one of them.
        """
        takes = [set(cls.parameters()) - {"inner"} for cls in self.classes]
        unknown = parameters.keys() - set().union(*takes)
        if unknown:  # the innermost refuses them: its parameters are the ones that are meant most often
            check_parameters(self.classes[-1], dict.fromkeys(unknown, 0))
        shares: list[dict[str, Any]] = [{} for _ in self.classes]
        for key, value in parameters.items():
            shares[next(i for i, taken in enumerate(takes) if key in taken)][key] = value
        return shares


def rotary_method(name: str) -> RotaryMethod:
    """The rotary method called `name`, which may be composed, as `resonance(yarn)` is.

    Raises:
        RopeExtendError: unknown name, an encoding of another kind, or one around another that takes none.
    """
    names = str(name).replace(" ", "").split("(")
    closing = len(names) - 1
    if not names[-1].endswith(")" * closing):
        raise RopeExtendError(f"{name}: {closing} opening brackets want as many closing ones at the end")
    names[-1] = names[-1][: len(names[-1]) - closing]
    classes = []
    for position, part in enumerate(names):
        cls = encoding_class(part)
        if not issubclass(cls, RopeEncoding):
            rotary = ", ".join(encodings(RopeEncoding))
            raise RopeExtendError(f"{part} is not a rotary method; there are {rotary}")
        if position < closing and not issubclass(cls, ComposedRope):
            composed = ", ".join(encodings(ComposedRope))
            raise RopeExtendError(f"{name}: {part} stands alone; those that go around another: {composed}")
        classes.append(cls)
    return RotaryMethod(tuple(classes))


@dataclass(frozen=True)
class OtherMethod:
    """A method by name that is not rotary, with what a `RotaryMethod` can do.

    Attributes:
        cls: the encoding.
    """

    cls: type[Encoding]

    def for_target(self, shape: RopeShape, target_length: int, **parameters: Any) -> Encoding:
        """The encoding that reads `target_length` tokens.

        Raises:
            RopeExtendError: unknown or invalid parameters.
        """
        return self.cls.for_target(shape, target_length, **parameters)

    @property
    def adaptation(self) -> Adaptation:
        """The default recipe."""
        return self.cls.adaptation

    def shared_out(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parameters themselves.

        Raises:
            RopeExtendError: the encoding does not have one of them.
        """
        check_parameters(self.cls, parameters)
        return [dict(parameters)]


def method_named(name: str) -> RotaryMethod | OtherMethod:
    """The method called `name`, rotary or not; rotary ones may be composed, as `resonance(yarn)` is.

    Raises:
        RopeExtendError: unknown name, or one around another that takes none.
    """
    cls = Encoding._registry.get(name)
    return rotary_method(name) if cls is None or issubclass(cls, RopeEncoding) else OtherMethod(cls)


def dialled_methods() -> list[str]:
    """The rotary methods that need nothing but a target length, and no other method inside them."""
    names = []
    for name in encodings(RopeEncoding):
        cls = encoding_class(name)
        with contextlib.suppress(RopeExtendError):
            assert issubclass(cls, RopeEncoding)
            cls.for_target(RopeShape(dim=128, theta=1e4, trained_length=4096), 32_768)
            if not issubclass(cls, ComposedRope):
                names.append(name)
    return names


def _rotary(made: Encoding) -> RopeEncoding:
    assert isinstance(made, RopeEncoding)
    return made


class BiasEncoding(Encoding):
    """A bias on the attention logits, as ALiBi and T5 have it; rotary becomes the identity.

    The logits keep the model's own scale, and the bias is added to what is scaled.
    """

    adaptation = REPLACED

    @abstractmethod
    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """`[heads, ...]` float32, what is added to the logits of a query and a key.

        `distance` `[...]` is the number of whole tokens from a key to a later query, at least 0; `query` is
        the position of that query, of a shape that broadcasts to it. `learned` are the learned parameters,
        float32, by the names of `initial`.
        """

    def slopes(self, shape: ModelShape) -> Tensor | None:
        """`[heads]` float64 where the bias is `-slope * distance` for each head; None where it is not.

        Such a bias is a number for the key less one for the query, which fits into channels of the two.
        """
        return None

    def same_until(self, shape: ModelShape, learned: Mapping[str, Tensor]) -> float:
        """The query position up to which the bias follows from the distance alone; infinity for any."""
        return math.inf


class RelativeEncoding(BiasEncoding):
    """A vector for each range of distances: what a query has in common with it is the bias.

    The logits are `scale * query . (key + vector)`, so that the bias follows from the query too.
    """

    @abstractmethod
    def ranges(self, distance: Tensor) -> Tensor:
        """The range that each distance `[...]`, whole tokens from 0, is in: int64 `[...]`."""

    @abstractmethod
    def of_keys(self, learned: Mapping[str, Tensor]) -> Tensor:
        """`[ranges, head_dim]`, what is added to keys; the same for all heads."""

    def of_values(self, learned: Mapping[str, Tensor]) -> Tensor | None:
        """`[ranges, value_dim]`, what is added to values; None if nothing is."""
        return None

    def bias(
        self, shape: ModelShape, distance: Tensor, query: Tensor, learned: Mapping[str, Tensor]
    ) -> Tensor:
        """Never asked for: the bias follows from what the query is."""
        raise NotImplementedError


class AbsoluteEncoding(Encoding):
    """Vectors added to the token embeddings, by position; rotary becomes the identity."""

    adaptation = REPLACED

    @abstractmethod
    def vectors(self, shape: ModelShape, position_ids: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """`[..., hidden_size]` float32 for `position_ids` `[...]`, whole tokens from 0.

        Raises:
            RopeExtendError: a position that the encoding has no vector for.
        """


class PositionRemap(Encoding):
    """Another distance for each query-key pair than the true one; keys are cached unrotated."""

    @abstractmethod
    def distance(self, query: Tensor, key: Tensor, shape: RopeShape) -> Tensor:
        """`[Q, K]` distance in tokens by which a pair is rotated, from positions `[Q]` and `[K]`."""


class KernelEncoding(Encoding):
    """Attention by a feature map in place of softmax, in time linear in the length."""

    adaptation = REPLACED

    inner: RopeEncoding
    """What features are rotated by: a static schedule."""

    @abstractmethod
    def features(self, states: Tensor) -> Tensor:
        """Feature map of queries or keys, `[..., head_dim]` to `[..., features]`, positive."""
