"""rope_extend: extend the context window of pretrained Llama-style models.

Each public name is imported when it is first used. So importing the package loads neither torch nor
transformers.
After the import, transformers' auto classes can load checkpoints whose model type is "rope_extend".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rope_extend.checkpoint.auto_registration import register_when_imported

if TYPE_CHECKING:  # the same names as in `_MODULES`, for type checkers and editors
    from rope_extend.advice.advice import Advice
    from rope_extend.advice.answer import advise
    from rope_extend.attention.sink_cache import sink_cache
    from rope_extend.checkpoint.callback import SaveEncodingCallback
    from rope_extend.checkpoint.converting import convert
    from rope_extend.checkpoint.export.write import export
    from rope_extend.checkpoint.info import info
    from rope_extend.checkpoint.merging import merge
    from rope_extend.checkpoint.publishing import push_to_hub
    from rope_extend.checkpoint.restoring import load, load_adapter
    from rope_extend.checkpoint.saving import record_encoding, save
    from rope_extend.checkpoint.verifying import verify
    from rope_extend.data.documents import Document, load_documents
    from rope_extend.data.sampled_positions import PositionCollator
    from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encoding, encoding_names
    from rope_extend.errors import PatchError, RopeExtendError, UnsupportedModelError
    from rope_extend.evaluation.evaluate import evaluate
    from rope_extend.evaluation.evaluation_config import EvaluationConfig, RetrievalConfig
    from rope_extend.evaluation.perplexity import RunOptions, perplexity
    from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
    from rope_extend.evaluation.retrieve import retrieve
    from rope_extend.models.families import supported_families
    from rope_extend.patching import Patch, current_patch, extend, patch_model
    from rope_extend.searching.run_search import search
    from rope_extend.searching.search_config import SearchConfig
    from rope_extend.searching.search_result import SearchResult
    from rope_extend.study.reporting import compare_methods
    from rope_extend.study.study_config import StudyConfig
    from rope_extend.training.finetune import finetune
    from rope_extend.training.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "Advice",
    "Document",
    "Encoding",
    "EvaluationConfig",
    "EvaluationRow",
    "Patch",
    "PatchError",
    "PerplexityResult",
    "PositionCollator",
    "Recipe",
    "RetrievalConfig",
    "RetrievalResult",
    "RopeEncoding",
    "RopeExtendError",
    "RopeShape",
    "RunOptions",
    "SaveEncodingCallback",
    "SearchConfig",
    "SearchResult",
    "StudyConfig",
    "UnsupportedModelError",
    "__version__",
    "advise",
    "compare_methods",
    "convert",
    "current_patch",
    "encoding",
    "encoding_names",
    "evaluate",
    "export",
    "extend",
    "finetune",
    "info",
    "load",
    "load_adapter",
    "load_documents",
    "merge",
    "patch_model",
    "perplexity",
    "push_to_hub",
    "record_encoding",
    "retrieve",
    "save",
    "search",
    "sink_cache",
    "supported_families",
    "verify",
]
_MODULES = {
    "advice.advice": ("Advice",),
    "advice.answer": ("advise",),
    "attention.sink_cache": ("sink_cache",),
    "checkpoint.callback": ("SaveEncodingCallback",),
    "checkpoint.converting": ("convert",),
    "checkpoint.export.write": ("export",),
    "checkpoint.info": ("info",),
    "checkpoint.merging": ("merge",),
    "checkpoint.publishing": ("push_to_hub",),
    "checkpoint.restoring": ("load", "load_adapter"),
    "checkpoint.saving": ("record_encoding", "save"),
    "checkpoint.verifying": ("verify",),
    "data.documents": ("Document", "load_documents"),
    "data.sampled_positions": ("PositionCollator",),
    "encodings": ("Encoding", "RopeEncoding", "RopeShape", "encoding", "encoding_names"),
    "errors": ("PatchError", "RopeExtendError", "UnsupportedModelError"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.evaluation_config": ("EvaluationConfig", "RetrievalConfig"),
    "evaluation.perplexity": ("RunOptions", "perplexity"),
    "evaluation.results": ("EvaluationRow", "PerplexityResult", "RetrievalResult"),
    "evaluation.retrieve": ("retrieve",),
    "models.families": ("supported_families",),
    "patching": ("Patch", "current_patch", "extend", "patch_model"),
    "searching.run_search": ("search",),
    "searching.search_config": ("SearchConfig",),
    "searching.search_result": ("SearchResult",),
    "study.reporting": ("compare_methods",),
    "study.study_config": ("StudyConfig",),
    "training.finetune": ("finetune",),
    "training.recipe": ("Recipe",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_imported()
