"""What all encodings share: parameters, names and the registry."""

from __future__ import annotations

import inspect
import json
from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_extend.checks import Checked
from rope_extend.encodings.core.shapes import ModelShape, RopeShape, check_length
from rope_extend.errors import RopeExtendError
from rope_extend.files import write_json
from rope_extend.method_names import encoding_file, unknown_method
from rope_extend.units import format_length

_registry: dict[str, type[Encoding]] = {}
_MOST_NESTED = 16
"""The most methods in each other that are read from a file: more would end Python's stack."""


class Encoding(Checked, ABC):
    """A position encoding: frozen, validated when it is made, hashable, and found by name.

    A subclass that sets `name` registers itself; abstract kinds have no name. `to_dict` and `from_dict`
    are exact inverses, so an encoding can be stored in JSON, YAML and `config.json`. Code that supports only
    some encodings asks the attributes below and `why_not_one_table`.
    """

    name: ClassVar[str]
    """Registry key: the method's name in the literature."""
    paper: ClassVar[str]
    """Source: an arXiv id, or the name of the public post that introduced it."""
    replaces_rotation: ClassVar[bool] = False
    """Whether the model's RoPE is gone, so that a pretrained model has to be fine-tuned for longer."""
    depends_on_length: bool = False
    """Whether the encoding of a token changes with the length of its text, as in dynamic NTK."""
    per_layer: bool = False
    """Whether each layer has its own learned parameters, if the encoding learns any."""
    remaps: ClassVar[bool] = False
    """Whether it rotates distant pairs of tokens in another way than near ones, as SelfExtend does."""
    inner_name: ClassVar[str] = ""
    """The parameter that takes another method, as in `resonance(yarn)`; empty if there is none."""

    def why_not_one_table(self, shape: RopeShape) -> str:
        """Why one rotary table and one attention factor do not say all that the encoding does, as a clause.

        Empty if they do.
        """
        return "it acts inside attention, with or instead of a rotation"

    def scales_by_position(self, shape: RopeShape) -> bool:
        """Whether the attention logits of a query have a factor that changes with its position."""
        return False

    def target_length(self, shape: RopeShape) -> int | None:
        """The window this encoding is meant for, in tokens; None if its parameters do not say."""
        return None

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The encoding of this method for a window of `target_length` tokens.

        Raises:
            RopeExtendError: unknown, missing or invalid parameters.
        """
        return cls.make(parameters)

    @classmethod
    def make(cls, parameters: Mapping[str, Any]) -> Self:
        """The encoding with these parameters.

        Raises:
            RopeExtendError: unknown, missing or invalid parameters.
        """
        cls.check_names(parameters)
        if missing := [name for name in cls.required() if name not in parameters]:
            raise RopeExtendError(
                f"{cls.name}: missing {', '.join(missing)}; it takes {', '.join(cls.parameters())}"
            )
        return cls(**parameters)

    @classmethod
    def check_names(cls, parameters: Mapping[str, Any]) -> None:
        """Refuse parameters that the encoding does not have, and name the ones it has.

        Raises:
            RopeExtendError: an unknown parameter.
        """
        if unknown := [repr(name) for name in parameters if name not in cls.parameters()]:
            known = ", ".join(cls.parameters()) or "no parameters"
            raise RopeExtendError(f"{cls.name}: unknown parameter {', '.join(unknown)}; it takes {known}")

    def initial(self, shape: ModelShape) -> dict[str, Tensor]:
        """The first values of the learned parameters, float32, by name; empty if nothing is learned.

        The same at every call: random values come from a fixed seed.
        """
        return {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registered = _registry.get(cls.name)
            # A dataclass with slots, or a reloaded module, makes the same class twice: that is not a clash.
            if registered is not None and registered.__qualname__ != cls.__qualname__:
                raise TypeError(
                    f"two encodings are named {cls.name!r}: {registered.__qualname__}, {cls.__qualname__}"
                )
            _registry[cls.name] = cls

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
        """`yarn(factor=8)`, `resonance(yarn(factor=8))`: the method inside it, and what is no default."""
        shown = [str(getattr(self, self.inner_name))] if self.inner_name else []
        for field in self._fields():
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if field.name != self.inner_name and (value := getattr(self, field.name)) != default:
                shown.append(f"{field.name}={_short_text(value)}")
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., parameter: value, ...}`; parameters that are None are omitted."""
        plain: dict[str, Any] = {"name": self.name}
        for key in self.parameters():
            value = getattr(self, key)
            if isinstance(value, Encoding):
                value = value.to_dict()
            if value is not None:
                plain[key] = list(value) if isinstance(value, tuple) else value
        return plain

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Encoding:
        """The encoding that `to_dict` described.

        Raises:
            RopeExtendError: not a mapping, no or an unknown name, unknown or invalid parameters.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise RopeExtendError(
                f"an encoding is a mapping such as {{'name': 'linear', 'factor': 8.0}}, got {data!r}"
            )
        inner, depth = data, 0
        while isinstance(inner, Mapping):
            inner, depth = inner.get("inner", inner.get("far")), depth + 1
        if depth > _MOST_NESTED:
            raise RopeExtendError(
                f"an encoding has at most {_MOST_NESTED} methods in each other, got {depth}"
            )
        # Never a path: a record that names one must not make us read that file.
        parameters = {key: value for key, value in data.items() if key != "name"}
        return encoding_class(data["name"]).make(parameters)


def _short_text(value: object) -> str:
    """A parameter for logs and legends: rounded numbers, and only the ends of a long list."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"({_short_text(value[0])} .. {_short_text(value[-1])})"
    return str(value)


