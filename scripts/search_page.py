"""The measured part of docs/search.md: a section and two pictures for each setting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from page_parts import difference_text, filled
from results_lines import SEARCH, Line
from results_rows import Results, results_of

from rope_extend.evaluation.comparison import differences
from rope_extend.evaluation.results import EvaluationRow, RetrievalResult, file_name
from rope_extend.evaluation.statistics import paired
from rope_extend.plots.style import INK, PALETTE, QUIET, Canvas, Floats, draw_line, name_ends
from rope_extend.report.tables import markdown_table, number
from rope_extend.searching.search_config import GENETIC
from rope_extend.units import format_length

CLOSED = ("linear", "ntk", "yarn", "llama3")
"""Closed forms that each search measures on its held-out documents."""
NEAR = 0.3
"""Curves begin where a search comes that near to the best of all, in nats: first candidates are far above."""


def section(name: str, lines: Sequence[Line]) -> str:
    """The tables of a setting as Markdown.

    Args:
        name: names its files.
        lines: everything that was measured.
    """
    results, searches = results_of(lines), searches_of(lines)
    untrained = [row for row in results.rows if row.adapter is None]
    trained = [row for row in results.rows if row.adapter is not None]
    target, documents = format_length(results.longest), len(results.collected.documents)
    heading = f"### {results.model}, from {format_length(results.trained)} to {target} tokens"
    parts = [heading, found_table(searches), *_not_their_own(searches)]
    parts += [f"![Divisors by channel pair](search/{name}_tables.svg)"]
    parts += [f"![The course of each search](search/{name}_curves.svg)"]
    about = f"Perplexity on {documents} documents that nobody searched or trained on"
    parts.append(filled(f"{about}. {_against(results)}") + "\n\n" + rows_table(results, untrained))
    if trained:
        parts.append("After the same LoRA run of each row:\n\n" + rows_table(results, trained))
    return "\n\n".join(parts) + "\n"


def searches_of(lines: Sequence[Line]) -> dict[str, Line]:
    """The line of each strategy, LongRoPE's first, because the others are compared with it."""
    found = {line["strategy"]: line for line in lines if line["kind"] == SEARCH}
    first = {GENETIC: found[GENETIC]} if GENETIC in found else {}
    return {**first, **found}


def found_row(search: Line) -> Line:
    """The best finalist of the strategy itself on the held-out documents; closed forms do not count."""
    row: Line = next(row for row in search["rows"] if row["label"].startswith(f"{search['strategy']} "))
    return row


def found_table(searches: dict[str, Line]) -> str:
    """What each strategy found, and what it cost, next to closed forms on the same held-out documents."""
    first = next(iter(searches.values()))
    best = found_row(first)
    head = ["table", "held-out loss, nats", f"minus {first['strategy']} (95 %)", "forward tokens",
            "attention factor", "divisors"]  # fmt: skip
    rows = [head]
    closed = [(row["label"], row, None) for row in first["rows"] if row["label"] in CLOSED]
    for label, row, cost in [
        *((name, found_row(search), search["cost"]) for name, search in searches.items()), *closed,
    ]:  # fmt: skip
        change = paired(1, best["by_document"], row["by_document"], [1] * len(row["by_document"]))
        tokens = f"{cost['forward_tokens']:,}" if cost else ""
        divisors = " ".join(f"{divisor:g}" for divisor in row["divisors"])
        difference = "" if row is best else difference_text(change)
        rows.append(
            [label, f"{row['score']:.4f}", difference, tokens, f"{row['attention_factor']:g}", divisors]
        )
    return markdown_table(rows)


def _not_their_own(searches: dict[str, Line]) -> Iterator[str]:
    """A sentence for each search that a closed form won."""
    for name, search in searches.items():
        if not search["label"].startswith(f"{search['strategy']} "):
            yield filled(
                f"On its held-out documents, `{name}` found nothing better than `{search['label']}`. A "
                f"search writes the winner, so the rows `{name}` below are of that table."
            )


def _against(results: Results) -> str:
    target = format_length(results.longest)
    said = f"The difference is of the losses at {target}, paired by document, in nats."
    if results.collected.retrieval:
        said += f" Passkeys are at {target}, with their 95 % interval in percent."
    return said


