"""Commands that measure: evaluate, retrieve, report, compare and lm-eval."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from rope_extend.cli.arguments import (
    OTHERS,
    add_base_model,
    add_json,
    add_output,
    add_settings,
    checkpoint,
    length,
    lengths,
    one_method,
    path,
)
from rope_extend.config import from_arguments
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import (
    EvaluationConfig,
    ModelConfig,
    RetrievalConfig,
    StudyConfig,
)
from rope_extend.evaluation.protocols import protocol_help
from rope_extend.files import check_new, write_text
from rope_extend.models.locating import check_checkpoint

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
PLAN = "the estimated memory and time of each length, which need no weights, and with --data of all"


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, EvaluationConfig, "an evaluation", PLAN)
    add_json(parser, "print the plan as JSON")
    parser.epilog = f"protocols, where N is each of the lengths:\n{protocol_help()}"


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure perplexity at every length: methods untrained, and adapters, on the same text.

    The first argument is a checkpoint or a YAML file, such as those in configs/evaluation/. One forward per
    document gives the whole curve. The report has results.jsonl, a table, pictures and report.html. After an
    interruption, the same command with --resume continues. To share the documents among several GPUs:
    torchrun --nproc-per-node N -m rope_extend evaluate ...
    """
    config = model_config(EvaluationConfig, arguments)
    if arguments.json and not arguments.plan:
        raise RopeExtendError("--json belongs to --plan; an evaluation writes results.jsonl")
    _measure(config, arguments)


def _retrieve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, RetrievalConfig, "a run", "")


def retrieve(arguments: argparse.Namespace) -> None:
    """Measure retrieval over depth and length: passkeys, needles, many-shot learning, on the same prompts.

    The first argument is a checkpoint or a YAML file, such as those in configs/evaluation/. The report has
    prompts.jsonl, results.jsonl, tables with controls, accuracy against length, and heat maps in report.html.
    After an interruption, the same command with --resume continues.
    """
    config = model_config(RetrievalConfig, arguments)
    if not config.output:
        raise RopeExtendError("retrieve needs --output, the directory of the report")
    _measure(config, arguments)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    _add_settings(parser, StudyConfig, "a report", PLAN)


def report(arguments: argparse.Namespace) -> None:
    """Compare methods on your model, from untrained rows to a verdict, in one command.

    The first argument is a checkpoint or a YAML file, such as those in configs/results/. Every row is
    measured on the same documents and prompts, one document at a time. The report begins with a verdict:
    which method to use, or to train. It can be stopped at any time, and the same command with --resume
    continues.
    """
    _measure(model_config(StudyConfig, arguments), arguments)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    text = "directories of reports; the same one twice compares its rows, with --row"
    parser.add_argument("runs", type=path, nargs="*", metavar="RUN", help=text)
    text = (
        "row to compare: once for both runs, or twice, for the first and the second run (default: all labels "
        "that both runs have)"
    )
    parser.add_argument("--row", action="append", default=[], metavar="LABEL", help=text)
    add_output(parser, "FILE", "file for the tables, as Markdown")
    add_json(parser, "print JSON instead of tables")


def compare(arguments: argparse.Namespace) -> None:
    """Compare rows of two runs on the same tokens or prompts: the difference, and its interval.

    Perplexities are compared document by document, answers prompt by prompt. So the difficulty of a document
    or prompt does not affect the difference. Results on other text or prompts, or of another protocol, are
    refused.
    """
    from rope_extend.evaluation.report_files import compare_saved
    from rope_extend.evaluation.report_parts import comparison_parts
    from rope_extend.report.page import markdown

    if len(arguments.runs) != 2:
        raise RopeExtendError(
            f"compare needs two runs, and got {len(arguments.runs)}; to compare two rows of one run, give it "
            "twice: compare RUN RUN --row LABEL --row LABEL"
        )
    if arguments.output:
        check_new(Path(arguments.output), overwrite=arguments.overwrite)
    first, second = arguments.runs
    found = compare_saved(first, second, arguments.row)
    text = markdown(comparison_parts(found))
    print(json.dumps([comparison.to_dict() for comparison in found], indent=2) if arguments.json else text)
    if arguments.output:
        write_text(Path(arguments.output), text)
        print("written:", arguments.output, file=sys.stderr if arguments.json else sys.stdout)


def _add_settings(parser: argparse.ArgumentParser, cls: type[ModelConfig], work: str, plan: str) -> None:
    """Add the settings of a measurement, and adapters after the model."""
    add_settings(parser, cls, work, plan)
    text = "directories of adapters, one row each"
    parser.add_argument("adapter_paths", nargs="*", metavar="ADAPTER", help=text)


