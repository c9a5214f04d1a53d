"""Position encodings, one small file each; importing the package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

from rope_extend.encodings.base import (
    REPLACED,
    AbsoluteEncoding,
    Adaptation,
    BiasEncoding,
    ComposedRope,
    Encoding,
    GrowingRope,
    KernelEncoding,
    LengthDependent,
    ModelShape,
    PositionRemap,
    RelativeEncoding,
    RopeEncoding,
    RopeShape,
    ScaledRope,
    dialled_methods,
    encoding,
    encoding_class,
    encodings,
    method_named,
    rotary_method,
)

for _module in iter_modules(__path__):  # a new method is a new file, and nothing else
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "REPLACED",
    "AbsoluteEncoding",
    "Adaptation",
    "BiasEncoding",
    "ComposedRope",
    "Encoding",
    "GrowingRope",
    "KernelEncoding",
    "LengthDependent",
    "ModelShape",
    "PositionRemap",
    "RelativeEncoding",
    "RopeEncoding",
    "RopeShape",
    "ScaledRope",
    "dialled_methods",
    "encoding",
    "encoding_class",
    "encodings",
    "method_named",
    "rotary_method",
]
