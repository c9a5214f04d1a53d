"""Methods by name: encodings whose parameters are computed from the target length."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from rope_extend.encodings.core.encoding import (
    Encoding,
    check_parameters,
    encoding_class,
    encoding_classes,
    encoding_names,
)
from rope_extend.encodings.core.rope import ComposedRope, RopeEncoding
from rope_extend.encodings.core.saved import read_encoding_file
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.method_names import encoding_file, name_and_parameters
from rope_extend.units import format_length

EncodingT_co = TypeVar("EncodingT_co", bound=Encoding, covariant=True)


@dataclass(frozen=True)
class Method(Generic[EncodingT_co]):
    """A method by name, before it knows a model: `yarn`, `alibi`, or composed, `resonance(yarn)`.

    Attributes:
        classes: the encodings, the outermost first; only rotary schedules can be composed. The innermost may
            be a `SavedEncoding`, which has what is used of a class here.
        parameters: parameters that are part of the name, as in `yarn(critical=17)`.
    """

    classes: tuple[Any, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def for_target(self, shape: RopeShape, target_length: int, **parameters: Any) -> EncodingT_co:
        """The encoding for a window of `target_length` tokens.

        A parameter goes to the outermost encoding that has it. One that is part of the name may be given
        again, which replaces it.

        Raises:
            RopeExtendError: unknown or invalid parameters.
        """
        given = {**self.parameters, **parameters}
        *outer, innermost = zip(self.classes, self.split_parameters(given), strict=True)
        built: EncodingT_co = innermost[0].for_target(shape, target_length, **innermost[1])
        for cls, values in reversed(outer):
            built = cls.for_target(shape, target_length, **values, **{cls.inner_name: built})
        return built

    @property
    def replaces_rotation(self) -> bool:
        """Whether the model's RoPE is gone, so that a pretrained model has to be fine-tuned for longer."""
        return bool(self.classes[-1].replaces_rotation)

    def split_parameters(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parameters of each encoding; a parameter goes to the outermost that has it.

        Raises:
            RopeExtendError: no encoding has one of them.
        """
        accepted = [set(cls.parameters()) for cls in self.classes]
        for cls, names in zip(self.classes[:-1], accepted, strict=False):
            names.discard(cls.inner_name)
        unknown = parameters.keys() - set().union(*accepted)
        # The innermost refuses unknown parameters: its own are the ones that users set most often.
        check_parameters(self.classes[-1], dict.fromkeys(unknown))
        split: list[dict[str, Any]] = [{} for _ in self.classes]
        for key, value in parameters.items():
            split[next(i for i, names in enumerate(accepted) if key in names)][key] = value
        return split


@dataclass(frozen=True)
class SavedEncoding:
    """A saved encoding as a method: it has one model and one window, and takes no parameters.

    Attributes:
        name: the path, as it was given.
        encoding: the encoding.
        shape: the rotary shape of the model that it belongs to; None if the file does not say.
        target_length: the longest window that it is meant for, in tokens; None if the file does not say.
    """

    name: str
    encoding: Encoding
    shape: RopeShape | None
    target_length: int | None

    @classmethod
    def read(cls, name: str, file: Path) -> SavedEncoding:
        """From its file.

        Raises:
            RopeExtendError: the file is damaged.
        """
        content = read_encoding_file(file)
        return cls(name, Encoding.from_dict(content.encoding), content.shape, content.target_length)

    @property
    def replaces_rotation(self) -> bool:
        """Whether the encoding replaces RoPE."""
        return self.encoding.replaces_rotation

    def parameters(self) -> list[str]:
        """No parameters: all are in the file."""
        return []

    def for_target(self, shape: RopeShape, target_length: int) -> Encoding:
        """The encoding itself.

        Raises:
            RopeExtendError: it belongs to a model of another shape, or to a shorter window.
        """
        if self.shape is not None and self.shape != shape:
            raise RopeExtendError(
                f"the encoding in {self.name!r} belongs to another model: it is for {self.shape}, and this "
                f"model has {shape}; search again for this model"
            )
        if self.target_length is not None and target_length > self.target_length:
            raise RopeExtendError(
                f"the encoding in {self.name!r} is for {format_length(self.target_length)} tokens, got "
                f"{format_length(target_length)}; use a target up to that length, or search again"
            )
        return self.encoding


def rotary_method(name: str) -> Method[RopeEncoding]:
    """The rotary method called `name`, which may be composed: `resonance(yarn)`.

    Parameters may follow the innermost name: `yarn(critical=17)`.

    Raises:
        RopeExtendError: unknown name, not a rotary method, an outer method that takes no inner one, or
            parameters that none of them has.
    """
    if str(name) not in encoding_classes() and (file := encoding_file(str(name))) is not None:
        return Method((_rotary_file(str(name), file),))
    bare, texts = name_and_parameters(str(name))
    if texts:
        method = replace(rotary_method(bare), parameters=_values(texts))
        method.split_parameters(method.parameters)  # refuses those that none of the encodings has
        return method
    parts = [part.strip() for part in str(name).split("(")]  # spaces within a path are part of it
    opened = len(parts) - 1
    tail = parts[-1].rstrip(") ")
    parts[-1] = tail + parts[-1][len(tail) :].replace(" ", "")
    if not parts[-1].endswith(")" * opened):
        raise RopeExtendError(f"{name}: {opened} opening brackets need as many closing ones at the end")
    parts[-1] = parts[-1][: len(parts[-1]) - opened]
    classes: list[Any] = []
    for depth, part in enumerate(parts):
        if depth == opened and part not in encoding_classes() and (file := encoding_file(part)) is not None:
            classes.append(_rotary_file(part, file))
            continue
        cls = encoding_class(part)
        if not issubclass(cls, RopeEncoding):
            rotary = ", ".join(encoding_names(RopeEncoding))
            raise RopeExtendError(f"{part} is not a rotary method; rotary methods are {rotary}")
        if depth < opened and not cls.inner_name:
            composed = ", ".join(
                known for known, each in sorted(encoding_classes().items()) if getattr(each, "inner_name", "")
            )
            raise RopeExtendError(f"{name}: {part} takes no method inside it; those that do: {composed}")
        classes.append(cls)
    return Method(tuple(classes))


def _values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parameters from their texts, which are read as YAML.

    Raises:
        RopeExtendError: a text is not valid YAML.
    """
    try:
        return {key: yaml.safe_load(text) for key, text in texts.items()}
    except yaml.YAMLError as error:
        raise RopeExtendError(f"cannot read the parameters {dict(texts)}: {error}") from error


def _rotary_file(name: str, file: Path) -> SavedEncoding:
    """The saved encoding in a file.

    Raises:
        RopeExtendError: it is not a rotary one, or the file is damaged.
    """
    saved = SavedEncoding.read(name, file)
    if not isinstance(saved.encoding, RopeEncoding):
        raise RopeExtendError(f"the encoding in {name!r}, {saved.encoding}, is not rotary")
    return saved


def method_named(name: str) -> Method[Encoding]:
    """The method called `name`, rotary or not; rotary ones may be composed: `resonance(yarn)`.

    Parameters may follow the name, or the innermost one: `kerple(kernel=power)`. A path gives the encoding
    that is saved there.

    Raises:
        RopeExtendError: unknown name, an outer method that takes no inner one, or unknown parameters.
    """
    bare, texts = name_and_parameters(str(name))
    cls = encoding_classes().get(bare)
    if cls is None or issubclass(cls, RopeEncoding):
        return rotary_method(name)
    method: Method[Encoding] = Method((cls,), _values(texts))
    method.split_parameters(method.parameters)
    return method


def composed_name(encoding: Encoding) -> str:
    """The name of an encoding with the method inside it, such as `short_original(yarn)`."""
    inner = getattr(encoding, getattr(encoding, "inner_name", "") or "inner", None)
    if not isinstance(inner, RopeEncoding) or inner.name == "none":
        return encoding.name
    return f"{encoding.name}({composed_name(inner)})"


def methods_from_length() -> list[str]:
    """The rotary methods that need only a target length, and no other method inside them."""
    names = []
    for name in encoding_names(RopeEncoding):
        cls = encoding_class(name)
        with contextlib.suppress(RopeExtendError):
            cls.for_target(RopeShape(dim=128, theta=1e4, trained_length=4096), 32_768)
            if not issubclass(cls, ComposedRope):
                names.append(name)
    return names
