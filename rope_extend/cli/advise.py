"""The command that answers "I want 32k": advise."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rope_extend.advice.gpus import find_gpu
from rope_extend.advice.shipped import check_new, write_recipe
from rope_extend.checkpoint.export.targets import TARGETS
from rope_extend.cli.arguments import argument, checkpoint, export_target, length, path
from rope_extend.cli.flags import in_flags
from rope_extend.errors import RopeExtendError
from rope_extend.models.locating import check_checkpoint


@argument
def gpu(text: str) -> str:
    """A GPU's name or its memory, as it was written."""
    find_gpu(text)
    return text


@argument
def hours(text: str) -> float:
    """A number of hours above 0."""
    try:
        value = float(text)
    except ValueError as error:
        raise RopeExtendError(f"a number of hours, such as 8 or 0.5: {text!r}") from error
    if not 0 < value < float("inf"):
        raise RopeExtendError(f"a number of hours above 0: {text!r}")
    return value


def advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `advise`."""
    parser.add_argument(
        "model", type=checkpoint, help="directory or hub id of a checkpoint; only its config is read"
    )
    parser.add_argument(
        "--target-length", type=length, required=True, metavar="N", help="window that you want, such as 32k"
    )
    parser.add_argument(
        "--gpu", type=gpu, metavar="GPU",
        help="GPU to train on: its name, such as h100 or rtx-4090, or its memory, such as 24GB (default: "
        "80GB)",
    )  # fmt: skip
    parser.add_argument(
        "--hours", type=hours, metavar="N", help="longest training time; needs --gpu with a name"
    )
    parser.add_argument(
        "--engine", type=export_target, metavar="ENGINE",
        help=f"add how to serve the result: {', '.join(TARGETS)}",
    )  # fmt: skip
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="long documents to train on (default: PG-19 from the hub, which are books)",
    )
    parser.add_argument(
        "--trained-length", type=length, metavar="N", help="original context window, if config.json is wrong"
    )
    parser.add_argument("--output", type=path, metavar="FILE", help="write the recipe to this file")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def advise(arguments: argparse.Namespace) -> None:
    """Say how to reach a window: whether to train, the recipe, memory, hours, and how to serve it.

    Only the config is read; no weights are loaded. Memory is estimated by a dry run of the training step, and
    hours follow from its operations and the GPU's peak.
    """
    file = None if arguments.output is None else Path(arguments.output)
    if file is not None:
        check_new(file, overwrite=arguments.overwrite)
    check_checkpoint(arguments.model)  # before torch is imported

    from rope_extend.advice.answer import advise as run
    from rope_extend.advice.describing import describe

    advice = run(
        arguments.model, arguments.target_length, gpu=arguments.gpu, hours=arguments.hours,
        engine=arguments.engine, data=arguments.data, trained_length=arguments.trained_length,
    )  # fmt: skip
    written = None
    if file is not None and advice.recipe:
        write_recipe(file, advice.recipe_yaml())
        written = str(file)
    if arguments.json:
        named = advice.with_recipe_file(written) if written else advice
        print(json.dumps({**named.to_dict(), "recipe_file": written}, indent=2))
        return
    print(in_flags(describe(advice, written), ("--trained-length", "--data")))
    if written:
        print(f"\nwritten: {written}")
    elif file is not None:
        why = (
            "because no step fits the GPU" if advice.memory else f"because the verdict is {advice.verdict!r}"
        )
        print(f"\nnothing is written to {file}: there is no recipe, {why}")
