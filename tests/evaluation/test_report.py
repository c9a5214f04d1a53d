"""Reports are read back as they were written, and pictures show the measured numbers."""

import csv
import html
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import front_picture
import numpy as np
import pytest

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.cells import collect, merged
from rope_extend.evaluation.comparison import compare, regressions
from rope_extend.evaluation.output_directory import check_measurement
from rope_extend.evaluation.report_files import csv_table, read_results, write_report
from rope_extend.evaluation.report_parts import table_parts
from rope_extend.evaluation.results import (
    EvaluationRow,
    PerplexityResult,
    RetrievalResult,
    Scores,
    control_edges,
)
from rope_extend.plots.curves import plot_perplexity
from rope_extend.plots.style import Canvas
from rope_extend.report.page import Picture, markdown, page
from rope_extend.report.tables import Code, Section

DOCS = Path(__file__).parents[2] / "docs"
TRAINED = 32
BASIC = (
    "results.jsonl", "report.md", "table.csv", "perplexity.png", "loss_by_position.png", "report.html",
)  # fmt: skip
LENGTHS = (32, 64, 128, 256)


def result(level: float, lengths: tuple[int, ...] = LENGTHS, **changes: object) -> PerplexityResult:
    nll = level + np.sin(np.arange(max(lengths) - 1.0)) / 7
    blocks = np.tile([0.0, *nll], (3, 1))
    sums = {n: [float(nll[: n - 1].sum())] * 3 for n in lengths}
    values = {
        "document_nll": sums,
        "document_terms": {n: [n - 1] * 3 for n in lengths},
        "ppl": {n: math.exp(nll[: n - 1].mean()) for n in lengths},
        "tokens": {n: 3 * (n - 1) for n in lengths},
        "block_nll": blocks,
        "block_terms": (blocks > 0).astype(np.int64),
        "protocol": "prefix",
        "window": None,
        "documents": 3,
        "data": "0123456789abcdef",
        "passes": 1,
        "forward_tokens": 3 * max(lengths),
        "seconds": 1.5,
        "peak_memory_bytes": 10**8,
    }
    return PerplexityResult(**{**values, **changes})


def row(label: str, method: str | None, level: float, adapter: str | None = None, **changes) -> EvaluationRow:
    encoding = None if method is None else {"name": method, "factor": 8.0}
    return EvaluationRow(label, encoding, "demo", adapter, result(level, **changes), TRAINED)


def several_rows() -> list[EvaluationRow]:
    return [
        row("plain RoPE", None, 7.1),
        row("linear", "linear", 3.01),
        row("YaRN", "yarn", 3.0),
        row("linear + LoRA", "linear", 2.02, "runs/linear"),
        row("YaRN + LoRA", "yarn", 2.01, "runs/yarn"),
        row("LoRA, cropped", None, 2.0, "runs/none", protocol="cropped", window=32, blocks=16),
        row("short", "ntk", 2.5, lengths=(32, 64)),
    ]


@pytest.fixture
def rows() -> list[EvaluationRow]:
    return several_rows()


def test_a_report_reads_back_as_it_was_written(rows: list[EvaluationRow], tmp_path: Path) -> None:
    """Each line of the results also has the versions of the software."""
    sums = {32: [60.0, 66.0, 61.0], 64: [130.0, 125.0, 126.0]}
    found = RetrievalResult(tuple(Scores("passkey", n, 0.5, (1.0, 0.0), "a") for n in (32, 64)))
    one = row("a", "yarn", 2.0, lengths=(32, 64), document_nll=sums)
    alone = row("b", None, 2.0, document_nll={32: [60.0]}, document_terms={32: [31]}, lengths=(32,))
    rows += [replace(one, retrieval=found), alone]
    paths = write_report(rows, tmp_path / "new" / "report")
    assert {path.name for path in paths} == {*BASIC, "accuracy_passkey.png"}
    none = RetrievalResult(tuple(replace(cell, scores=(0.0, 0.0)) for cell in found.cells))
    without = write_report([replace(one, retrieval=none)], tmp_path / "none")  # no picture of nothing
    assert "accuracy_passkey.png" not in {path.name for path in without}
    assert all(path.stat().st_size > 100 for path in paths)
    for again in (read_results(tmp_path / "new" / "report"), read_results(paths[0])):
        assert [r.to_dict() for r in again] == [r.to_dict() for r in rows]
        assert again[-2].retrieval == found
    *_, first, _ = (json.loads(line) for line in paths[0].read_text().splitlines())
    assert first["encoding"] == {"name": "yarn", "factor": 8.0}
    assert first["versions"].keys() == {"python", "rope_extend", "torch", "transformers", "numpy"}


