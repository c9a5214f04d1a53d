"""The page `docs/gpu.md`, written from `gpu.json`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.gpu_record import GpuRecord
from rope_extend.report.tables import markdown_table

NOTHING = "**No figure on this page has been measured: nothing has run on a GPU yet.**"

INTRODUCTION = """\
`make gpu` checks and measures everything on a machine with a CUDA device of 80 GB or more. It needs no
network: weights are random, at the shape of Llama 3 8B, and retrieval uses the bundled model. It writes
`gpu.json` and this page.

```bash
make gpu                    # all sections, one after the other
make gpu SECTION=kernels    # one section, at most 9 minutes
make gpu AGAIN=1            # measure again what is recorded already
make gpu DRY=1              # every step at a tiny shape on the CPU; records nothing
```

- It uses `.venv` if that exists, else `python3`; `make gpu GPU_PYTHON=python` uses another Python.
- Without make: `python3 benchmarks/gpu --section kernels`.
- Nothing is installed: torch, transformers, accelerate, peft, safetensors and numpy are enough.
- A step that was interrupted, that failed, or for which no time was left runs again with the next `make gpu`.
- Figures of one machine and of one set of versions belong together; others are refused.
"""


def page(record: GpuRecord, sections: Mapping[str, tuple[str, Sequence[str]]]) -> str:
    """The page as Markdown.

    Args:
        record: what has been measured.
        sections: by name, what a section shows and the names of its steps.
    """
    return "\n".join(["# On a GPU", "", _summary(record), "", INTRODUCTION, *_sections(record, sections)])


def _summary(record: GpuRecord) -> str:
    if not record.steps:
        return NOTHING
    figures = [figure for step in record.steps.values() for figure in step["figures"]]
    judged = [figure["passed"] for figure in figures if figure["passed"] is not None]
    failed = [name for name, step in record.steps.items() if step["error"] is not None]
    lines = [f"**{sum(judged)} of {len(judged)} targets are met.**"]
    if failed:
        lines.append(f"**These steps failed: {', '.join(failed)}.**")
    lines.append(f"Measured on: {', '.join(f'{name} {value}' for name, value in record.machine.items())}.")
    sources = {step["source"] for step in record.steps.values()}
    if len(sources) > 1:
        lines.append(f"The steps were measured with {len(sources)} versions of the source.")
    return "\n".join(lines)


def _sections(record: GpuRecord, sections: Mapping[str, tuple[str, Sequence[str]]]) -> list[str]:
    lines = []
    for section, (subject, steps) in sections.items():
        rows = [row for step in steps for row in _rows(step, record.steps.get(f"{section}/{step}"))]
        lines += [f"## {section}", "", textwrap.fill(subject, 118), ""]
        lines += [markdown_table([["step", "figure", "measured", "target", "result"], *rows]), ""]
    return lines


def _rows(name: str, step: dict[str, Any] | None) -> list[list[str]]:
    if step is None:
        return [[name, "", "not measured", "", ""]]
    rows = [
        [
            name, figure["name"] + (f" ({figure['note']})" if figure["note"] else ""), _value(figure),
            _target(figure), {True: "pass", False: "**fail**", None: ""}[figure["passed"]],
        ]
        for figure in step["figures"]
    ]  # fmt: skip
    if step["error"] is not None:
        rows.append([name, f"failed: {step['error']}".replace("|", "/"), "not measured", "", "**fail**"])
    return rows


def _value(figure: dict[str, Any]) -> str:
    return "not measured" if figure["value"] is None else f"{figure['value']:,.4g} {figure['unit']}".strip()


def _target(figure: dict[str, Any]) -> str:
    parts = [
        f"{words} {figure[name]:,.4g}"
        for name, words in (("at_least", "at least"), ("at_most", "at most"))
        if figure[name] is not None
    ]
    return " and ".join(parts)
