"""The parts of an evaluation's report: pictures and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, against_cropped, regressions, within_window
from rope_extend.evaluation.protocols import PROTOCOLS
from rope_extend.evaluation.results import SAME_WEIGHTS, EvaluationRow, PerplexityResult
from rope_extend.evaluation.statistics import Difference, ppl
from rope_extend.files import public_name
from rope_extend.report.page import Part, Picture
from rope_extend.report.tables import Line, Section, interval, number, signed
from rope_extend.units import counted, format_length


def report_parts(rows: Sequence[EvaluationRow]) -> list[Part]:
    """The pictures and tables of a report, in order."""
    from rope_extend.plots import curves, retrieval_maps

    scored, tasks = [row for row in rows if row.result], tasks_of(rows)
    pictures = [
        Picture("Perplexity by length", partial(curves.plot_perplexity, scored), "perplexity.png"),
        Picture("Loss by position", partial(curves.plot_loss_by_position, scored), "loss_by_position.png"),
    ]
    parts: list[Part] = [*(pictures if scored else [])]
    solving = {task: [row for row in rows if row.retrieval.solves(task)] for task in tasks}  # else all is 0
    for task in filter(solving.get, tasks):
        draw = partial(retrieval_maps.plot_accuracy, rows, task)
        if len({n for row in rows for n in row.retrieval.lengths(task)}) > 1:  # a line has two points
            parts.append(Picture(f"Retrieval by length: {task}", draw, f"accuracy_{task}.png"))
    parts += table_parts(rows)
    for task in tasks:
        for row in solving[task]:
            if row.retrieval.depths(task):
                draw = partial(retrieval_maps.plot_heat_map, row, task)
                parts.append(Picture(f"{task}, {row.label}: trials solved by depth and length", draw))
    return [*parts, _origins(rows)]


def table_parts(rows: Sequence[EvaluationRow]) -> list[Part]:
    """Perplexity, the gain over a cropped context, the cost within the trained window, and retrieval."""
    parts: list[Part] = [perplexity_section(rows)] if any(row.result for row in rows) else []
    if gains := against_cropped(rows):
        parts.append(_gain_section(gains))
    if compared := regressions(rows):
        window, base = format_length(compared[0].first.trained_length or 0), compared[0].first.label
        for gain in gains if compared[0].first.result else []:
            row, own = gain.second, within_window(gain.second.result, gain.first.result)
            trained = gain.first.adapter not in (None, row.adapter)  # training lowers the perplexity of both
            if own and trained:
                row = replace(row, label=f"{row.label} (with its trained control)")
                compared.append(Comparison(gain.first, row, [own]))
        parts += comparison_parts(compared, f"within the trained window of {window}, compared with {base}")
    return [*parts, *retrieval_sections(rows)]


def _by_length(values: Mapping[str, Mapping[int, str]]) -> list[Line]:
    """A table of text by row and length, with a dash where nothing was measured."""
    lengths = sorted({length for by_length in values.values() for length in by_length})
    lines = [[label, *(each.get(length, "–") for length in lengths)] for label, each in values.items()]
    return [["", *map(format_length, lengths)], *lines]


def _gain_section(gains: Sequence[Comparison]) -> Section:
    """The perplexity of rows divided by that of their controls, beyond the window of these."""
    head, *lines = _by_length(
        {gain.second.label: {change.length: _ratio(change) for change in gain.differences} for gain in gains}
    )
    better = (
        f"{gain.longest.better} of {gain.longest.documents}" if math.isfinite(gain.longest.nats) else "–"
        for gain in gains
    )
    table = [[*head, "better in"], *([*line, last] for line, last in zip(lines, better, strict=True))]
    window = format_length(gains[0].beyond or 0)
    controls: dict[str, list[str]] = {}
    for gain in gains:
        controls.setdefault(gain.first.label, []).append(gain.second.label)
    notes = [
        f"On the targets of the control from {window} to each length, in the pass over the longest one. "
        "Below 1, the longer context helps. In brackets, the 95 % interval over documents.",
        "Better in: documents that are below 1 at the longest length.",
    ]
    if alone := [gain.second.label for gain in gains if gain.before_training]:
        notes.append(f"Not compared with a trained control, so training alone may help: {', '.join(alone)}.")
    if len(controls) > 1:
        notes += [f"The control “{label}” is that of: {', '.join(of)}." for label, of in controls.items()]
    of = "the control" if len(controls) > 1 else gains[0].first.label
    return Section(f"Perplexity beyond {window}, divided by that of {of}", table, notes)


def perplexity_section(rows: Sequence[EvaluationRow]) -> Section:
    """Perplexity by row and length."""
    rows = [row for row in rows if row.result]
    if not rows:
        raise RopeExtendError("no rows with a perplexity to report")
    values = {row.label: {n: number(row.result.levels.get(n)) for n in row.result.ppl} for row in rows}
    return Section("Perplexity", _by_length(values), _notes(rows))


def _ratio(change: Difference) -> str:
    if change.low is None or change.high is None:
        return f"{change.ratio:.3f}"
    return f"{change.ratio:.3f} ({ppl(change.low):.3f}–{ppl(change.high):.3f})"


def tasks_of(rows: Sequence[EvaluationRow]) -> list[str]:
    """The tasks that some row was measured on, in order."""
    return list(dict.fromkeys(task for row in rows for task in row.retrieval.tasks))


def retrieval_sections(rows: Sequence[EvaluationRow]) -> list[Section]:
    """For each task, a table of accuracy by row and length."""
    sections = []
    for task in tasks_of(rows):
        found = {row.label: row.retrieval for row in rows if task in row.retrieval.tasks}
        lines = _by_length(
            {label: {n: str(each.rate(task, n)) for n in each.lengths(task)} for label, each in found.items()}
        )
        notes = ["Share of trials solved, mean over depths, with the 95 % interval in percent."]
        cells_of_task = [cell for each in found.values() for cell in each.cells if cell.task == task]
        counts = sorted({len(cell.scores) for cell in cells_of_task if cell.depth is not None})
        if counts:
            notes.append(f"Trials at each depth and length: {', '.join(map(str, counts))}.")
        notes += [
            f"{label}: the model saw only the last {each.crop} tokens of a prompt."
            for label, each in found.items()
            if each.crop
        ]
        sections.append(Section(f"Retrieval, {task}", lines, notes))
    return sections


def _origins(rows: Sequence[EvaluationRow]) -> Section:
    """What each row is, what it was measured on, and at which cost."""
    lines = [["", "encoding", "adapter", "protocol", "text", "forward tokens", "seconds", "peak memory, MiB"]]
    for row in rows:
        both = (row.result, row.retrieval)
        lines.append([
            row.label,
            row.encoding_text,
            public_name(row.adapter or "–"),
            row.result.measured_by if row.result else "–",
            row.result.data or "–",
            f"{sum(each.forward_tokens for each in both):,}",
            f"{sum(each.seconds for each in both):,.0f}",
            f"{max(each.peak_memory_bytes for each in both) / 2**20:,.0f}",
        ])  # fmt: skip
    return Section("Models, texts and cost", lines)


def _notes(rows: Sequence[EvaluationRow]) -> list[str]:
    first = next((row.result for row in rows if not row.cropped), rows[0].result)  # a control says its own
    trained = rows[0].trained_length
    rule = PROTOCOLS[first.protocol]
    weighted = "" if rule.average == "window" else ", token-weighted"
    words = "".join(f", {key} {value}" for key, value in first.settings.items() if key != "window")
    notes = [
        f"Perplexity of {counted(first.documents, 'document')}{weighted} (text {first.data}).",
        f"Protocol {first.protocol}{words}. {rule.measures} But: {rule.flaw}",
    ]
    if trained is not None:
        notes.append(f"Trained window: {trained} tokens.")
        if first.protocol != "prefix" and not first.cropped and first.max_length > trained:
            notes.append("No control with a cropped context: the protocol prefix has one.")
    if any(row.of_same_weights for row in rows):
        notes.append(
            f"{SAME_WEIGHTS}: plain RoPE with the weights of this checkpoint, which were saved with another "
            "encoding. This is not the model before its extension. To see what the extension gives, evaluate "
            "that model, with the adapter."
        )
    for row in rows:
        if row.is_extended and row.adapter and (row.target_length or math.inf) < row.result.max_length:
            window = format_length(row.target_length or 0)
            notes.append(f"{row.label} has a window of {window}: expect nonsense after it.")
        if row.result.cropped:
            notes.append(f"{row.label}: {_control_note(row.result)}")
        if row.result.data != first.data:
            notes.append(f"{row.label}: measured on other text ({row.result.data}); do not compare.")
    return notes


def _control_note(result: PerplexityResult) -> str:
    """What the model saw under a control, and which targets were scored."""
    window, longest = result.window or 0, result.max_length
    seen = f"the model sees {window} tokens at a time"
    if result.protocol != "cropped":
        return f"{seen}. {PROTOCOLS[result.protocol].flaw}"
    share = result.between(window, longest)[1].sum() / (result.documents * max(1, longest - window))
    scored = f"{seen}. Beyond them, {share:.0%} of the targets are scored, spread evenly"
    return f"{scored}." if longest in result.levels else f"{scored}; other rows are compared on these."


def comparison_parts(comparisons: Sequence[Comparison], heading: str = "") -> list[Section]:
    """Both perplexities of each pair, their difference with its interval, and their ratio; and both rates.

    `heading` says with what all are compared; without it, the labels of each pair do.
    """
    same_weights = any(pair.first.of_same_weights for pair in comparisons)
    both, named = ["plain RoPE", "row"] if same_weights else ["before", "after"], bool(heading)
    if not heading:
        both, heading = ["first", "second"], "compared"
        if named := len(comparisons) == 1:
            both = [comparisons[0].first.label, comparisons[0].second.label]
            heading = f"of {both[1]}, compared with {both[0]}"
    losses: list[Line] = [["", "length", *both, "ratio", "difference, nats", "95 % interval"]]
    scores: list[Line] = [["", "task", "length", *both, "points"]]
    gains = [pair for pair in comparisons if pair.beyond]
    for pair in comparisons:
        name = pair.second.label if named else pair.label
        for change in [] if pair.beyond else pair.differences:
            values = [number(row.result.levels.get(change.length)) for row in (pair.first, pair.second)]
            ends = [signed(change.nats), interval(change.low, change.high)]
            losses.append([name, format_length(change.length), *values, f"{change.ratio:.4f}", *ends])
        for task, length, rates in pair.changes:
            scores.append(
                [name, task, format_length(length), str(rates.first), str(rates.second), str(rates)]
            )
    sections = [_gain_section(gains)] if gains else []
    if len(losses) > 1:
        first = comparisons[0].first
        notes = [
            f"Text {first.result.data}, protocol {first.result.measured_by}.",
            f"Difference: mean loss {both[1]} minus {both[0]}; below zero, and a ratio below 1, is better. "
            "The interval is over documents, and needs three. If it contains zero, there is no clear "
            "difference.",
        ]
        sections.append(Section(f"Perplexity {heading}", losses, notes))
    if len(scores) > 1:
        notes = [
            f"Points: share of prompts solved {both[1]} minus {both[0]}; above zero is better. The interval "
            "is Newcombe's for paired proportions, with the exact limits of each share."
        ]
        sections.append(Section(f"Retrieval {heading}", scores, notes))
    return sections
