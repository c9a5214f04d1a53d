"""The `rope-extend` command: one subcommand per thing a user does, each a thin layer over the library."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rope_extend.errors import RopeExtendError

Command = Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 2 after a user's mistake and with 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("rope_extend").setLevel(logging.INFO)
    # peft calls by its old name what transformers has renamed; there is nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    command: Command = arguments.command
    try:
        command(arguments)
    except RopeExtendError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `rope-extend methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    print(f"rope-extend: error: {message}", file=sys.stderr)
    sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rope-extend",
        description="Make pretrained Llama-style models read further than they were trained to.",
    )
    from rope_extend import __version__

    parser.add_argument("--version", action="version", version=f"rope-extend {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, describe, run in (
        ("demo", _demo_arguments, demo),
        ("methods", _methods_arguments, methods),
        ("families", _families_arguments, families),
        ("info", _info_arguments, info),
        ("finetune", _finetune_arguments, finetune),
        ("evaluate", _evaluate_arguments, evaluate),
        ("plot", _plot_arguments, plot),
    ):
        text = (run.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        describe(command)
        command.set_defaults(command=run)
    return parser


# ---------------------------------------------------------------------------------------------------------
# What there is


def _methods_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")


def _follows_length(cls: type[Any]) -> bool:
    """Whether a method's table changes with the length; for one that goes around another, by itself."""
    value = getattr(cls, "depends_on_length", False)
    return value if isinstance(value, bool) else bool(cls().depends_on_length)


def methods(arguments: argparse.Namespace) -> None:
    """List the position encodings: what each is, its parameters, and its source."""
    from rope_extend.encodings import encoding_class, encodings

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": cls.parameters(),
            "depends_on_length": _follows_length(cls),
            "paper": cls.paper,
            "summary": cls.summary(),
        }
        for name in encodings()
        for cls in [encoding_class(name)]
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['name']}\n    {row['summary']}")
        print(f"    parameters: {', '.join(row['parameters']) or 'none'}; source: {row['paper']}")


def _families_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")


