"""Lines of docs/results/results.jsonl as finished measurements: a new clone measures only what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_lines import (
    SEARCH,
    TRAINING,
    Line,
    is_last_step,
    is_measured_line,
    ordered,
    recipe_settings,
    row_name,
    search_settings,
    torch_dtype,
)
from rope_extend.study.cells import PERPLEXITY, Cell, CellStore
from rope_extend.study.run_study import Study
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint.info import info
from rope_extend.data.documents import fingerprint
from rope_extend.encodings.core.saved import EncodingFile, write_encoding_file
from rope_extend.encodings.core.shapes import RopeShape
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.identity import model_identity
from rope_extend.journal import Identity, check_same
from rope_extend.method_names import ENCODING_FILE
from rope_extend.models.loading import pretrained
from rope_extend.searching.run_search import search_documents
from rope_extend.searching.search_config import SearchConfig
from rope_extend.study.study_config import StudyConfig
from rope_extend.training.recipe import Recipe
from rope_extend.training.training_data import load_training_data


def restore(lines: Sequence[Line], cells: Sequence[Cell], store: CellStore) -> int:
    """Keep the lines of open cells as finished cells; returns their number.

    A line is that of a cell if all that the measurement depends on is equal: the bits of the weights, the
    tokens of the text, the encoding, the lengths and the dtype.

    Args:
        lines: lines that were read from a file.
        cells: all cells of a study.
        store: the finished cells of the study.
    """
    recorded = {_key(line["label"], line["identity"]): line for line in lines if is_measured_line(line)}
    restored = 0
    for cell in cells:
        line = recorded.get(_key(cell.row.label, cell.identity))
        if line is not None and not store.has(cell):
            values = {name: value for name, value in line.items() if name not in ("identity", "dtype")}
            store.write(cell, {**values, "label": cell.row.label})
            restored += 1
    return restored


def merged(own: Sequence[Line], recorded: Sequence[Line]) -> list[Line]:
    """The lines of a run, and recorded lines of what the run has not measured itself.

    A run that has measured a row again replaces its line on the same text or prompt, also if the row is
    another one by now. A run that has trained an adapter or searched a table again replaces all lines of it.
    A LoRA run that has only begun replaces no line of a finished one.
    """
    adapters: dict[str, list[Any]] = {}
    for line in own:
        if line.get("adapter"):
            adapters.setdefault(line["adapter"], []).append(_adapter(line))
    tables = {_table(line) for line in recorded if line["kind"] == SEARCH}
    searched = {line["name"] for line in own if line["kind"] == SEARCH and _table(line) not in tables}

    def is_replaced(line: Line) -> bool:
        if not is_measured_line(line):
            return False
        again = adapters.get(line.get("adapter") or "")
        return line["label"] in searched or (again is not None and _adapter(line) not in again)

    finished = {line["run"] for line in recorded if line["kind"] == TRAINING and is_last_step(line)}
    begun = {line["run"] for line in own if line["kind"] == TRAINING}
    begun -= {line["run"] for line in own if line["kind"] == TRAINING and is_last_step(line)}
    own = [line for line in own if line["kind"] != TRAINING or line["run"] not in finished & begun]
    taken = {_place(line) for line in own}
    steps = {line["run"] for line in own if line["kind"] == TRAINING}
    kept = [line for line in recorded if _place(line) not in taken and not is_replaced(line)]
    return ordered([*own, *(line for line in kept if line["kind"] != TRAINING or line["run"] not in steps)])


def check_model(lines: Sequence[Line], model: str, file: Path) -> None:
    """Refuse lines of another model.

    Args:
        lines: lines that were read from a file.
        model: name or path of the checkpoint of this run.
        file: the file of the lines, for the error message.

    Raises:
        RopeExtendError: the lines are of another model, or do not say of which.
    """
    measured = [line for line in lines if is_measured_line(line)]
    if not measured:
        return
    what, advice = f"{str(file)!r} holds results", "give another directory for the page: --docs DIRECTORY"
    for line in measured:
        stored = line.get("identity")
        if not isinstance(stored, dict):
            check_same(stored, {}, what=what, advice=advice)
    for dtype in dict.fromkeys(line["dtype"] for line in measured):
        weights = model_identity(pretrained(AutoModelForCausalLM, model, dtype=torch_dtype(dtype)))["weights"]
        for stored in dict.fromkeys(
            line["identity"].get("weights") for line in measured if line["dtype"] == dtype
        ):
            check_same({"weights": stored}, {"weights": weights}, what=what, advice=advice)


def is_trained(lines: Sequence[Line], run: str, recipe: Recipe) -> bool:
    """Whether the lines have the last step of a LoRA run with the same recipe, model and training text.

    Args:
        lines: lines that were read from a file.
        run: name of the run.
        recipe: its recipe.
    """
    last = (
        line.get("identity") for line in lines
        if line["kind"] == TRAINING and line["run"] == run and line["step"] == recipe.steps
    )  # fmt: skip
    stored = next(last, None)
    if not stored or stored["recipe"] != recipe_settings(recipe):
        return False
    lm = pretrained(AutoModelForCausalLM, recipe.model, dtype=torch_dtype(stored["dtype"]))
    text = load_training_data(
        recipe,
        pretrained(AutoTokenizer, recipe.model),
        trained_length=info(recipe.model).shape.trained_length,
    )
    return bool(stored["weights"] == model_identity(lm)["weights"] and stored["data"] == text.fingerprint)


def restore_table(lines: Sequence[Line], directory: Path, target_length: int) -> bool:
    """Write the searched table of the lines as the file of an encoding; returns whether a line has it.

    Args:
        lines: lines that were read from a file.
        directory: directory of the search; its name is the label of the rows.
        target_length: the length that the table is for.
    """
    for line in lines:
        if line["kind"] == PERPLEXITY and line["label"] == directory.name and line["encoding"]:
            shape = RopeShape(**line["identity"]["shape"])
            directory.mkdir(parents=True, exist_ok=True)
            write_encoding_file(
                directory / ENCODING_FILE, EncodingFile(line["encoding"], shape, target_length)
            )
            return True
    return False


def plain_cells(config: StudyConfig) -> list[Cell]:
    """The cells of plain RoPE of a study, also those with a cropped context."""
    study = Study(config)
    lm = study.candidates.load_options.load(study.candidates.name)
    return [cell for cell in study.cells(lm) if cell.row.method == PLAIN]


def is_searched(lines: Sequence[Line], name: str, config: SearchConfig) -> bool:
    """Whether the lines have the result of a search with the same settings and texts.

    Args:
        lines: lines that were read from a file.
        name: name of the search.
        config: its settings.
    """
    line = next((line for line in lines if line["kind"] == SEARCH and line["name"] == name), None)
    if line is None or line.get("settings") != search_settings(config):
        return False
    documents = search_documents(config, pretrained(AutoTokenizer, config.model))
    return bool(line["data"] == fingerprint(documents))


def is_measured(lines: Sequence[Line], cells: Sequence[Cell], *, run: str = "", label: str = "") -> bool:
    """Whether the lines have a row, or the adapter of a LoRA run, on the text or prompt of each cell.

    Args:
        lines: lines that were read from a file.
        cells: cells of plain RoPE. Those of the row depend on the same, but for `OF_A_ROW`.
        run: name of the LoRA run.
        label: label of the row, if there is no `run`.
    """
    found = {
        _target(line["identity"])
        for line in lines
        if is_measured_line(line) and (line["adapter"] == run if run else line["label"] == label)
    }
    return bool(cells) and all(_target(cell.identity) in found for cell in cells)


OF_A_ROW = ("encoding", "shape", "adapter")
"""What a measurement depends on that is of its row, not of the model, the text or the prompt."""


def _target(identity: Identity) -> str:
    """All that a measurement depends on but its row, as text."""
    kept = {name: value for name, value in identity.items() if name not in OF_A_ROW}
    return json.dumps(kept, sort_keys=True)


def _key(label: str, identity: Identity) -> str:
    return json.dumps([row_name(label), identity], sort_keys=True)


def _place(line: Line) -> tuple[Any, ...]:
    """What a line is the result of: a row on a text or prompt, a step of a LoRA run, or a search."""
    kind = line["kind"]
    if kind == TRAINING:
        return kind, line["run"], line["step"]
    if kind == SEARCH:
        return kind, line["name"]
    if kind == PERPLEXITY:
        result = line["result"]
        return kind, line["label"], result["data"], tuple(map(int, result["ppl"])), line["dtype"]
    (cell,) = line["cells"]
    prompt = cell["task"], cell["length"], cell["depth"], line["trial"], cell["data"]
    return kind, line["label"], *prompt, line["dtype"]


def _adapter(line: Line) -> Any:
    """The digits of the files of a line's adapter."""
    return (line.get("identity") or {}).get("adapter")


def _table(line: Line) -> str:
    """The name of a search and what it found, as text."""
    return json.dumps([line[name] for name in ("name", "divisors", "attention_factor")])
