"""Comparisons of two saved runs, on the same tokens or on the same prompts."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from test_report import row

from rope_extend.cli.main import main
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import compare_retrieval, retrieval_comparison_table
from rope_extend.evaluation.perplexity_report import write_report
from rope_extend.evaluation.results import Cell, RetrievalResult
from rope_extend.evaluation.retrieval_report import holds_retrieval, read_retrieval, write_retrieval
from rope_extend.evaluation.saved_runs import compare_saved
from rope_extend.evaluation.statistics import paired_rates

FIRST, SECOND = (1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0)


def retrieved(
    label: str, *scores: tuple[float, ...], task: str = "passkey", data: str = "a"
) -> RetrievalResult:
    cells = [Cell(task, 100 * (n + 1), 0.5, 50, some, f"{data}{n}") for n, some in enumerate(scores)]
    return RetrievalResult(label, tuple(cells), model="m", trained_length=100)


def test_rates_are_compared_prompt_by_prompt() -> None:
    first, second = retrieved("one", FIRST, SECOND), retrieved("two", SECOND, SECOND)
    found = compare_retrieval(first, second)
    assert [(one.task, one.length) for one in found.changes] == [("passkey", 100), ("passkey", 200)]
    assert found.changes[0].change == paired_rates(FIRST, SECOND)
    assert found.changes[0].change.change == -0.5
    table = retrieval_comparison_table([found])
    assert "Retrieval, two against one" in table
    assert "-50 points" in table
    # Depths are sorted, in whatever order they were measured.
    cells = [replace(first.cells[0], depth=depth, data=str(depth)) for depth in (0.0, 1.0)]
    forth, back = (replace(first, cells=tuple(some)) for some in (cells, cells[::-1]))
    assert compare_retrieval(forth, back).changes[0].change.change == 0


def test_different_prompts_are_refused() -> None:
    first = retrieved("one", FIRST)
    for second, message in (
        (retrieved("two", FIRST, data="b"), "had different prompts of passkey at 100 tokens"),
        (retrieved("two", FIRST, task="needle"), "have no task and length in common"),
        (replace(first, cells=tuple(replace(cell, data=None) for cell in first.cells)), "different prompts"),
    ):
        with pytest.raises(RopeExtendError, match=message):
            compare_retrieval(first, second)


@pytest.mark.slow
def test_runs_of_one_kind_compare_and_of_two_do_not(tmp_path: Path) -> None:
    write_report([row("none", "none", 2.0)], tmp_path / "perplexity", trained_length=32)
    write_retrieval([retrieved("none", FIRST)], tmp_path / "one")
    write_retrieval([retrieved("none", SECOND)], tmp_path / "two")
    assert [holds_retrieval(tmp_path / name) for name in ("perplexity", "one", "nowhere")] == [
        False,
        True,
        False,
    ]
    text, paths = compare_saved(tmp_path / "one", tmp_path / "two" / "results.jsonl", output=tmp_path / "c")
    assert "Retrieval, none (two) against none (one)" in text
    assert [path.name for path in paths] == ["comparison.md", "comparison_passkey.png"]
    assert paths[0].read_text() == text
    assert paths[1].stat().st_size > 1000
    with pytest.raises(RopeExtendError, match=r"already holds comparison\.md"):
        compare_saved(tmp_path / "one", tmp_path / "two", output=tmp_path / "c")
    assert compare_saved(tmp_path / "one", tmp_path / "two", output=tmp_path / "c", overwrite=True)[0] == text
    for pair in (("one", "perplexity"), ("perplexity", "one")):
        with pytest.raises(RopeExtendError, match="which cannot be compared; give two runs of"):
            compare_saved(*(tmp_path / name for name in pair))
    with pytest.raises(RopeExtendError, match="no results at"):
        compare_saved(tmp_path / "one", tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.usefixtures("private_cache")
def test_the_command_compares_retrieval_in_both_kinds_of_run(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str) -> str:
        main(shlex.split(command))
        return capsys.readouterr().out

    out = tmp_path / "retrieval"
    run(f"retrieve {MODEL_DIR} --lengths 256 --depths 2 --trials 2 --methods none,as-is --output {out}")
    text = run(f"compare {out} {out} --row none --row as-is")
    assert "Retrieval, as-is against none" in text
    assert "+0 points" in text
    none, as_is = read_retrieval(out)
    assert none.cells == as_is.cells
    assert as_is.encoding is None
    assert as_is.rope_parameters["rope_type"] == "default"
    assert as_is.encoding_text.startswith("as in the checkpoint: default(")
    evaluation = f"evaluate {MODEL_DIR} --data {work / 'data'} --lengths 512 --methods none,dynamic_ntk"
    run(f"{evaluation} --retrieval 1 --output {tmp_path / 'evaluation'}")
    text = run(f"compare {tmp_path / 'evaluation'} {tmp_path / 'evaluation'} --row none --row dynamic_ntk")
    assert "Perplexity, dynamic_ntk against none, 3 documents" in text
    assert "Retrieval, dynamic_ntk against none" in text