def draw(_: object, path: Path, **__: object) -> Path:
    """Instead of a picture, which takes a second."""
    path.write_bytes(b"<svg/>")
    return path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for picture in ("plot_perplexity", "plot_loss_by_position"):
        monkeypatch.setattr(f"rope_extend.plots.curves.{picture}", draw)
    for picture in ("plot_accuracy", "plot_heat_map"):
        monkeypatch.setattr(f"rope_extend.plots.retrieval_maps.{picture}", lambda _, __, path: draw(_, path))


@pytest.mark.usefixtures("undrawn")
def test_pages_and_tables_have_no_absolute_paths(rows: list[EvaluationRow], tmp_path: Path) -> None:
    """`results.jsonl` keeps them: it says where the adapters are."""
    clients = tmp_path / "clients"
    named = [replace(each, model=str(clients / "base"), adapter=str(clients / "run")) for each in rows[2:4]]
    found = RetrievalResult((Scores("passkey", 64, 0.5, (1.0, 0.0), "0"),))
    named.append(replace(named[0], label="retrieval", result=PerplexityResult(), retrieval=found))
    write_report(named, tmp_path / "one")
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert {path.name for path in files if b"clients" in path.read_bytes()} == {"results.jsonl"}
    assert "<h1>base: perplexity" in (tmp_path / "one" / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_replaced_only_on_request(rows: list[EvaluationRow], tmp_path: Path) -> None:
    """And only its own files are: those of other people stay, and no link is followed."""
    check_measurement(tmp_path / "report")
    found = RetrievalResult(tuple(Scores("passkey", n, 0.5, (1.0, 0.0), "0") for n in (32, 64)))
    write_report([replace(rows[0], retrieval=found)], tmp_path / "report")
    assert (tmp_path / "report" / "accuracy_passkey.png").exists()
    (tmp_path / "report" / "accuracy_mine.png").write_text("untouched")
    before = (tmp_path / "report" / "results.jsonl").read_bytes()
    for refuse in (
        lambda: check_measurement(tmp_path / "report"),
        lambda: write_report(rows, tmp_path / "report"),
    ):
        with pytest.raises(RopeExtendError, match=r"already holds results\.jsonl.*overwrite=True"):
            refuse()
    assert (tmp_path / "report" / "results.jsonl").read_bytes() == before
    write_report(rows[:2], tmp_path / "report", overwrite=True)
    assert [r.label for r in read_results(tmp_path / "report")] == ["plain RoPE", "linear"]
    assert {path.name for path in (tmp_path / "report").iterdir()} == {*BASIC, "accuracy_mine.png"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_report_appears_whole_or_not_at_all(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Canvas, "save", lambda self: (_ for _ in ()).throw(error))
    with pytest.raises(error):
        write_report([row("none", "none", 2.0)], tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("prepare", "call", "message"),
    [
        (lambda out: out.write_text(""), check_measurement, "is a file"),
        (lambda out: None, read_results, "no results at"),
        (lambda out: out.mkdir(), read_results, "no results at"),
        (lambda out: out.write_text('{"label": "a"}\n'), read_results, "line 1"),
        (lambda out: (out.mkdir(), (out / "report.md").symlink_to("nowhere")), check_measurement,
         r"already holds report\.md"),
        *((lambda out, name=name: (out.mkdir(), (out / name).symlink_to(out)),
           lambda out, how=how: check_measurement(out, **how), "is a link, and links are not followed")
          for name in ("cells.jsonl", "cells.1.jsonl")
          for how in ({}, {"overwrite": True}, {"resume": True})),
    ],
)  # fmt: skip
def test_mistakes_are_explained_and_nothing_is_replaced_silently(
    prepare: Any, call: Any, message: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "report")
    with pytest.raises(RopeExtendError, match=message):
        call(tmp_path / "report")


def test_the_cost_is_that_of_each_row_against_the_model_before() -> None:
    """A cropped row equals the plain one within the window, and replaces it."""
    plain, tuned = row("none", "none", 2.0), row("yarn", "yarn", 2.3)
    cropped = row("none, cropped", "none", 2.0, protocol="cropped", window=32)
    # If the config extends the model, only plain RoPE is the model before extension.
    for rows, labels in (
        ([plain, cropped, tuned, row("other text", "ntk", 1.0, data="f" * 16)], ["yarn"]),
        ([cropped, tuned], ["yarn"]),
        ([row("as-is", None, 2.3), cropped], ["as-is"]),
        ([tuned], []),
        ([cropped, row("long", "ntk", 2.1, lengths=(64, 256))], []),  # not measured at the trained window
    ):
        found = regressions(rows)
        before = "none" if plain in rows else "none, cropped"
        assert [(pair.second.label, pair.first.label) for pair in found] == [
            (label, before) for label in labels
        ]
    # And a trained row against its trained control, too.
    base, trained = replace(cropped, label="LoRA, cropped", adapter="a"), replace(tuned, adapter="b")
    within = next(part for part in table_parts([plain, base, trained]) if "within" in part.heading)
    assert [line[0] for line in within.lines[1:]] == ["yarn", "yarn (with its trained control)"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ppl": {"64": "12"}}, {"ppl": {}}, {"ppl": {"-5": 3.0}}, {"ppl": {"9" * 400: 3.0}}, {"tokens": {}},
        {"tokens": dict.fromkeys(LENGTHS, 0)}, {"block_nll": [1, 2]},
        {"document_nll": {n: [1.0] for n in LENGTHS}}, {"document_nll": {"32": [1.0]}},
        {"document_terms": {n: [0] * 3 for n in LENGTHS}}, {"protocol": "zzz"}, {"window": "64"},
        {"documents": 0}, {"seconds": "1"}, {"data": 5}, {"passes": True}, {"block_terms": [[1]]},
        {"block_nll": [[1.0, "2"]] * 3, "block_terms": [[1, 1]] * 3}, {"block_nll": [[1.0], [1.0, 2.0]]},
        ("label", 5), ("label", None), ("label", "a"), ("trained_length", "64"), ("encoding", "yarn"),
        ("encoding", {}), ("result", []), ("retrieval", {"cells": 5}),
        ("retrieval", {"cells": [{"task": "a", "length": 3, "depth": None, "scores": [2]}],
                       "crop": None, "seconds": 1, "forward_tokens": 1, "peak_memory_bytes": 1}),
        [1, 2], "[" * 100_000, "", "NaN",
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_damaged_results_are_refused_by_line(changes: Any, tmp_path: Path) -> None:
    """Whoever reads them: a report, a card, a picture or a comparison."""
    whole = row("a", "yarn", 2.0)
    line: Any = {**whole.to_dict(), "label": "b"}
    if isinstance(changes, dict):
        line["result"] = {**line["result"], **changes}
    elif isinstance(changes, tuple):
        line[changes[0]] = changes[1]
    else:
        line = changes
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "results.jsonl").write_text(json.dumps(whole.to_dict()) + "\n" + text + "\n")
    with pytest.raises(RopeExtendError, match=r"line 2 of .* is damaged .*--resume"):
        read_results(tmp_path)


def test_numbers_out_of_range_cost_no_report(tmp_path: Path) -> None:
    rows = [
        row("a", "yarn", 2.0, document_nll={n: [1e308] * 3 for n in LENGTHS}),
        row("b", "ntk", 2.0, block_nll=np.zeros((0, 0)), block_terms=np.zeros((0, 0), np.int64)),
    ]
    write_report(rows, tmp_path)
    assert [each.label for each in read_results(tmp_path)] == ["a", "b"]
    assert compare(rows[0], replace(rows[0], label="c")).differences


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DOCS.glob("results/*/cells.jsonl")))
def test_the_tables_of_the_results_are_those_of_their_cells(name: str) -> None:
    lines = {line for table in measured(name) for line in table.markdown().splitlines() if line[0:1] == "|"}
    assert len(lines) > {"code": 20}.get(name, 3)
    assert lines <= {*(DOCS / "results.md").read_text().splitlines()}


