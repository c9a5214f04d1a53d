"""Measurements that mean the same thing for every method."""

from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult

__all__ = ["EvaluationRow", "PerplexityResult", "perplexity"]
