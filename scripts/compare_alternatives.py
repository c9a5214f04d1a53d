"""Write docs/alternatives.md: what each encoding instead of RoPE reaches after the same training.

    python scripts/compare_alternatives.py                      # train every row, write table and picture
    python scripts/compare_alternatives.py --rows alibi,yarn    # only these
    python scripts/compare_alternatives.py --long               # nine rows, 2,000 steps, 6 CPU hours
    python scripts/compare_alternatives.py --page               # from existing results

Each row trains the bundled model, with `configs/demo_alternatives.yaml`, or with
`configs/demo_alternatives_long.yaml` on the text that it was pretrained on. Rows are trained one after the
other into `--runs`. Interrupted rows resume, and finished rows are kept. The page keeps the results of other
rows, and long rows that it has are not trained again. Results of another recipe or text are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from alternatives_page import (
    LONG_RESULTS,
    LONG_ROWS,
    NARROW,
    SHORT_RESULTS,
    Result,
    read,
    results_file,
    table,
    write,
)
from pretrain_corpus import pretraining_corpus
from script_run import run

from rope_extend.data.bundled import read_text
from rope_extend.demo.run import finetune_once
from rope_extend.errors import RopeExtendError
from rope_extend.files import sha256, write_text
from rope_extend.report.tables import markdown_table, public_name
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import MAY_CHANGE

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "demo_alternatives.yaml"
LONG_CONFIG = ROOT / "configs" / "demo_alternatives_long.yaml"
TEXT_BYTES, TEXT_CHARACTERS = 30_000_000, 8_000
"""The size of the text of long runs, of which none reads a part twice, and the smallest file in it."""


class Row(NamedTuple):
    label: str
    changes: dict[str, Any]


ROWS = (
    Row("none", {"method": "none"}),
    Row("yarn", {"method": "yarn"}),
    Row("alibi", {"method": "alibi"}),
    Row("nope", {"method": "nope"}),
    Row("drope", {"method": "drope", "block_length": 256, "batch_size": 8}),
    Row("linear_attention", {"method": "linear_attention"}),
    Row("t5_bias", {"method": "t5_bias"}),
    Row("kerple", {"method": "kerple"}),
    Row("fire", {"method": "fire"}),
    Row("sandwich", {"method": "sandwich"}),
    Row("shaw", {"method": "shaw"}),
    Row("sinusoidal", {"method": "sinusoidal", "method_parameters": {"scale": 0.1}}),
    Row("learned", {"method": "learned", "method_parameters": {"rows": 2048, "start": "zeros"}}),
    Row(NARROW, {"method": "alibi", "lora_targets": "attention", "train_norm_embed": False}),
)
"""The controls first. DroPE follows its paper, with blocks of the trained window."""


def recipe_settings(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that decide what a run computes, without the names of files, as JSON."""
    left_out = (MAY_CHANGE - {"steps"}) | {"model", "data"}
    values = {name: value for name, value in recipe.to_dict().items() if name not in left_out}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found | {"method": public_name(recipe.method)}


def recipe_of(row: Row, config: Path, runs: Path, steps: int | None = None) -> Recipe:
    changes = {**row.changes, "output_dir": str(runs / row.label.replace(" ", "-"))}
    return Recipe.from_yaml(config, changes | ({} if steps is None else {"steps": steps}))


def write_training_text(folder: Path) -> str:
    """Write the text of long runs, a file for each source file, unless it is there; returns its identity.

    It is a part of what the bundled model was pretrained on, as far as the same packages are installed.
    """
    if not folder.exists():
        size, partial = 0, folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(pretraining_corpus().files):
            text = read_text(path)
            if len(text) >= TEXT_CHARACTERS and size < TEXT_BYTES:
                write_text(partial / f"{number:05}.py", text)
                size += len(text.encode("utf-8", "replace"))
        if size < TEXT_BYTES:
            raise RopeExtendError(
                f"installed packages have {size:,} bytes in source files of {TEXT_CHARACTERS:,} characters "
                f"or more, and long runs need {TEXT_BYTES:,}; install the extras test, lint and docs too"
            )
        partial.rename(folder)
    return text_identity(folder)


