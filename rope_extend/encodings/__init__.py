"""Position encodings, one small file each; importing the package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

from rope_extend.encodings.absolute import Learned, Sinusoidal
from rope_extend.encodings.composed import (
    Clipped,
    LogN,
    Power,
    PRoPE,
    Resonance,
    ShortOriginal,
    Truncated,
    XPos,
)
from rope_extend.encodings.core.alternatives import (
    AbsoluteEncoding,
    BiasEncoding,
    KernelEncoding,
    RelativeEncoding,
)
from rope_extend.encodings.core.effects import Effects
from rope_extend.encodings.core.encoding import (
    Encoding,
    encoding,
    encoding_class,
    encoding_classes,
    encoding_names,
)
from rope_extend.encodings.core.methods import (
    Method,
    composed_name,
    method_named,
    methods_from_length,
    rotary_method,
)
from rope_extend.encodings.core.remap import RemapEncoding
from rope_extend.encodings.core.rope import (
    ComposedRope,
    GrowingRope,
    LengthDependent,
    RopeEncoding,
    ScaledRope,
)
from rope_extend.encodings.core.shapes import ModelShape, RopeShape
from rope_extend.encodings.dynamic import DynamicLinear, DynamicNTK, DynamicYaRN
from rope_extend.encodings.linear_attention import LinearAttention
from rope_extend.encodings.logit_biases import FIRE, ALiBi, Kerple, Sandwich, Shaw, T5Bias
from rope_extend.encodings.longrope import LongRoPE
from rope_extend.encodings.near_far import NearFar
from rope_extend.encodings.position_maps import DualChunk, JetLong, ReRoPE, SelfExtend, Sinks, String
from rope_extend.encodings.static import (
    ABF,
    NTK,
    DroPE,
    Linear,
    Llama3,
    NoPE,
    NTKByParts,
    NTKMixed,
    PlainRope,
    YaRN,
)

for _module in iter_modules(__path__):  # registers a new method whose export line is still missing
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ABF",
    "FIRE",
    "NTK",
    "ALiBi",
    "AbsoluteEncoding",
    "BiasEncoding",
    "Clipped",
    "ComposedRope",
    "DroPE",
    "DualChunk",
    "DynamicLinear",
    "DynamicNTK",
    "DynamicYaRN",
    "Effects",
    "Encoding",
    "GrowingRope",
    "JetLong",
    "KernelEncoding",
    "Kerple",
    "Learned",
    "LengthDependent",
    "Linear",
    "LinearAttention",
    "Llama3",
    "LogN",
    "LongRoPE",
    "Method",
    "ModelShape",
    "NTKByParts",
    "NTKMixed",
    "NearFar",
    "NoPE",
    "PRoPE",
    "PlainRope",
    "Power",
    "ReRoPE",
    "RelativeEncoding",
    "RemapEncoding",
    "Resonance",
    "RopeEncoding",
    "RopeShape",
    "Sandwich",
    "ScaledRope",
    "SelfExtend",
    "Shaw",
    "ShortOriginal",
    "Sinks",
    "Sinusoidal",
    "String",
    "T5Bias",
    "Truncated",
    "XPos",
    "YaRN",
    "composed_name",
    "encoding",
    "encoding_class",
    "encoding_classes",
    "encoding_names",
    "method_named",
    "methods_from_length",
    "rotary_method",
]
