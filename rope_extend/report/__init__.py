"""Markdown tables, HTML pages and library versions for every report."""
