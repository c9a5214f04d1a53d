"""Measurements that mean the same thing for every method."""

from rope_extend.evaluation.perplexity import EvaluationRow, PerplexityResult, perplexity

__all__ = ["EvaluationRow", "PerplexityResult", "perplexity"]
