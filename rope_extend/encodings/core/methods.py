"""Methods by name: encodings whose parameters are computed from the target length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import yaml

from rope_extend.encodings.core.encoding import (
    Encoding,
    SavedEncoding,
    encoding_class,
    encoding_classes,
    encoding_names,
)
from rope_extend.encodings.core.rope import RopeEncoding
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.errors import RopeExtendError
from rope_extend.method_names import encoding_file, parse_method

EncodingT_co = TypeVar("EncodingT_co", bound=Encoding, covariant=True)


@dataclass(frozen=True)
class Method(Generic[EncodingT_co]):
    """A method by name, before it knows a model: `yarn`, `alibi`, or composed, `resonance(yarn)`.

    Attributes:
        classes: the encodings, the outermost first; only rotary schedules can be composed.
        parameters: parameters that are part of the name, as in `yarn(critical=17)`.
        saved: a saved encoding inside all of them, or alone; it takes no parameters.
    """

    classes: tuple[Any, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    saved: SavedEncoding | None = None

    def for_target(self, shape: RopeShape, target_length: int, **parameters: Any) -> EncodingT_co:
        """The encoding for a window of `target_length` tokens.

        A parameter goes to the outermost encoding that has it. One that is part of the name may be given
        again, which replaces it.

        Raises:
            RopeExtendError: unknown or invalid parameters.
        """
        built = None if self.saved is None else self.saved.for_target(shape, target_length)
        split = self.split_parameters({**self.parameters, **parameters})
        for cls, values in reversed(list(zip(self.classes, split, strict=True))):
            inner = {} if built is None else {cls.inner_name: built}
            built = cls.for_target(shape, target_length, **values, **inner)
        return cast("EncodingT_co", built)

    @property
    def replaces_rotation(self) -> bool:
        """Whether the model's RoPE is gone, so that a pretrained model has to be fine-tuned for longer."""
        innermost = self.classes[-1] if self.saved is None else self.saved.encoding
        return bool(innermost.replaces_rotation)

    def split_parameters(self, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The parameters of each encoding; a parameter goes to the outermost that has it.

        Raises:
            RopeExtendError: no encoding has one of them.
        """
        split: list[dict[str, Any]] = [{} for _ in self.classes]
        accepted = [set(cls.parameters()) for cls in self.classes]
        for cls, names in zip(self.classes if self.saved else self.classes[:-1], accepted, strict=False):
            names.discard(cls.inner_name)
        for key, value in parameters.items():
            owners = [index for index, names in enumerate(accepted) if key in names]
            if owners:
                split[owners[0]][key] = value
            elif self.saved is not None:
                raise RopeExtendError(
                    f"unknown parameter {key!r}: a saved encoding has all of its parameters in its file"
                )
            else:  # the parameters of the innermost are the ones that users set most often
                self.classes[-1].check_names({key: value})
        return split


def method_named(name: str, kind: type[Encoding] = Encoding) -> Method[Any]:
    """The method called `name`; rotary methods may be composed: `resonance(yarn)`.

    Parameters may follow the name, or the innermost one: `kerple(kernel=power)`. A path gives the encoding
    that is saved there.

    Args:
        name: the name.
        kind: the kind of encoding that is accepted.

    Raises:
        RopeExtendError: unknown name, another kind, an outer method that takes no inner one, or parameters
            that none of them has.
    """
    known = encoding_classes()
    names, texts = ([name], {}) if name in known else parse_method(str(name))
    file = None if names[-1] in known else encoding_file(names[-1])
    saved = None if file is None else SavedEncoding.read(file)
    classes = [encoding_class(each) for each in (names if file is None else names[:-1])]
    rotary = kind is RopeEncoding or len(names) > 1
    for each, cls in zip(names, [*classes, *([] if saved is None else [type(saved.encoding)])], strict=True):
        if rotary and not issubclass(cls, RopeEncoding):
            raise RopeExtendError(
                f"{each} is not a rotary method; rotary methods are {', '.join(encoding_names(RopeEncoding))}"
            )
    for cls in classes[: len(names) - 1]:
        if not cls.inner_name:
            composed = [each for each in encoding_names(RopeEncoding) if known[each].inner_name]
            raise RopeExtendError(
                f"{name}: {cls.name} takes no method inside it; those that do: {', '.join(composed)}"
            )
    try:
        parameters = {key: yaml.safe_load(text) for key, text in texts.items()}
    except yaml.YAMLError as error:
        raise RopeExtendError(f"cannot read the parameters {texts}: {error}") from error
    method: Method[Any] = Method(tuple(classes), parameters, saved)
    method.split_parameters(parameters)  # refuses those that none of the encodings has
    return method


def rotary_method(name: str) -> Method[RopeEncoding]:
    """The rotary method called `name`, see `method_named`.

    Raises:
        RopeExtendError: as `method_named`, or it is not a rotary method.
    """
    return method_named(name, RopeEncoding)


def composed_name(encoding: Encoding) -> str:
    """The name of an encoding with the method inside it, such as `short_original(yarn)`."""
    inner = getattr(encoding, encoding.inner_name, None)
    if not isinstance(inner, RopeEncoding) or inner.name == "none":
        return encoding.name
    return f"{encoding.name}({composed_name(inner)})"