def families(arguments: argparse.Namespace) -> None:
    """List the model families that can be patched, by the `model_type` in their config.json."""
    from rope_extend.families import adapter_for, supported_families

    rows = {name: adapter_for(name).note for name in supported_families()}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows))
    print(f"{'model_type':<{width}}  rotates")
    for name, note in rows.items():
        print(f"{name:<{width}}  {note}")


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint's directory or hub id; only its config is read")
    parser.add_argument(
        "--target-length",
        type=_length,
        metavar="N",
        help="a window, such as 32k (default: 8x the trained one)",
    )
    parser.add_argument(
        "--trained-length", type=_length, metavar="N", help="where the config does not say which it was"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")


def info(arguments: argparse.Namespace) -> None:
    """Say what position encoding a checkpoint has, and what each method would do to it.

    Reads the config alone: no weights are loaded. The columns of the table:
      resolution  the fastest channel's frequency against the trained one; 1/8 squeezes 8 positions into one
      kept        share of channel pairs that turn as in training
      unseen      how much further the slow channels turn at the target than they ever did in training;
                  above 1.00 the model meets angles it has never seen
      attention   factor on cos and sin
      stock       the rope_type under which stock transformers loads it
    """
    from dataclasses import asdict

    from rope_extend.data import format_length
    from rope_extend.info import info as inspect_model

    found = inspect_model(arguments.model, trained_length=arguments.trained_length)
    target = arguments.target_length or 8 * found.shape.trained_length
    effects = found.effects(target)
    if arguments.json:
        rows = [asdict(effect) for effect in effects]
        print(json.dumps({**found.to_dict(), "target_length": target, "effects": rows}, indent=2))
        return
    shape = found.shape
    print(f"family          {found.model_type}")
    print(f"encoding        {found.encoding or 'not one that rope_extend knows'}")
    print(f"rope_parameters {found.rope_parameters}")
    print(f"trained window  {shape.trained_length} tokens; the config claims {found.window}")
    print(f"rotated         {shape.dim} of {found.head_dim} channels per head, base {shape.theta:g}")
    print(f"slow channels   {found.slow_channels} of {shape.dim // 2} pairs never turned once in training")
    if found.record:
        print(f"extended by rope_extend to {found.record['target_length']} tokens")
    print(f"\nread at {format_length(target)} tokens, {target / shape.trained_length:g}x the trained window:")
    width = max(len(effect.encoding) for effect in effects)
    print(f"{'method':<{width}}  resolution  kept  unseen  attention  stock")
    for effect in effects:
        print(
            f"{effect.encoding:<{width}}  {effect.resolution:>10.3f}  {effect.kept:>4.0%}  "
            f"{effect.unseen:>6.2f}  {effect.attention_factor:>9.3f}  {effect.native or 'no'}"
        )


def _length(text: str) -> int:
    from rope_extend.data import parse_length

    try:
        return parse_length(text)
    except RopeExtendError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _lengths(text: str) -> list[int]:
    return [_length(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# ---------------------------------------------------------------------------------------------------------
# What is done


def _finetune_arguments(parser: argparse.ArgumentParser) -> None:
    from rope_extend.recipe import add_recipe_arguments

    add_recipe_arguments(parser)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in the output directory"
    )
    existing.add_argument("--resume-from", metavar="CHECKPOINT", help="go on from this one")
    existing.add_argument("--overwrite", action="store_true", help="replace a run in the output directory")


def finetune(arguments: argparse.Namespace) -> None:
    """Extend a model and adapt it with LoRA, from a YAML recipe, flags, or both.

    The output directory holds the adapter, and beside it rope_extend.json, which says how it reads positions.
    Runs on what accelerate finds; for several GPUs: torchrun --nproc-per-node N scripts/finetune.py ...
    """
    from rope_extend.finetune import finetune as run
    from rope_extend.recipe import recipe_from_arguments

    recipe = recipe_from_arguments(arguments)
    result = run(recipe, resume=arguments.resume_from or arguments.resume, overwrite=arguments.overwrite)
    print(f"{result.steps} steps, {result.tokens:,} tokens, {result.seconds:.0f} s: {result.output_dir}")
    print(f"evaluate it: rope-extend evaluate {recipe.model} {result.output_dir} --data ...")


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint's directory or hub id")
    parser.add_argument("adapters", nargs="*", metavar="ADAPTER", help="adapter directories, one row each")
    parser.add_argument(
        "--data", required=True, action="append", metavar="SOURCE",
        help="long documents: a directory, glob, file or hub id; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help="such as 4k,8k,32k (default: the trained window to 8x it)",
    )
    parser.add_argument(
        "--methods", type=_names, metavar="NAME,NAME",
        help="untrained rows: methods, none for plain RoPE, as-is for the model's own (default: as-is, or no "
        "such row where there are adapters)",
    )  # fmt: skip
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the report")
    parser.add_argument("--overwrite", action="store_true", help="replace a report in that directory")
    parser.add_argument(
        "--documents", type=int, default=16, metavar="N", help="how many to use (default: 16)"
    )
    parser.add_argument("--text-column", default="text", help="column of the text, in tabular data")
    parser.add_argument("--split", default="train", help="split of a hub dataset")
    parser.add_argument(
        "--trained-length", type=_length, metavar="N", help="where the config is wrong about it"
    )
    parser.add_argument("--no-cropped", action="store_true", help="leave out the rows with cropped context")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--device", help="such as cuda:1 (default: the GPU, if there is one)")


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure perplexity at every length: methods untrained, and adapters, on the same text.

    One forward per document gives the whole curve. Writes results.jsonl, a table and pictures.
    """
    import torch

    from rope_extend.evaluation.evaluate import AS_IS
    from rope_extend.evaluation.evaluate import evaluate as measure
    from rope_extend.evaluation.report import check_output, markdown_table, write_report

    check_output(arguments.output, overwrite=arguments.overwrite)
    methods = arguments.methods if arguments.methods is not None else ([] if arguments.adapters else [AS_IS])
    rows = list(
        measure(
            arguments.model,
            data=arguments.data if len(arguments.data) > 1 else arguments.data[0],
            lengths=arguments.lengths,
            methods=methods,
            adapters=arguments.adapters,
            cropped=not arguments.no_cropped,
            trained_length=arguments.trained_length,
            max_documents=arguments.documents,
            text_column=arguments.text_column,
            split=arguments.split,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            device=arguments.device,
        )
    )
    trained = rows[0].trained_length
    assert trained is not None
    paths = write_report(rows, arguments.output, trained_length=trained, overwrite=arguments.overwrite)
    print(markdown_table(rows))
    print("written:", *paths)


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="kinds", required=True, metavar="KIND", dest="kind")
    for kind, what, text in (
        ("perplexity", "results", "perplexity against length, from evaluations"),
        ("loss", "results", "loss by position, from evaluations"),
        ("training", "run", "loss against step, from a fine-tuning run"),
        ("frequencies", "model", "each method's wavelengths, for a checkpoint"),
    ):
        one = kinds.add_parser(kind, help=text, description=text.capitalize() + ".")
        many = "+" if what == "results" else None
        helps = {
            "results": "evaluation directories or results.jsonl files",
            "run": "a run's directory or metrics.jsonl",
            "model": "a checkpoint's directory or hub id; only its config is read",
        }
        one.add_argument(what, nargs=many, help=helps[what])
        one.add_argument("--output", required=True, metavar="FILE", help=".png, .svg or .pdf")
        one.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
        one.add_argument("--title", help="heading")
        if kind == "frequencies":
            one.add_argument(
                "--target-length", type=_length, metavar="N", help="default: 8x the trained window"
            )
            one.add_argument("--methods", type=_names, metavar="NAME,NAME", help="default: all")


def plot(arguments: argparse.Namespace) -> None:
    """Draw pictures from saved results, from a run, or from a checkpoint's config alone."""
    from rope_extend import plots

    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise RopeExtendError(f"{output} exists; choose another file, or --overwrite")
    options: dict[str, Any] = {"title": arguments.title}
    if arguments.kind == "frequencies":
        from rope_extend.encodings import dialled_methods, rotary_method
        from rope_extend.info import info as inspect_model

        shape = inspect_model(arguments.model).shape
        target = arguments.target_length or 8 * shape.trained_length
        names = arguments.methods or dialled_methods()
        rotary = [rotary_method(name).for_target(shape, target) for name in names]
        plots.plot_frequencies(rotary, shape, output, seq_len=target, **options)
    elif arguments.kind == "training":
        run = Path(arguments.run)
        plots.plot_training(run / "metrics.jsonl" if run.is_dir() else run, output, **options)
    else:
        from rope_extend.evaluation.report import read_results

        rows = [row for path in arguments.results for row in read_results(path)]
        trained = next((row.trained_length for row in rows if row.trained_length), None)
        if trained is None:
            raise RopeExtendError("these results do not say the trained window; evaluate again")
        draw = plots.plot_perplexity if arguments.kind == "perplexity" else plots.plot_loss_by_position
        draw(rows, trained, output, **options)
    print("written:", output)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        default="demo-output",
        metavar="DIR",
        help="directory of the results (default: demo-output)",
    )
    parser.add_argument(
        "--methods", type=_names, metavar="NAME,NAME",
        help="which to compare (default: none,linear,ntk,yarn)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="LoRA steps of each method")
    parser.add_argument(
        "--overwrite", action="store_true", help="start over in a directory that holds results"
    )


def demo(arguments: argparse.Namespace) -> None:
    """Extend the bundled model 8x: perplexity at every length before and after a short LoRA run.

    Needs no network and no GPU. An interrupted demo goes on where it stopped.
    """
    from rope_extend.demo.run import METHODS, run_demo

    run_demo(
        arguments.output,
        methods=arguments.methods or METHODS,
        steps=arguments.steps,
        overwrite=arguments.overwrite,
    )
