"""Commands that measure: evaluate, retrieve, compare."""

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
)
from rope_extend.evaluation.protocols import protocol_help

ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add_model_arguments(parser, EvaluationConfig)
    parser.add_argument(
        "--plan", action="store_true",
        help="print the estimated memory and time, and stop; needs neither --data nor weights",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_existing(parser, "an evaluation")
    add_fields(parser, EvaluationConfig, LOAD_FIELDS)
    parser.epilog = f"protocols, where N is each of the lengths:\n{protocol_help()}"


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure perplexity at every length: methods untrained, and adapters, on the same text.

    The first argument is a checkpoint or a YAML file, such as those in configs/evaluation/. One forward per
    document gives the whole curve. The report has results.jsonl, a table, pictures and report.html. After an
    interruption, the same command with --resume continues. To share the documents among several GPUs:
    torchrun --nproc-per-node N -m rope_extend evaluate ...
    """
    config = model_config(EvaluationConfig, arguments)
    if not arguments.plan and not (config.data and config.output):
        raise RopeExtendError("evaluate needs --data and --output, or --plan for an estimate without them")
    if arguments.json and not arguments.plan:
        raise RopeExtendError("--json belongs to --plan; an evaluation writes results.jsonl")

    from rope_extend.evaluation.evaluate import evaluate as run
    from rope_extend.evaluation.measurement import Measurement
    from rope_extend.evaluation.perplexity_report import markdown_report
    from rope_extend.models.processes import is_main_process, process_count, processes
    from rope_extend.training.launch import check_launch

    if arguments.plan:
        if arguments.resume and not (config.data and config.output):
            raise RopeExtendError("--plan --resume needs --data and --output, to see what is finished")
        measurement = Measurement(config, texts=arguments.resume)
        plan = measurement.plan
        if plan is None:
            raise RopeExtendError(f"cannot estimate the memory of {config.model}; run it without --plan")
        missing = measurement.missing(config.output) if arguments.resume and config.output else None
        work = measurement.work_text(missing)
        if is_main_process():
            if arguments.json:
                print(json.dumps({**plan.to_dict(), "work": work.splitlines()}, indent=2))
            else:
                print(plan)
                print(work)
        plan.check()
        return
    check_launch(process_count())
    assert config.output is not None
    with says_how_to_resume(config.output):
        rows = run(config, resume=arguments.resume, overwrite=arguments.overwrite)
    if connected := processes(config.load_options().torch_device):
        connected.destroy_process_group()
    if is_main_process():
        print(markdown_report(rows))
        print("written:", config.output)


def retrieve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `retrieve`."""
    add_model_arguments(parser, RetrievalConfig)
    add_existing(parser, "a run")
    add_fields(parser, RetrievalConfig, LOAD_FIELDS)


def retrieve(arguments: argparse.Namespace) -> None:
    """Measure retrieval over depth and length: passkeys, needles, RULER-style tasks, on the same prompts.

    The first argument is a checkpoint or a YAML file, such as those in configs/evaluation/. The report has
    prompts.jsonl, cells.jsonl, results.jsonl, a table with controls, heat maps, accuracy against length and
    report.html. After an interruption, the same command with --resume continues.
    """
    config = model_config(RetrievalConfig, arguments)
    if not config.output:
        raise RopeExtendError("retrieve needs --output, the directory of the report")

    from rope_extend.evaluation.retrieval_report import retrieval_table
    from rope_extend.evaluation.retrieve import retrieve as run
    from rope_extend.models.processes import is_main_process, process_count, processes
    from rope_extend.training.launch import check_launch

    check_launch(process_count())
    with says_how_to_resume(config.output):
        results = run(config, resume=arguments.resume, overwrite=arguments.overwrite)
    if connected := processes(config.load_options().torch_device):
        connected.destroy_process_group()
    if is_main_process():
        print(retrieval_table(results))
        print("written:", config.output)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument(
        "runs",
        type=path,
        nargs=2,
        metavar="RUN",
        help="directories of evaluate or of retrieve; the same one twice compares its rows, with --row",
    )
    parser.add_argument(
        "--row", action="append", default=[], metavar="LABEL",
        help="row to compare: once for both runs, or twice, for the first and the second run (default: all "
        "labels that both runs have)",
    )  # fmt: skip
    add_output(parser, "DIR", "directory for comparison.md and the pictures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def compare(arguments: argparse.Namespace) -> None:
    """Compare rows of two runs on the same tokens or prompts: the difference, and its interval.

    Two evaluations are compared document by document, two retrieval runs prompt by prompt. So the difficulty
    of a document or prompt does not affect the difference. Results on other text or prompts, or of another
    protocol, are refused.
    """
    from rope_extend.evaluation.saved_runs import compare_saved, comparison_values

    table, paths = compare_saved(
        *arguments.runs, rows=arguments.row, output=arguments.output, overwrite=arguments.overwrite
    )
    if arguments.json:
        print(json.dumps(comparison_values(*arguments.runs, rows=arguments.row), indent=2))
        return
    print(table)
    if paths:
        print("written:", *paths)


@contextmanager
def says_how_to_resume(output: str) -> Iterator[None]:
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


def add_model_arguments(parser: argparse.ArgumentParser, cls: type[ModelConfig]) -> None:
    """Add the checkpoint or YAML file, and the adapters."""
    add_model_or_config(parser, cls)
    parser.add_argument(
        "adapter_paths", nargs="*", metavar="ADAPTER", help="directories of adapters, one row each"
    )


def model_config(cls: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
    """The settings of a command line."""
    values = flag_values(cls, arguments)
    if arguments.adapter_paths:
        if "adapters" in values:
            raise RopeExtendError("adapters are given by position and by --adapters; choose one of them")
        values["adapters"] = arguments.adapter_paths
    return config_of(cls, arguments.model_or_config, values)
