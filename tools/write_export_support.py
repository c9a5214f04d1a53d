"""Write the table of docs/saving.md: which encoding is exported where, and in which form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.export.gguf import READS_FACTORS
from rope_extend.checkpoint.export.support import support
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.encodings import Encoding, RopeEncoding, RopeShape, encoding_names, method_named

SHAPE, TARGET = RopeShape(dim=8, theta=10_000.0, trained_length=4096), 32_768
PAGE = Path(__file__).parent.parent / "docs" / "saving.md"
BEGIN, END = "<!-- table of tools/write_export_support.py -->", "<!-- end of table -->"


_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("yarn", {"attention_scale": 1.25}),
    ("yarn", {"beta_fast": 16.0, "truncate": False}),
    ("yarn", {"ramp": "turns"}),
    ("longrope", {"short": True}),
    ("longrope", {"start_tokens": 4}),
    ("resonance(yarn)", {}),
    ("logn(ntk)", {}),
    ("short_original(yarn)", {}),
)
"""Parameters or inner methods that change the verdict; the table shows them in addition to all defaults."""


def examples(shape: RopeShape, target_length: int) -> Iterator[Encoding]:
    """Every method for a target length, rotary methods first, and the variants with other verdicts."""
    rotary = encoding_names(RopeEncoding)
    for name, parameters in sorted([*((name, {}) for name in rotary), *_VARIANTS], key=lambda row: row[0]):
        options = dict(parameters)
        if name == "longrope":
            options["long_factor"] = [1.0 + i for i in range(shape.dim // 2)]
            if options.pop("short", False):
                options["short_factor"] = options["long_factor"]
        length = target_length
        if name == "string":  # its reach is less than twice the trained window
            length = min(length, 3 * shape.trained_length // 2)
        yield method_named(name).for_target(shape, length, **options)
    for name in encoding_names():
        if name not in rotary:
            yield method_named(name).for_target(shape, target_length)


def support_table(rows: Sequence[Encoding], shape: RopeShape, target_length: int) -> str:
    """A Markdown table of encodings and targets, with the reasons numbered below it.

    Encodings with the same cells share a row.
    """
    reasons: dict[str, int] = {}
    alike: dict[str, list[str]] = {}
    for encoding in rows:
        cells = []
        for target in TARGETS:
            cell = support(encoding, shape, target, target_length=target_length)
            cells.append(f"{cell.verdict} ({reasons.setdefault(cell.reason, len(reasons) + 1)})")
        alike.setdefault(" | ".join(cells), []).append(f"`{encoding}`")
    lines = [f"| encoding | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())])


def page() -> str:
    """The page with the table as the code says."""
    table = support_table(list(examples(SHAPE, TARGET)), SHAPE, TARGET)
    names = ", ".join(sorted(READS_FACTORS))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    note = f"Architectures of llama.cpp that read factors: {names}."
    return f"{before}{BEGIN}\n\n{table}\n\n{note}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
