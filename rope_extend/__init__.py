"""rope_extend: make pretrained Llama-style models read further than they were trained to."""

from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encoding, encodings
from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError
from rope_extend.families import supported_families
from rope_extend.patching import Patch, current_patch, extend, patch_model

__version__ = "0.1.0"
__all__ = [
    "Encoding",
    "Patch",
    "PatchError",
    "RopeEncoding",
    "RopeExtendError",
    "RopeShape",
    "UnsupportedModelError",
    "__version__",
    "current_patch",
    "encoding",
    "encodings",
    "extend",
    "patch_model",
    "supported_families",
]
