"""A verdict says what the numbers of its row say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report import row

from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.results import Cell, EvaluationRow, RetrievalResult
from rope_extend.evaluation.statistics import Difference
from rope_extend.evaluation.verdicts import Verdict, _gain, verdicts

TRAINED = 32


def retrieval(rates: dict[float, float], length: int = 64) -> RetrievalResult:
    """Passkeys at depths, ten trials each, of which a share is solved."""
    cells = tuple(
        Cell("passkey", length, depth, tuple(float(n < round(10 * rate)) for n in range(10)))
        for depth, rate in rates.items()
    )
    return RetrievalResult(cells)


def measured(
    label: str, method: str, level: float, adapter: str | None = None, **changes: Any
) -> EvaluationRow:
    """A row with a mean loss of `level` nats in five documents, two easier and two harder."""
    sums = {n: [(level + offset) * (n - 1) for offset in (-0.2, -0.1, 0.0, 0.1, 0.2)] for n in (32, 64)}
    terms = {n: [n - 1] * 5 for n in (32, 64)}
    ppl = {n: math.exp(level) for n in (32, 64)}
    found = row(
        label, method, level, adapter, lengths=(32, 64), ppl=ppl, document_nll=sums, document_terms=terms,
        **changes,
    )  # fmt: skip
    return replace(found, trained_length=TRAINED)


def rows(level: float, found: RetrievalResult | None = None) -> list[EvaluationRow]:
    """Plain RoPE, the cropped control, and a fine-tuned row; they differ by the same in every document."""
    return [
        measured("none", "none", 3.0),
        measured("none, cropped to 32", "none", 3.0, protocol="cropped", window=TRAINED),
        replace(measured("yarn + LoRA", "yarn", level, "runs/yarn"), retrieval=found or RetrievalResult()),
    ]


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (Difference(64, -0.1, -0.2, -0.01, math.exp(-0.1), 4), None),  # too few documents to decide
        (Difference(64, -0.1, None, None, math.exp(-0.1), 1), None),
        (Difference(64, math.inf, None, None, math.inf, 9), False),
    ],
)
def test_a_gain_without_a_certain_interval_is_none(change: Difference, used: bool | None) -> None:
    assert gain_of(change)[1] is used


def gain_of(change: Difference) -> tuple[str, bool | None]:
    return _gain(Comparison(row("control", "none", 2.0), row("yarn", "yarn", 2.0), [change]))


@given(st.floats(-5, 5), st.floats(0, 5), st.floats(0, 5))
def test_the_interval_contains_the_gain_and_decides(nats: float, below: float, above: float) -> None:
    change = Difference(64, nats, nats - below, nats + above, math.exp(nats), 9, nats + above < 0)
    words, used = gain_of(change)
    gain, low, high = map(float, re.findall(r"-?\d+\.\d", words))
    assert low - 0.06 <= gain <= high + 0.06  # each is rounded to 0.1
    assert used == (nats + above < 0)
    assert ("chance" in words) == (nats - below <= 0 <= nats + above)


def test_a_verdict_has_the_gain_the_passkeys_and_the_cost() -> None:
    level = 2.9
    (verdict,) = verdicts(rows(level, retrieval({0.0: 1.0, 0.5: 0.9, 1.0: 0.8})))
    # Every loss is 0.1 nats less than that of plain RoPE and of the control.
    assert verdict.gain == "at 64, 9.5 % better than cropping (9.5 to 9.5, 5 documents)"
    assert verdict.found == "passkey 90% (73–98), 80% at the worst depth"
    assert verdict.cost == "texts within 32 -9.5 % perplexity"
    assert verdict.success is False  # one depth is below 90 %
    assert str(verdict).endswith("No success yet.")


def test_a_control_is_known_before_it_is_measured_with_a_cropped_context() -> None:
    """By the window that it was trained for. A run in a longer window is none."""
    for target, is_judged in ((TRAINED, False), (TRAINED - 1, False), (TRAINED + 1, True), (None, False)):
        run = replace(measured("LoRA", "none", 3.5, "runs/control"), target_length=target)
        again = EvaluationRow.from_dict(json.loads(json.dumps(run.to_dict())))
        found = [*rows(2.9)[:2], again]
        assert [verdict.label for verdict in verdicts(found)] == (["LoRA"] if is_judged else [])


def test_what_is_not_finite_is_not_called_unmeasured() -> None:
    def broken(one: EvaluationRow) -> EvaluationRow:
        nothing = {n: [math.nan] * 5 for n in (32, 64)}
        ppl = dict.fromkeys((32, 64), math.nan)
        return replace(one, result=replace(one.result, ppl=ppl, document_nll=nothing))

    plain, control, tuned = rows(2.9, retrieval({0.5: 1.0}))
    (verdict,) = verdicts([plain, control, broken(tuned)])
    assert "not finite" in verdict.gain
    assert "no finite perplexity" in verdict.cost
    assert verdict.success is False
    (verdict,) = verdicts([broken(plain), broken(control), tuned])
    assert "none, cropped to 32 has no finite perplexity" in verdict.gain
    assert verdict.cost.endswith("no finite perplexity with none")
    assert verdict.success is None


def test_what_is_not_measured_leaves_the_verdict_open() -> None:
    (verdict,) = verdicts(rows(2.9))
    assert verdict.found == "no task at 64 was measured"
    assert verdict.success is None
    elsewhere = verdicts(rows(2.9, retrieval({0.5: 1.0}, length=32)))[0]
    assert elsewhere.found == "no task at 64 was measured"  # those within the old window do not count
    # But a row that fails a criterion is no success, whatever is missing.
    (costly,) = verdicts(rows(3.1))
    assert costly.success is False
    assert "+10.5 % perplexity" in costly.cost


def test_all_three_criteria_are_a_success() -> None:
    (verdict,) = verdicts(rows(2.9, retrieval({0.0: 0.9, 1.0: 1.0})))
    assert verdict.success is True
    assert str(Verdict("yarn", 0.9, "a", "b", "c", True)) == "yarn: a; b; c. Success."
    # 2.02 % more within the window is too much, and 1.98 % is not; the gain is at 64.
    for ratio, success in ((1.0202, False), (1.0198, True)):
        found = rows(2.9, retrieval({0.5: 1.0}))
        nll = {
            **found[2].result.document_nll,
            32: [(3 + math.log(ratio) + d / 10) * 31 for d in range(-2, 3)],
        }
        ppl = {**found[2].result.ppl, 32: math.exp(3) * ratio}
        found[2] = replace(found[2], result=replace(found[2].result, document_nll=nll, ppl=ppl))
        assert verdicts(found)[0].success is success


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
    own = measured("as-is", "none", 2.9)
    found = [*rows(2.9)[:2], replace(own, encoding=None, rope_parameters=parameters)]
    assert ([verdict.label for verdict in verdicts(found)] == ["as-is"]) == is_judged
