"""The parts of an evaluation's report: verdicts, pictures, tables, and samples of text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import (
    Comparison,
    against_cropped,
    protocol_text,
    regressions,
)
from rope_extend.evaluation.protocols import PROTOCOLS, Protocol
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.samples import sample_parts
from rope_extend.evaluation.statistics import Difference, ppl
from rope_extend.evaluation.verdicts import verdict_sentences
from rope_extend.report.page import Part, Picture
from rope_extend.report.tables import Line, Section, TwoLines, interval, number, public_name, signed
from rope_extend.units import format_length


def report_parts(rows: Sequence[EvaluationRow]) -> list[Part]:
    """All parts of a report, in order."""
    from rope_extend.plots import curves, retrieval_maps

    scored, answered = [row for row in rows if row.result], [row for row in rows if row.retrieval]
    parts: list[Part] = ["Model: " + ", ".join(sorted({public_name(row.model) for row in rows}))]
    parts += verdict_sentences(rows)
    if gains := against_cropped(rows):
        heading = f"Perplexity divided by that of {gains[0].first.label}"
        parts.append(Picture(heading, partial(curves.plot_ratio, gains)))
    for heading, draw, name in (
        ("Perplexity by length", curves.plot_perplexity, "perplexity.png"),
        ("Loss by position", curves.plot_loss_by_position, "loss_by_position.png"),
    ):
        if scored:
            parts.append(Picture(heading, partial(draw, scored), name))
    for task in tasks_of(rows):
        draw = partial(retrieval_maps.plot_accuracy, rows, task)
        parts.append(Picture(f"Retrieval by length: {task}", draw, f"accuracy_{task}.png"))
    parts += table_parts(rows)
    parts += [
        Picture(f"{task}, {row.label}: trials solved by depth and length", partial(draw_map, row, task))
        for draw_map in [retrieval_maps.plot_heat_map]
        for task in tasks_of(rows)
        for row in answered
        if row.retrieval.depths(task)
    ]
    return [*parts, cost_section(rows), encoding_section(rows), *sample_parts(rows)]


def table_parts(rows: Sequence[EvaluationRow]) -> list[Part]:
    """Perplexity, the gain over a cropped context, the cost within the trained window, and retrieval."""
    parts: list[Part] = [perplexity_section(rows)] if any(row.result for row in rows) else []
    if gains := against_cropped(rows):
        lengths = sorted({change.length for gain in gains for change in gain.differences})
        lines: list[Line] = [["", *map(format_length, lengths)]]
        for gain in gains:
            by_length = {change.length: change for change in gain.differences}
            lines.append([gain.second.label, *(_ratio(by_length.get(length)) for length in lengths)])
        heading = f"Perplexity divided by that of {gains[0].first.label}, on the same targets"
        note = "Below 1, the longer context helps: cropping it to the trained window is worse."
        parts.append(Section(heading, lines, [note], best="lowest"))
    if compared := regressions(rows):
        parts.append(_window(compared))
    return [*parts, *retrieval_sections(rows)]


def perplexity_section(rows: Sequence[EvaluationRow]) -> Section:
    """Perplexity by row and length, with its interval.

    Raises:
        RopeExtendError: no row has a perplexity.
    """
    rows = [row for row in rows if row.result]
    if not rows:
        raise RopeExtendError("no rows with a perplexity to report")
    lengths = sorted({length for row in rows for length in row.result.ppl})

    def cell(row: EvaluationRow, length: int) -> str | TwoLines:
        value, ends = number(row.result.ppl.get(length)), row.result.interval(length)
        return value if ends is None else TwoLines(value, f"{number(ends[0])} … {number(ends[1])}")

    lines: list[Line] = [["", *map(format_length, lengths)]]
    lines += [[row.label, *(cell(row, length) for length in lengths)] for row in rows]
    return Section("Perplexity", lines, _notes(rows), best="lowest")


def _ratio(change: Difference | None) -> str | TwoLines:
    if change is None:
        return "–"
    if change.low is None or change.high is None:
        return f"{change.ratio:.3f}"
    return TwoLines(f"{change.ratio:.3f}", f"{ppl(change.low):.3f} … {ppl(change.high):.3f}")


def _window(compared: Sequence[Comparison]) -> Section:
    """Perplexity and retrieval within the trained window, before and after."""
    tasks = tasks_of([pair.second for pair in compared])
    head = ["", "before", "after", "ratio", "difference, nats", "95 % interval"]
    lines = [[*head, *(text for task in tasks for text in (task, "points"))]]
    for pair in compared:
        cells = ["–"] * 5
        for change in pair.differences:
            values = [number(row.result.ppl[change.length]) for row in (pair.first, pair.second)]
            ends = interval(change.low, change.high)
            cells = [*values, f"{change.ratio:.3f}", signed(change.nats), ends]
        rates = {task: change for task, _, change in pair.changes}
        for task in tasks:
            found = rates.get(task)
            cells.append(f"{found.first.mean:.0%} → {found.second.mean:.0%}" if found else "–")
            cells.append(str(found or "–"))
        lines.append([pair.second.label, *cells])
    notes = ["Above a ratio of 1, short texts got worse: those within the trained window."]
    notes.append("The interval of the difference is over documents, that of the points is over prompts.")
    changes = [change for pair in compared for _, _, change in pair.changes]
    if changes and not any(change.first.mean for change in changes):
        notes.append("Plain RoPE solves none of the prompts: the model cannot do the task.")
    if not changes:
        notes.append("Retrieval within the window was not measured.")
    base = compared[0].first
    window = format_length(base.trained_length or 0)
    return Section(f"Within the trained window of {window}, compared with {base.label}", lines, notes)


def tasks_of(rows: Sequence[EvaluationRow]) -> list[str]:
    """The tasks that some row was measured on, in order."""
    return list(dict.fromkeys(task for row in rows for task in row.retrieval.tasks))


def retrieval_sections(rows: Sequence[EvaluationRow]) -> list[Section]:
    """For each task, a table of accuracy by row and length."""
    sections = []
    for task in tasks_of(rows):
        found = {row.label: row.retrieval for row in rows if task in row.retrieval.tasks}
        lengths = sorted({length for each in found.values() for length in each.lengths(task)})
        longest = lengths[-1]
        k_max = {label: each.k_max(longest) if task == "passkey" else None for label, each in found.items()}
        with_k = any(k is not None for k in k_max.values())
        head = ["", *map(format_length, lengths), *([f"k_max at {format_length(longest)}"] if with_k else [])]
        lines: list[Line] = [head]
        for label, each in found.items():
            cells = [str(each.rate(task, length) or "–") for length in lengths]
            k = k_max[label]
            lines.append([label, *cells, *([f"{k:,}" if k is not None else "–"] if with_k else [])])
        notes = ["Share of trials solved, mean over depths, with the 95 % interval in percent."]
        cells_of_task = [cell for each in found.values() for cell in each.cells if cell.task == task]
        counts = sorted({len(cell.scores) for cell in cells_of_task if cell.depth is not None})
        if counts:
            notes.append(f"Trials at each depth and length: {', '.join(map(str, counts))}.")
        if with_k:
            notes.append(
                "k_max: the largest distance from key to end, in tokens, with at least 20 % success up to it."
            )
        notes += [
            f"{label}: the model saw only the last {each.crop} tokens of a prompt."
            for label, each in found.items()
            if each.crop
        ]
        sections.append(Section(f"Retrieval, {task}", lines, notes, best="highest"))
    return sections


def cost_section(rows: Sequence[EvaluationRow]) -> Section:
    """Cost of the measurement, by row."""
    lines = [["", "measured", "forward tokens", "tokens/s", "peak memory, MiB", "passes"]]
    for row in rows:
        for kind, result, passes in (
            ("perplexity", row.result, str(row.result.passes)),
            ("retrieval", row.retrieval, "–"),
        ):
            if result:
                speed, memory = result.tokens_per_second, result.peak_memory_bytes / 2**20
                lines.append(
                    [row.label, kind, f"{result.forward_tokens:,}", f"{speed:,.0f}", f"{memory:,.0f}", passes]
                )
    return Section("Cost", lines)


def encoding_section(rows: Sequence[EvaluationRow]) -> Section:
    """Encoding, adapter, protocol and text of each row."""
    lines = [
        [
            row.label,
            row.encoding_text,
            public_name(row.adapter or "–"),
            protocol_text(row) if row.result else "–",
            row.result.data or "–",
        ]
        for row in rows
    ]
    return Section("Models and texts", [["", "encoding", "adapter", "protocol", "text"], *lines])


def _notes(rows: Sequence[EvaluationRow]) -> list[str]:
    first = rows[0].result
    texts = f"of {first.documents} documents, token-weighted (text {first.data})."
    if first.protocol in ("prefix", "cropped"):
        notes = [f"Perplexity over the first N tokens of each {texts}"]
    else:
        rule = PROTOCOLS[first.protocol]
        words = "".join(f", {key} {value}" for key, value in first.settings.items() if key != "window")
        notes = [
            f"Perplexity {texts.replace(', token-weighted', '') if rule.average == 'window' else texts}",
            f"Protocol {first.protocol}{words}. {rule.measures} But: {rule.flaw}",
        ]
        notes += _without_control(rule, rows[0])
    if rows[0].trained_length is not None:
        notes.append(f"Trained window: {rows[0].trained_length} tokens.")
    for row in rows:
        result = row.result
        if result.cropped:
            notes.append(f"{row.label}: the model sees {result.window} tokens at a time.")
        if result.passes > 1 and PROTOCOLS[result.protocol].nested:  # for others each length is a pass
            notes.append(
                f"{row.label}: its tables depend on the length, so there are {result.passes} passes per "
                "document."
            )
        if result.data != first.data:
            notes.append(f"{row.label}: measured on other text ({result.data}); do not compare.")
    return notes


def _without_control(rule: Protocol, row: EvaluationRow) -> list[str]:
    """Why there is no control with a cropped context, as a note; empty if there can be one."""
    no = "No control with a cropped context, because"
    if not rule.same_targets:
        return [f"{no} the targets of this protocol depend on N."]
    trained, settings = row.trained_length, row.result.settings
    if trained is None or row.result.max_length <= trained or rule.shares_targets(settings, trained):
        return []
    window = f"the trained window of {trained} tokens"
    if "last" in settings:
        return [f"{no} {settings['last']} targets do not fit {window}; use a smaller last."]
    return [
        f"{no} windows {settings['stride']} tokens apart do not overlap within {window}, and so score other "
        f"targets; use a stride below {trained}."
    ]


def comparison_parts(comparisons: Sequence[Comparison]) -> list[Part]:
    """Both perplexities of each pair, their difference with its interval, and their ratio; and both rates."""
    parts: list[Part] = []
    for pair in comparisons:
        first, second = pair.first, pair.second
        against = f"{second.label} against {first.label}"
        if pair.differences:
            lines = [["length", "first", "second", "difference, nats", "95 % interval", "ratio"]]
            for change in pair.differences:
                values = [f"{row.result.ppl[change.length]:.4g}" for row in (first, second)]
                ends = interval(change.low, change.high)
                words = [format_length(change.length), *values, signed(change.nats), ends]
                lines.append([*words, f"{change.ratio:.4f}"])
            about = f"{pair.longest.documents} documents (text {first.result.data}, protocol "
            parts.append(Section(f"Perplexity, {against}, {about}{protocol_text(first)})", lines))
        if pair.changes:
            lines = [["task", "length", "first", "second", "difference", "95 % interval"]]
            for task, length, rates in pair.changes:
                points = f"{signed(100 * rates.change, '+.0f')} points"
                ends = interval(100 * rates.low, 100 * rates.high, "+.0f")
                words = [task, format_length(length), str(rates.first), str(rates.second)]
                lines.append([*words, points, ends])
            parts.append(Section(f"Retrieval, {against}", lines))
    if any(pair.differences for pair in comparisons):
        parts.append(
            "Difference: mean loss of the second minus that of the first; below zero the second is better. "
            "The interval is Student's t over documents, and needs three. If it contains zero, there is no "
            "clear difference."
        )
    if any(pair.changes for pair in comparisons):
        parts.append(
            "Difference: share of prompts that the second solves minus that of the first; above zero the "
            "second is better. The interval is Newcombe's for paired proportions. If it contains zero, there "
            "is no clear difference."
        )
    return parts
