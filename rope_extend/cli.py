"""The `rope-extend` command: one subcommand per thing a user does, each a thin layer over the library."""

from __future__ import annotations

import argparse
import inspect
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
    from rope_extend.processes import is_main_process

    logging.getLogger("rope_extend").setLevel(logging.INFO if is_main_process() else logging.ERROR)
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
        ("compare", _compare_arguments, compare),
        ("retrieve", _retrieve_arguments, retrieve),
        ("plot", _plot_arguments, plot),
        ("merge", _merge_arguments, merge),
        ("verify", _verify_arguments, verify),
        ("card", _card_arguments, card),
        ("export", _export_arguments, export),
    ):
        text = inspect.getdoc(run) or ""
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
    from rope_extend.hardware import memory_size
    from rope_extend.training.recipe import add_recipe_arguments

    add_recipe_arguments(parser)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in the output directory"
    )
    existing.add_argument("--resume-from", metavar="CHECKPOINT", help="go on from this one")
    existing.add_argument("--overwrite", action="store_true", help="replace a run in the output directory")
    parser.add_argument(
        "--plan", action="store_true",
        help="print what a step takes in memory, lever by lever, and an evaluation, and stop; nothing is "
        "loaded or written",
    )  # fmt: skip
    parser.add_argument(
        "--limit-memory", type=memory_size, metavar="SIZE",
        help="plan with this much memory of the device, such as 80GB (default: what is free)",
    )  # fmt: skip


