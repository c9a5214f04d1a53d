"""Formulas of pages as MathML, which browsers draw themselves: no script and no font from a network."""

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
    # Without a font for formulas, browsers draw a raised prime, which is small already, too small to see.
    made = re.sub(r"<m([io])>(&#x02032;)</m\1>", r'<mo mathsize="125%">\2</mo>', made)
    return f'<div class="formula">{made}</div>'