def text_identity(folder: Path) -> str:
    """16 digits that identify the files of a directory, in order."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(bytes.fromhex(sha256(path)))
    return digest.hexdigest()[:16]


def trained(recipe: Recipe, label: str) -> Result:
    """Train a row, or resume it, and return its results."""
    finetune_once(recipe)
    directory = Path(recipe.output_dir)
    lines = [json.loads(text) for text in (directory / "metrics.jsonl").read_text().splitlines()]
    curve = {line["step"]: line["perplexity"] for line in lines if "perplexity" in line}
    first, *_, last = curve.values()
    record = json.loads((directory / "rope_extend.json").read_text())
    *_, done = steps = [line for line in lines if "loss" in line]
    speeds = sorted(line["tokens_per_second"] for line in steps)
    return {
        "label": label, "encoding": record["encoding"], "steps": done["step"], "tokens": done["tokens"],
        "block": recipe.length, "documents": recipe.eval_documents,
        "seconds": round(done["seconds"]), "before": first, "after": last, "recipe": recipe_settings(recipe),
        **({"curve": curve, "tokens_per_second": speeds[len(speeds) * 9 // 10]} if recipe.eval_every else {}),
    }  # fmt: skip


def trained_long(recipe: Recipe, label: str, text: str, known: list[Result]) -> Result:
    """The result of a long row, trained or known; `text` identifies what it is trained on."""
    for one in known:
        if one["label"] == label and "recipe" in one:  # and it is of the same recipe: see `check_known`
            print("already measured", flush=True)
            return one
    return trained(recipe, label) | {"text": text}


def check_known(known: list[Result], recipes: dict[str, Recipe], text: str, file: Path) -> None:
    """Refuse results of other recipes or texts: rows of a table are trained alike.

    Args:
        known: the results of the page.
        recipes: the recipe of each row.
        text: identity of the text of long runs; empty for short ones.
        file: the file of the results, for the error message.

    Raises:
        RopeExtendError: a result is of another recipe or text.
    """
    for one in known:
        recipe = recipes[one["label"]]
        expected = _settings(recipe, text)
        found = {
            "steps": one["steps"], "block": one["block"], "documents": one["documents"],
            "lengths": list(map(int, one["after"])), "text": one.get("text", ""),
        }  # fmt: skip
        if "recipe" in one:  # results of earlier versions have none
            expected |= recipe_settings(recipe)
            found |= one["recipe"]
        if changed := sorted(name for name in expected if found.get(name) != expected[name]):
            raise RopeExtendError(
                f"{str(file)!r} holds {one['label']!r} of another recipe or text, which differ in "
                f"{', '.join(changed)}; delete the file to train all rows again, or give another directory "
                "with --docs"
            )


def _settings(recipe: Recipe, text: str) -> dict[str, Any]:
    """What a result says of its recipe, besides the recipe itself."""
    return {
        "steps": recipe.steps, "block": recipe.length, "documents": recipe.eval_documents,
        "lengths": sorted(recipe.eval_lengths or ()), "text": text,
    }  # fmt: skip


def with_result(known: list[Result], new: Result) -> list[Result]:
    """Results with a new one, in the order of the rows."""
    order = [row.label for row in ROWS]
    kept = [one for one in known if one["label"] != new["label"]]
    return sorted([*kept, new], key=lambda one: order.index(one["label"]))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, help="directory of the training runs (default: the recipe's)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="directory of alternatives.md")
    parser.add_argument("--rows", help="labels of rows, separated by commas (default: all)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each row (default: the recipe's)")
    parser.add_argument("--long", action="store_true", help="train for 2,000 steps")
    parser.add_argument(
        "--page", action="store_true", help="only write the page again, from existing results"
    )
    arguments = parser.parse_args(words)
    docs = arguments.docs
    short, long = read(docs, SHORT_RESULTS), read(docs, LONG_RESULTS)
    if arguments.page:
        if not short:
            raise RopeExtendError(f"there are no results in {str(docs)!r}; train rows first, without --page")
        write(short, long, docs)
        return
    offered = [row for row in ROWS if not arguments.long or row.label in LONG_ROWS]
    named = None if arguments.rows is None else arguments.rows.split(",")
    rows = [row for row in offered if named is None or row.label in named]
    if not rows or (named and len(rows) < len(named)):
        parser.error(f"--rows takes labels from this list: {','.join(row.label for row in offered)}")
    if arguments.long and not short:
        parser.error(f"{docs} has no results of short rows; train them first, without --long")
    config = LONG_CONFIG if arguments.long else CONFIG
    runs = arguments.runs or Path(Recipe.from_yaml(config).output_dir)
    text = write_training_text(runs / "text") if arguments.long else ""
    known, name = (long, LONG_RESULTS) if arguments.long else (short, SHORT_RESULTS)
    labels = {row.label for row in rows} | {one["label"] for one in known}
    recipes = {
        row.label: recipe_of(row, config, runs, arguments.steps) for row in offered if row.label in labels
    }
    check_known(known, recipes, text, results_file(docs, name))
    for number, row in enumerate(rows, start=1):
        print(f"\n[{number}/{len(rows)}] {row.label}", flush=True)
        recipe = recipes[row.label]
        if arguments.long:
            recipe = replace(recipe, data=str(runs / "text"))
            long = with_result(long, trained_long(recipe, row.label, text, long))
        else:
            short = with_result(short, trained(recipe, row.label))
        write(short, long, docs)
    print(markdown_table(table(long if arguments.long else short)))


if __name__ == "__main__":
    run(main, "", "rope_extend", style="%(message)s")
