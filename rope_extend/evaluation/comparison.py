"""Two measured rows on the same tokens, document by document: how two methods should be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rope_extend.data import format_length
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult
from rope_extend.evaluation.statistics import Difference, paired


@dataclass(frozen=True)
class Comparison:
    """Two rows, and at each length that both have how the second differs from the first."""

    first: EvaluationRow
    second: EvaluationRow
    differences: list[Difference]


def compare(first: EvaluationRow, second: EvaluationRow) -> Comparison:
    """Compare two rows at all lengths that both were measured at.

    Raises:
        RopeExtendError: they are of other tokens or another protocol, share no length, or were saved without
            sums by document.
    """
    one, other = first.result, second.result
    for what, a, b in (
        ("other text", one.data, other.data),
        ("another protocol", _protocol(first), _protocol(second)),
    ):
        if a != b:
            raise RopeExtendError(
                f"{first.label!r} and {second.label!r} were measured on {what} ({a} and {b}), so their "
                "difference would say nothing; evaluate both with the same --data, --documents, --lengths "
                "and --protocol"
            )
    lengths = sorted(one.ppl.keys() & other.ppl.keys())
    if not lengths:
        raise RopeExtendError(f"{first.label!r} and {second.label!r} share no length")
    found = differences(one, other, lengths)
    if not found:
        raise RopeExtendError(
            "these results were saved without sums by document; evaluate again to compare them"
        )
    return Comparison(first, second, found)


def differences(
    first: PerplexityResult, second: PerplexityResult, lengths: Sequence[int]
) -> list[Difference]:
    """Compare two results of the same targets at these lengths; none if they keep no sums by document."""
    if first.document_nll is None or second.document_nll is None or first.document_terms is None:
        return []
    return [
        paired(n, first.document_nll[n], second.document_nll[n], first.document_terms[n]) for n in lengths
    ]


def compare_runs(
    first: Sequence[EvaluationRow],
    second: Sequence[EvaluationRow],
    *,
    names: tuple[str, str],
    rows: Sequence[str] = (),
) -> list[Comparison]:
    """Compare the rows of two runs that have the same label, or those that are named.

    Args:
        first: rows of one run.
        second: rows of the other, or of the same one.
        names: what tells the runs apart where labels are equal.
        rows: none: all labels that both have, or the only row of each; one label: that of both; two: the
            first's and the second's.

    Raises:
        RopeExtendError: no such row, nothing to pair, or :func:`compare` refuses.
    """
    by_label = [{row.label: row for row in run} for run in (first, second)]
    if len(rows) > 2:
        raise RopeExtendError(f"a comparison is of one row or two, got {len(rows)}: {', '.join(rows)}")
    if rows:
        pairs = [(rows[0], rows[-1])]
    elif len(first) == len(second) == 1:
        pairs = [(first[0].label, second[0].label)]
    else:
        pairs = [(label, label) for label in by_label[0] if label in by_label[1]]
    for label, run in ((label, run) for pair in pairs for label, run in zip(pair, by_label, strict=True)):
        if label not in run:
            raise RopeExtendError(f"no row {label!r}; there are {', '.join(map(repr, run))}")
    if not pairs or (names[0] == names[1] and any(a == b for a, b in pairs)):
        raise RopeExtendError(
            f"nothing to compare: {names[0]} has {', '.join(map(repr, by_label[0]))}, {names[1]} has "
            f"{', '.join(map(repr, by_label[1]))}; name two rows with --row LABEL --row LABEL"
        )
    found = []
    for a, b in pairs:
        one, other = by_label[0][a], by_label[1][b]
        if a == b:
            one, other = replace(one, label=f"{a} ({names[0]})"), replace(other, label=f"{b} ({names[1]})")
        found.append(compare(one, other))
    return found


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Markdown: for each pair and length both perplexities, the difference with its interval, the ratio."""
    lines = []
    for pair in comparisons:
        first, second = pair.first, pair.second
        lines += [
            f"{second.label} against {first.label}, {pair.differences[0].documents} documents "
            f"(text {first.result.data}, protocol {_protocol(first)}):",
            "",
            "| length | first | second | difference, nats | 95 % interval | ratio |",
            "|-------:|------:|-------:|-----------------:|--------------:|------:|",
        ]
        for one in pair.differences:
            interval = "–" if one.low is None else f"{one.low:+.4f} … {one.high:+.4f}"
            lines.append(
                f"| {format_length(one.length)} | {first.result.ppl[one.length]:.4g} "
                f"| {second.result.ppl[one.length]:.4g} | {one.nats:+.4f} | {interval} | {one.ratio:.4f} |"
            )
        lines.append("")
    lines.append(
        "- Difference: mean loss of the second less that of the first; below zero the second is better. The "
        "interval is a bootstrap over documents; where it holds zero, the rows cannot be told apart."
    )
    return "\n".join(lines) + "\n"


def _protocol(row: EvaluationRow) -> str:
    result = row.result
    settings = {"window": result.window, "stride": result.stride, "last": result.last}
    return " ".join([result.protocol, *(f"{k}={v}" for k, v in settings.items() if v is not None)])
