"""The demonstration: the steps that a user takes with any model, on the bundled one."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.info import info
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.encodings import rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.evaluation.report_files import card_results, markdown_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.training.finetune import finetune
from rope_extend.training.recipe import Recipe

DATA = "demo:evaluation"
DOCUMENTS = 8
"""Number of evaluation files. They are from the part of the standard library that no run trains on."""
METHODS = ("none", "yarn")
"""The methods that are measured without training."""
TUNED = ("yarn", "short_original(yarn)")
"""The methods of the LoRA runs. One with two tables also trains on short texts: mixed windows."""
TRIALS = 2
"""Passkeys at each of 5 depths, within the old window and at the end of the new one."""
RECIPE = Path(__file__).with_name("recipe.yaml")
"""The recipe of every run. The runs differ in the method, and the control also in its window."""


def run_demo(
    output: str | Path,
    *,
    methods: Sequence[str] = METHODS,
    tuned: Sequence[str] = TUNED,
    steps: int | None = None,
    overwrite: bool = False,
) -> list[EvaluationRow]:
    """Measure methods on the bundled model, untrained and after a LoRA run, and write the report.

    A run of a method with two tables mixes both windows: a part of its blocks are short texts. The control
    trains on the same number of tokens in the original window, and is measured with its context cropped to
    that window. It shows what fine-tuning gains from the new kind of text alone. Perplexity, and
    passkeys within the old window and at the end of the new one, are measured, and the card of each run shows
    them. Each step prints the command that does the same. What is finished in the directory is used.

    Args:
        output: directory for the runs (`runs/`) and the report.
        methods: rotary methods to measure without training.
        tuned: rotary methods to fine-tune.
        steps: LoRA steps of each run; by default those of the recipe.
        overwrite: start again in a directory that holds results.

    Returns:
        The rows of the table.

    Raises:
        RopeExtendError: the bundled model or the source of the standard library is missing, an unknown
            method, or results or a run in the directory that were made in another way.
    """
    if not (MODEL_DIR / "config.json").exists():
        raise RopeExtendError(f"the bundled model is missing from {MODEL_DIR}; install rope_extend again")
    for method in (*methods, *tuned):
        rotary_method(method)
    output = Path(output)
    if overwrite:
        (output / RESULTS).unlink(missing_ok=True)  # first: they are of the runs that are removed now
        shutil.rmtree(output / "runs", ignore_errors=True)
    shared: dict[str, Any] = {"model": str(MODEL_DIR)} | ({} if steps is None else {"steps": steps})
    base = Recipe.from_yaml(RECIPE, {**shared, "output_dir": str(output / "runs")})
    shape, target = info(base.model).shape, base.target_length
    trained = shape.trained_length
    runs: dict[str, dict[str, Any]] = {}
    for method in tuned:
        two_tables = rotary_method(method).for_target(shape, target).depends_on_length
        name = re.sub(r"[^\w.]+", "-", method).strip("-")  # short_original-yarn
        runs[name] = {"method": method, **({"mixed_windows": True} if two_tables else {})}
    # The same number of tokens, in windows of the original length.
    batch_size = base.batch_size * target // trained
    runs["control"] = {"method": "none", "target_length": trained, "batch_size": batch_size}
    adapters = []
    for number, (name, changes) in enumerate(runs.items(), start=1):
        values = {**shared, **changes, "output_dir": str(output / "runs" / name)}
        recipe = Recipe.from_yaml(RECIPE, values)
        tokens = recipe.steps * recipe.batch_size * recipe.length
        print(f"\n[{number}/{len(runs) + 2}] LoRA, {name}: {tokens:,} tokens in windows of {recipe.length}")
        flags = [(Recipe.flag_name(key), *([] if it is True else [str(it)])) for key, it in values.items()]
        _print_command("finetune", str(RECIPE), *chain(*flags))
        finetune(recipe, resume=(Path(recipe.output_dir) / "recipe.yaml").exists())
        adapters.append(recipe.output_dir)
    lengths = [trained // 2 * 2**power for power in range(int(math.log2(target / trained)) + 2)]
    asked: dict[str, Any] = {
        "data": DATA, "lengths": tuple(lengths), "methods": tuple(methods), "max_documents": DOCUMENTS,
        "retrieval": TRIALS, "retrieval_lengths": (target,), "output": str(output),
        "control_blocks": (target - trained) * 16 // trained,  # all targets: the model is small
    }  # fmt: skip
    config = EvaluationConfig(model=base.model, adapters=tuple(adapters), **asked)
    print(f"\n[{len(runs) + 1}/{len(runs) + 2}] perplexity and passkeys, before and after")
    words = {EvaluationConfig.flag_name(key): value for key, value in asked.items()}
    texts = [
        (flag, ",".join(map(str, it)) if isinstance(it, tuple) else str(it)) for flag, it in words.items()
    ]
    _print_command("evaluate", base.model, *adapters, *chain(*texts))
    rows = evaluate(config, resume=not overwrite, overwrite=overwrite)
    print(f"\n[{len(runs) + 2}/{len(runs) + 2}] the model card of each run, with these results")
    for adapter in adapters:
        _print_command("card", adapter, "--results", str(output))
        add_card(adapter, **card_results(rows))
    print("\n" + markdown_report(rows))
    print("\nThis verdict is of a model of 3M parameters: it shows the steps, not what a large model gains.")
    print(f"The report: {output / 'report.html'}, and its picture: {output / 'perplexity.png'}")
    return rows


def _print_command(*words: str) -> None:
    """Print the command line that does the same."""
    print("  $ " + shlex.join(["rope-extend", *words]), flush=True)
