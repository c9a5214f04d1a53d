"""Formulas of pages as MathML, which browsers draw themselves: no script and no font from a network.

A hat marks what a method changes. Without a font for formulas, a prime is too small to see.
"""

from __future__ import annotations

import re


def with_formulas(text: str) -> str:
    """A Markdown page with its blocks of `math`, which hold LaTeX, as MathML."""
    return re.sub(
        r"^```math\n(?P<latex>.*?)^```$", lambda match: formula(match["latex"]), text,
        flags=re.MULTILINE | re.DOTALL,
    )  # fmt: skip


def formula(latex: str) -> str:
    """One formula in LaTeX as a block of HTML."""
    from latex2mathml.converter import convert

    made = convert(" ".join(latex.split()), display="block")
    return f'<div class="formula">{made}</div>'