def finetune(arguments: argparse.Namespace) -> None:
    """Extend a model and adapt it with LoRA, from a YAML recipe, flags, or both.

    The output directory holds the adapter, and beside it rope_extend.json, which says how it reads positions.
    Runs on what accelerate finds; for several GPUs: torchrun --nproc-per-node N scripts/finetune.py ...
    """
    from rope_extend.training.finetune import finetune as run
    from rope_extend.training.finetune import plan
    from rope_extend.training.recipe import recipe_from_arguments

    recipe = recipe_from_arguments(arguments)
    if arguments.plan:
        foretold = plan(recipe, limit_memory=arguments.limit_memory)
        print(foretold)
        foretold.check()
        return
    result = run(
        recipe, resume=arguments.resume_from or arguments.resume, overwrite=arguments.overwrite,
        limit_memory=arguments.limit_memory,
    )  # fmt: skip
    print(f"{result.steps} steps, {result.tokens:,} tokens, {result.seconds:.0f} s: {result.output_dir}")
    if result.skipped:
        print(f"{result.skipped} of the steps were skipped: their loss or gradient was not finite")
    print(f"evaluate it: rope-extend evaluate {recipe.model} {result.output_dir} --data ...")


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    from rope_extend.evaluation.evaluate import RETRIEVAL
    from rope_extend.evaluation.protocols import table
    from rope_extend.hardware import add_hardware_arguments

    parser.add_argument("model", help="a checkpoint's directory or hub id")
    parser.add_argument("adapters", nargs="*", metavar="ADAPTER", help="adapter directories, one row each")
    parser.add_argument(
        "--data", action="append", metavar="SOURCE",
        help="long documents: a directory, glob, file or hub id; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help="such as 4k,8k,32k; the trained window comes with them (default: that and up to 8x it)",
    )
    parser.add_argument(
        "--methods", type=_names, metavar="NAME,NAME",
        help="untrained rows: methods, none for plain RoPE, as-is for the model's own (default: as-is, or no "
        "such row where there are adapters)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="directory of the report")
    parser.add_argument(
        "--plan", action="store_true",
        help="only say what it would take, in memory and time; needs neither data nor weights",
    )  # fmt: skip
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace a report in that directory")
    existing.add_argument(
        "--resume", action="store_true", help="go on with an interrupted evaluation in that directory"
    )
    parser.add_argument("--protocol", default="prefix", metavar="NAME", help="see below (default: prefix)")
    parser.add_argument("--window", type=_length, metavar="N", help="tokens seen, for the protocol cropped")
    parser.add_argument(
        "--stride", type=_length, metavar="N", help="tokens between windows, where it has any"
    )
    parser.add_argument("--last", type=_length, metavar="K", help="targets, for the protocol last-k")
    parser.add_argument(
        "--max-tokens", type=_length, metavar="N", help="cut documents, for protocols that read them whole"
    )
    parser.add_argument(
        "--chunk", type=_length, metavar="N",
        help="read windows in pieces of N tokens, layer by layer (by itself only above 128k tokens, or where "
        "memory is short)",
    )  # fmt: skip
    parser.add_argument(
        "--save-losses", action="store_true", help="write the loss of every token, float32, to losses/*.npz"
    )
    parser.add_argument(
        "--documents", type=int, default=16, metavar="N", help="how many to use (default: 16)"
    )
    parser.add_argument("--text-column", default="text", help="column of the text, in tabular data")
    parser.add_argument("--split", default="train", help="split of a hub dataset")
    parser.add_argument(
        "--trained-length", type=_length, metavar="N", help="where the config is wrong about it"
    )
    parser.add_argument("--no-cropped", action="store_true", help="leave out the rows with cropped context")
    parser.add_argument(
        "--retrieval", type=int, default=RETRIEVAL, metavar="N",
        help="control: N passkeys at each of 5 depths within the trained window, before and after; each row "
        "reads 5 N windows more, at the default what 2.5 documents of 8x the window cost (default: "
        f"{RETRIEVAL}; 0: none)",
    )  # fmt: skip
    add_hardware_arguments(parser)
    parser.epilog = f"protocols, N being each of the lengths:\n{table()}"


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure perplexity at every length: methods untrained, and adapters, on the same text.

    One forward per document gives the whole curve. Writes results.jsonl, a table, pictures and report.html.
    What is done survives an interruption: the same command with --resume goes on. Several GPUs share the
    documents: torchrun --nproc-per-node N -m rope_extend evaluate ...
    """
    import shutil

    from rope_extend.evaluation.evaluate import evaluate as measure
    from rope_extend.evaluation.report import UNFINISHED, check_output, markdown_report, write_report
    from rope_extend.evaluation.variants import AS_IS
    from rope_extend.hardware import Hardware
    from rope_extend.processes import is_main_process, process_count, processes
    from rope_extend.training.launch import check_launch

    methods = arguments.methods if arguments.methods is not None else ([] if arguments.adapters else [AS_IS])
    hardware = Hardware.from_arguments(arguments)
    if arguments.plan:
        _print_plan(arguments, methods, hardware)
        return
    if not (arguments.data and arguments.output):
        raise RopeExtendError("evaluate needs --data and --output; only --plan does without")
    output = check_output(arguments.output, overwrite=arguments.overwrite, resume=arguments.resume)
    unfinished = output / UNFINISHED
    check_launch(process_count())
    together = processes(hardware.place)
    if together:  # all have looked into the directory before anything in it changes
        together.wait_for_everyone()
    if arguments.overwrite and is_main_process():
        shutil.rmtree(unfinished, ignore_errors=True)
    if together:
        together.wait_for_everyone()
    measured = measure(
        arguments.model,
        data=arguments.data if len(arguments.data) > 1 else arguments.data[0],
        lengths=arguments.lengths,
        methods=methods,
        adapters=arguments.adapters,
        protocol=arguments.protocol,
        window=arguments.window,
        stride=arguments.stride,
        last=arguments.last,
        cropped=not arguments.no_cropped,
        retrieval=arguments.retrieval,
        trained_length=arguments.trained_length,
        max_documents=arguments.documents,
        max_tokens=arguments.max_tokens,
        text_column=arguments.text_column,
        split=arguments.split,
        hardware=hardware,
        chunk=arguments.chunk,
        save_losses=arguments.save_losses,
        finished=unfinished,
    )
    try:
        rows = list(measured)
    except KeyboardInterrupt:
        if unfinished.exists():
            print(f"\n{output} keeps what is done; the same command with --resume goes on", file=sys.stderr)
        raise
    if together:
        together.destroy_process_group()
    if not is_main_process():
        return
    trained = rows[0].trained_length
    assert trained is not None
    paths = write_report(rows, output, trained_length=trained, overwrite=arguments.overwrite)
    shutil.rmtree(unfinished, ignore_errors=True)
    print(markdown_report(rows))
    print("written:", *paths)


def _print_plan(arguments: argparse.Namespace, methods: Sequence[str], hardware: Any) -> None:
    from rope_extend.evaluation.evaluate import plan_of
    from rope_extend.evaluation.protocols import protocol
    from rope_extend.processes import is_main_process

    found = plan_of(
        arguments.model, methods, arguments.adapters, lengths=arguments.lengths, hardware=hardware,
        trained_length=arguments.trained_length, chunk=arguments.chunk,
        batched=not (arguments.no_cropped and protocol(arguments.protocol).nested),
    )  # fmt: skip
    if found is None:
        raise RopeExtendError(f"what {arguments.model} takes cannot be foretold without its weights")
    if is_main_process():
        print(found)
    found.check()


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs=2,
        metavar="RUN",
        help="directories of `evaluate` or of `retrieve`; one given twice, with --row",
    )
    parser.add_argument(
        "--row", action="append", default=[], metavar="LABEL",
        help="which rows: one label for both runs, or given twice, the first's and the second's (default: "
        "all labels that both have)",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", help="write comparison.md and the pictures there")
    parser.add_argument("--overwrite", action="store_true", help="replace a comparison in that directory")


def compare(arguments: argparse.Namespace) -> None:
    """Compare rows of two runs on the same tokens or prompts: the difference, and its interval.

    Two evaluations are compared document by document, two runs of retrieval prompt by prompt, so that what is
    hard for both drops out of the difference. Results on other text or prompts, or under another protocol,
    are refused.
    """
    from rope_extend.evaluation.saved_runs import compare_saved

    table, paths = compare_saved(
        *arguments.runs, rows=arguments.row, output=arguments.output, overwrite=arguments.overwrite
    )
    print(table)
    if paths:
        print("written:", *paths)


def _depths(text: str) -> int | list[float]:
    try:
        return int(text) if text.strip().isdecimal() else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a number of depths, or depths from 0 to 1: {text!r}") from error


def _retrieve_arguments(parser: argparse.ArgumentParser) -> None:
    from rope_extend.hardware import add_hardware_arguments

    parser.add_argument("model", help="a checkpoint's directory or hub id")
    parser.add_argument("adapters", nargs="*", metavar="ADAPTER", help="adapter directories, one row each")
    parser.add_argument(
        "--tasks", type=_names, default=["passkey"], metavar="NAME,NAME",
        help="passkey, needle, multi_key, multi_value, variable_tracking, common_words, frequent_words "
        "(default: passkey)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help="of prompt and answer, such as 4k,8k,32k (default: the trained window to 8x it)",
    )
    parser.add_argument(
        "--depths", type=_depths, default=5, metavar="N", help="how many, or which: 0,0.5,1 (default: 5)"
    )
    parser.add_argument(
        "--trials", type=int, default=10, metavar="N", help="prompts at each depth (default: 10)"
    )
    parser.add_argument(
        "--methods", type=_names, metavar="NAME,NAME",
        help="untrained rows: methods, none for plain RoPE, as-is for the model's own (default: as-is, or no "
        "such row where there are adapters)",
    )  # fmt: skip
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the report")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with the run in that directory")
    existing.add_argument("--overwrite", action="store_true", help="replace the run in that directory")
    parser.add_argument(
        "--data", action="append", metavar="SOURCE",
        help="long documents to hide needles in: a directory, glob, file or hub id; may be given again "
        "(default: repeated filler)",
    )  # fmt: skip
    parser.add_argument("--chat", choices=("auto", "on", "off"), default="auto", help="use the chat template")
    parser.add_argument(
        "--template", choices=("published", "demo"),
        help="form of the passkey task (default: published; demo for the bundled model)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument(
        "--batch-tokens", type=_length, default=32_768, metavar="N",
        help="how many tokens of prompts to answer at a time (default: 32k)",
    )  # fmt: skip
    parser.add_argument(
        "--trained-length", type=_length, metavar="N", help="where the config is wrong about it"
    )
    parser.add_argument(
        "--no-controls", action="store_true",
        help="leave out the trained window, before and after, and plain RoPE with cropped context",
    )  # fmt: skip
    add_hardware_arguments(parser)


def retrieve(arguments: argparse.Namespace) -> None:
    """Measure retrieval over depth and length: passkeys, needles, RULER-style tasks, on the same prompts.

    Writes prompts.jsonl, trials.jsonl, results.jsonl, a table with controls, heat maps, accuracy against
    length and report.html. An interrupted run goes on with --resume.
    """
    from rope_extend.evaluation.retrieval_report import retrieval_table
    from rope_extend.evaluation.retrieve import retrieve as measure
    from rope_extend.evaluation.variants import AS_IS
    from rope_extend.hardware import Hardware
    from rope_extend.processes import process_count

    if process_count() > 1:
        raise RopeExtendError("retrieve runs in one process; start it without torchrun or accelerate launch")
    methods = arguments.methods if arguments.methods is not None else ([] if arguments.adapters else [AS_IS])
    results = measure(
        arguments.model,
        output=arguments.output,
        tasks=arguments.tasks,
        lengths=arguments.lengths,
        depths=arguments.depths,
        trials=arguments.trials,
        methods=methods,
        adapters=arguments.adapters,
        data=arguments.data,
        controls=not arguments.no_controls,
        template=arguments.template,
        chat=arguments.chat,
        seed=arguments.seed,
        batch_tokens=arguments.batch_tokens,
        trained_length=arguments.trained_length,
        hardware=Hardware.from_arguments(arguments),
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )
    print(retrieval_table(results))
    print("written:", arguments.output)


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="kinds", required=True, metavar="KIND", dest="kind")
    for kind, what, text in (
        ("perplexity", "results", "perplexity against length, from evaluations"),
        ("loss", "results", "loss by position, from evaluations"),
        ("accuracy", "results", "trials solved against length, from retrieval"),
        ("heat-map", "results", "trials solved over depth and length, from retrieval"),
        ("training", "run", "loss against step, from a fine-tuning run"),
        ("distances", "run", "distances seen in training, from a run with sampled positions"),
        ("frequencies", "model", "each method's wavelengths, for a checkpoint"),
    ):
        one = kinds.add_parser(kind, help=text, description=text.capitalize() + ".")
        many = "+" if what == "results" else None
        helps = {
            "results": "evaluation directories or results.jsonl files",
            "run": "a run's directory, or its metrics.jsonl or positions.json",
            "model": "a checkpoint's directory or hub id; only its config is read",
        }
        one.add_argument(what, nargs=many, help=helps[what])
        one.add_argument("--output", required=True, metavar="FILE", help=".png, .svg or .pdf")
        one.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
        one.add_argument("--title", help="heading")
        if kind in ("accuracy", "heat-map"):
            one.add_argument("--task", default="passkey", metavar="NAME", help="default: passkey")
        if kind == "heat-map":
            one.add_argument("--row", metavar="LABEL", help="where there are several")
        if kind == "frequencies":
            one.add_argument(
                "--target-length", type=_length, metavar="N", help="default: 8x the trained window"
            )
            one.add_argument("--methods", type=_names, metavar="NAME,NAME", help="default: all")
    text = "what each kind of encoding does, as pictures in a directory; needs no model"
    gallery = kinds.add_parser("encodings", help=text, description=text.capitalize() + ".")
    gallery.add_argument("--output", required=True, metavar="DIR", help="directory of the pictures")
    gallery.add_argument("--overwrite", action="store_true", help="replace pictures that exist")


def plot(arguments: argparse.Namespace) -> None:
    """Draw pictures from saved results, from a run, from a checkpoint's config, or of encodings alone."""
    from rope_extend import plots

    output = Path(arguments.output)
    if arguments.kind == "encodings":
        from rope_extend.gallery import draw_gallery

        for path in draw_gallery(output, overwrite=arguments.overwrite):
            print("written:", path)
        return
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
    elif arguments.kind == "distances":
        run = Path(arguments.run)
        plots.plot_distances(run / "positions.json" if run.is_dir() else run, output, **options)
    elif arguments.kind in ("accuracy", "heat-map"):
        from rope_extend.evaluation.retrieval_report import read_retrievals

        found = read_retrievals(arguments.results)
        if arguments.kind == "accuracy":
            plots.plot_accuracy(found, arguments.task, output, **options)
        else:
            labels = [one.label for one in found]
            row = arguments.row or (labels[0] if len(labels) == 1 else None)
            if row not in labels:
                raise RopeExtendError(f"name one of the rows with --row: {', '.join(labels)}; got {row!r}")
            plots.plot_heat_map(found[labels.index(row)], arguments.task, output, **options)
    else:
        from rope_extend.evaluation.report import read_runs

        rows = read_runs(arguments.results)
        trained = next((row.trained_length for row in rows if row.trained_length), None)
        if trained is None:
            raise RopeExtendError("these results do not say the trained window; evaluate again")
        draw = plots.plot_perplexity if arguments.kind == "perplexity" else plots.plot_loss_by_position
        draw(rows, trained, output, **options)
    print("written:", output)


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", help="a LoRA adapter's directory, with its rope_extend.json")
    parser.add_argument("--output", required=True, metavar="DIR", help="directory of the merged checkpoint")
    parser.add_argument("--base-model", metavar="NAME", help="where the record is wrong about it")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: each as in the base model)",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE",
        help="of one file of weights, and about what memory has to hold (default: 5GB)",
    )  # fmt: skip
    parser.add_argument("--no-tokenizer", action="store_true", help="do not write the tokenizer")
    parser.add_argument(
        "--in-memory", action="store_true",
        help="load the whole model: for weights that transformers joins or splits when it loads them",
    )  # fmt: skip
    parser.add_argument(
        "--no-guard", action="store_true",
        help="write a stock config.json even where stock loaders would read it on the old window",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in that directory")


def merge(arguments: argparse.Namespace) -> None:
    """Merge an adapter into its base model: one plain checkpoint, exact, a file of weights at a time.

    What the adapter changes is computed in float32 and rounded once; all else is the base model's own bits.
    """
    import torch

    from rope_extend.checkpoint.merging import merge as run

    path = run(
        arguments.adapter, arguments.output, base_model=arguments.base_model, overwrite=arguments.overwrite,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        max_shard_size=arguments.max_shard_size, tokenizer=not arguments.no_tokenizer,
        in_memory=arguments.in_memory, guard=not arguments.no_guard,
    )  # fmt: skip
    print("written:", path)
    print(f"verify it: rope-extend verify {path}")


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="a checkpoint with its rope_extend.json")
    parser.add_argument("--base-model", metavar="NAME", help="of an adapter, where the record is wrong")
    parser.add_argument(
        "--reference", metavar="DIR", help="what it is compared with, such as the adapter (default: itself)"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="on logits (default: 1e-4)")
    parser.add_argument("--length", type=_length, metavar="N", help="window to try (default: the target)")


