"""Perplexity and retrieval, measured the same way for every method, and their reports."""
