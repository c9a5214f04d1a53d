"""The public names, for type checkers, editors, and `__init__.py`, which loads each when it is first used."""

from rope_extend.advice.advice import Advice as Advice
from rope_extend.advice.answer import advise as advise
from rope_extend.attention.sink_cache import sink_cache as sink_cache
from rope_extend.attention.split_window import split_window as split_window
from rope_extend.checkpoint.callback import SaveEncodingCallback as SaveEncodingCallback
from rope_extend.checkpoint.converting import convert as convert
from rope_extend.checkpoint.exporting import export as export
from rope_extend.checkpoint.info import info as info
from rope_extend.checkpoint.merging import merge as merge
from rope_extend.checkpoint.opening import base_model_of as base_model_of
from rope_extend.checkpoint.opening import load_any as load_any
from rope_extend.checkpoint.opening import load_tokenizer as load_tokenizer
from rope_extend.checkpoint.restoring import load as load
from rope_extend.checkpoint.restoring import load_adapter as load_adapter
from rope_extend.checkpoint.saving import save as save
from rope_extend.checkpoint.verifying import verify as verify
from rope_extend.data.documents import Document as Document
from rope_extend.data.documents import load_documents as load_documents
from rope_extend.data.sampled_positions import PositionCollator as PositionCollator
from rope_extend.encodings import Encoding as Encoding
from rope_extend.encodings import RopeEncoding as RopeEncoding
from rope_extend.encodings import RopeShape as RopeShape
from rope_extend.encodings import encoding as encoding
from rope_extend.encodings import encoding_names as encoding_names
from rope_extend.errors import PatchError as PatchError
from rope_extend.errors import RopeExtendError as RopeExtendError
from rope_extend.errors import UnsupportedModelError as UnsupportedModelError
from rope_extend.evaluation.evaluate import compare_methods as compare_methods
from rope_extend.evaluation.evaluate import evaluate as evaluate
from rope_extend.evaluation.evaluate import retrieve as retrieve
from rope_extend.evaluation.evaluation_config import EvaluationConfig as EvaluationConfig
from rope_extend.evaluation.evaluation_config import RetrievalConfig as RetrievalConfig
from rope_extend.evaluation.evaluation_config import StudyConfig as StudyConfig
from rope_extend.evaluation.loss_computer import RunOptions as RunOptions
from rope_extend.evaluation.perplexity import perplexity as perplexity
from rope_extend.evaluation.results import EvaluationRow as EvaluationRow
from rope_extend.evaluation.results import PerplexityResult as PerplexityResult
from rope_extend.evaluation.results import RetrievalResult as RetrievalResult
from rope_extend.evaluation.verdicts import verdict as verdict
from rope_extend.models.families import supported_families as supported_families
from rope_extend.patching import Patch as Patch
from rope_extend.patching import current_patch as current_patch
from rope_extend.patching import extend as extend
from rope_extend.patching import patch_model as patch_model
from rope_extend.searching.run_search import search as search
from rope_extend.searching.search_config import SearchConfig as SearchConfig
from rope_extend.searching.search_result import SearchResult as SearchResult
from rope_extend.training.chunked_loss import chunked_loss as chunked_loss
from rope_extend.training.finetune import finetune as finetune
from rope_extend.training.recipe import Recipe as Recipe
from rope_extend.training.trainer import RopeTrainer as RopeTrainer
from rope_extend.training.training_data import blocks as blocks
from rope_extend.units import parse_lengths as parse_lengths

__version__: str
__all__: list[str]
