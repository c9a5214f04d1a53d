"""Measurements that mean the same thing for every method."""

from rope_extend.evaluation.perplexity import PerplexityResult, perplexity

__all__ = ["PerplexityResult", "perplexity"]