def rows_table(results: Results, rows: Sequence[EvaluationRow]) -> str:
    """Perplexity by length, the difference to LongRoPE's table, and passkeys, best first."""
    untrained = {Path(row.label).name for row in results.rows if row.adapter is None}
    by_run = {file_name(name): name for name in untrained}

    def name(row: EvaluationRow | RetrievalResult) -> str:
        return Path(row.label).name if row.adapter is None else by_run[Path(row.adapter).name]

    first = next((row for row in rows if name(row) == GENETIC), None)
    answers = {(name(each), each.adapter is None): each for each in results.collected.retrieval}
    lengths = sorted(rows[0].result.ppl)
    head = ["", *map(format_length, lengths)]
    head += [f"minus {GENETIC} (95 %)"] * (first is not None) + ["passkeys"] * bool(answers)
    lines = [head]
    for row in sorted(rows, key=lambda row: row.result.ppl[lengths[-1]]):
        line = [name(row), *(number(row.result.ppl[length]) for length in lengths)]
        if first is not None:
            change = differences(first.result, row.result, lengths[-1:])[0]
            line.append("" if row is first else difference_text(change))
        if answers:
            found = answers.get((name(row), row.adapter is None))
            line.append("" if found is None else str(found.rate("passkey", results.longest)))
        lines.append(line)
    return markdown_table(lines)


def draw(name: str, lines: Sequence[Line], folder: Path) -> None:
    """Draw the tables and the courses of the searches of a setting."""
    searches = searches_of(lines)
    for suffix in ("png", "svg"):
        draw_tables(searches, folder / f"{name}_tables.{suffix}")
        draw_curves(searches, folder / f"{name}_curves.{suffix}")


def draw_tables(searches: dict[str, Line], path: Path) -> None:
    """Draw the divisor of each channel pair, of what was found and of closed forms."""
    canvas = Canvas(path, "Divisors by channel pair", "solid: searched; dashed: closed forms")
    first = next(iter(searches.values()))
    closed = {row["label"]: row["divisors"] for row in first["rows"] if row["label"] in CLOSED[:3]}
    found = {name: found_row(search)["divisors"] for name, search in searches.items()}
    colours, ends = itertools.cycle(PALETTE), []
    for label, divisors in [*found.items(), *closed.items()]:
        style = {"color": next(colours), "linestyle": "-" if label in found else (0, (4, 2))}
        pairs, values = np.arange(len(divisors), dtype=np.float64), np.array(divisors, dtype=np.float64)
        ends += draw_line(canvas.axes, pairs, values, label, linewidth=2, **style)
    canvas.axes.set_yscale("log", base=2)
    canvas.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    canvas.axes.set_xlabel("channel pair, fastest first", color=INK)
    canvas.axes.set_ylabel("divisor of the frequency", color=INK)
    canvas.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    name_ends(canvas.axes, ends)
    canvas.save()


def draw_curves(searches: dict[str, Line], path: Path) -> None:
    """Draw the best fitness of each strategy so far against the documents that it measured."""
    canvas = Canvas(path, "The best fitness so far", "on the documents searched on")
    ends = []
    for colour, (label, passes, values) in zip(itertools.cycle(PALETTE), _curves(searches), strict=False):
        ends += draw_line(
            canvas.axes, passes, values, label, linewidth=2, color=colour, drawstyle="steps-post"
        )
    canvas.axes.set_xscale("log")
    canvas.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    canvas.axes.set_xlabel("documents measured", color=INK)
    canvas.axes.set_ylabel("loss, nats per token", color=INK)
    canvas.axes.tick_params(axis="x", which="minor", color=QUIET)
    name_ends(canvas.axes, ends)
    canvas.save()


def _curves(searches: dict[str, Line]) -> Iterator[tuple[str, Floats, Floats]]:
    """The course of each search near its end, up to the documents that it measured in all."""
    least = min(search["curve"][-1][1] for search in searches.values())
    for label, search in searches.items():
        curve = [(n, value) for n, value in search["curve"] if value is not None and value < least + NEAR]
        if curve:
            curve.append((search["cost"]["passes"], curve[-1][1]))
            passes, values = np.array(curve, dtype=np.float64).T
            yield label, passes, values
