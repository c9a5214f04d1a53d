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

MAX_LENGTH = 2**40
"""The longest window, in tokens, that is taken at its word."""


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
        if isinstance(self.dim, bool) or not isinstance(self.dim, Integral) or self.dim < 2 or self.dim % 2:
            raise RopeExtendError(
                f"RopeShape: dim must be an even whole number of channels, got {self.dim!r}"
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


class Encoding(ABC):
    """A position encoding: frozen, validated when it is made, hashable, and found by name.

    A subclass that sets `name` registers itself; abstract kinds do not. `to_dict` and `from_dict` are
    exact inverses, so an encoding travels through JSON, YAML and `config.json`.
    """

    name: ClassVar[str]
    """Registry key, as the field calls the method."""
    paper: ClassVar[str]
    """Where it comes from: an arXiv id, or the name of the public post it appeared in."""
    depends_on_length: ClassVar[bool] = False
    """Whether the tensors change with the current length, as in dynamic NTK."""

    _registry: ClassVar[dict[str, type[Encoding]]] = {}

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
        return [field.name for field in cls._fields() if field.default is MISSING]

    def __str__(self) -> str:
        """`yarn(factor=8)`: the name and what differs from the defaults, for logs and legends."""
        given = [
            f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}"
            for field in self._fields()
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., parameter: value, ...}`; parameters left at None are omitted."""
        values = {key: getattr(self, key) for key in self.parameters()}
        return {"name": self.name, **{key: value for key, value in values.items() if value is not None}}

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

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The encoding of this method that reads `target_length` tokens, from the one dial.

        Raises:
            RopeExtendError: unknown or invalid parameters.
        """
        check_parameters(cls, parameters)
        return cls(**parameters)

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

        That form carries any static table of non-zero frequencies, to float32 rounding.

        Raises:
            RopeExtendError: the schedule depends on the length or has zero frequencies.
        """
        table = self.inv_freq(shape)
        if self.depends_on_length or not bool((table > 0).all()):
            raise RopeExtendError(f"{self.name} has no form that stock transformers can load")
        factors = (shape.inv_freq() / table).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": shape.theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": self.attention_factor(shape),
            "original_max_position_embeddings": shape.trained_length,
        }

    @staticmethod
    def from_rope_parameters(rope_parameters: Mapping[str, Any]) -> RopeEncoding | None:
        """The encoding that a stock `config.rope_parameters` describes; None for a type without one here.

        Raises:
            RopeExtendError: the parameters are invalid.
        """
        rope_type = rope_parameters.get("rope_type", "default")
        for cls in Encoding._registry.values():
            if issubclass(cls, RopeEncoding) and cls.rope_type == rope_type:
                given = {key: rope_parameters.get(cls.stock_names.get(key, key)) for key in cls.parameters()}
                made = encoding(cls.name, **{key: value for key, value in given.items() if value is not None})
                assert isinstance(made, RopeEncoding)
                return made
        return None


@dataclass(frozen=True)
class ScaledRope(RopeEncoding):
    """A rotary schedule that follows from one number: how many times longer the window becomes.

    Attributes:
        factor: `s = target_length / trained_length`, at least 1.
    """

    factor: float

    def __post_init__(self) -> None:
        self._check("factor", minimum=1, maximum=MAX_FACTOR)

    def _check(self, field: str, *, minimum: float, maximum: float = math.inf, above: bool = False) -> None:
        value = check_number(
            self.name, field, getattr(self, field), minimum=minimum, maximum=maximum, above=above
        )
        object.__setattr__(self, field, value)

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
        check_parameters(cls, parameters)
        return cls(factor=target_length / shape.trained_length, **parameters)


def rotary_method(name: str) -> type[RopeEncoding]:
    """The rotary schedule registered under `name`.

    Raises:
        RopeExtendError: unknown name, or an encoding of another kind.
    """
    cls = encoding_class(name)
    if not issubclass(cls, RopeEncoding):
        rotary = ", ".join(encodings(RopeEncoding))
        raise RopeExtendError(f"{name} is not a rotary method; there are {rotary}")
    return cls


class BiasEncoding(Encoding):
    """A bias on the attention logits, as ALiBi and T5 have it; rotary becomes the identity."""

    @abstractmethod
    def bias(self, distance: Tensor, num_heads: int) -> Tensor:
        """`[num_heads, Q, K]`, added to the logits, for `distance = query - key` `[Q, K]` in tokens.

        Encodings with learned parameters are also `torch.nn.Module`s.
        """


class AbsoluteEncoding(Encoding):
    """Vectors added to the token embeddings, by position; rotary becomes the identity."""

    @abstractmethod
    def vectors(self, position_ids: Tensor, hidden_size: int) -> Tensor:
        """`[..., hidden_size]` float32 for `position_ids` `[...]`, whole tokens from 0."""


class PositionRemap(Encoding):
    """Another distance for each query-key pair than the true one; keys are cached unrotated."""

    @abstractmethod
    def distance(self, query: Tensor, key: Tensor, shape: RopeShape) -> Tensor:
        """`[Q, K]` distance in tokens by which a pair is rotated, from positions `[Q]` and `[K]`."""


class KernelEncoding(Encoding):
    """Attention by a feature map in place of softmax, in time linear in the length."""

    @abstractmethod
    def features(self, states: Tensor) -> Tensor:
        """Feature map of queries or keys, `[..., head_dim]` to `[..., features]`, positive."""
