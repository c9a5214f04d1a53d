"""What an evaluation says about each row: the gain of the longer context, what is found, and the cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison, against_cropped, regressions, within_window
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult
from rope_extend.evaluation.statistics import CERTAIN, FEWEST_TO_DECIDE, QUANTILE, Difference, ppl
from rope_extend.report.tables import Section, signed
from rope_extend.units import counted, format_length

LEAST_FOUND = 0.9
"""Share of passkeys that a row must find at every depth, at the longest length."""
MOST_COST = 1.02
"""Perplexity within the trained window that a row may have, divided by that of plain RoPE."""
_ALLOWED = f"{100 * MOST_COST - 100:.0f} %"
UNMEASURED = "not measured"
MARKS = {True: "✓", False: "✗", None: "?"}


class Criterion(NamedTuple):
    """What was measured, in words.

    Attributes:
        words: the numbers.
        met: whether they are good enough; None if that cannot be said.
        open: if it cannot be said, the reason and what to do, as a clause.
    """

    words: str
    met: bool | None
    open: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.met]} {self.words}"


class Verdict(NamedTuple):
    """The three criteria of a row.

    Attributes:
        label: the row.
        gain: its perplexity from the trained window to the longest length, compared with the control.
        found: passkeys, or other tasks, at the longest length.
        cost: perplexity within the trained window, compared with plain RoPE.
        whole: whether the row is wholly measured.
        alone: how much of the gain may be the training alone, if no control was trained; else empty.
        doubt: why its perplexity shows nothing, and what to do; else empty.
    """

    label: str
    gain: Criterion
    found: Criterion
    cost: Criterion
    whole: bool = True
    alone: str = ""
    doubt: str = ""

    @property
    def success(self) -> bool | None:
        """Whether all three criteria are met; None if one was not measured, or the row not wholly."""
        met = {self.gain.met, self.found.met, self.cost.met}
        if not self.whole:
            return None
        return False if False in met else None if None in met else True


class Decision(NamedTuple):
    """The verdict on all rows.

    Attributes:
        verdicts: on each row that is compared with a cropped context; controls have none.
        train: whether to train is an answer: no untrained row has a certain gain, and none is trained yet.
        section: a sentence that says what to do, and a table of the criteria, if a row has a verdict.
    """

    verdicts: list[Verdict]
    train: bool
    section: Section


def decide(
    rows: Sequence[EvaluationRow],
    unfinished: Collection[str] = (),
    doubts: Mapping[str, str] = {},
    fell: bool | None = None,
) -> Decision:
    """Judge each row by the three criteria, and say what to do.

    Args:
        rows: what was measured, with the control whose context is cropped.
        unfinished: labels of rows of which something is not measured yet, such as depths. They are not
            decided, and one of them may meet the criteria.
        doubts: why the perplexity of a row shows nothing, by its label: `reason_for_doubt`, or empty.
        fell: whether the loss still fell at the end of the training; None if that cannot be said.
    """
    longest = max((row.result.max_length for row in rows if row.result), default=0)
    window, target = (format_length(n) for n in (rows[0].trained_length or 0 if rows else 0, longest))
    judged = _verdicts(rows, unfinished, doubts)
    head = ["", f"perplexity beyond {window}", f"found at {target}", f"perplexity within {window}"]
    sentence, train = _sentence(rows, judged, unfinished, longest, head[1:], fell)
    if not judged:
        return Decision(judged, train, Section("Verdict", lead=sentence))
    documents = counted(max(row.result.documents for row in rows if row.result), "document")
    notes = [
        f"In brackets: the 95 % interval over {documents}. ?: this does not show it, or was not measured.",
        f"Beyond {window}: perplexity, compared with a cropped context on the same targets; after training, "
        "with that of the trained control, if there is one. ✓ if the 99.5 % interval is wholly below 0: in "
        "simulations, at most 3 % of such claims were wrong. ✗ if the 95 % interval is wholly above 0.",
        f"Found at {target}: ✓ if at least {LEAST_FOUND:.0%} at every depth, otherwise ✗; ? if plain RoPE "
        f"fails within {window} too.",
        f"Within {window}: compared with plain RoPE, and with a trained control. ✓ if the 95 % interval is "
        f"wholly below {_ALLOWED}, ✗ if it is wholly above.",
    ]
    lines = [[each.label, *map(str, each[1:4])] for each in judged]
    return Decision(judged, train, Section("Verdict", [head, *lines], notes, sentence))


def _verdicts(
    rows: Sequence[EvaluationRow], unfinished: Collection[str], doubts: Mapping[str, str]
) -> list[Verdict]:
    costs = {id(regression.second): regression for regression in regressions(rows)}
    remedy, verdicts = _remedy(rows), []
    for gain in against_cropped(rows):
        if not _is_control(row := gain.second):
            why = doubts.get(row.label, "")
            verdicts.append(Verdict(
                row.label, _unless(why, _gain(gain, remedy)), _found(row, gain.longest.length, rows),
                _unless(why, _cost(costs.get(id(row)), gain)), row.label not in unfinished,
                "" if why else _alone(gain), why,
            ))  # fmt: skip
    return verdicts


def _unless(why: str, criterion: Criterion) -> Criterion:
    """A criterion of perplexity, which a reason for doubt leaves open."""
    if not why or criterion.words == "not finite":
        return criterion
    return Criterion(f"{criterion.words}; but {why.partition(':')[0]}", None, why)


def _sentence(
    rows: Sequence[EvaluationRow],
    judged: Sequence[Verdict],
    unfinished: Collection[str],
    longest: int,
    criteria: Sequence[str],
    fell: bool | None,
) -> tuple[str, bool]:
    """What to do, with names of the `criteria`, and whether it is to train."""
    target, window = format_length(longest), rows[0].trained_length if rows else None
    if window is not None and 0 < longest <= window:
        return f"The model was trained on {format_length(window)} tokens, so it needs no extension.", False
    ppl = {row.label: row.result.ppl[row.result.max_length] for row in rows if row.result}
    finite = {label for label, value in ppl.items() if math.isfinite(value)}
    ranked = sorted(judged, key=lambda each: ppl[each.label] if each.label in finite else math.inf)
    good = [each.label for each in ranked if each.success]
    if good:
        more = f" So does {', '.join(good[1:])}." if good[1:] else ""
        return f"Use {good[0]}, which meets all three criteria at {target}.{more}", False
    if judged and not unfinished and not any(each.label in finite for each in judged):
        those = "extended row" if finite else "row"
        return f"No {those} has a finite perplexity at {target}: check the weights, and the dtype.", False
    whole, more = [each for each in ranked if each.whole], ""
    trained = {row.label for row in rows if _is_trained(row)}
    asked = [each for each in whole if each.label in trained] or whole  # others show nothing about training
    fair = [each for each in asked if not each.doubt]
    asked = fair if (compared := 0 < len(fair) < len(asked)) else asked
    undecided, train = [each for each in asked if each.success is None], False
    failed = {
        each.label: ", ".join(
            f"{name} ({one.words.partition(' (')[0]})"
            for name, one in zip(criteria, each[1:4], strict=True)
            if one.met is False
        )
        for each in whole
    }
    if unfinished:
        first = f"Not decided yet: not wholly measured are {'; '.join(unfinished)}."
        more = " The same command with --resume measures the rest."
    elif not ppl:
        first = "No row can be judged: no perplexity was measured; give long documents (--data)."
    elif not judged:
        first = "No row can be judged: all are controls, or the control with a cropped context is missing."
    elif undecided:
        best, train = undecided[0], not (trained or undecided[0].gain.met)
        if best.alone:
            return f"Not decided on {best.label}: {best.alone}.", train
        open_ = dict.fromkeys(each.open for each in (best.gain, best.found, best.cost) if each.open)
        among = ""
        if len(undecided) > 1:
            among = f", which has the lowest perplexity of {len(undecided)} undecided rows"
        reasons = (f"{reason[0].upper()}{reason[1:]}." for reason in open_)
        return " ".join([f"Not decided on {best.label}{among}.", *reasons]), train
    elif trained:
        untrained = any(row.is_extended and not row.adapter for row in rows)
        first = f"No row meets all three criteria at {target}"
        if still := [each.label for each in whole if each.success is None]:
            first += f"; without training, not decided: {', '.join(still)}."
        else:
            first += f"{', with or without training' * untrained}."
        missed = ", or passkeys are missed" if any(each.found.met is False for each in whole) else ""
        remedy = _remedy(rows)
        more = f" {remedy[0].upper()}{remedy[1:]}"
        more += (
            ": the loss still fell at the end." if fell else f", if the loss still fell at the end{missed}."
        )
        if fell is False:
            more = " The loss no longer fell, so longer training promises little."
        if known := [each for each in whole if each.doubt and each.gain.open]:
            more = "".join(f" {each.label}: {each.gain.open}." for each in known)
    else:
        those = "None of these methods meets" if len(whole) > 1 else f"{whole[0].label} does not meet"
        first, train = f"{those} all three criteria at {target} without training, so train.", True
    nearest = ""
    if asked and asked[0].label in finite and (len(whole) > 1 or unfinished):
        among = "with training" if asked is not whole else "that are wholly measured"
        among = "extended rows" if asked[0] is ranked[0] else f"rows {among}"
        among = "rows that can be compared" if compared else among
        nearest = f" Of the {among}, {asked[0].label} has the lowest perplexity"
        nearest += f", and fails: {fails}." if (fails := failed[asked[0].label]) else "."
    elif asked and (fails := failed[asked[0].label]):
        nearest = f" {asked[0].label} fails: {fails}."
    shown = dict.fromkeys(each.found.open for each in whole if each.found.open)
    more += "".join(f" {reason[0].upper()}{reason[1:]}." for reason in shown)
    return first + nearest + more, train


def _is_trained(row: EvaluationRow) -> bool:
    """Whether a row is the result of a training, and not a control."""
    return bool(row.adapter and not _is_control(row)) or row.of_same_weights


def _remedy(rows: Sequence[EvaluationRow]) -> str:
    """What may help if no gain is seen."""
    if not any(map(_is_trained, rows)):
        return "train"
    control = any(row.adapter and _is_control(row) for row in rows)
    return "train adapter and control longer" if control else "train longer, with a control"


def _is_control(row: EvaluationRow) -> bool:
    """Whether a row is plain RoPE without training, or with training in the old window only."""
    if row.is_extended or row.adapter is None:
        return not row.is_extended
    return (row.target_length or 0) <= (row.trained_length or 0)


def verdict(result: PerplexityResult, control: PerplexityResult, *, same_training: bool | None) -> str:
    """Say whether a longer context is of use, and whether that is certain.

    Args:
        result: what was measured of the extended model, by the protocol `prefix`.
        control: the base model, by the protocol `cropped`, on the same texts and lengths. Only the targets
            beyond its `window` count: before them, both have read the same.
        same_training: whether the control has as much of the same training in the old window. Else a gain may
            be that of the training, and is not decided. None if neither was trained.

    Raises:
        RopeExtendError: the control was not cropped, no length is beyond its window, or the two were measured
            on different texts, or in other blocks: the window must be one of the lengths.
    """
    changes = result.against(control) if control.cropped else []
    if not changes:
        raise RopeExtendError(
            "verdict compares a result with its control: on the same texts and lengths, of which one is the "
            f"control's window and the longest exceeds it; got {result!r} and {control!r}, window "
            f"{control.window}"
        )
    base = EvaluationRow("the control", result=control, adapter="trained" if same_training else None)
    trained, change = None if same_training is None else "trained", changes[-1]
    row = EvaluationRow("the model", result=result, adapter=trained)
    window, longest = format_length(control.window or 0), format_length(change.length)
    words, useful, _ = _gain(compared := Comparison(base, row, [change]))
    if alone := _alone(compared):
        command = f" (--method none --target-length {window}, and more steps or larger batches; "
        command += "scripts/finetune.py and `rope-extend advise` print it all)"
        return f"Not decided: {alone}{command * compared.before_training}."
    said = (
        f"from {window} to {longest}, perplexity of {counted(change.documents, 'document')}, compared with a "
        f"cropped context: {words}"
    )
    if (within := within_window(result, control)) is not None and within.ratio > MOST_COST:
        said += f"; within {window} it is {_change(within.ratio)}, and {_ALLOWED} is allowed"
    if useful:
        return (
            f"The longer context is of use, with little doubt: {said}. What it finds, only retrieval shows."
        )
    if useful is False:
        return f"The longer context is of no use so far: {said}."
    if change.clear and not control.is_weak:
        return f"The longer context may be of use: {said}."
    then = "Measure more documents"
    then += ", or train." if same_training is None else ", or train on more tokens, the control too."
    if change.nats > 0:
        return f"By the estimate, the longer context is of no use, which is not certain: {said}. {then}"
    return f"It is not certain that the longer context is of use: {said}. {then}"


def _alone(comparison: Comparison) -> str:
    """How much of a gain may be that of the training alone, and what shows it; empty if nothing may.

    That is so if the control is not trained, or if the row may gain as much within the old window, where its
    longer context is of no use: then their training differs.
    """
    control, change, row = comparison.first.result, comparison.longest, comparison.second
    window, untrained = control.window or 0, comparison.before_training
    if row.adapter is None or change.nats >= 0 or not math.isfinite(change.nats):
        return ""
    within = within_window(row.result, control)
    as_much = within and within.nats < 0 and not _below(change, within)
    if not (untrained or as_much):
        return ""
    old, new = format_length(window), format_length(change.length)
    ratio = within.ratio if within else math.nan
    remedy = f"Train a control: plain RoPE, on as many tokens within {old}"
    if not untrained:
        remedy = "Train both longer, on equally many tokens, or measure more documents"
    chance = "" if change.clear else "which may be chance, "
    but, so = ("but", " too, so") if ratio < 1 else ("and", ", and a part of")
    return (
        f"from {old} to {new}, perplexity of {counted(change.documents, 'document')} is "
        f"{_change(change.ratio)} than {'before training' if untrained else 'that of the control'}, {chance}"
        f"{but} within {old} it is {_change(ratio)}{so} this may be the training alone. {remedy}"
    )


def _enough(change: Difference) -> str:
    """About how many documents would decide, if the gain is as large as it seems; `N` if nobody can say."""
    if change.high is None or not change.nats < 0:
        return "N"
    from scipy.special import ndtri, stdtrit

    error = (change.high - change.nats) / stdtrit(change.documents - 1, QUANTILE)
    count = change.documents * min(1e9, abs(ndtri(CERTAIN) * error / change.nats)) ** 2
    count = max(change.documents + 1, count)
    many = f"about {float(f'{count:.2g}'):,.0f}" if count < 100_000 else "far more"
    return f"N, {many} if it is as large as it seems"


def _below(change: Difference, other: Difference) -> bool:
    """Whether a difference is below another on other targets, by the 95 % interval of their difference."""
    if change.high is None or other.high is None:
        return True  # without an interval, nothing is claimed
    return change.nats + math.hypot(change.high - change.nats, other.high - other.nats) < other.nats


def _change(ratio: float) -> str:
    return f"{100 * abs(ratio - 1):.1f} % {'lower' if ratio < 1 else 'higher'}"


def _gain(comparison: Comparison, remedy: str = "train") -> Criterion:
    """The perplexity compared with a cropped context, and whether it is certainly below, or what may help."""
    control, change = comparison.first, comparison.longest
    if not math.isfinite(control.result.ppl[change.length]):
        return Criterion(words := f"{control.label} has no finite perplexity", None, words)
    if not math.isfinite(change.ratio):
        return Criterion("not finite", False)
    digits = 2 if change.before < 20 else 1  # of both, so that they show the difference
    words = f"{change.before * change.ratio:,.{digits}f} instead of {change.before:,.{digits}f}, "
    words += _with_interval(change)
    documents = counted(change.documents, "document")
    if change.nats < 0 or change.certain is None:
        more = f"over {documents}, the gain beyond the old window may be chance: measure more texts "
        more += f"(--resume --documents {_enough(change)}; --data adds texts), or {remedy}"
    else:
        more = f"over {documents}, no gain beyond the old window is seen: {remedy}"
    if change.low is None or change.high is None:
        return Criterion(f"{words} (too few documents for an interval)", None, more)
    if comparison.before_training:
        words += ", compared with before training"
    if not change.clear:
        words += ", which may be chance" if _percent(change.ratio)[1:] != "0.0" else ", no clear difference"
    elif change.certain is False and change.nats < 0 and not comparison.before_training:
        words += ", but the 99.5 % interval, which decides, contains 0"
    weak = control.result.protocol if control.result.is_weak else control.of_same_weights and control.label
    if weak and change.nats < 0:
        too_weak = f"the control, {weak}, is too weak"
        return Criterion(f"{words}; but {too_weak}", None, too_weak)
    if change.certain is None and (change.nats < 0 or not change.clear):
        return Criterion(f"{words}; a verdict needs at least {FEWEST_TO_DECIDE} documents", None, more)
    if _alone(comparison):
        return Criterion(f"{words}: perhaps the training alone", None)
    if change.certain or (change.clear and change.nats > 0):
        return Criterion(words, bool(change.certain))
    return Criterion(words, None, more)


def _found(row: EvaluationRow, length: int, rows: Sequence[EvaluationRow]) -> Criterion:
    """What the row retrieves at a length, and whether it finds enough at every depth.

    A task that plain RoPE clearly fails within its window, where it is not clearly better, decides nothing.
    """
    found, trained = list[Criterion](), row.trained_length or 0
    window = format_length(trained)
    plain = [each for each in rows if not (each.adapter or each.is_extended or each.of_same_weights)]
    for task in row.retrieval.tasks:
        if (rate := row.retrieval.rate(task, length)) is None:
            continue
        worst = min(scores.rate.mean for scores in row.retrieval.at(task, length))
        words = f"{task} {rate}" + (f", {worst:.0%} at the worst depth" if worst < rate.mean else "")
        able = next((share for each in plain if (share := each.retrieval.rate(task, trained))), None)
        if worst < LEAST_FOUND and able and able.high < LEAST_FOUND and able.low <= rate.high:
            shows_nothing = f"plain RoPE fails {task} within {window} too, so {task} shows nothing"
            found.append(Criterion(words, None, f"{shows_nothing} (others: --tasks, such as many_shot)"))
        else:
            found.append(Criterion(words, worst >= LEAST_FOUND))
    if not found:
        flags = f"report: --tasks passkey, evaluate: --retrieval-lengths {format_length(length)}"
        return Criterion(UNMEASURED, None, f"retrieval is {UNMEASURED} ({flags})")
    met, words = {each.met for each in found}, "; ".join(each.words for each in found)
    why = "; ".join(each.open for each in found if each.open)
    return Criterion(words, False if False in met else None if None in met else True, why)


def _cost(regression: Comparison | None, gain: Comparison) -> Criterion:
    """The perplexity within the trained window compared with plain RoPE, and whether it is small enough.

    A trained row is compared with its trained control too: training lowers the perplexity of both.
    """
    if regression is None or not regression.differences:
        return Criterion("not measured", None, "perplexity within the old window is not measured (--lengths)")
    change, plain = regression.longest, regression.first
    if not math.isfinite(plain.result.ppl[change.length]):
        return Criterion(words := f"{plain.label} has no finite perplexity", None, words)
    if not math.isfinite(change.ratio):
        return Criterion("not finite", False)
    if plain.of_same_weights:
        words = f"{_with_interval(change)}, compared with {plain.label}"
        return Criterion(words, None, "the base model is not measured")
    costs, words = [change], _with_interval(change)
    trained = within_window(gain.second.result, gain.first.result) if gain.first.adapter is not None else None
    if trained is not None:
        costs, words = [change, trained], f"{_with_interval(trained)}, compared with the trained control"
    ends = [(-math.inf if each.low is None else ppl(each.low), each.high) for each in costs]
    if any(low > MOST_COST for low, _ in ends):
        return Criterion(words, False)
    if all(high is not None and ppl(high) <= MOST_COST for _, high in ends):
        if gain.before_training and gain.second.adapter is not None:
            words += ", compared with before training"
            return Criterion(
                words, None, "the cost within the old window shows beside a trained control only"
            )
        return Criterion(words, True)
    documents = counted(change.documents, "document")
    return Criterion(words, None, f"over {documents}, the cost within the old window may be above {_ALLOWED}")


def _with_interval(change: Difference) -> str:
    """A difference in percent, with its 95 % interval if there is one."""
    if change.low is None or change.high is None:
        return f"{_percent(change.ratio)} %"
    return f"{_percent(change.ratio)} % ({_percent(ppl(change.low))} to {_percent(ppl(change.high))})"


def _percent(ratio: float) -> str:
    """A ratio of perplexities as a change in percent, with its sign: below zero is better."""
    return signed(100 * (ratio - 1), "+.1f")
