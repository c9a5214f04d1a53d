"""Whatever an evaluation resumes, reuses or compares belongs to one measurement; others are refused.

`READERS` lists every function of the room that reads a file. A new one fails the first test until it is
listed here, as an artefact with its own test of refusals, or with the reason why it needs none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cases import llama
from test_perplexity import measure, texts
from test_retrieval import TOKENIZER, measured

import rope_extend as rx
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import compare
from rope_extend.evaluation.report_files import read_results, write_report
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult

READERS = {
    "report_files.read_results": "results",
    # `test_measurement.py` has their refusals.
    "cells.finished_in": None,  # digests, for an estimate of the time
    # These need no identity.
    "candidates._check_removable": None,  # an adapter's own config and names of weights, before it is loaded
}
"""By function, the artefact that it reads."""

ROOM = Path(rx.__file__).parent / "evaluation"

READING = {"open", "load", "load_file", "read_bytes", "read_text", "safe_open"}
"""Names of functions and methods that read a file, of any library."""

NOT_FILES = {"load_options.load"}
"""Calls of such names that read no file of an evaluation."""


def readers(room: Path) -> Iterator[str]:
    """The functions of a room that read files, such as `retrieval.TrialLog.read`."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            path = (*path, node.name)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in READING and not called.endswith((*NOT_FILES,)):
                yield ".".join(path)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, path)

    for file in sorted(room.rglob("*.py")):
        yield from walk(ast.parse(file.read_text(encoding="utf-8")), (file.stem,))


def test_every_file_that_is_read_is_listed() -> None:
    found = set(readers(ROOM))
    assert found - READERS.keys() == set(), "list it in READERS, with the identity that it is checked by"
    assert READERS.keys() - found == set(), "no such function reads a file any more"
    assert {artefact for artefact in READERS.values() if artefact} == {artefact for artefact, _ in REFUSALS}


@contextmanager
def patched(model: Any, method: str = "dynamic_linear", trained_length: int = 32) -> Iterator[None]:
    """The model of the first measurement, or one with another encoding or shape."""
    with rx.patch_model(
        model, rx.encoding(method), trained_length=trained_length, target_length=4 * trained_length
    ):
        yield


def results(directory: Path, model: Any, how: Any = patched, **changes: Any) -> None:
    """Results that are saved by the first call, and compared by the others."""
    scored = {"documents": texts(40), "lengths": [40], **{k: v for k, v in changes.items() if k != "seed"}}
    prompts = {"lengths": [128], "depths": 1, "trials": 1, "seed": changes.get("seed", 0)}
    with how(model):
        found = PerplexityResult() if "seed" in changes else measure(model, **scored)
        row = EvaluationRow("one", result=found, retrieval=measured(model, **prompts))
    if directory.exists():
        compare(*read_results(directory), row)
    else:
        write_report([row], directory)


REFUSALS: list[tuple[str, dict[str, tuple[dict[str, Any], str]]]] = [
    (
        "results",
        {
            "documents": ({"documents": texts(40, 40)[1:]}, "different texts"),
            "protocol": ({"protocol": "cropped", "window": 16}, "different protocols"),
            "seed": ({"seed": 7}, "different prompts"),
        },
    ),
]
"""By artefact, what differs in the second measurement, and the error."""


@pytest.mark.parametrize(("artefact", "refused"), REFUSALS, ids=[name for name, _ in REFUSALS])
def test_an_artefact_of_another_measurement_is_refused(
    artefact: str,
    refused: dict[str, tuple[dict[str, Any], str]],
    tmp_path: Path,
) -> None:
    use = globals()[artefact]
    model, directory = llama(vocab_size=TOKENIZER.vocab_size), tmp_path / "artefact"
    use(directory, model)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    use(directory, model)  # the same again is accepted
    for changes, message in refused.values():
        with pytest.raises(RopeExtendError, match=message):
            use(directory, model, **changes)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
