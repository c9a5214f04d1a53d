"""The lines of docs/results/results.jsonl: measured cells, evaluations of LoRA runs, and searches."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rope_extend.study.cells import FOLDER, PERPLEXITY, RETRIEVAL, row_of_cell

from rope_extend.checkpoint.manifest import adapter_digests
from rope_extend.encodings.core.encoding import encoding_classes
from rope_extend.encodings.core.saved import read_encoding_file
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.results import RetrievalResult, or_none
from rope_extend.files import write_text
from rope_extend.method_names import ENCODING_FILE, encoding_file
from rope_extend.report.tables import public_name
from rope_extend.searching.search_config import SearchConfig
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import MAY_CHANGE, checkpoints, read_state

Line = dict[str, Any]

TRAINING, SEARCH = "training", "search"
SEARCHED = ("label", "score", "by_document", "divisors", "attention_factor")
"""Values of each table of a search."""
DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What reading values raises if some of them are missing or of another type."""
_MEASURED = ("label", "model", "dtype", "adapter", "trained_length", "cpu_seconds", "seconds")
NEEDED = {
    PERPLEXITY: (*_MEASURED, "document", "result"),
    RETRIEVAL: (*_MEASURED, "trial", "cells"),
    TRAINING: ("run", "method", "step", "tokens", "seconds", "perplexity"),
    SEARCH: ("name", "label", "divisors", "attention_factor", "cost"),
}
"""Values that a line of each kind has."""


def lines_of(run: Path) -> list[Line]:
    """All lines of a run, in a stable order: perplexity, retrieval, training, searches.

    Args:
        run: directory of the run.
    """
    found = [_cell(path) for path in sorted((run / FOLDER).glob("*.json"))]
    old = _Old(run)
    cells = [cell for cell in found if cell and not old.has(cell)]
    return ordered([*cells, *_training(run), *_searches(run)])


class _Old:
    """Which cells are of an adapter or a table that the run has made again since."""

    def __init__(self, run: Path) -> None:
        finished = (path.parent for path in run.glob("lora/*/adapter_config.json"))
        self.adapters = {path.name: adapter_digests(path) for path in finished}
        self.tables = {
            file.parent.name: dict(read_encoding_file(file).encoding)
            for file in run.glob(f"*/{ENCODING_FILE}")
        }

    def has(self, cell: Line) -> bool:
        """Whether a cell is of an earlier adapter or table of its name."""
        identity = cell["identity"]
        if (name := cell["adapter"]) is not None:
            return name in self.adapters and identity.get("adapter") != self.adapters[name]
        table = self.tables.get(cell["label"])
        return table is not None and identity.get("encoding") != table


def is_measured_line(line: Line) -> bool:
    """Whether a line is of a cell: the perplexity on a text, or the answer to a prompt."""
    return line["kind"] in (PERPLEXITY, RETRIEVAL)


def is_last_step(line: Line) -> bool:
    """Whether a line is of the last step of its LoRA run; lines of earlier versions do not know."""
    steps = (line.get("identity") or {}).get("recipe", {}).get("steps", line["step"])
    return bool(0 < line["step"] == steps)


def ordered(lines: Sequence[Line]) -> list[Line]:
    """Lines in a stable order: perplexity, retrieval, training, searches."""
    return sorted(lines, key=_order)


def _cell(path: Path) -> Line | None:
    """The line of a cell; None if the file is damaged, or is none of ours."""
    values = _object(path.read_text(encoding="utf-8", errors="replace"))
    identity = values.get("identity")
    if values.get("kind") not in (PERPLEXITY, RETRIEVAL) or not isinstance(identity, dict):
        return None
    values["dtype"] = str(identity.get("dtype")).removeprefix("torch.")
    if _fault(values):
        return None
    values["label"] = row_name(values["label"])
    values["model"] = public_name(values["model"])
    values["adapter"] = Path(values["adapter"]).name if values["adapter"] else None
    for name in ("rope_parameters", "retrieval", "peak_memory_bytes", "k_max", "tokens_per_second"):
        values.pop(name, None)
    return values


def row_name(label: str) -> str:
    """The label of a row on the page: a searched table is named by its directory, wherever that is."""
    return Path(label).name


