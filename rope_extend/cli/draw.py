"""The command that draws: plot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rope_extend.cli.arguments import add_output, length, methods, path
from rope_extend.errors import RopeExtendError
from rope_extend.files import check_creatable


def plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plot`."""
    kinds = parser.add_subparsers(title="kinds", required=True, metavar="KIND", dest="kind")
    sources = {
        "results": "evaluation directories or results.jsonl files",
        "run": "a run's directory, or its metrics.jsonl or positions.json",
        "model": "a checkpoint's directory or hub id; only its config is read",
    }
    for kind, source, text in (
        ("perplexity", "results", "perplexity against length, from evaluations"),
        ("loss", "results", "loss by position, from evaluations"),
        ("accuracy", "results", "trials solved against length, from retrieval"),
        ("heat-map", "results", "trials solved by depth and length, from retrieval"),
        ("training", "run", "loss against step, from a fine-tuning run"),
        ("distances", "run", "distances seen in training, from a run with sampled positions"),
        ("frequencies", "model", "wavelengths of each method, for a checkpoint"),
    ):
        command = kinds.add_parser(kind, help=text, description=text.capitalize() + ".")
        command.add_argument(
            source, type=path, nargs="+" if source == "results" else None, help=sources[source]
        )
        add_output(command, "FILE", "picture: .png, .svg or .pdf", required=True)
        command.add_argument("--title", help="heading of the picture")
        if kind in ("accuracy", "heat-map"):
            command.add_argument(
                "--task", default="passkey", metavar="NAME", help="retrieval task (default: passkey)"
            )
        if kind == "heat-map":
            command.add_argument("--row", metavar="LABEL", help="row to draw, if the results have several")
        if kind == "frequencies":
            command.add_argument(
                "--target-length", type=length, metavar="N",
                help="target length in tokens (default: 8 times the trained window)",
            )  # fmt: skip
            command.add_argument(
                "--methods", type=methods, metavar="NAME,NAME",
                help="methods (default: all that need only a target length)",
            )  # fmt: skip


def plot(arguments: argparse.Namespace) -> None:
    """Draw pictures from saved results, from a run, or from a checkpoint's config."""
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise RopeExtendError(f"{output} exists; choose another file, or overwrite=True")
    check_creatable(output.parent)
    draw = {
        "perplexity": _plot_perplexity,
        "loss": _plot_perplexity,
        "accuracy": _plot_retrieval,
        "heat-map": _plot_retrieval,
        "training": _plot_run,
        "distances": _plot_run,
        "frequencies": _plot_frequencies,
    }[arguments.kind]
    draw(arguments, output, {"title": arguments.title})
    print("written:", output)


def _plot_perplexity(arguments: argparse.Namespace, output: Path, options: dict[str, Any]) -> None:
    from rope_extend.evaluation.report_files import read_runs
    from rope_extend.plots import curves

    rows = [row for row in read_runs(arguments.results) if row.result]
    draw = curves.plot_perplexity if arguments.kind == "perplexity" else curves.plot_loss_by_position
    draw(rows, output, **options)


def _plot_retrieval(arguments: argparse.Namespace, output: Path, options: dict[str, Any]) -> None:
    from rope_extend.evaluation.report_files import read_runs
    from rope_extend.plots import retrieval_maps

    results = read_runs(arguments.results)
    if arguments.kind == "accuracy":
        retrieval_maps.plot_accuracy(results, arguments.task, output, **options)
        return
    labels = [result.label for result in results]
    row = arguments.row or (labels[0] if len(labels) == 1 else None)
    if row not in labels:
        problem = "the results have several rows" if row is None else f"the results have no row {row!r}"
        raise RopeExtendError(f"{problem}; give --row with one of {', '.join(labels)}")
    retrieval_maps.plot_heat_map(results[labels.index(row)], arguments.task, output, **options)


def _plot_run(arguments: argparse.Namespace, output: Path, options: dict[str, Any]) -> None:
    from rope_extend.plots import training_curves

    run = Path(arguments.run)
    if arguments.kind == "training":
        training_curves.plot_training(run / "metrics.jsonl" if run.is_dir() else run, output, **options)
    else:
        training_curves.plot_distances(run / "positions.json" if run.is_dir() else run, output, **options)


def _plot_frequencies(arguments: argparse.Namespace, output: Path, options: dict[str, Any]) -> None:
    from rope_extend.checkpoint.info import info
    from rope_extend.encodings import RemapEncoding, encoding_class, methods_from_length, rotary_method
    from rope_extend.plots.frequencies import plot_frequencies

    shape = info(arguments.model).shape
    target = arguments.target_length or 8 * shape.trained_length
    # Methods that change positions have the frequencies of plain RoPE.
    static = [name for name in methods_from_length() if not issubclass(encoding_class(name), RemapEncoding)]
    method_names = arguments.methods or static
    encodings = [rotary_method(name).for_target(shape, target) for name in method_names]
    plot_frequencies(encodings, shape, output, seq_len=target, **options)