def test_a_control_that_comes_first_does_not_name_the_protocol_of_the_other_rows() -> None:
    assert any("Protocol prefix. " in note for table in measured("books") for note in table.notes)


def test_the_table_of_the_readme_is_that_of_its_cells() -> None:
    levels = {line[0]: line[1:] for line in measured("code_32k")[0].lines}
    text = (DOCS.parent / "README.md").read_text()
    _, rule, *rows = re.search(r"^\| +\| +8k.*\n(?:\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    assert re.fullmatch(r"\|( -+:? \|){4}", rule)
    assert len(rows) == 3
    for name, *cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in rows):
        assert cells == levels[name]


def test_the_picture_of_the_readme_is_drawn_from_its_cells(tmp_path: Path) -> None:
    drawn, kept = front_picture.draw(tmp_path / "front.svg").read_text(), front_picture.FRONT.read_text()
    assert re.sub(r"\d", "", drawn) == re.sub(r"\d", "", kept), "run python tools/front_picture.py"
    numbers = [[float(each) for each in re.findall(r"\d+\.\d+", text)] for text in (drawn, kept)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)


def test_the_csv_has_every_number_and_the_gain_over_the_control() -> None:
    """As computed from the cells, and as the results say in words."""
    cells, label = committed("code"), "jet_long"
    rows, lines = rows_of(cells), [*csv.DictReader(csv_table(rows_of(cells)).splitlines())]
    levels = [line for line in lines if line["measured"] == "perplexity"]
    assert [(line["row"], int(line["length"]), float(line["value"])) for line in levels] == [
        (row.label, length, ppl) for row in rows for length, ppl in row.result.levels.items()
    ]
    assert all(float(line["low"]) < float(line["value"]) < float(line["high"]) for line in levels)
    (mean,) = (
        float(line["value"])
        for line in lines
        if (line["row"], line["measured"], line["length"])
        == (label, "beyond 8k, divided by none, cropped to 8k", "16384")
    )
    blocks, gains = {}, {}
    for cell in cells:  # 256 blocks up to 16k
        blocks[cell["label"], cell["document"]] = np.array(
            [cell["result"]["block_nll"][0], cell["result"]["block_terms"][0]]
        )[:, 128:]
    for name in {document for _, document in blocks}:
        control, whole = blocks["none, cropped to 8k", name], blocks[label, name]
        assert control[1].sum() == 8192  # every target from 8k to 16k
        difference = (whole[0] - control[0])[control[1] > 0].sum()
        gains[name] = math.exp(difference / control[1].sum())
    assert len(gains) == 16
    assert mean == pytest.approx(math.prod(gains.values()) ** (1 / len(gains)), rel=1e-9)
    said = re.findall(r"(?<![\d.])(\d+) % in `(\w+)`", (DOCS / "results.md").read_text())
    assert len(said) >= 4
    assert all(round(100 * (1 - gains[f"{name}.txt"])) == int(gain) for gain, name in said)


