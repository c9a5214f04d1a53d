"""Whatever an evaluation resumes, reuses or compares belongs to one measurement; others are refused.

`READERS` lists every function of the room that reads a file. A new one fails the first test until it is
listed here, as an artefact with its own test of refusals, or with the reason why it needs none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import llama
from test_output_files import draw
from test_perplexity import measure, texts
from test_retrieval import TOKENIZER, measured

import rope_extend as rx
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import compare, compare_retrieval
from rope_extend.evaluation.evaluation_config import RetrievalConfig
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.perplexity_report import read_results, write_report
from rope_extend.evaluation.results import EvaluationRow, Subject
from rope_extend.evaluation.retrieval_report import read_retrieval, write_retrieval
from rope_extend.evaluation.retrieve import retrieve
from rope_extend.evaluation.tasks import Passkey
from rope_extend.journal import differences
from rope_extend.models.load_options import LoadOptions

READERS = {
    "finished_documents.FinishedDocuments.read": "losses",
    "retrieval.TrialLog.read": "trials",
    "identity.read_identity": "settings",
    "perplexity_report.read_results": "perplexity",
    "retrieval_report.read_retrieval": "retrieval",
    # These need no identity.
    "retrieval.TrialLog.append": None,  # writes
    "results.write_arrays": None,  # writes
    "retrieval_report.holds_retrieval": None,  # asks only which kind of results these are
    "output_directory.losses_in": None,  # asks only which files belong to a report
    "candidates._check_removable": None,  # an adapter's own config and names of weights, before it is loaded
    "finished_rows._lines": None,  # counts trials for an estimate of the time
    "work_plan._kept": None,  # how many documents; their losses have an identity of their own
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


@contextmanager
def other_weights(model: Any) -> Iterator[None]:
    """One bit of one weight is another."""
    bits = model.model.layers[1].mlp.up_proj.weight.detach().view(torch.int32)
    bits[0, 0] ^= 1
    try:
        with patched(model):
            yield
    finally:
        bits[0, 0] ^= 1


@contextmanager
def other_config(model: Any) -> Iterator[None]:
    """A value of the config is another that no weight depends on."""
    own = model.config.rms_norm_eps
    model.config.rms_norm_eps = 2 * own
    try:
        with patched(model):
            yield
    finally:
        model.config.rms_norm_eps = own


MODELS = {
    "weights": other_weights,
    "config": other_config,
    "encoding": partial(patched, method="nope"),
    "shape": partial(patched, trained_length=64),
}
"""Models of other measurements, by what differs."""


def losses(directory: Path, model: Any, how: Any = patched, **changes: Any) -> None:
    """Finished documents of an interrupted measurement."""
    arguments = {"documents": texts(40), "lengths": [40], "finished": directory, **changes}
    with how(model):
        measure(model, **arguments)


def trials(directory: Path, model: Any, how: Any = patched, **changes: Any) -> None:
    """Trials of an interrupted measurement."""
    arguments = {"lengths": [128], "depths": 1, "trials": 1, "log": directory / "trials.jsonl", **changes}
    with how(model):
        measured(model, **arguments)


def settings(directory: Path, model: Any, how: Any = patched, **changes: Any) -> None:
    """Settings of a run of retrieval, which is interrupted before its first trial."""
    arguments = {"lengths": [128], "depths": 1, "trials": 1, "controls": False, **changes}
    config = RetrievalConfig(model=str(model), output=str(directory), **arguments)
    with pytest.raises(KeyboardInterrupt):
        retrieve(config, resume=True, progress=False)


def perplexity(directory: Path, model: Any, how: Any = patched, **changes: Any) -> None:
    """Results that are saved by the first call, and compared by the others."""
    arguments = {"documents": texts(40), "lengths": [40], **changes}
    with how(model):
        row = EvaluationRow.of(Subject("one"), measure(model, **arguments))
    if directory.exists():
        compare(*read_results(directory), row)
    else:
        write_report([row], directory, trained_length=32)


def retrieval(directory: Path, model: Any, how: Any = patched, **changes: Any) -> None:
    """Results of retrieval that are saved by the first call, and compared by the others."""
    with how(model):
        result = measured(model, **{"lengths": [128], "depths": 1, "trials": 1, **changes})
    if directory.exists():
        compare_retrieval(*read_retrieval(directory), result)
    else:
        write_retrieval([result], directory)


REFUSALS: list[tuple[str, dict[str, tuple[dict[str, Any], str]]]] = [
    (
        "losses",
        {
            **{name: ({"how": how}, rf"differ in .*\b{name} \(") for name, how in MODELS.items()},
            "documents": ({"documents": texts(40, 40)[1:]}, r"differ in data \("),
            "lengths": ({"lengths": [20]}, r"lengths \(\[40\] there, \[20\] here\)"),
            "protocol": ({"protocol": "cropped", "window": 16}, r"protocol .*, window \(None there, 16 here"),
        },
    ),
    (
        "trials",
        {
            **{name: ({"how": how}, rf"differ in .*\b{name} \(") for name, how in MODELS.items()},
            "seed": ({"seed": 7}, r"differ in prompt \("),
            "task": ({"tasks": [replace(Passkey(), new_tokens=11)]}, r"task \("),
            "crop": ({"crop": 48}, r"differ in crop \(None there, 48 here\)"),
            "batch": ({"batch_tokens": 100}, r"differ in batch_tokens \("),
        },
    ),
    (
        "settings",
        {
            "seed": ({"seed": 7}, r"differ in seed \(0 there, 7 here\)"),
            "tasks": ({"template": "published"}, r"differ in tasks \("),
            "lengths": ({"lengths": [160]}, r"differ in lengths \("),
            "trained length": ({"trained_length": 128}, r"differ in trained_length \(256 there, 128 here\)"),
        },
    ),
    (
        "perplexity",
        {
            "documents": ({"documents": texts(40, 40)[1:]}, "different texts"),
            "protocol": ({"protocol": "cropped", "window": 16}, "different protocols"),
        },
    ),
    ("retrieval", {"seed": ({"seed": 7}, "different prompts")}),
]
"""By artefact, what differs in the second measurement, and the error."""


@pytest.mark.parametrize(("artefact", "refused"), REFUSALS, ids=[name for name, _ in REFUSALS])
def test_an_artefact_of_another_measurement_is_refused(
    artefact: str,
    refused: dict[str, tuple[dict[str, Any], str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("curves.plot_perplexity", "curves.plot_loss_by_position", "retrieval_maps.plot_accuracy"):
        monkeypatch.setattr(f"rope_extend.plots.{name}", draw)
    monkeypatch.setattr("rope_extend.plots.retrieval_maps.plot_heat_map", draw)
    use = globals()[artefact]
    model = MODEL_DIR if artefact == "settings" else llama(vocab_size=TOKENIZER.vocab_size)
    directory = tmp_path / "artefact"
    if artefact == "settings":
        monkeypatch.setattr(LoadOptions, "load", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    use(directory, model)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    use(directory, model)  # the same again is accepted
    for changes, message in refused.values():
        with pytest.raises(RopeExtendError, match=message):
            use(directory, model, **changes)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_only_buffers_that_are_saved_are_part_of_a_model() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.register_buffer("saved", torch.zeros(2, dtype=torch.bool))
    module[0].register_buffer("cached", torch.zeros(3), persistent=False)
    before = model_identity(module)
    module[0].cached += 1
    assert model_identity(module) == before
    module.saved[1] = True
    assert differences(before, model_identity(module)).startswith("weights (")
