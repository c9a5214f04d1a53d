"""The demonstration: the steps that a user takes with any model, on the bundled one."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_extend.checkpoint.card import add_card
from rope_extend.checkpoint.info import info
from rope_extend.checkpoint.manifest import RECORD_NAME
from rope_extend.checkpoint.peft_models import remove_adapter
from rope_extend.data.bundled import MODEL_DIR
from rope_extend.encodings import RopeShape, rotary_method
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.commands import command_words, commands_part, how_it_was_made
from rope_extend.evaluation.controls import regressions
from rope_extend.evaluation.evaluate import evaluate
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.output_directory import RESULTS
from rope_extend.evaluation.perplexity_report import (
    card_results,
    markdown_report,
    read_results,
    write_report,
)
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import default_dtype, pretrained
from rope_extend.training.finetune import FinetuneInterrupted, finetune
from rope_extend.training.recipe import Recipe
from rope_extend.training.resume import check_continues, checkpoints, read_state

DATA = "demo:evaluation"
TITLE = "A model trained on 256 tokens, extended to 2,048"
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
    that window. It shows what fine-tuning gains from the new kind of text alone. Perplexity, passkeys within
    the old window and at the end of the new one, and a sample of text are measured, and the card of each run
    shows them. A demonstration that was interrupted is resumed. Each step prints the command that does the
    same.

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
    if (output / RESULTS).exists() and not overwrite:
        rows = read_results(output)
        steps = steps or Recipe.from_yaml(RECIPE, {"output_dir": str(output)}).steps
        _check_results(rows, output, methods, tuned, steps)
        _show(rows, output)
        print(f"\nThese results were already in {output}. To run the demo again, add --overwrite.")
        return rows
    if overwrite:
        (output / RESULTS).unlink(missing_ok=True)  # first: they are of the runs that are removed now
        shutil.rmtree(output / "runs", ignore_errors=True)

    shared: dict[str, object] = {"model": str(MODEL_DIR)} | ({} if steps is None else {"steps": steps})
    base = Recipe.from_yaml(RECIPE, {**shared, "output_dir": str(output / "runs" / "yarn")})
    shape, target = info(base.model).shape, base.target_length
    trained = shape.trained_length
    # The same number of tokens, in windows of the original length.
    control = {"target_length": trained, "batch_size": base.batch_size * target // trained}
    runs = [(_directory_name(method), _changes(method, shape, target)) for method in tuned]
    runs.append(("control", {"method": "none", **control}))
    model = pretrained(AutoModelForCausalLM, base.model, dtype=default_dtype(LoadOptions().torch_device))
    tokenizer = pretrained(AutoTokenizer, base.model)
    adapters, commands = [], []
    for number, (name, changes) in enumerate(runs, start=1):
        directory = str(output / "runs" / name)
        overrides = {**shared, **changes, "output_dir": directory}
        recipe = Recipe.from_yaml(RECIPE, overrides)
        tokens = recipe.steps * recipe.batch_size * recipe.length
        _print_step(number, len(runs) + 2, f"LoRA, {name}: {tokens:,} tokens in windows of {recipe.length}")
        commands.append(["finetune", str(RECIPE), *_flags(overrides)])
        _print_command(commands[-1])
        finetune_once(recipe, model, tokenizer)
        adapters.append(directory)
    lengths = [trained // 2 * 2**power for power in range(int(math.log2(target / trained)) + 2)]
    config = EvaluationConfig(
        model=base.model,
        data=DATA,
        lengths=tuple(lengths),
        methods=tuple(methods),
        adapters=tuple(adapters),
        max_documents=DOCUMENTS,
        retrieval=TRIALS,
        retrieval_lengths=(target,),
        samples=1,
    )
    _print_step(len(runs) + 1, len(runs) + 2, "perplexity, passkeys and a sample, before and after")
    written = replace(config, output=str(output))
    commands.append(["evaluate", *command_words(written)])
    _print_command(commands[-1])
    with _says_how_to_resume():
        rows = evaluate(config)
    made_by = [commands_part(commands), *how_it_was_made("evaluate", written)[1:]]
    write_report(rows, output, trained_length=trained, title=TITLE, overwrite=True, made_by=made_by)
    _print_step(len(runs) + 2, len(runs) + 2, "the model card of each run, with these results")
    for adapter in adapters:
        _print_command(["card", adapter, "--results", str(output)])
        add_card(adapter, **card_results(rows))
    _show(rows, output)
    return rows


def _directory_name(method: str) -> str:
    """The name of a run's directory: `short_original-yarn` for `short_original(yarn)`."""
    return re.sub(r"[^\w.]+", "-", method).strip("-")


def _changes(method: str, shape: RopeShape, target: int) -> dict[str, object]:
    """The values of a run's recipe that are not those of `RECIPE`."""
    two_tables = rotary_method(method).for_target(shape, target).effects(shape).depends_on_length
    return {"method": method, **({"mixed_windows": True} if two_tables else {})}


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
    with _says_how_to_resume():
        result = finetune(
            recipe, model=model, tokenizer=tokenizer, resume=(directory / "recipe.yaml").exists()
        )
    result.patch.remove()
    remove_adapter(result.model)


@contextmanager
def _says_how_to_resume() -> Iterator[None]:
    """If the block is interrupted, say which command continues."""
    try:
        yield
    except (FinetuneInterrupted, KeyboardInterrupt):
        print("\nThe same command resumes from here; leave --overwrite out if you gave it.")
        raise


def _check_results(
    rows: Sequence[EvaluationRow], output: Path, methods: Sequence[str], tuned: Sequence[str], steps: int
) -> None:
    """Refuse results of a demonstration without one of the methods or runs, or with other steps.

    Raises:
        RopeExtendError: names what the results were made with.
    """
    labels = {row.label for row in rows}
    runs = {path.name: checkpoints(path) for path in (output / "runs").glob("*")}
    done = {name: read_state(saved[-1]).step for name, saved in runs.items() if saved}
    missing = [method for method in methods if method not in labels]
    missing += [f"LoRA run of {method}" for method in tuned if _directory_name(method) not in runs]
    if missing:
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


def _print_command(words: Sequence[str]) -> None:
    """Print the command line that does the same."""
    print("  $ " + shlex.join(["rope-extend", *words]), flush=True)


def _flags(values: dict[str, object]) -> list[str]:
    words = []
    for name, value in values.items():
        words += [Recipe.flag_name(name), *([] if value is True else [str(value)])]
    return words


def _show(rows: Sequence[EvaluationRow], output: Path) -> None:
    """Print the tables and the main results: what the extension gives, and what it costs."""
    print("\n" + markdown_report(rows))
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
    for line in _old_window(rows):
        print(line)
    print(f"\nThe report: {output / 'report.html'}, and its picture: {output / 'perplexity.png'}")


def _old_window(rows: Sequence[EvaluationRow]) -> list[str]:
    """What fine-tuning did to texts and passkeys that fit the old window, in a sentence for each run."""
    said = []
    for change in regressions(rows):
        if change.row.adapter is not None:
            line = f"{change.row.label}, texts of {change.length} tokens: perplexity {change.before:.2f} → "
            line += f"{change.after:.2f}"
            for task, rates in change.retrieval.items():
                line += f", {task} {rates.first.mean:.0%} → {rates.second.mean:.0%}"
            said.append(line + ".")
    return said
