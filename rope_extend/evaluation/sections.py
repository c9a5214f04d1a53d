"""What an evaluation shows, as tables: perplexities, the controls beside them, positions, and the cost."""

from __future__ import annotations

from collections.abc import Sequence

from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.controls import Regression, against_cropped, regressions
from rope_extend.evaluation.protocols import PROTOCOLS
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.retrieval_report import retrieval_sections
from rope_extend.evaluation.statistics import Difference, ppl
from rope_extend.evaluation.tables import Line, Section, TwoLines, interval, number, signed


def perplexity_section(rows: Sequence[EvaluationRow]) -> Section:
    """Perplexity by row and length, with the interval beneath it."""
    check_labels(rows)
    lengths = measured_lengths(rows)

    def cell(row: EvaluationRow, length: int) -> str | TwoLines:
        value = number(row.result.ppl.get(length))
        ends = row.result.interval(length) if length in row.result.ppl else None
        return value if ends is None else TwoLines(value, f"{number(ends[0])} … {number(ends[1])}")

    head = ["", *map(format_length, lengths)]
    lines: list[Line] = [head]
    lines += [[row.label, *(cell(row, length) for length in lengths)] for row in rows]
    return Section("Perplexity", lines, _notes(rows))


def control_sections(rows: Sequence[EvaluationRow]) -> list[Section]:
    """What a longer context is worth, what short texts cost, and what was retrieved, where measured."""
    sections = []
    if gains := against_cropped(rows):
        lengths = sorted({one.length for gain in gains for one in gain.differences})
        lines: list[Line] = [["", *map(format_length, lengths)]]
        for gain in gains:
            by_length = {one.length: one for one in gain.differences}
            lines.append([gain.second.label, *(_ratio(by_length.get(length)) for length in lengths)])
        sections.append(
            Section(
                f"Perplexity as a ratio to that of {gains[0].first.label}, on the same targets",
                lines,
                ["Below 1, reading further is worth more than cropping the context to what the model knows."],
            )
        )
    if found := regressions(rows):
        sections.append(_window(found))
    retrieved = [row.retrieval for row in rows if row.retrieval is not None]
    return [*sections, *retrieval_sections(retrieved)]


def _ratio(one: Difference | None) -> str | TwoLines:
    if one is None:
        return "–"
    if one.low is None or one.high is None:
        return f"{one.ratio:.3f}"
    return TwoLines(f"{one.ratio:.3f}", f"{ppl(one.low):.3f} … {ppl(one.high):.3f}")


def _window(found: Sequence[Regression]) -> Section:
    """Perplexity and retrieval within the trained window, before and after."""
    tasks = list(dict.fromkeys(task for one in found for task in one.retrieval))
    head = ["", "before", "after", "ratio", "difference, nats", "95 % interval"]
    head += [text for task in tasks for text in (task, "points")]
    lines = [head]
    for one in found:
        change = one.difference
        cells = [number(one.before), number(one.after), f"{one.ratio:.3f}"]
        cells += ["–", "–"] if change is None else [signed(change.nats), interval(change.low, change.high)]
        for task in tasks:
            rates = one.retrieval.get(task)
            cells.append(f"{rates.first.mean:.0%} → {rates.second.mean:.0%}" if rates else "–")
            cells.append(str(rates or "–"))
        lines.append([one.row.label, *cells])
    notes = ["Above a ratio of 1, texts that needed no longer window are read worse than before."]
    if any(one.difference for one in found):
        notes.append("The interval of the difference is over documents, that of the points over prompts.")
    if tasks and not any(rates.first.mean for one in found for rates in one.retrieval.values()):
        notes.append("Plain RoPE solves none of the prompts: the model does not know the task.")
    if not tasks:
        notes.append("Retrieval within the window was not measured.")
    return Section(
        f"Within the trained window of {format_length(found[0].length)}, against {found[0].against}",
        lines,
        notes,
    )


def position_section(rows: Sequence[EvaluationRow]) -> Section:
    """Perplexity in ranges of positions that double."""
    by_row = [{(one.start, one.stop): one.ppl for one in row.result.buckets()} for row in rows]
    ranges = sorted({where for found in by_row for where in found})
    return Section(
        "Perplexity by position",
        [
            ["positions", *(row.label for row in rows)],
            *(
                [f"{start} … {stop - 1}", *(number(found.get((start, stop))) for found in by_row)]
                for start, stop in ranges
            ),
        ],
    )


def cost_section(rows: Sequence[EvaluationRow]) -> Section:
    """What the measurement cost, by row."""
    return Section(
        "What it cost",
        [
            ["", "forward tokens", "per scored token", "tokens/s", "peak memory, MiB", "passes"],
            *(
                [
                    row.label,
                    f"{row.result.forward_tokens:,}",
                    f"{row.result.forward_tokens_per_scored_token:.2f}",
                    f"{row.result.tokens_per_second:,.0f}",
                    f"{row.result.peak_memory_bytes / 2**20:,.0f}",
                    str(row.result.passes),
                ]
                for row in rows
            ),
        ],
    )


def encoding_section(rows: Sequence[EvaluationRow]) -> Section:
    """What each row read, and how."""
    lines = [
        [row.label, row.encoding_text, row.adapter or "–", row.result.protocol, row.result.data]
        for row in rows
    ]
    return Section("What was read", [["", "encoding", "adapter", "protocol", "text"], *lines])


def _notes(rows: Sequence[EvaluationRow]) -> list[str]:
    first = rows[0].result
    what = f"of {first.documents} documents, token-weighted (text {first.data})."
    if first.protocol in ("prefix", "cropped"):
        notes = [f"Perplexity over the first N tokens of each {what}"]
    else:
        rule = PROTOCOLS[first.protocol]
        settings = {"stride": first.stride, "last": first.last}
        words = "".join(f", {key} {value}" for key, value in settings.items() if value is not None)
        notes = [
            f"Perplexity {what.replace(', token-weighted', '') if rule.average == 'window' else what}",
            f"Protocol {first.protocol}{words}. {rule.measures} But: {rule.flaw}",
        ]
        if not rule.same_targets:
            notes.append("No control with a cropped context: what this protocol scores depends on N.")
    if rows[0].trained_length is not None:
        notes.append(f"Trained window: {rows[0].trained_length} tokens.")
    for row in rows:
        result = row.result
        if result.cropped:
            notes.append(f"{row.label}: the model sees {result.window} tokens at a time.")
        if result.passes > 1 and PROTOCOLS[result.protocol].nested:  # else each length is a pass anyway
            notes.append(f"{row.label}: tables depend on the length, so {result.passes} passes per document.")
        if result.data != first.data:
            notes.append(f"{row.label}: measured on other text ({result.data}); DO NOT COMPARE.")
    return notes


def check_labels(rows: Sequence[EvaluationRow]) -> None:
    """Refuse rows that a table could not tell apart.

    Raises:
        RopeExtendError: there are none, or two have one label.
    """
    labels = [row.label for row in rows]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if not labels or twice:
        raise RopeExtendError(
            f"rows with the same label cannot be told apart: {', '.join(twice)}"
            if labels
            else "no rows to report"
        )


def measured_lengths(rows: Sequence[EvaluationRow]) -> list[int]:
    """All lengths at which a row was measured, ascending."""
    return sorted({length for row in rows for length in row.result.ppl})
