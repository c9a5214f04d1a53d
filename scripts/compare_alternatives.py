"""Write docs/alternatives.md: what each encoding instead of RoPE reaches after the same training.

    python scripts/compare_alternatives.py                      # train every row, write table and picture
    python scripts/compare_alternatives.py --rows alibi,yarn    # only these
    python scripts/compare_alternatives.py --page               # from existing results

Rows are trained one after the other into `--runs`. Interrupted rows resume, and finished rows are kept. Each
row trains the bundled model with `configs/demo_alternatives.yaml`.
"""

from __future__ import annotations

import argparse
import csv
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from script_run import run

from rope_extend.demo.run import finetune_once
from rope_extend.plots.style import INK, PALETTE, PLAIN, QUIET, write_figure
from rope_extend.report.tables import markdown_table
from rope_extend.training.recipe import Recipe
from rope_extend.units import format_length

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "demo_alternatives.yaml"


NARROW = "alibi by attention alone"


class Row(NamedTuple):
    label: str
    changes: dict[str, Any]
    annealed: bool = False


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
    Row("alibi annealed", {"method": "alibi"}, annealed=True),
    Row("linear_attention annealed", {"method": "linear_attention"}, annealed=True),
    Row("nope annealed", {"method": "nope"}, annealed=True),
    Row(NARROW, {"method": "alibi", "lora_targets": "attention", "train_norm_embed": False}),
)
"""The controls first. DroPE follows its paper, with blocks of the trained window."""

PAGE = """\
# Encodings instead of RoPE, after the same training

<!-- written by scripts/compare_alternatives.py -->

The bundled model was trained with RoPE on 256 tokens. Each row replaces RoPE by another encoding and trains
for {steps} steps of {per_step:,} tokens ({tokens:,} in all) in blocks of {block:,}, with
`configs/demo_alternatives.yaml`: LoRA on all linear layers, norms and embeddings.

- `none` and `yarn` are the controls, trained in the same way.
- `drope` is recalibrated in blocks of 256, as in its paper, for the same number of tokens.
- Rows called annealed blend from RoPE to the encoding over the first fifth of the steps. The others switch
  at once.
- In the last row, only LoRA on attention is trained.
- `sinusoidal` has a `scale` of 0.1. `learned` has a row for each position, which starts at zero.

Perplexity on {documents} held-out files, by length:

{table}

![perplexity inside and beyond the trained window](alternatives/perplexity.svg)

{says}
"""

SAYS = """\
After so short a training, no encoding instead of RoPE comes near the controls. The best of them, {best},
has {beyond:.1f} at {length} and {inside:.1f} inside the window; `yarn` has {yarn_beyond:.1f} and
{yarn_inside:.1f}. So this shows which of them start well, and not where long training ends. Annealing
{verdict}. At {length}, switching at once and annealing give: {pairs}. LoRA on attention alone takes alibi
to {narrow:.1f}.
"""


def says(results: list[dict[str, Any]]) -> str:
    """What the results show, in two sentences."""
    by_label = {one["label"]: one["after"] for one in results}
    short, *_, length = results[0]["after"]
    controls = {"none", "yarn"}
    replaced = {label: after for label, after in by_label.items() if label not in controls}
    pairs = {label: label.removesuffix(" annealed") for label in replaced if label.endswith(" annealed")}
    if not pairs or not controls | {NARROW, *pairs.values()} <= by_label.keys():
        return ""
    best = min(replaced, key=lambda label: replaced[label][length])
    gains = [replaced[label][length] < replaced[cold][length] for label, cold in pairs.items()]
    verdict = "helped" if all(gains) else "helped some" if any(gains) else "did not help in so short a run"
    text = SAYS.format(
        best=f"`{best}`", length=format_length(int(length)), inside=replaced[best][short],
        beyond=replaced[best][length], yarn_inside=by_label["yarn"][short],
        yarn_beyond=by_label["yarn"][length], verdict=verdict, narrow=by_label[NARROW][length],
        pairs=", ".join(
            f"{cold} {replaced[cold][length]:.1f} and {replaced[label][length]:.1f}"
            for label, cold in pairs.items()
        ),
    )  # fmt: skip
    return textwrap.fill(" ".join(text.split()), 110)