def model_config(cls: type[ConfigT], arguments: argparse.Namespace) -> ConfigT:
    """The settings of a command line.

    Raises:
        RopeExtendError: adapters or models are given twice, or the settings are wrong.
    """
    adapters = arguments.adapter_paths
    if adapters and arguments.adapters:
        raise RopeExtendError("adapters are given by position and by --adapters; choose one of them")
    return from_arguments(cls, arguments, implied={"adapters": adapters} if adapters else {})


def _measure(config: ModelConfig, arguments: argparse.Namespace) -> None:
    """Measure in one process or several and print the table, or print the plan alone.

    If it is interrupted or fails, and finished parts are on disk, a line says how to use them. An error of
    this library says itself what to do.
    """
    plan = getattr(arguments, "plan", False)
    if isinstance(config, EvaluationConfig | StudyConfig) and not (config.data and config.output):
        if not plan:
            raise RopeExtendError(
                f"{config.command} needs --data and --output, or --plan for an estimate without "
                f"them\nSee `rope-extend {config.command} --help`."
            )
        if arguments.resume:
            raise RopeExtendError("--plan --resume needs --data and --output, to see what is finished")
    if plan:
        _print_plan(config, arguments)
        return

    from rope_extend.evaluation.cells import our_parts
    from rope_extend.evaluation.evaluate import compare_methods, measure
    from rope_extend.evaluation.output_directory import RESULTS
    from rope_extend.models.launch import check_launch
    from rope_extend.models.load_options import LoadOptions
    from rope_extend.models.processes import is_main_process, process_count, processes

    run: Any = compare_methods if isinstance(config, StudyConfig) else measure
    check_launch(process_count())
    output = str(config.output)
    try:
        found = run(config, resume=arguments.resume, overwrite=arguments.overwrite)
    except RopeExtendError:
        raise
    except BaseException:
        if is_main_process() and our_parts(output):
            how = "keeps what is finished; the same command with --resume continues"
            print(f"\n{output} {how}", file=sys.stderr)
        raise
    if connected := processes(LoadOptions.of(config).torch_device):
        connected.destroy_process_group()
    if is_main_process():
        print(found.markdown())
        none = "no report is written: nothing is measured yet"
        print(f"written: {output}" if (Path(output) / RESULTS).exists() else none)


def _print_plan(config: ModelConfig, arguments: argparse.Namespace) -> None:
    """Print the estimated memory and time, and with data the work: with `--resume` what is missing."""
    from rope_extend.evaluation.measurement import Measurement
    from rope_extend.models.processes import is_main_process

    measurement = Measurement(config, texts=False)
    fits = measurement.plan is None or measurement.plan.longest_fit is None
    if config.data and fits:  # else the plan says what does not fit, without the work
        measurement = Measurement(config, progress=False)
    cells = measurement.missing(config.output) if arguments.resume and config.output else measurement.cells()
    work, plan = measurement.work_text(cells).splitlines() if config.data and fits else [], measurement.plan
    if plan is None:
        raise RopeExtendError(f"cannot estimate the memory of {config.model}; run it without --plan")
    if is_main_process():
        text = "\n".join([str(plan), *work])
        as_json = getattr(arguments, "json", False)
        print(json.dumps({**plan.to_dict(), "work": work}, indent=2) if as_json else text)
    plan.check()


def _lm_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    parser.set_defaults(**{OTHERS: []})
    add = parser.add_argument
    add(
        "model", type=checkpoint, help="a run of finetune, a checkpoint's directory, a GGUF file, or a hub id"
    )
    text = "lengths in tokens of tasks that make their own prompts, such as ruler"
    add("--lengths", type=lengths, default=[], metavar="N,N", help=text)
    add("--method", type=one_method, metavar="NAME", help="extend the model by this method, without training")
    text = "window for --method (default: the longest of --lengths)"
    add("--target-length", type=length, metavar="N", help=text)
    add_base_model(parser)
    parser.epilog = "All other arguments go to the harness: --tasks, --limit, --apply_chat_template, ..."


def lm_eval(arguments: argparse.Namespace) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness, such as RULER, LongBench and BABILong.

    The model comes first. It is loaded with its adapter and its encoding, long prompts are processed in
    chunks, and scoring never holds the logits of the whole window. Requests are scored one at a time.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise RopeExtendError("lm-eval needs EleutherAI's harness: pip install 'lm_eval[ruler,longbench]'")
    target = arguments.target_length or max(arguments.lengths, default=None)
    if arguments.method is not None and target is None:
        raise RopeExtendError(
            f"--method {arguments.method} needs a window to extend to; give --target-length"
        )
    if arguments.method is None and arguments.target_length is not None:
        raise RopeExtendError("--target-length is the window for --method; give both, or neither")
    check_checkpoint(arguments.model)  # before torch is imported

    from rope_extend.evaluation.harness import run_harness

    given = {"pretrained": arguments.model, "base_model": arguments.base_model}
    if arguments.method is not None:
        given |= {"method": arguments.method, "target_length": target}
    run_harness(given, arguments.lengths, arguments.others)
