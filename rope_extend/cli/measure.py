"""Commands that measure: evaluate, retrieve, report, compare."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from rope_extend.cli.arguments import (
    add_existing,
    add_fields,
    add_model_or_config,
    add_output,
    config_of,
    path,
)
from rope_extend.config import flag_values
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import (
    LOAD_FIELDS,
    EvaluationConfig,
    ModelConfig,
    RetrievalConfig,
    StudyConfig,
)
from rope_extend.evaluation.protocols import protocol_help

ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    _add_arguments(parser, EvaluationConfig, "an evaluation")
    parser.epilog = f"protocols, where N is each of the lengths:\n{protocol_help()}"


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure perplexity at every length: methods untrained, and adapters, on the same text.

    The first argument is a checkpoint or a YAML file, such as those in configs/evaluation/. One forward per
    document gives the whole curve. The report has results.jsonl, a table, pictures and report.html. After an
    interruption, the same command with --resume continues. To share the documents among several GPUs:
    torchrun --nproc-per-node N -m rope_extend evaluate ...
    """
    _run(EvaluationConfig, arguments)


def retrieve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `retrieve`."""
    _add_arguments(parser, RetrievalConfig, "a run")


def retrieve(arguments: argparse.Namespace) -> None:
    """Measure retrieval over depth and length: passkeys, needles, RULER-style tasks, on the same prompts.

    The first argument is a checkpoint or a YAML file, such as those in configs/evaluation/. The report has
    prompts.jsonl, results.jsonl, tables with controls, accuracy against length, and heat maps in report.html.
    After an interruption, the same command with --resume continues.
    """
    _run(RetrievalConfig, arguments)


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    _add_arguments(parser, StudyConfig, "a study")


def report(arguments: argparse.Namespace) -> None:
    """Compare methods on your model, from untrained rows to a verdict, in one command.

    The first argument is a checkpoint or a YAML file, such as those in configs/results/. Every row is
    measured on the same documents and prompts, one document at a time. The report begins with a verdict:
    which method to use, or to train. It can be stopped at any time, and the same command with --resume
    continues.
    """
    _run(StudyConfig, arguments)


def _add_arguments(parser: argparse.ArgumentParser, cls: type[ModelConfig], work: str) -> None:
    add_model_or_config(parser, cls)
    parser.add_argument(
        "adapter_paths", nargs="*", metavar="ADAPTER", help="directories of adapters, one row each"
    )
    parser.add_argument(
        "--plan", action="store_true",
        help="print what will be measured, the estimated memory and time, and stop; needs no data or weights",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_existing(parser, work)
    add_fields(parser, cls, LOAD_FIELDS)


def _run(cls: type[ModelConfig], arguments: argparse.Namespace) -> None:
    """Print the plan, or measure, print the tables, and say where the report is."""
    config = model_config(cls, arguments)
    given = config.output and (config.data or cls is RetrievalConfig)
    needs = "--output" if cls is RetrievalConfig else "--data and --output"
    if not given and (arguments.resume or not arguments.plan):
        raise RopeExtendError(
            f"{config.command} needs {needs}; only --plan without --resume estimates without them"
        )
    if arguments.json and not arguments.plan:
        raise RopeExtendError(f"--json belongs to --plan; {config.command} writes results.jsonl")

    from rope_extend.evaluation.cells import holds_cells
    from rope_extend.models.processes import is_main_process, process_count, processes
    from rope_extend.training.launch import check_launch

    if arguments.plan:
        _print_plan(config, resume=arguments.resume, as_json=arguments.json)
        return
    check_launch(process_count())
    assert config.output is not None
    with _says_how_to_resume(config.output):
        shown = _measured(config, arguments.resume, arguments.overwrite)
    if connected := processes(config.load_options().torch_device):
        connected.destroy_process_group()
    if is_main_process():
        print(shown)
        done = holds_cells(config.output)
        print(f"written: {config.output}" if done else "no report is written: nothing is measured yet")


def _measured(config: ModelConfig, resume: bool, overwrite: bool) -> str:
    """Measure; returns the tables, and the verdict of a study."""
    if isinstance(config, StudyConfig):
        from rope_extend.study import compare_methods

        return compare_methods(config, resume=resume, overwrite=overwrite).markdown()
    from rope_extend.evaluation.evaluate import measure
    from rope_extend.evaluation.report_files import markdown_report

    found = measure(config, resume=resume, overwrite=overwrite)
    return markdown_report(found.rows) if found.rows else ""


def _print_plan(config: ModelConfig, *, resume: bool, as_json: bool) -> None:
    from rope_extend.evaluation.measurement import Measurement
    from rope_extend.models.processes import is_main_process

    if isinstance(config, StudyConfig):
        from rope_extend.study import without_needless_methods

        config = without_needless_methods(config)
    measurement = Measurement(config, texts=resume)
    plan = measurement.plan
    work = measurement.work_text(measurement.missing(config.output) if resume and config.output else None)
    if is_main_process():
        if as_json:
            print(json.dumps({**(plan.to_dict() if plan else {}), "work": work.splitlines()}, indent=2))
        else:
            print(*([] if plan is None else [plan]), work, sep="\n")
    if plan is not None:
        plan.check()


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument(
        "runs",
        type=path,
        nargs=2,
        metavar="RUN",
        help="directories of evaluate, retrieve or report; the same one twice compares its rows, with --row",
    )
    parser.add_argument(
        "--row", action="append", default=[], metavar="LABEL",
        help="row to compare: once for both runs, or twice, for the first and the second run (default: all "
        "labels that both runs have)",
    )  # fmt: skip
    add_output(parser, "DIR", "directory for comparison.md and the pictures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def compare(arguments: argparse.Namespace) -> None:
    """Compare rows of two runs on the same tokens and prompts: the difference, and its interval.

    Perplexities are compared document by document, answers prompt by prompt. So the difficulty of a document
    or prompt does not affect the difference. Results on other text or prompts, or of another protocol, are
    refused.
    """
    from rope_extend.evaluation.report_files import compare_saved
    from rope_extend.evaluation.report_parts import comparison_parts
    from rope_extend.report.page import markdown

    found, paths = compare_saved(
        *arguments.runs, rows=arguments.row, output=arguments.output, overwrite=arguments.overwrite
    )
    if arguments.json:
        print(json.dumps([comparison.to_dict() for comparison in found], indent=2))
        return
    print(markdown(comparison_parts(found)))
    if paths:
        print("written:", *paths)


@contextmanager
def _says_how_to_resume(output: str) -> Iterator[None]:
    """If the block is interrupted or fails, and finished parts are on disk, say how to use them.

    Not after an error of this library, which says itself what to do.
    """
    from rope_extend.evaluation.cells import holds_cells
    from rope_extend.models.processes import is_main_process

    try:
        yield
    except RopeExtendError:
        raise
    except BaseException:
        if is_main_process() and holds_cells(output):
            print(
                f"\n{output} keeps what is finished; the same command with --resume continues",
                file=sys.stderr,
            )
        raise


def model_config(cls: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
    """The settings of a command line."""
    values = flag_values(cls, arguments)
    if arguments.adapter_paths:
        if "adapters" in values:
            raise RopeExtendError("adapters are given by position and by --adapters; choose one of them")
        values["adapters"] = arguments.adapter_paths
    return config_of(cls, arguments.model_or_config, values)
