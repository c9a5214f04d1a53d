"""The lines of docs/results/results.jsonl: measured cells, evaluations of LoRA runs, and searches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from rope_extend.files import write_text
from rope_extend.report.tables import public_name
from rope_extend.study.cells import FOLDER, PERPLEXITY, RETRIEVAL
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import MAY_CHANGE, checkpoints, read_state

Line = dict[str, Any]

TRAINING, SEARCH = "training", "search"


def lines_of(run: Path) -> list[Line]:
    """All lines of a run, in a stable order: perplexity, retrieval, training, searches.

    Args:
        run: directory of the run.
    """
    cells = [_cell(path) for path in sorted((run / FOLDER).glob("*.json"))]
    return ordered([*(cell for cell in cells if cell), *_training(run), *_searches(run)])


def ordered(lines: Sequence[Line]) -> list[Line]:
    """Lines in a stable order: perplexity, retrieval, training, searches."""
    return sorted(lines, key=_order)


def _cell(path: Path) -> Line | None:
    """The line of a cell; None if the file is damaged, or is none of ours."""
    values = _object(path.read_text(encoding="utf-8", errors="replace"))
    if values.get("kind") not in (PERPLEXITY, RETRIEVAL) or not isinstance(values.get("identity"), dict):
        return None
    identity = values["identity"]
    values["dtype"] = str(identity["dtype"]).removeprefix("torch.")
    values["label"] = public_name(values["label"])  # a searched table is named by its directory
    values["model"] = public_name(values["model"])
    values["adapter"] = public_name(values["adapter"]) if values["adapter"] else None
    for name in ("rope_parameters", "retrieval", "peak_memory_bytes", "k_max", "tokens_per_second"):
        values.pop(name, None)
    return values


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
    """Each step with a perplexity, of each LoRA run."""
    for file in sorted(run.glob("lora/*/metrics.jsonl")):
        recipe = yaml.safe_load(file.with_name("recipe.yaml").read_text(encoding="utf-8"))
        identity = _training_identity(file.parent)
        seconds = tokens = 0.0
        for text in file.read_text(encoding="utf-8").splitlines():
            values = _object(text)
            seconds, tokens = values.get("seconds", seconds), values.get("tokens", tokens)
            if "perplexity" in values:
                yield {
                    "kind": TRAINING, "run": file.parent.name, "method": recipe["method"],
                    "step": values["step"], "tokens": int(tokens), "seconds": seconds,
                    "perplexity": values["perplexity"], "identity": identity,
                }  # fmt: skip


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
    """The fields of a recipe that decide what a run computes, without the names of files, as JSON."""
    left_out = (MAY_CHANGE - {"steps"}) | {"model", "data"}
    values = {name: value for name, value in recipe.to_dict().items() if name not in left_out}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as `bfloat16` or `torch.bfloat16`."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _searches(run: Path) -> Iterator[Line]:
    for file in sorted(run.glob("*/search.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        best = values["rows"][0]
        yield {
            "kind": SEARCH, "name": file.parent.name, "strategy": values["config"]["strategy"],
            "label": best["label"], "score": best["score"], "divisors": best["divisors"],
            "attention_factor": best["attention_factor"], "cost": values["cost"],
            "rows": [{"label": row["label"], "score": row["score"]} for row in values["rows"]],
        }  # fmt: skip


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """Write the lines as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def read_lines(path: Path) -> list[Line]:
    """Read what `write_lines` wrote; no lines if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
