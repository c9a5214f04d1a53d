"""What all encodings share: parameters, names and the registry."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_extend.encodings.core.checks import Checked, short_text
from rope_extend.encodings.core.effects import Effects
from rope_extend.encodings.core.saved import read_encoding_file
from rope_extend.encodings.core.shapes import ModelShape, RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.method_names import encoding_file, unknown_method

_registry: dict[str, type[Encoding]] = {}


class Encoding(Checked, ABC):
    """A position encoding: frozen, validated when it is made, hashable, and found by name.

    A subclass that sets `name` registers itself; abstract kinds have no name. `to_dict` and `from_dict`
    are exact inverses, so an encoding can be stored in JSON, YAML and `config.json`.
    """

    name: ClassVar[str]
    """Registry key: the method's name in the literature."""
    paper: ClassVar[str]
    """Source: an arXiv id, or the name of the public post that introduced it."""
    replaces_rotation: ClassVar[bool] = False
    """Whether the model's RoPE is gone, so that a pretrained model has to be fine-tuned for longer."""
    depends_on_length: bool = False
    """Whether the encoding of a token changes with the length of its text, as in dynamic NTK."""
    per_row: bool = False
    """Whether every token of a row is encoded by the row's whole length, later tokens included."""
    per_layer: bool = False
    """Whether each layer has its own learned parameters, if the encoding learns any."""

    def effects(self, shape: RopeShape) -> Effects:
        """What the encoding does to a model of this shape, beyond one static rotary table."""
        raise NotImplementedError

    def target_length(self, shape: RopeShape) -> int | None:
        """The window this encoding is meant for, in tokens; None if its parameters do not say."""
        return None

    @classmethod
    def for_target(cls, shape: RopeShape, target_length: int, **parameters: Any) -> Self:
        """The encoding of this method for a window of `target_length` tokens.

        Raises:
            RopeExtendError: unknown, missing or invalid parameters.
        """
        return cls._build(parameters)

    @classmethod
    def _build(cls, parameters: Mapping[str, Any]) -> Self:
        built = encoding(cls.name, **parameters)
        assert isinstance(built, cls)
        return built

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
        """`yarn(factor=8)`: the name and what differs from the defaults, for logs and legends."""
        changed = self._changed_parameters()
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    def _changed_parameters(self) -> list[str]:
        """`name=value` of the parameters that differ from the defaults, without an inner schedule."""
        return [
            f"{field.name}={short_text(value)}"
            for field in self._fields()
            if field.name != "inner" and (value := getattr(self, field.name)) != field.default
        ]

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., parameter: value, ...}`; parameters that are None are omitted."""
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
            RopeExtendError: not a mapping, no or an unknown name, unknown or invalid parameters.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
            raise RopeExtendError(
                f"an encoding is a mapping such as {{'name': 'linear', 'factor': 8.0}}, got {data!r}"
            )
        # Never a path: a record that names one must not make us read that file.
        return _named(data["name"], {key: value for key, value in data.items() if key != "name"})


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


def check_parameters(cls: type[Encoding], parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that the encoding does not have, and name the ones it has.

    Raises:
        RopeExtendError: an unknown parameter.
    """
    unknown = [key for key in parameters if key not in cls.parameters()]
    if unknown:
        known = ", ".join(cls.parameters()) or "no parameters"
        raise RopeExtendError(
            f"{cls.name}: unknown parameter {', '.join(map(repr, unknown))}; it takes {known}"
        )


def encoding(name: str, **parameters: Any) -> Encoding:
    """Make an encoding by name: `encoding("yarn", factor=4.0)`.

    A saved encoding is made from the path of its file, or of its directory: `encoding("runs/search")`.

    Raises:
        RopeExtendError: unknown name, unknown, missing or invalid parameters, or a damaged file.
    """
    if name not in _registry and (file := encoding_file(name)) is not None:
        if parameters:
            raise RopeExtendError(f"{name} is a saved encoding, which takes no parameters; got {parameters}")
        return Encoding.from_dict(read_encoding_file(file).encoding)
    return _named(name, parameters)


def _named(name: str, parameters: Mapping[str, Any]) -> Encoding:
    cls = encoding_class(name)
    check_parameters(cls, parameters)
    missing = [field for field in cls.required() if field not in parameters]
    if missing:
        raise RopeExtendError(f"{name}: missing {', '.join(missing)}; it takes {', '.join(cls.parameters())}")
    return cls(**parameters)
