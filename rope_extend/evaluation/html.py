"""A report as one HTML page that opens anywhere: pictures inside it, no script, nothing to fetch."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from rope_extend.data import format_length
from rope_extend.evaluation.results import EvaluationRow

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid #777; }
small { color: #777; display: block; }
img { max-width: 100%; height: auto; }
li { margin: .2rem 0; }
"""


class Regression(NamedTuple):
    """A row's perplexity within the trained window, that of the row it is held against, and its label."""

    row: EvaluationRow
    after: float
    before: float
    against: str


def page(
    rows: Sequence[EvaluationRow],
    *,
    title: str,
    notes: Sequence[str],
    regressions: Sequence[Regression],
    pictures: Sequence[Path],
    versions: Mapping[str, str],
    number: Callable[[float | None], str],
) -> str:
    """The page as text.

    Args:
        rows: what was measured.
        title: heading.
        notes: what one must know to compare the rows, one sentence each.
        regressions: what extending costs within the trained window.
        pictures: PNG files, put into the page.
        versions: of the software, by name.
        number: writes a perplexity.
    """
    lengths = sorted({length for row in rows for length in row.result.ppl})
    sections = [
        _table(
            "Perplexity",
            ["", *map(format_length, lengths)],
            [[escape(row.label), *(_perplexity(row, length, number) for length in lengths)] for row in rows],
        ),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>",
        "<p>Small: 95 % interval, by bootstrap over documents. To compare two rows, their difference on the "
        "same documents says far more: <code>rope-extend compare</code>.</p>",
        *(f'<p><img alt="{escape(path.stem)}" src="{_data(path)}"></p>' for path in pictures),
    ]
    if regressions:
        trained = format_length(rows[0].trained_length or 0)
        cells = [
            [escape(row.label), number(before), number(after), f"{after / before:.3f}"]
            for row, after, before, _ in regressions
        ]
        heading = f"Within the trained window of {trained}, against {regressions[0].against}"
        sections.append(_table(heading, ["", "before", "after", "ratio"], cells))
    sections.append(_positions(rows, number))
    sections.append(
        _table(
            "What it cost",
            ["", "forward tokens", "per scored token", "tokens/s", "peak memory, MiB", "passes"],
            [
                [
                    escape(row.label),
                    f"{row.result.forward_tokens:,}",
                    f"{row.result.forward_tokens_per_scored_token:.2f}",
                    f"{row.result.tokens_per_second:,.0f}",
                    f"{row.result.peak_memory_bytes / 2**20:,.0f}",
                    str(row.result.passes),
                ]
                for row in rows
            ],
        )
    )
    sections.append(
        _table(
            "What was read",
            ["", "encoding", "adapter", "protocol"],
            [
                [
                    escape(row.label),
                    escape(_encoding(row)),
                    escape(row.adapter or "–"),
                    escape(row.result.protocol),
                ]
                for row in rows
            ],
        )
    )
    models = ", ".join(sorted({row.model for row in rows}))
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{escape(title)}</h1>\n<p>Model: {escape(models)}</p>\n"
        + "\n".join(sections)
        + f"\n<p><small>{escape(software)}</small></p>\n</body>\n</html>\n"
    )


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section; the cells are HTML already."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<h2>{escape(heading)}</h2>\n<div class="wide"><table>\n<thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _perplexity(row: EvaluationRow, length: int, number: Callable[[float | None], str]) -> str:
    value = number(row.result.ppl.get(length))
    interval = row.result.interval(length) if length in row.result.ppl else None
    return (
        value if interval is None else f"{value}<small>{number(interval[0])} … {number(interval[1])}</small>"
    )


def _positions(rows: Sequence[EvaluationRow], number: Callable[[float | None], str]) -> str:
    by_row = [{(one.start, one.stop): one.ppl for one in row.result.buckets()} for row in rows]
    ranges = sorted({where for found in by_row for where in found})
    return _table(
        "Perplexity by position",
        ["positions", *(row.label for row in rows)],
        [
            [f"{start} … {stop - 1}", *(number(found.get((start, stop))) for found in by_row)]
            for start, stop in ranges
        ],
    )


def _encoding(row: EvaluationRow) -> str:
    if row.encoding is None:
        return "as the checkpoint says"
    settings = ", ".join(f"{name}={value}" for name, value in row.encoding.items() if name != "name")
    return f"{row.encoding.get('name')}({settings})"


def _data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