def verify(arguments: argparse.Namespace) -> None:
    """Check that a checkpoint reads in stock transformers, in a process without rope_extend, as it does here.

    Compares logits inside and beyond the pretrained window, writes verification.json, and fails if they do
    not agree.
    """
    from rope_extend.checkpoint.verifying import VERIFICATION_NAME
    from rope_extend.checkpoint.verifying import verify as run

    found = run(
        arguments.directory, base_model=arguments.base_model, reference=arguments.reference,
        tolerance=arguments.tolerance, length=arguments.length,
    )  # fmt: skip
    for where, gap in (("inside", found.inside), ("beyond", found.beyond)):
        if gap is not None:
            print(f"greatest difference of a logit {where} the pretrained window: {gap:.2g}")
    print("written:", Path(arguments.directory) / VERIFICATION_NAME)
    print(found.check())


def _card_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="an adapter or a checkpoint, with its rope_extend.json")
    parser.add_argument("--results", metavar="FILE", help="results.jsonl of an evaluation, or its directory")
    parser.add_argument("--data", action="append", metavar="SOURCE", help="what it was trained on")
    parser.add_argument("--name", help="what the card's lines call it, such as its hub id")


def card(arguments: argparse.Namespace) -> None:
    """Write the model card: method, windows, perplexity, limits, and the lines that load it rightly.

    A README.md that somebody wrote or edited is not replaced.
    """
    from rope_extend.checkpoint.card import CARD_NAME, write_card

    path = write_card(
        arguments.directory, results=arguments.results, data=arguments.data, name=arguments.name
    )
    if path is None:
        raise RopeExtendError(
            f"{Path(arguments.directory) / CARD_NAME} was written or edited by somebody; move it away first"
        )
    print("written:", path)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", help="an adapter, which is merged first, or a full checkpoint"
    )
    parser.add_argument(
        "--to", default="transformers", metavar="TARGET", help="transformers, vllm, sglang or llama.cpp"
    )
    parser.add_argument("--output", metavar="DIR", help="directory of the export")
    parser.add_argument(
        "--gguf", metavar="FILE", help="for llama.cpp: what its convert_hf_to_gguf.py made of the weights"
    )
    parser.add_argument(
        "--base-model", metavar="NAME", help="of an adapter, where the record is wrong about it"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in that directory")
    parser.add_argument("--no-verify", action="store_true", help="do not compare it with the original")
    parser.add_argument(
        "--support", action="store_true",
        help="print what is possible, for a checkpoint or for all methods, and write nothing",
    )  # fmt: skip


def export(arguments: argparse.Namespace) -> None:
    """Write a checkpoint in the form that transformers, vLLM, SGLang or llama.cpp reads, or say why not.

    The result needs no rope_extend where it is read. It is compared with the original before it appears.
    """
    from rope_extend.checkpoint import exporting, read_record
    from rope_extend.encodings import RopeShape

    if arguments.support and arguments.directory:
        record = read_record(arguments.directory)
        print(
            exporting.support_table(
                [record.encoding], record.shape, model_type=record.model_type,
                target_length=record.target_length,
            )
        )  # fmt: skip
    elif arguments.support:
        shape = RopeShape(dim=8, theta=10_000.0, trained_length=4096)
        print(exporting.support_table(list(exporting.examples(shape, 32_768)), shape, target_length=32_768))
    elif not (arguments.directory and arguments.output):
        raise RopeExtendError("export takes a checkpoint's directory and --output, or --support")
    else:
        path = exporting.export(
            arguments.directory, arguments.output, arguments.to, overwrite=arguments.overwrite,
            verify=not arguments.no_verify, base_model=arguments.base_model, gguf=arguments.gguf,
        )  # fmt: skip
        print("written:", path)


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
