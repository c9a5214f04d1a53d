"""What a reader should take from docs/results.md, in a few sentences computed from the results."""

from __future__ import annotations

from collections.abc import Iterator

from results_rows import Results, machines, seconds

from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.controls import against_cropped, regressions
from rope_extend.report.tables import number
from rope_extend.units import format_duration, format_length


def says(results: Results) -> list[str]:
    """The sentences, as far as something is measured."""
    parts = (_best_untrained, _best_trained, _short_texts, _cost, _failed)
    return [sentence for part in parts for sentence in part(results)] if results.rows else []


def _at(results: Results, gain: Comparison) -> str:
    """The perplexity of a row at the longest length."""
    return number(gain.second.result.ppl[results.longest])


def _gains(results: Results, *, tuned: bool) -> list[Comparison]:
    """The rows against the cropped context, the best first, without plain RoPE."""
    found = [
        gain
        for gain in against_cropped(results.rows)
        if (gain.second.adapter is not None) == tuned and gain.second.label != "none"
    ]
    return sorted(found, key=lambda gain: gain.differences[-1].ratio)


def _best_untrained(results: Results) -> Iterator[str]:
    if gains := _gains(results, tuned=False):
        best, longest = gains[0].differences[-1], format_length(results.longest)
        plain = next((row for row in results.rows if row.label == "none"), None)
        beyond = (
            "" if plain is None else f", where plain RoPE has {number(plain.result.ppl[results.longest])}"
        )
        yield (
            f"Without training, `{gains[0].second.label}` is best at {longest}: perplexity "
            f"{_at(results, gains[0])}{beyond}. This is {_against(best.ratio)} the same text cropped to the "
            "old window."
        )


def _against(ratio: float) -> str:
    percent = 100 * (1 - ratio)
    return f"{abs(percent):.1f} % {'better' if percent >= 0 else 'worse'} than"


def _best_trained(results: Results) -> Iterator[str]:
    if gains := _gains(results, tuned=True):
        best = gains[0]
        yield (
            f"With training, `{best.second.label}` is best: perplexity {_at(results, best)}, "
            f"{_against(best.differences[-1].ratio)} cropping."
        )


def _short_texts(results: Results) -> Iterator[str]:
    costs = [each for each in regressions(results.rows) if each.row.adapter is None]
    if costs:
        free = [f"`{each.row.label}`" for each in costs if abs(each.ratio - 1) < 5e-4]
        worst = max(costs, key=lambda each: each.ratio)
        percent = f"{100 * (worst.ratio - 1):+.1f} %"
        said = f"Texts within the old window pay most under `{worst.row.label}`: {percent}."
        yield said + (f" They pay nothing under {', '.join(free)}." if free else "")


def _cost(results: Results) -> Iterator[str]:
    took, where = format_duration(seconds(results.lines)), " and ".join(machines(results.lines))
    yield f"All of this took {took} of computing on {where}."


def _failed(results: Results) -> Iterator[str]:
    worse = [gain for gain in _gains(results, tuned=False) if _is_worse(gain)]
    if worse:
        names = ", ".join(f"`{gain.second.label}` ({gain.differences[-1].ratio:.3f})" for gain in worse)
        yield f"Worse than cropping the text: {names}."


def _is_worse(gain: Comparison) -> bool:
    """Whether a row is worse than the cropped context, with its whole interval if there is one."""
    change = gain.differences[-1]
    return change.ratio > 1 if change.low is None else change.low > 0
