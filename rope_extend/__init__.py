"""rope_extend: make pretrained Llama-style models read further than they were trained to."""

from rope_extend.checkpoint import SaveEncodingCallback, load, load_adapter, record_encoding, save
from rope_extend.checkpoint.merging import merge
from rope_extend.checkpoint.verifying import verify
from rope_extend.data import load_documents
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encoding, encodings
from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError
from rope_extend.evaluation import PerplexityResult, perplexity
from rope_extend.families import supported_families
from rope_extend.info import info
from rope_extend.patching import Patch, current_patch, extend, patch_model
from rope_extend.training.finetune import finetune
from rope_extend.training.positions import PositionCollator
from rope_extend.training.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "Encoding",
    "Patch",
    "PatchError",
    "PerplexityResult",
    "PositionCollator",
    "Recipe",
    "RopeEncoding",
    "RopeExtendError",
    "RopeShape",
    "SaveEncodingCallback",
    "UnsupportedModelError",
    "__version__",
    "current_patch",
    "encoding",
    "encodings",
    "extend",
    "finetune",
    "info",
    "load",
    "load_adapter",
    "load_documents",
    "merge",
    "patch_model",
    "perplexity",
    "record_encoding",
    "save",
    "supported_families",
    "verify",
]
