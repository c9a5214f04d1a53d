"""A verdict says what the numbers of its row say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import row

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.evaluation_config import METHODS, StudyConfig
from rope_extend.evaluation.report_files import markdown_report
from rope_extend.evaluation.results import (
    SAME_WEIGHTS,
    EvaluationRow,
    PerplexityResult,
    RetrievalResult,
    Scores,
)
from rope_extend.evaluation.statistics import Difference
from rope_extend.evaluation.verdicts import Criterion, _gain, decide, verdict

TRAINED = 32
NAN = float("nan")


def judged(
    label: str,
    level: float,
    found: float | None = None,
    adapter: str | None = None,
    *,
    short: float = NAN,
    **changes: Any,
) -> EvaluationRow:
    """A row with a mean loss of `level` nats in five documents, two easier and two harder.

    Args:
        found: share of the passkeys at one of two depths; at the other one all are found.
        short: the mean loss within the trained window; by default `level`.
    """
    short = level if math.isnan(short) else short
    offsets, levels = np.arange(-2, 3) / 10, {32: short, 64: level}
    scored = np.arange(64) > 0
    scores = [] if found is None else [Scores("passkey", 64, depth, (share,) * 10, "x")
                                       for depth, share in ((0.2, found), (0.8, 1.0))]  # fmt: skip
    made = row(
        label, label if adapter is None else "yarn", level, adapter, lengths=(32, 64), documents=5,
        ppl={n: math.exp(each) for n, each in levels.items()},
        document_nll={n: ((each + offsets) * (n - 1)).tolist() for n, each in levels.items()},
        document_terms={n: [n - 1] * 5 for n in levels}, block_nll=np.outer(level + offsets, scored),
        block_terms=np.tile(scored, (5, 1)).astype(np.int64),
    )  # fmt: skip
    return replace(made, trained_length=TRAINED, retrieval=RetrievalResult(tuple(scores)), **changes)


def cropped(level: float, adapter: str | None = None, **changes: Any) -> EvaluationRow:
    made = judged("none", level, **changes)
    result = replace(made.result, protocol="cropped", window=TRAINED)
    return replace(made, label=f"{adapter or 'none'}, cropped", adapter=adapter, result=result)


def noisy(level: float, short: float = NAN) -> EvaluationRow:
    """A row that is better than the control in some documents, and worse in others."""
    made, noise = judged("noisy", level, 1.0, short=short), np.array([-0.2, 0.2, 0.0, 0.1, -0.1])
    result = made.result
    sums = {n: (values + noise * (n - 1)).tolist() for n, values in result.document_nll.items()}
    losses = result.block_nll + np.outer(noise, np.arange(64) > 0)
    return replace(made, result=replace(result, block_nll=losses, document_nll=sums))


PLAIN, CONTROL = judged("none", 1.0), cropped(1.0)
SAME = replace(PLAIN, label=SAME_WEIGHTS)
WEAK = replace(CONTROL, result=replace(CONTROL.result, protocol="cropped-half"))
UNABLE, ABLE, FEW = (
    replace(PLAIN, retrieval=RetrievalResult((Scores("passkey", 32, 0.5, (share,) * trials),)))
    for share, trials in ((0.2, 100), (0.83, 100), (0.8, 10))
)
RUN = replace(PLAIN, label="LoRA", adapter="runs/control", target_length=32)


@given(st.floats(-5, 5), st.floats(0, 5), st.floats(0, 5))
def test_the_interval_contains_the_gain_and_decides(nats: float, below: float, above: float) -> None:
    change = Difference(64, nats, nats - below, nats + above, math.exp(nats), 9, nats + above < 0, 0, 9.0)
    words, used, _ = _gain(Comparison(row("control", "none", 2.0), row("yarn", "yarn", 2.0), [change]))
    assert words.startswith(f"{9 * math.exp(nats):,.2f} instead of 9.00, ")
    gain, low, high = map(float, re.findall(r"[+-]\d+\.\d", words))  # all have their sign
    assert low - 0.06 <= gain <= high + 0.06  # each is rounded to 0.1
    assert gain == pytest.approx(100 * math.expm1(nats), abs=0.06)
    assert used is (True if nats + above < 0 else False if nats - below > 0 else None)
    open_ = "may be chance" in words or "no clear difference" in words
    assert open_ == (nats - below <= 0 <= nats + above)


@pytest.mark.parametrize(
    ("nats", "half", "documents", "certain", "said", "met"),
    [
        (-0.03, 0.02, 6, False, "(-4.9 to -1.0), but the 99.5 % interval, which decides, contains 0", None),
        (-0.01, 0.02, 6, False, "-1.0 % (-3.0 to +1.0), which may be chance", None),
        (-0.01, 0.02, 3, None, "which may be chance; a verdict needs at least 5 documents", None),
        (0.01, 0.02, 3, None, "which may be chance; a verdict needs at least 5 documents", None),
        (0.05, 0.02, 3, None, "+5.1 % (+3.0 to +7.3)", False),
        (-0.05, None, 2, None, "-4.9 % (too few documents for an interval)", None),
    ],
)
def test_few_documents_decide_only_what_is_clear(
    nats: float, half: float | None, documents: int, certain: bool | None, said: str, met: bool | None
) -> None:
    ends = (None, None) if half is None else (nats - half, nats + half)
    change = Difference(64, nats, *ends, math.exp(nats), documents, certain)
    words, found, open_ = _gain(Comparison(row("control", "none", 2.0), row("yarn", "yarn", 2.0), [change]))
    assert words.endswith(said)
    assert found is met
    assert open_.startswith(f"over {documents} documents, ") == (met is None)


YES, NO, OPEN = (
    "2.46 instead of 2.72, -9.5 % (-9.5 to -9.5)",
    "3.00 instead of 2.72, +10.5 % (+10.5 to +10.5)",
    "not measured",
)
ASK = "not measured (report: --tasks passkey, evaluate: --retrieval-lengths 64)"
COST, MORE_COST = "-9.5 % (-9.5 to -9.5)", "+10.5 % (+10.5 to +10.5)"
OF_CONTROL = "compared with the trained control"
FOUND, LOST = "passkey 100% (83–100)", "passkey 90% (68–99), 80% at the worst depth"
HALF = "passkey 50% (27–73), 0% at the worst depth"


@pytest.mark.parametrize(
    ("rows", "criteria", "success"),
    [
        ([PLAIN, CONTROL, judged("yarn", 0.9, 1.0)], [(YES, True), (FOUND, True), (COST, True)], True),
        # One depth is below 90 %.
        ([PLAIN, CONTROL, judged("yarn", 0.9, 0.8)], [(YES, True), (LOST, False), (COST, True)], False),
        # What is not measured leaves it open, but a row that fails a criterion is no success.
        ([PLAIN, CONTROL, judged("yarn", 0.9)], [(YES, True), (OPEN, None), (COST, True)], None),
        ([PLAIN, CONTROL, judged("yarn", 1.1)], [(NO, False), (OPEN, None), (MORE_COST, False)], False),
        # What plain RoPE cannot do within its own window shows nothing; but a loss from 83 % to 50 % does.
        # Few prompts do not show that it cannot.
        ([UNABLE, CONTROL, judged("yarn", 0.9, 0.0)],
         [(YES, True), (HALF, None), (COST, True)],
         None),
        ([UNABLE, CONTROL, judged("yarn", 0.9, 1.0)], [(YES, True), (FOUND, True), (COST, True)], True),
        *(([some, CONTROL, judged("yarn", 0.9, 0.0)], [(YES, True), (HALF, False), (COST, True)], False)
          for some in (ABLE, FEW)),
        # 2.02 % more within the window is too much, and 1.98 % is not.
        *(([PLAIN, CONTROL, judged("yarn", 0.9, 1.0, short=1 + math.log(ratio))],
           [(YES, True), (FOUND, True), ("+2.0 % (+2.0 to +2.0)", met)], met)
          for ratio, met in ((1.0202, False), (1.0198, True))),
        # What is not finite is not called unmeasured.
        ([PLAIN, CONTROL, judged("yarn", NAN, 1.0)],
         [("not finite", False), (FOUND, True), ("not finite", False)], False),
        ([judged("none", NAN), cropped(NAN), judged("yarn", 0.9, 1.0)],
         [("none, cropped has no finite perplexity", None), (FOUND, True),
          ("none has no finite perplexity", None)], None),
        # No gain over the weak control of earlier versions is a success.
        ([PLAIN, WEAK, judged("yarn", 0.9, 1.0)],
         [(f"{YES}; but the control, cropped-half, is too weak", None), (FOUND, True), (COST, True)],
         None),
        ([PLAIN, WEAK, judged("yarn", 1.1)], [(NO, False), (OPEN, None), (MORE_COST, False)], False),
        # Nor is one over plain RoPE with weights that were trained under another encoding.
        ([SAME, replace(CONTROL, label=f"{SAME.label}, cropped"), judged("as-is", 0.9, 1.0)],
         [(f"{YES}; but the control, {SAME.label}, cropped, is too weak", None), (FOUND, True),
          (f"{COST}, compared with {SAME.label}", None)], None),
        # A trained row is compared with a trained control, if there is one.
        ([PLAIN, CONTROL, judged("run", 0.9, 1.0, "a")],
         [(f"{YES}, compared with before training: perhaps the training alone", None), (FOUND, True),
          (f"{COST}, compared with before training", None)], None),
        ([PLAIN, CONTROL, judged("run", 1.1, 1.0, "a")],
         [(f"{NO}, compared with before training", False), (FOUND, True), (MORE_COST, False)], False),
        ([PLAIN, cropped(1.0, "b"), judged("run", 0.9, 1.0, "a", short=0.99)],
         [(YES, True), (FOUND, True), (f"-1.0 % (-1.0 to -1.0), {OF_CONTROL}", True)], True),
        # Training lowers perplexity, and the extension takes a part of that back.
        ([PLAIN, cropped(0.8, "b"), judged("run", 0.7, 1.0, "a", short=0.85)],
         [("2.01 instead of 2.23, -9.5 % (-9.5 to -9.5)", True), (FOUND, True),
          (f"+5.1 % (+5.1 to +5.1), {OF_CONTROL}", False)], False),
        # If it gains as much within the old window, the two were not trained in the same way.
        ([PLAIN, cropped(1.0, "b"), judged("run", 0.9, 1.0, "a", short=0.9)],
         [(f"{YES}: perhaps the training alone", None), (FOUND, True),
          (f"{COST}, {OF_CONTROL}", True)], None),
    ],
)  # fmt: skip
def test_the_criteria(rows: list[EvaluationRow], criteria: list[Criterion], success: bool | None) -> None:
    (found,) = decide(rows).verdicts
    assert [(each.words, each.met) for each in found[1:4]] == criteria
    said = decide(rows).section.lead
    assert success is not None or bool(found.alone) or all(each.open[1:] in said for each in found[1:4])
    assert found.success is success
    marks = {True: "✓", False: "✗", None: "?"}
    cells = [f"{marks[met]} {words}" for words, met in criteria]
    assert decide(rows).section.lines[1] == [found.label, *cells]
    # It may lack depths while it is measured, and find all passkeys at the others.
    (begun,) = decide(rows, [found.label]).verdicts
    assert begun == found._replace(whole=False)
    assert begun.success is None


def test_a_cost_that_may_be_chance_is_open() -> None:
    for short, met in ((1.03, None), (1.01, None), (0.5, True), (2.0, False)):
        (found,) = decide([PLAIN, CONTROL, noisy(0.9, short=short)]).verdicts
        assert found.cost.met is met
    assert COSTS in decide([PLAIN, CONTROL, noisy(0.5, 1.03)]).section.lead


def test_tables_show_no_count_of_what_is_not_finite() -> None:
    short = judged("short", 1.0, adapter="a", target_length=48)
    text = markdown_report([PLAIN, CONTROL, judged("yarn", NAN), short])
    assert text.count("expect nonsense") == text.count("short has a window of 48: expect nonsense") == 1
    assert re.search(r"\| yarn +\|  *nan \|  *– \|", text)  # not "0 of 5" documents


def test_passkeys_within_the_old_window_do_not_count() -> None:
    scores = RetrievalResult((Scores("passkey", 32, 0.5, (1.0,)),))
    (one,) = decide([PLAIN, CONTROL, replace(judged("yarn", 0.9), retrieval=scores)]).verdicts
    assert one.found == Criterion(OPEN, None, f"retrieval is {ASK}")


def test_a_control_is_known_before_it_is_measured_with_a_cropped_context() -> None:
    """By the window that it was trained for. A run in a longer window is none."""
    for target, is_judged in ((TRAINED, False), (TRAINED - 1, False), (TRAINED + 1, True), (None, False)):
        again = EvaluationRow.from_dict(json.loads(json.dumps(replace(RUN, target_length=target).to_dict())))
        found = decide([PLAIN, CONTROL, again]).verdicts
        assert [one.label for one in found] == (["LoRA"] if is_judged else [])


@pytest.mark.parametrize(
    ("parameters", "is_judged"),
    [
        (None, False),
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "longrope", "rope_theta": 1e4}, True),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, False),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, True),
    ],
)
def test_a_model_with_scaling_of_its_own_is_no_control(
    parameters: dict[str, Any] | None, is_judged: bool
) -> None:
    own = replace(judged("as-is", 0.9), encoding=None, rope_parameters=parameters)
    found = decide([PLAIN, CONTROL, own]).verdicts
    assert [one.label for one in found] == (["as-is"] if is_judged else [])


NONE = "None of these methods meets all three criteria at 64 without training, so train."
NEITHER = "No row meets all three criteria at 64."
LOWEST = "Of the extended rows, yarn has the lowest perplexity"
REST = " The same command with --resume measures the rest."
COSTS = "Over 5 documents, the cost within the old window may be above 2 %."
MORE = " Train longer, with a control, if the loss still fell at the end"
ONE = "yarn does not meet all three criteria at 64 without training, so train. yarn fails: "
WORSE = f"perplexity beyond 32 ({NO.partition(' (')[0]}), perplexity within 32 (+10.5 %)"
ALONE = (
    "Not decided on run: from 32 to 64, perplexity of 5 documents is 9.5 % lower than before training, "
    "{} may be the training alone. Train a control: plain RoPE, on as many tokens within 32."
)


@pytest.mark.parametrize(
    ("rows", "missing", "said"),
    [
        ([judged("yarn", 0.9, 1.0)], [], "Use yarn, which meets all three criteria at 64."),
        ([judged("yarn", 0.9, 1.0), judged("ntk", 0.8, 1.0)], [],
         "Use ntk, which meets all three criteria at 64. So does yarn."),
        ([judged("yarn", 0.9, 0.0)], [], f"{ONE}found at 64 (passkey 50%)."),
        ([judged("yarn", 1.1, 1.0)], [], f"{ONE}{WORSE}."),
        ([judged("yarn", 0.9)], [], f"Not decided on yarn. Retrieval is {ASK}."),
        # A row that failed is not called undecided; of the open ones, the nearest is named.
        ([judged("ntk", 0.9, 0.0), judged("yarn", 0.99), judged("rerope", 0.95)], [],
         f"Not decided on rerope, which has the lowest perplexity of 2 undecided rows. Retrieval is {ASK}."),
        # A gain that may be chance needs more documents, or training.
        ([noisy(0.99)], [], "Not decided on noisy. Over 5 documents, the gain beyond the old window may be "
         "chance: measure more texts (--resume --documents N, about 2,500 if it is as large as it seems; "
         f"--data adds texts), or train. {COSTS}"),
        ([noisy(1.01, 1.0)], [],
         f"Not decided on noisy. Over 5 documents, no gain beyond the old window is seen: train. {COSTS}"),
        # A row that was trained and failed comes first, and the advice is not to begin to train.
        ([PLAIN, noisy(1.01, 1.0), judged("run", 1.1, 1.0, "a", short=1.1)], [],
         f"{NEITHER[:-1]}; without training, not decided: noisy. Of the rows with training, run has the "
         f"lowest perplexity, and fails: {WORSE}.{MORE}."),
        # What is not finite is never the nearest.
        ([judged("ntk", NAN, 1.0), judged("yarn", 0.9, 0.0)], [],
         f"{NONE} {LOWEST}, and fails: found at 64 (passkey 50%)."),
        ([judged("yarn", NAN, 0.0)], [],
         "No extended row has a finite perplexity at 64: check the weights, and the dtype."),
        # While rows are missing.
        ([judged("yarn", NAN, 0.0)], ["ntk"],
         "Not decided yet: not wholly measured are ntk. yarn fails: perplexity beyond 32 (not finite), found "
         f"at 64 (passkey 50%), perplexity within 32 (not finite).{REST}"),
        ([judged("yarn", 1.2, 1.0), judged("ntk", 1.1, 1.0)], ["ntk"],
         "Not decided yet: not wholly measured are ntk. Of the rows that are wholly measured, yarn has the "
         "lowest perplexity, and fails: perplexity beyond 32 (3.32 instead of 2.72, +22.1 %), perplexity "
         f"within 32 (+22.1 %).{REST}"),
        ([judged("yarn", 1.1, 1.0)], ["rerope", "string"],
         f"Not decided yet: not wholly measured are rerope; string. {LOWEST}, and fails: {WORSE}.{REST}"),
        ([judged("yarn", 0.9, 1.0)], ["yarn"], f"Not decided yet: not wholly measured are yarn.{REST}"),
        ([judged("yarn", 0.9, 1.0), judged("ntk", 0.95, 1.0)], ["yarn"],
         "Use ntk, which meets all three criteria at 64."),
        ([PLAIN, RUN], [],
         "No row can be judged: all are controls, or the control with a cropped context is missing."),
        # What training gives without a longer context is no success of the longer context.
        ([PLAIN, judged("run", 0.9, 1.0, "a")], [],
         ALONE.format("but within 32 it is 9.5 % lower too, so this")),
        ([PLAIN, judged("run", 0.9, 1.0, "a", short=1.1)], [],
         f"{NEITHER} run fails: perplexity within 32 (+10.5 %).{MORE}."),
        ([PLAIN, judged("run", 1.1, 0.0, "a")], [], f"{NEITHER} run fails: "
         f"{WORSE.replace(', perp', ', found at 64 (passkey 50%), perp')}.{MORE}, or passkeys are missed."),
        ([PLAIN, judged("run", 0.9, 1.0, "a", short=1.01)], [],
         ALONE.format("and within 32 it is 1.0 % higher, and a part of this")),
        ([PLAIN, judged("run", 0.9, 1.0, "a"), judged("yarn", 0.95, 1.0)], [],
         "Use yarn, which meets all three criteria at 64."),
        # The best row has the lowest perplexity. It need not gain most over its own control.
        ([judged("yarn", 0.9, 1.0), cropped(0.8, "a"),
          judged("run", 0.75, 1.0, "b", short=0.8, target_length=64)], [],
         "Use run, which meets all three criteria at 64. So does yarn."),
    ],
)  # fmt: skip
def test_the_sentence(rows: list[EvaluationRow], missing: list[str], said: str) -> None:
    decision = decide([CONTROL, *rows], missing)
    assert decision.section.lead == said
    assert decision.train == (" train." in said)
    if MORE in said:
        still, no_more = (decide([CONTROL, *rows], missing, fell=fell).section.lead for fell in (True, False))
        assert still.endswith("Train longer, with a control: the loss still fell at the end.")
        assert no_more.endswith("The loss no longer fell, so longer training promises little.")


ALLOWED = "within 32 it is 5.1 % higher, and 2 % is allowed"
BEYOND = "from 32 to 64, perplexity of 5 documents, compared with a cropped context:"


@pytest.mark.parametrize(
    ("level", "documents", "said"),
    [
        (0.9, 5, f"The longer context is of use, with little doubt: {BEYOND} {YES}. What it finds, only "
         "retrieval shows."),
        (1.1, 5, f"The longer context is of no use so far: {BEYOND} {NO}; {ALLOWED}."),
        (NAN, 5, f"The longer context is of no use so far: {BEYOND} not finite; {ALLOWED}."),
        (0.9, 2, f"It is not certain that the longer context is of use: {BEYOND.replace('5', '2')} "
         "2.12 instead of 2.34, -9.5 % (too few documents for an interval). Measure more documents, or train "
         "on more tokens, the control too."),
    ],
)  # fmt: skip
def test_the_verdict_on_one_result(level: float, documents: int, said: str) -> None:
    result, control = (
        replace(one, block_nll=one.block_nll[:documents], block_terms=one.block_terms[:documents],
                document_nll={n: sums[:documents] for n, sums in one.document_nll.items()},
                document_terms={n: terms[:documents] for n, terms in one.document_terms.items()})
        for one in (judged("yarn", level, short=0.95 if level < 1 else 1.05).result, CONTROL.result)
    )  # fmt: skip
    assert verdict(result, control, same_training=True) == said
    if documents == 5:  # without a trained control, only a loss is certain
        trained = verdict(result, control, same_training=False)
        assert trained.startswith(
            "Not decided: from 32 to 64, perplexity of 5 documents is 9.5 % lower than before training, but "
            "within 32 it is 4.9 % lower too, so this may be the training alone. Train a control: "
            if level < 1
            else "The longer context is of no use so far: "
        )
    # What was not trained gains nothing from training, also if it gains as much within the window.
    within = judged("rerope", 0.9, short=0.8).result
    begins = {None: "The longer context is of use", True: "Not decided: ", False: "Not decided: "}
    for same, words in begins.items():
        assert verdict(within, CONTROL.result, same_training=same).startswith(words)
    for wrong in (replace(control, data="f" * 16), replace(control, protocol="prefix", window=None)):
        with pytest.raises(RopeExtendError, match="verdict compares a result with its control"):
            verdict(result, wrong, same_training=True)


def test_a_report_on_tasks_alone_says_what_is_missing() -> None:
    rows = [replace(each, result=PerplexityResult()) for each in (PLAIN, judged("yarn", 1.0, 1.0))]
    said = "No row can be judged: no perplexity was measured; give long documents (--data)."
    assert decide(rows).section.lead == said
    within = replace(PLAIN, trained_length=64)
    assert decide([within]).section.lead == "The model was trained on 64 tokens, so it needs no extension."


def test_settings() -> None:
    config = StudyConfig(model="m", target_length="16k")
    assert config.lengths == (2048, 4096, 8192, 16_384)
    assert (config.task_lengths, config.methods) == ((16_384,), METHODS)
    assert StudyConfig(model="m", target_length="16k", adapters=["a"]).methods == ("none",)
    assert StudyConfig(model="m", target_length=64, lengths=[16]).lengths == (16, 64)
    assert StudyConfig.from_dict(config.to_dict()) == config
    assert StudyConfig(model="m", target_length=64, tasks="none").tasks == ()
    asked = [config.prompts((16_384,), trained, extended=True) for trained in (2048, 16_384, 32_768)]
    assert [each.lengths for each in asked] == [(2048, 16_384), (16_384,), (16_384,)]
    assert [each.optional_length for each in asked] == [2048, None, None]
    for wrong, message in (
        ({}, "missing target_length"),
        ({"target_length": 64, "lengths": [128]}, "lengths must be at most target_length"),
        ({"target_length": 64, "task_lengths": [128]}, "task_lengths must be at most target_length"),
        ({"target_length": 64, "budget": "soon"}, "budget must be a duration"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            StudyConfig(model="m", **wrong)


def test_rows_that_gain_as_much_within_the_old_window_are_no_success() -> None:
    """Both were trained, and one a little more: at most 3 of 100 claims may be wrong, as the report says."""
    rng, scored = np.random.default_rng(0), np.arange(64) > 0
    control, trained = cropped(1.0, "b"), judged("run", 0.9, 1.0, "a")

    def successes(within: float, beyond: float, documents: int) -> int:
        count = 0
        for _ in range(200):
            easier = (
                np.where(np.arange(64) < TRAINED, within, beyond)
                + rng.normal(0, 0.01, (documents, 2))[:, (np.arange(64) >= TRAINED).astype(int)]
            )
            rows = [
                replace(row, result=replace(
                    row.result, documents=documents, block_nll=values * scored,
                    block_terms=np.tile(scored, (documents, 1)).astype(np.int64),
                    document_nll={n: (values * scored)[:, :n].sum(1).tolist() for n in (32, 64)},
                    document_terms={n: [n - 1] * documents for n in (32, 64)}))
                for row, values in ((control, np.ones((documents, 64))), (trained, 1 + easier))
            ]  # fmt: skip
            count += decide(rows).verdicts[0].gain.met is True
        return count

    assert successes(-0.02, -0.02, 16) <= 6
    assert successes(-0.01, -0.01, 5) <= 6
    assert successes(-0.002, -0.01, 64) > 150  # a gain that is there is found