def committed(name: str) -> list[dict[str, Any]]:
    """The committed cells of a measurement."""
    return [json.loads(line) for line in (DOCS / "results" / name / "cells.jsonl").open()][1:]


def rows_of(cells: list[dict[str, Any]]) -> list[EvaluationRow]:
    """Cells as rows, in order."""
    return collect(cells, [*dict.fromkeys(cell["label"] for cell in cells)])


def measured(name: str) -> list[Any]:
    """The tables of the committed cells of a measurement."""
    return table_parts(rows_of(committed(name)))


def test_the_control_of_an_earlier_version_has_a_name_of_its_own() -> None:
    """Its windows were half new. It is not merged with another, and the rows next to it stay as they are."""
    old, new = (row("c", "none", 2.0, protocol="cropped", window=32, blocks=n) for n in (None, 16))
    old = EvaluationRow.from_dict(old.to_dict())
    assert old.result.measured_by == "cropped-half window=32"
    one = row("c", "none", 2.0)
    others = (replace(one, result=result(2.0, lengths)) for lengths in ((32, 64), (32, 100, 256)))
    for first, second in ((old, new), *((one, other) for other in others)):  # nor other lengths or blocks
        with pytest.raises(RopeExtendError, match="delete the finished cells of one"):
            merged([first.result, second.result])
    for lengths in ([8192, 12_288, 16_384], [8192, 16_384, 32_768]):  # of the committed cells
        assert control_edges(lengths, 16) == []


SCRIPT = '<script>alert("&\'")</script>{{ 7 * 7 }}'


def test_no_name_can_leave_its_place() -> None:
    rows = [row(SCRIPT, "yarn", 2.0)]
    parts = [
        Picture(SCRIPT, partial(plot_perplexity, rows)), SCRIPT, Section(SCRIPT, notes=[SCRIPT]),
        Code(SCRIPT, SCRIPT),
        Section(SCRIPT, [["", SCRIPT], [SCRIPT, SCRIPT]], [SCRIPT]),
    ]  # fmt: skip
    text = page(SCRIPT, parts)
    assert "<script" not in text
    assert html.unescape(text).count(SCRIPT) >= 11
    assert 'src="' not in text  # it needs no other file
    assert text.count("<table>") == text.count('<div class="wide"><table>') == 1  # wide tables scroll


def test_drawings_are_inside_and_have_no_name_twice() -> None:
    rows = [row("a", "yarn", 2.0), row("b", "linear", 3.0)]
    text = page("t", [Picture("p", partial(plot_perplexity, rows))] * 2)
    assert text.count("<svg") == 2
    names = re.findall(r' id="([^"]+)"', text)
    assert [name for name in names if name.startswith("part-")] == ["part-1", "part-2"]
    assert not [name for name in names if re.fullmatch(r"[a-z0-9]+_\d+", name)]


def test_markdown_shows_every_text_as_it_is() -> None:
    fences = [line for line in Code("Text", "a\n````\nb").markdown().splitlines() if line.startswith("`")]
    assert fences == ["`````", "````", "`````"]
    text = markdown(
        [Section("[h](x)", [["", "a|b"], ["<c>", "\n# d"]], ["> e"]), Section("s", notes=["# f"]), "`g`"]
    )
    assert text == (
        "\\[h\\](x):\n\n|       | a\\|b |\n| ----- | ---: |\n| \\<c\\> | \\# d |\n\n- \\> e\n\n"
        "s:\n\n- \\# f\n\n\\`g\\`\n"
    )