def _object(text: str) -> Line:
    """The values of a line of JSON; empty if a process was killed while it wrote it."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _order(values: Line) -> tuple[Any, ...]:
    if values["kind"] == TRAINING:
        return "run", values["run"], values["step"]
    if values["kind"] == SEARCH:
        return SEARCH, values["name"]
    if values["kind"] == PERPLEXITY:
        result = values["result"]
        return values["kind"], values["document"], result["data"], values["label"], len(result["ppl"])
    (cell,) = values["cells"]
    depth = -1.0 if cell["depth"] is None else cell["depth"]
    return values["kind"], cell["task"], cell["length"], values["trial"], depth, values["label"]


def _training(run: Path) -> Iterator[Line]:
    """Each step with a perplexity, of each LoRA run.

    `trained_on` is the number of the texts of this perplexity that are training data too; None if unknown.
    """
    for file in sorted(run.glob("lora/*/metrics.jsonl")):
        method = _method(file.with_name("recipe.yaml"))
        identity = _training_identity(file.parent)
        seconds = tokens = 0.0
        for text in file.read_text(encoding="utf-8").splitlines():
            values = _object(text)
            seconds, tokens = values.get("seconds", seconds), values.get("tokens", tokens)
            if "perplexity" in values:
                yield {
                    "kind": TRAINING, "run": file.parent.name, "method": method,
                    "step": values["step"], "tokens": int(tokens), "seconds": seconds,
                    "perplexity": values["perplexity"], "identity": identity,
                    "trained_on": (values.get("eval_data") or {}).get("trained_on"),
                }  # fmt: skip


def _method(recipe: Path) -> str:
    """The method of a LoRA run, from its file.

    Raises:
        RopeExtendError: the file is missing or damaged.
    """
    try:
        return public_name(str(yaml.safe_load(recipe.read_text(encoding="utf-8"))["method"]))
    except (OSError, yaml.YAMLError, *DAMAGED) as error:
        raise RopeExtendError(
            f"{str(recipe)!r} is missing or damaged; delete its directory to train again"
        ) from error


def _training_identity(run: Path) -> dict[str, Any] | None:
    """What a LoRA run depends on: its recipe, the bits of the base model, and the text; None if unknown."""
    if not (saved := checkpoints(run)):
        return None
    state = read_state(saved[-1])
    model = state.model or {}
    return {
        "recipe": recipe_settings(Recipe.from_dict(state.recipe)), "data": state.data,
        "weights": model.get("weights"), "dtype": model.get("dtype"),
    }  # fmt: skip


def recipe_settings(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that decide what a run computes, without the names of files, as JSON.

    A searched table is named by its directory; the settings have the table itself.
    """
    left_out = (MAY_CHANGE - {"steps"}) | {"model", "data"}
    values = _fields(recipe, left_out) | {"method": public_name(recipe.method)}
    if recipe.method not in encoding_classes() and (file := encoding_file(recipe.method)) is not None:
        values["method"] = dict(read_encoding_file(file).encoding)
    return values


def search_settings(config: SearchConfig) -> dict[str, Any]:
    """The settings of a search, without the names of files, as JSON."""
    return _fields(config, {"model", "data", "output"})


def _fields(config: Recipe | SearchConfig, left_out: Collection[str]) -> dict[str, Any]:
    """The other fields of a config, as they are read back from JSON."""
    values = {name: value for name, value in config.to_dict().items() if name not in left_out}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as `bfloat16` or `torch.bfloat16`."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _searches(run: Path) -> Iterator[Line]:
    for file in sorted(run.glob("*/search.json")):
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            best = values["rows"][0]
            line = {
                "kind": SEARCH, "name": file.parent.name, "strategy": values["config"]["strategy"],
                "label": best["label"], "score": best["score"], "divisors": best["divisors"],
                "attention_factor": best["attention_factor"], "cost": values["cost"],
                "settings": search_settings(SearchConfig.from_dict(values["config"])), "data": values["data"],
                "curve": values["curve"], "documents": len(values["documents"]),
                "rows": [{name: row[name] for name in SEARCHED} for row in values["rows"]],
            }  # fmt: skip
        except DAMAGED as error:
            raise RopeExtendError(
                f"{str(file)!r} is damaged: it holds no result of a search; delete its directory to search "
                "again"
            ) from error
        yield line


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """Write the lines as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines))


def _finite(value: Any) -> Any:
    """Values with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return or_none(value) if isinstance(value, float) else value


def read_lines(path: Path) -> list[Line]:
    """Read what `write_lines` wrote; no lines if there is no file.

    Raises:
        RopeExtendError: a line is damaged; the message names the file and the line.
    """
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        values = _object(text.decode(errors="replace"))
        if fault := _fault(values):
            raise RopeExtendError(
                f"line {number} of {str(path)!r} is damaged: {fault}; restore the file from its repository, "
                "or delete the line to measure it again"
            )
        found.append(values)
    return found


def _fault(values: Line) -> str:
    """What is wrong with the values of a line; empty if the page can be made of it."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in NEEDED:
        return "it is no line of a result"
    if missing := [name for name in NEEDED[kind] if name not in values]:
        return f"it has no {', '.join(missing)}"
    try:
        _read_values(kind, values)
    except DAMAGED as error:
        return f"its values are not those of a result ({error!r})"
    return ""


def _read_values(kind: str, values: Line) -> None:
    """Read the values of a line as the page does; one of `DAMAGED` if it could not."""
    if kind == TRAINING:
        math.fsum([values["step"], values["tokens"], values["seconds"]])
        dict(values["perplexity"])
    elif kind != SEARCH:
        math.fsum([values["seconds"], values["cpu_seconds"]])
        torch_dtype(values["dtype"])
    if kind == PERPLEXITY:
        row_of_cell(values)
        tuple(nll[0] for nll in values["result"]["document_nll"].values())
    elif kind == RETRIEVAL:
        (_,) = RetrievalResult.from_dict(values).cells
