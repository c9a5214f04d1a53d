"""Tables of an evaluation's report: perplexity, controls, positions, cost and encodings."""

from __future__ import annotations

from collections.abc import Sequence

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.controls import Regression, against_cropped, regressions
from rope_extend.evaluation.protocols import PROTOCOLS, Protocol, Settings
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.retrieval_report import retrieval_sections
from rope_extend.evaluation.statistics import Difference, ppl
from rope_extend.report.tables import Line, Section, TwoLines, interval, number, public_name, signed
from rope_extend.units import format_length


def perplexity_section(rows: Sequence[EvaluationRow]) -> Section:
    """Perplexity by row and length, with its interval."""
    check_labels(rows)
    lengths = measured_lengths(rows)

    def cell(row: EvaluationRow, length: int) -> str | TwoLines:
        value = number(row.result.ppl.get(length))
        ends = row.result.interval(length) if length in row.result.ppl else None
        return value if ends is None else TwoLines(value, f"{number(ends[0])} … {number(ends[1])}")

    head = ["", *map(format_length, lengths)]
    lines: list[Line] = [head]
    lines += [[row.label, *(cell(row, length) for length in lengths)] for row in rows]
    return Section("Perplexity", lines, _notes(rows), best="lowest")


def control_sections(rows: Sequence[EvaluationRow]) -> list[Section]:
    """The gain over a cropped context, the cost within the trained window, and retrieval, if measured."""
    sections = []
    if gains := against_cropped(rows):
        lengths = sorted({change.length for gain in gains for change in gain.differences})
        lines: list[Line] = [["", *map(format_length, lengths)]]
        for gain in gains:
            by_length = {change.length: change for change in gain.differences}
            lines.append([gain.second.label, *(_ratio(by_length.get(length)) for length in lengths)])
        sections.append(
            Section(
                f"Perplexity divided by that of {gains[0].first.label}, on the same targets",
                lines,
                ["Below 1, the longer context helps: cropping it to the trained window is worse."],
                best="lowest",
            )
        )
    if compared := regressions(rows):
        sections.append(_window(compared))
    retrieved = [row.retrieval for row in rows if row.retrieval is not None]
    return [*sections, *retrieval_sections(retrieved)]


def _ratio(change: Difference | None) -> str | TwoLines:
    if change is None:
        return "–"
    if change.low is None or change.high is None:
        return f"{change.ratio:.3f}"
    return TwoLines(f"{change.ratio:.3f}", f"{ppl(change.low):.3f} … {ppl(change.high):.3f}")


def _window(compared: Sequence[Regression]) -> Section:
    """Perplexity and retrieval within the trained window, before and after."""
    tasks = list(dict.fromkeys(task for regression in compared for task in regression.retrieval))
    head = ["", "before", "after", "ratio", "difference, nats", "95 % interval"]
    head += [text for task in tasks for text in (task, "points")]
    lines = [head]
    for regression in compared:
        change = regression.difference
        cells = [number(regression.before), number(regression.after), f"{regression.ratio:.3f}"]
        cells += ["–", "–"] if change is None else [signed(change.nats), interval(change.low, change.high)]
        for task in tasks:
            rates = regression.retrieval.get(task)
            cells.append(f"{rates.first.mean:.0%} → {rates.second.mean:.0%}" if rates else "–")
            cells.append(str(rates or "–"))
        lines.append([regression.row.label, *cells])
    notes = ["Above a ratio of 1, short texts got worse: those within the trained window."]
    if any(regression.difference for regression in compared):
        notes.append("The interval of the difference is over documents, that of the points is over prompts.")
    every_rate = [rates for regression in compared for rates in regression.retrieval.values()]
    if tasks and not any(rates.first.mean for rates in every_rate):
        notes.append("Plain RoPE solves none of the prompts: the model cannot do the task.")
    if not tasks:
        notes.append("Retrieval within the window was not measured.")
    window, plain = format_length(compared[0].length), compared[0].against
    return Section(f"Within the trained window of {window}, compared with {plain}", lines, notes)


def position_section(rows: Sequence[EvaluationRow]) -> Section:
    """Perplexity by position, in ranges that double."""
    by_row = [{(bucket.start, bucket.stop): bucket.ppl for bucket in row.result.buckets()} for row in rows]
    ranges = sorted({positions for buckets in by_row for positions in buckets})
    return Section(
        "Perplexity by position",
        [
            ["positions", *(row.label for row in rows)],
            *(
                [f"{start} … {stop - 1}", *(number(buckets.get((start, stop))) for buckets in by_row)]
                for start, stop in ranges
            ),
        ],
    )


def cost_section(rows: Sequence[EvaluationRow]) -> Section:
    """Cost of the measurement, by row."""
    return Section(
        "Cost",
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
    """Encoding, adapter, protocol and text of each row."""
    lines = [
        [row.label, row.encoding_text, public_name(row.adapter or "–"), row.result.protocol, row.result.data]
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
        given = {"stride": first.stride, "last": first.last}
        settings = {key: value for key, value in given.items() if value is not None}
        words = "".join(f", {key} {value}" for key, value in settings.items())
        notes = [
            f"Perplexity {texts.replace(', token-weighted', '') if rule.average == 'window' else texts}",
            f"Protocol {first.protocol}{words}. {rule.measures} But: {rule.flaw}",
        ]
        notes += _without_control(rule, settings, rows[0])
    if rows[0].trained_length is not None:
        notes.append(f"Trained window: {rows[0].trained_length} tokens.")
    for row in rows:
        result = row.result
        if result.cropped:
            notes.append(f"{row.label}: the model sees {result.window} tokens at a time.")
        if (
            result.passes > 1 and PROTOCOLS[result.protocol].nested
        ):  # for other protocols each length is a pass
            notes.append(
                f"{row.label}: its tables depend on the length, so there are {result.passes} passes per "
                "document."
            )
        if result.data != first.data:
            notes.append(f"{row.label}: measured on other text ({result.data}); do not compare.")
    return notes


def _without_control(rule: Protocol, settings: Settings, row: EvaluationRow) -> list[str]:
    """Why there is no control with a cropped context, as a note; empty if there can be one."""
    no = "No control with a cropped context, because"
    if not rule.same_targets:
        return [f"{no} the targets of this protocol depend on N."]
    trained = row.trained_length
    if trained is None or row.result.max_length <= trained or rule.shares_targets(settings, trained):
        return []
    window = f"the trained window of {trained} tokens"
    if "last" in settings:
        return [f"{no} {settings['last']} targets do not fit {window}; use a smaller last."]
    return [
        f"{no} windows {settings['stride']} tokens apart do not overlap within {window}, and so score other "
        f"targets; use a stride below {trained}."
    ]


def check_labels(rows: Sequence[EvaluationRow]) -> None:
    """Check that each row has a label of its own.

    Raises:
        RopeExtendError: there are no rows, or two have the same label.
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