def recipe_of(row: Row, runs: Path, steps: int | None = None) -> Recipe:
    changes = {**row.changes, "output_dir": str(runs / row.label.replace(" ", "-"))}
    recipe = Recipe.from_yaml(CONFIG, changes | ({} if steps is None else {"steps": steps}))
    return replace(recipe, anneal_steps=recipe.steps // 5) if row.annealed else recipe


def trained(recipe: Recipe, label: str) -> dict[str, Any]:
    """Train a row, or resume it, and return its results."""
    finetune_once(recipe)
    directory = Path(recipe.output_dir)
    lines = [json.loads(text) for text in (directory / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (line["perplexity"] for line in lines if "perplexity" in line)
    record = json.loads((directory / "rope_extend.json").read_text())
    done = [line for line in lines if "loss" in line][-1]
    return {
        "label": label, "encoding": record["encoding"], "steps": done["step"], "tokens": done["tokens"],
        "block": recipe.length, "anneal_steps": recipe.anneal_steps, "documents": recipe.eval_documents,
        "seconds": round(done["seconds"]), "before": first, "after": last,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    lengths = list(results[0]["after"])
    return [
        ["", *(format_length(int(length)) for length in lengths), "untrained, 256", "untrained, 2k"],
        *(
            [one["label"], *(f"{one['after'][length]:.1f}" for length in lengths)]
            + [f"{one['before'][length]:,.0f}" for length in (lengths[0], lengths[-1])]
            for one in results
        ),
    ]


def page(results: list[dict[str, Any]]) -> str:
    first = results[0]
    return PAGE.format(
        steps=first["steps"], tokens=first["tokens"], per_step=first["tokens"] // first["steps"],
        block=first["block"], documents=first["documents"], table=markdown_table(table(results)).strip(),
        says=says(results),
    )  # fmt: skip


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the perplexity of each row inside the trained window and at the longest length; .png or .svg."""
    ranked = sorted(results, key=lambda one: -list(one["after"].values())[-1])
    figure = Figure(figsize=(8, 1.4 + 0.3 * len(ranked)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for height, result in enumerate(ranked):
        inside, *_, beyond = result["after"].values()
        control = result["label"] in ("none", "yarn")
        axes.plot([inside, beyond], [height, height], color=QUIET, linewidth=1.5, zorder=1)
        axes.plot(inside, height, "o", color=PALETTE[0], markersize=6)
        axes.plot(beyond, height, "D", color=PALETTE[1], markersize=6)
        axes.annotate(
            result["label"], (0, height), (-8, 0), xycoords=axes.get_yaxis_transform(), ha="right",
            va="center", textcoords="offset points", color=PLAIN if control else INK, annotation_clip=False,
            style="italic" if control else "normal",
        )  # fmt: skip
    axes.set_xscale("log")
    values = [value for one in results for value in one["after"].values()]
    ticks = [tick for tick in (8, 10, 12, 15, 20, 30, 50, 100, 200, 500, 1000) if tick < 1.1 * max(values)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(NullLocator())
    axes.set_xlabel("perplexity (● at 256 tokens, the trained window; ◆ at 2,048)", color=INK)
    axes.set_title("After the same training", loc="left", color=INK, fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#E4E4E4")
    write_figure(figure, path, path.suffix[1:], dpi=130)


def write(results: list[dict[str, Any]], docs: Path) -> None:
    """Write the page, the results and the picture."""
    folder = docs / "alternatives"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(one) + "\n" for one in results)
    (folder / "results.jsonl").write_text(text, encoding="utf-8")
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table(results))
    for suffix in (".png", ".svg"):
        draw(results, folder / f"perplexity{suffix}")
    (docs / "alternatives.md").write_text(page(results), encoding="utf-8")


def read(docs: Path) -> list[dict[str, Any]]:
    lines = (docs / "alternatives" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/alternatives"), help="directory of the training runs"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="directory of alternatives.md")
    parser.add_argument("--rows", help="labels of rows, separated by commas (default: all)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each row (default: the recipe's)")
    parser.add_argument(
        "--page", action="store_true", help="only write the page again, from existing results"
    )
    arguments = parser.parse_args(words)
    if arguments.page:
        write(read(arguments.docs), arguments.docs)
        return
    labels = None if arguments.rows is None else arguments.rows.split(",")
    rows = [row for row in ROWS if labels is None or row.label in labels]
    if not rows or (labels and len(rows) < len(labels)):
        parser.error(f"--rows takes labels from this list: {','.join(row.label for row in ROWS)}")
    results = []
    for number, row in enumerate(rows, start=1):
        print(f"\n[{number}/{len(rows)}] {row.label}", flush=True)
        results.append(trained(recipe_of(row, arguments.runs, arguments.steps), row.label))
    write(results, arguments.docs)
    print(markdown_table(table(results)))


if __name__ == "__main__":
    run(main, "", "rope_extend", style="%(message)s")
