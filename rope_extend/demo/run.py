"""The demonstration: the steps that a user takes with any model, on the bundled one."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint.info import info
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.peft_models import remove_adapter
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.encodings import rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.evaluation.perplexity_report import perplexity_table, read_results, write_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import default_dtype, pretrained
from rope_extend.training.finetune import FinetuneInterrupted, finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import check_continues, checkpoints, read_state

DATA = "demo:evaluation"
TITLE = "A model trained on 256 tokens, extended to 2,048"
DOCUMENTS = 12
"""Number of evaluation files. They are from the part of the standard library that no run trains on."""
METHODS = ("none", "linear", "ntk", "yarn")
RECIPE = Path(__file__).with_name("recipe.yaml")
"""The recipe of every run. The runs differ in the method, and the control also in its window."""


def run_demo(
    output: str | Path, *, methods: Sequence[str] = METHODS, steps: int | None = None, overwrite: bool = False
) -> list[EvaluationRow]:
    """Fine-tune the bundled model with each method, measure it before and after, and write the report.

    The control trains on the same tokens in the original window, and is measured with its context cropped to
    that window. It shows what fine-tuning gains from the new kind of text alone. A demonstration that was
    interrupted is resumed. Each step prints the command that does the same.

    Args:
        output: directory for the runs (`runs/`) and the report.
        methods: rotary methods to compare.
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
    for method in methods:
        rotary_method(method)
    output = Path(output)
    if (output / RESULTS).exists() and not overwrite:
        rows = read_results(output)
        _check_results(
            rows, output, methods, steps or Recipe.from_yaml(RECIPE, {"output_dir": str(output)}).steps
        )
        _show(rows, output)
        print(f"\nThese results were already in {output}. To run the demo again, add --overwrite.")
        return rows
    if overwrite:
        shutil.rmtree(output / "runs", ignore_errors=True)

    shared: dict[str, object] = {"model": str(MODEL_DIR)} | ({} if steps is None else {"steps": steps})
    base = Recipe.from_yaml(RECIPE, {**shared, "output_dir": str(output / "runs" / "yarn")})
    trained, target = info(base.model).shape.trained_length, base.target_length
    # The same number of tokens, in windows of the original length.
    control = {"target_length": trained, "batch_size": base.batch_size * target // trained}
    runs: list[tuple[str, dict[str, object]]] = [(method, {"method": method}) for method in methods]
    runs.append(("control", {"method": "none", **control}))
    model = pretrained(AutoModelForCausalLM, base.model, dtype=default_dtype(LoadOptions().torch_device))
    tokenizer = pretrained(AutoTokenizer, base.model)
    adapters = []
    for number, (name, changes) in enumerate(runs, start=1):
        directory = str(output / "runs" / name)
        overrides = {**shared, **changes, "output_dir": directory}
        recipe = Recipe.from_yaml(RECIPE, overrides)
        tokens = recipe.steps * recipe.batch_size * recipe.length
        _print_step(number, len(runs) + 1, f"LoRA, {name}: {tokens:,} tokens in windows of {recipe.length}")
        _print_command("finetune", str(RECIPE), *_flags(overrides))
        finetune_once(recipe, model, tokenizer)
        adapters.append(directory)
    lengths = [trained // 2 * 2**power for power in range(int(math.log2(target / trained)) + 2)]
    _print_step(len(runs) + 1, len(runs) + 1, "perplexity at every length, before and after fine-tuning")
    _print_command(
        "evaluate", base.model, *adapters, "--methods", ",".join(methods), "--data", DATA,
        "--lengths", ",".join(map(str, lengths)), "--documents", str(DOCUMENTS), "--output", str(output),
    )  # fmt: skip
    rows = evaluate(
        EvaluationConfig(
            model=base.model,
            data=DATA,
            lengths=tuple(lengths),
            methods=tuple(methods),
            adapters=tuple(adapters),
            max_documents=DOCUMENTS,
        )
    )
    write_report(rows, output, trained_length=trained, title=TITLE, overwrite=True)
    _show(rows, output)
    return rows


def finetune_once(recipe: Recipe, model: Any | None = None, tokenizer: Any | None = None) -> None:
    """Run a recipe, resume its run, or leave a finished run as it is.

    Args:
        recipe: the run.
        model: the loaded model of the recipe; by default it is loaded. It is unchanged at the end, except
            what `train_norm_embed` trains.
        tokenizer: its tokenizer; by default it is loaded.

    Raises:
        RopeExtendError: another recipe made the run in the output directory.
    """
    directory = Path(recipe.output_dir)
    if (directory / RECORD_NAME).exists():
        saved = checkpoints(directory)
        if not saved:
            raise RopeExtendError(
                f"{directory} holds an adapter, but no checkpoint that tells which recipe made it; remove "
                "the directory, or start again with overwrite=True"
            )
        state = read_state(saved[-1])
        check_continues(state, recipe)
        if state.step == recipe.steps:
            print(f"  already done: {directory}")
            return
    try:
        result = finetune(
            recipe, model=model, tokenizer=tokenizer, resume=(directory / "recipe.yaml").exists()
        )
    except FinetuneInterrupted:
        print("\nThe same command resumes from here.")
        raise
    result.patch.remove()
    remove_adapter(result.model)


def _check_results(rows: Sequence[EvaluationRow], output: Path, methods: Sequence[str], steps: int) -> None:
    """Refuse results of a demonstration without one of the methods, or with another number of steps.

    Raises:
        RopeExtendError: names what the results were made with.
    """
    labels = {row.label for row in rows}
    runs = {path.name: checkpoints(path) for path in (output / "runs").glob("*")}
    done = {name: read_state(saved[-1]).step for name, saved in runs.items() if saved}
    if missing := [method for method in methods if method not in labels]:
        problem = f"no {', '.join(missing)}"
    elif others := {name: count for name, count in done.items() if count != steps}:
        problem = f"runs of {', '.join(f'{count} steps ({name})' for name, count in sorted(others.items()))}"
    else:
        return
    raise RopeExtendError(
        f"{output} holds results of another demonstration, with {problem}. Choose another output, or add "
        "--overwrite"
    )


def _print_step(number: int, of: int, text: str) -> None:
    print(f"\n[{number}/{of}] {text}", flush=True)


def _print_command(*words: str) -> None:
    """Print the command line that does the same."""
    print("  $ " + shlex.join(["rope-extend", *words]), flush=True)


def _flags(values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (Recipe.flag_name(name), str(value))]


def _show(rows: Sequence[EvaluationRow], output: Path) -> None:
    """Print the table and its main results."""
    print("\n" + perplexity_table(rows))
    by_label = {row.label: row.result for row in rows}
    plain, trained = by_label.get("none"), rows[0].trained_length
    if plain is not None and trained is not None:
        longest = plain.max_length
        print(
            f"Plain RoPE, untrained: perplexity {plain.within(trained):.1f} within its window of {trained} "
            f"tokens, {plain.beyond(trained):.1f} at the positions beyond it."
        )
        for row in rows:
            if row.adapter is not None and row.method != "none":
                print(
                    f"{row.label}: {row.result.ppl[longest]:.2f} at {longest} tokens; "
                    f"the base model at {trained}: {plain.ppl[trained]:.2f}."
                )
    print(f"\nThe picture: {output / 'perplexity.png'}")
