"""The demonstration: what a user does with a model of their own, done with the bundled one."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from rope_extend.checkpoint import RECORD_NAME
from rope_extend.demo import MODEL_DIR
from rope_extend.encodings import rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.report import RESULTS, markdown_table, read_results, write_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.info import info
from rope_extend.training.finetune import FinetuneInterrupted, finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import check_continues, checkpoints, read_state

DATA = "demo:evaluation"
TITLE = "A model trained on 256 tokens, read at 2,048"
DOCUMENTS = 12
"""Evaluation files used, from the part of the standard library that is not tuned on."""
METHODS = ("none", "linear", "ntk", "yarn")
RECIPE = Path(__file__).with_name("recipe.yaml")
"""What every row is trained with; only the method differs, and for the control the window."""


def run_demo(
    output: str | Path, *, methods: Sequence[str] = METHODS, steps: int | None = None, overwrite: bool = False
) -> list[EvaluationRow]:
    """Measure the bundled model untrained, fine-tune it with each method, measure again; write the report.

    The control spends the same tokens at the old window, and reads with its context cropped to it: what
    fine-tuning alone gains by getting used to the new text. A directory with part of the same demo is gone
    on with.

    Args:
        output: directory for the runs (`runs/`) and the report.
        methods: rotary methods to compare.
        steps: LoRA steps of each run; by default the recipe's.
        overwrite: start over in a directory that holds results.

    Raises:
        RopeExtendError: the bundled model or the standard library's source is missing, an unknown method,
            or a finished demo that is not to be overwritten.
    """
    if not (MODEL_DIR / "config.json").exists():
        raise RopeExtendError(f"the bundled model is missing from {MODEL_DIR}; install rope_extend again")
    for method in methods:
        rotary_method(method)
    output = Path(output)
    if (output / RESULTS).exists() and not overwrite:
        rows = read_results(output)
        _show(rows, output)
        print(f"\nThese are the results that were already in {output}; --overwrite runs the demo again.")
        return rows
    if overwrite:
        shutil.rmtree(output / "runs", ignore_errors=True)

    given: dict[str, object] = {"model": str(MODEL_DIR)} | ({} if steps is None else {"steps": steps})
    base = Recipe.from_yaml(RECIPE, {**given, "output_dir": str(output / "runs" / "yarn")})
    trained, target = info(base.model).shape.trained_length, base.target_length
    # The same tokens, in windows of the old length.
    control = {"target_length": trained, "batch_size": base.batch_size * target // trained}
    runs: list[tuple[str, dict[str, object]]] = [(method, {"method": method}) for method in methods]
    runs.append(("control", {"method": "none", **control}))
    adapters = []
    for number, (name, changes) in enumerate(runs, start=1):
        directory = str(output / "runs" / name)
        overrides = {**given, **changes, "output_dir": directory}
        recipe = Recipe.from_yaml(RECIPE, overrides)
        tokens = recipe.steps * recipe.batch_size * recipe.length
        _step(number, len(runs) + 1, f"LoRA, {name}: {tokens:,} tokens in windows of {recipe.length}")
        _command("finetune", str(RECIPE), *_flags(overrides))
        finetune_once(recipe)
        adapters.append(directory)
    lengths = [trained // 2 * 2**power for power in range(int(math.log2(target / trained)) + 2)]
    _step(len(runs) + 1, len(runs) + 1, "perplexity at every length, untrained and fine-tuned")
    _command(
        "evaluate", base.model, *adapters, "--methods", ",".join(methods), "--data", DATA,
        "--lengths", ",".join(map(str, lengths)), "--documents", str(DOCUMENTS), "--output", str(output),
    )  # fmt: skip
    rows = list(
        evaluate(
            base.model,
            data=DATA,
            lengths=lengths,
            methods=methods,
            adapters=adapters,
            max_documents=DOCUMENTS,
        )
    )
    write_report(rows, output, trained_length=trained, title=TITLE, overwrite=True)
    _show(rows, output)
    return rows


def finetune_once(recipe: Recipe) -> None:
    """Run a recipe, go on with it where it stopped, or leave it where it is done.

    Raises:
        RopeExtendError: what is there was made by another recipe.
    """
    directory = Path(recipe.output_dir)
    if (directory / RECORD_NAME).exists():
        found = checkpoints(directory)
        if not found:
            raise RopeExtendError(
                f"{directory} holds an adapter but no checkpoint that says how it was made; remove it, or "
                "--overwrite the demonstration"
            )
        check_continues(read_state(found[-1]), recipe)
        print(f"  done before: {directory}")
        return
    try:
        finetune(recipe, resume=(directory / "recipe.yaml").exists())
    except FinetuneInterrupted:
        print("\nThe same command goes on from here.")
        raise


def _step(number: int, of: int, text: str) -> None:
    print(f"\n[{number}/{of}] {text}", flush=True)


def _command(*words: str) -> None:
    """Print the command that does the same; nothing here is reserved for the demonstration."""
    print("  $ " + shlex.join(["rope-extend", *words]), flush=True)


def _flags(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]


def _show(rows: Sequence[EvaluationRow], output: Path) -> None:
    """Print the table, and what it says."""
    print("\n" + markdown_table(rows))
    by_label = {row.label: row.result for row in rows}
    plain, trained = by_label.get("none"), rows[0].trained_length
    if plain is not None and trained is not None:
        longest = plain.max_length
        print(
            f"Plain RoPE, untrained: perplexity {plain.within(trained):.1f} within its window of {trained} "
            f"tokens, {plain.beyond(trained):.1f} on the positions beyond it."
        )
        for row in rows:
            if row.adapter is not None and row.method != "none":
                print(
                    f"{row.label}: {row.result.ppl[longest]:.2f} at {longest} tokens; "
                    f"the base model at {trained}: {plain.ppl[trained]:.2f}."
                )
    print(f"\nThe picture: {output / 'perplexity.png'}")
