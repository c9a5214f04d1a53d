"""Measurements that mean the same thing for every method: perplexity, retrieval, and how two compare."""

from rope_extend.evaluation.comparison import Comparison, RetrievalComparison, compare, compare_retrieval
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.evaluation.retrieval import retrieval
from rope_extend.evaluation.tasks import make_tasks

__all__ = [
    "Comparison",
    "EvaluationRow",
    "PerplexityResult",
    "RetrievalComparison",
    "RetrievalResult",
    "compare",
    "compare_retrieval",
    "make_tasks",
    "perplexity",
    "retrieval",
]
