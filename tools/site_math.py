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
    thin = '<mspace width="0.17em"/>'  # TeX puts it next to the name of a function
    made = re.sub(r"(<mi>(?:ln|sin|cos)</mi>)(?=<m[a-z]+>(?!<mo ))", rf"\1{thin}", made)
    made = re.sub(r"(?<=</m[in]>)(?=<mi>(?:ln|sin|cos)<)", thin, made)
    return f'<div class="formula">{made}</div>'