def encoding_classes() -> dict[str, type[Encoding]]:
    """All registered encodings, by name, in the order of registration."""
    return dict(_registry)


def encoding_names(kind: type[Encoding] = Encoding) -> list[str]:
    """The names of all registered encodings, sorted; `kind` restricts them to one kind."""
    return sorted(name for name, cls in _registry.items() if issubclass(cls, kind))


def encoding_class(name: str) -> type[Encoding]:
    """The class registered under `name`.

    Raises:
        RopeExtendError: unknown name; the message lists the known ones and the nearest.
    """
    if name in _registry:
        return _registry[name]
    raise unknown_method(name, _registry)


def encoding(name: str, **parameters: Any) -> Encoding:
    """Make an encoding by name: `encoding("yarn", factor=4.0)`.

    A saved encoding is made from the path of its file, or of its directory: `encoding("runs/search")`.

    Raises:
        RopeExtendError: unknown name, unknown, missing or invalid parameters, or a damaged file.
    """
    if name not in _registry and (file := encoding_file(name)) is not None:
        if parameters:
            raise RopeExtendError(f"{name} is a saved encoding, which takes no parameters; got {parameters}")
        return SavedEncoding.read(file).encoding
    return encoding_class(name).make(parameters)


@dataclass(frozen=True)
class SavedEncoding:
    """An encoding in a JSON file, such as `rope-extend search` writes, with the model that it belongs to.

    Attributes:
        encoding: the encoding.
        shape: the rotary shape of the model.
        target_length: the longest window that it is meant for, in tokens.
    """

    encoding: Encoding
    shape: RopeShape
    target_length: int

    @classmethod
    def read(cls, file: Path) -> SavedEncoding:
        """From its file.

        Raises:
            RopeExtendError: the file is damaged, or is no such file.
        """
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise TypeError(f"its JSON is a {type(values).__name__}, and not an object with keys")
            target_length = check_length(str(file), "target_length", values["target_length"])
            return cls(Encoding.from_dict(values["encoding"]), RopeShape(**values["shape"]), target_length)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RopeExtendError(
                f"{file} is not the file of a saved encoding ({error}); it needs encoding, shape and "
                "target_length, as `rope-extend search` writes them"
            ) from error

    def write(self, file: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        shape, encoded = asdict(self.shape), self.encoding.to_dict()
        write_json(file, {"encoding": encoded, "shape": shape, "target_length": self.target_length})

    def for_target(self, shape: RopeShape, target_length: int) -> Encoding:
        """The encoding itself.

        Raises:
            RopeExtendError: it belongs to a model of another shape, or to a shorter window.
        """
        if self.shape != shape:
            raise RopeExtendError(
                f"the saved encoding {self.encoding} belongs to another model: it is for {self.shape}, and "
                f"this model has {shape}; search again for this model"
            )
        if target_length > self.target_length:
            raise RopeExtendError(
                f"the saved encoding {self.encoding} is for {format_length(self.target_length)} tokens, got "
                f"{format_length(target_length)}; use a target up to that length, or search again"
            )
        return self.encoding
