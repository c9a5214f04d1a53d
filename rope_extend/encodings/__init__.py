"""Position encodings, one small file each; importing the package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

from rope_extend.encodings.abf import ABF
from rope_extend.encodings.alibi import ALiBi
from rope_extend.encodings.clipped import Clipped
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
from rope_extend.encodings.drope import DroPE
from rope_extend.encodings.dual_chunk import DualChunk
from rope_extend.encodings.dynamic_linear import DynamicLinear
from rope_extend.encodings.dynamic_ntk import DynamicNTK
from rope_extend.encodings.dynamic_yarn import DynamicYaRN
from rope_extend.encodings.fire import FIRE
from rope_extend.encodings.jet_long import JetLong
from rope_extend.encodings.kerple import Kerple
from rope_extend.encodings.learned import Learned
from rope_extend.encodings.linear import Linear
from rope_extend.encodings.linear_attention import LinearAttention
from rope_extend.encodings.llama3 import Llama3
from rope_extend.encodings.logn import LogN
from rope_extend.encodings.longrope import LongRoPE
from rope_extend.encodings.near_far import NearFar
from rope_extend.encodings.none import PlainRope
from rope_extend.encodings.nope import NoPE
from rope_extend.encodings.ntk import NTK
from rope_extend.encodings.ntk_by_parts import NTKByParts
from rope_extend.encodings.ntk_mixed import NTKMixed
from rope_extend.encodings.p_rope import PRoPE
from rope_extend.encodings.power import Power
from rope_extend.encodings.rerope import ReRoPE
from rope_extend.encodings.resonance import Resonance
from rope_extend.encodings.sandwich import Sandwich
from rope_extend.encodings.self_extend import SelfExtend
from rope_extend.encodings.shaw import Shaw
from rope_extend.encodings.short_original import ShortOriginal
from rope_extend.encodings.sinks import Sinks
from rope_extend.encodings.sinusoidal import Sinusoidal
from rope_extend.encodings.string import String
from rope_extend.encodings.t5_bias import T5Bias
from rope_extend.encodings.truncated import Truncated
from rope_extend.encodings.xpos import XPos
from rope_extend.encodings.yarn import YaRN

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
