"""The command `report`: from untrained methods to a verdict on a model."""

from __future__ import annotations

import argparse

from rope_extend.cli.arguments import add_existing, add_fields
from rope_extend.cli.measure import add_model_arguments, model_config, says_how_to_resume
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import LOAD_FIELDS
from rope_extend.study.study_config import StudyConfig


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    add_model_arguments(parser, StudyConfig)
    parser.add_argument(
        "--plan", action="store_true", help="print what will be measured and the estimated time, and stop"
    )
    add_existing(parser, "a study")
    add_fields(parser, StudyConfig, LOAD_FIELDS)


def report(arguments: argparse.Namespace) -> None:
    """Compare methods on your model, from untrained rows to a verdict, in one command.

    The first argument is a checkpoint or a YAML file, such as those in configs/results/. Every row is
    measured on the same documents and prompts, one document at a time. The report begins with a verdict:
    which method to use, or to train. It can be stopped at any time, and the same command with --resume
    continues.
    """
    config = model_config(StudyConfig, arguments)
    if not arguments.plan and not (config.data and config.output):
        raise RopeExtendError("report needs --data and --output, or --plan for an estimate without them")
    if arguments.resume and not (config.data and config.output):
        raise RopeExtendError("report --plan --resume needs --data and --output, to see what is finished")

    from rope_extend.evaluation.measurement import Measurement
    from rope_extend.models.processes import is_main_process, process_count, processes
    from rope_extend.study.reporting import compare_methods, without_needless_methods
    from rope_extend.training.launch import check_launch

    if arguments.plan:
        measurement = Measurement(without_needless_methods(config), texts=arguments.resume)
        missing = measurement.missing(config.output) if arguments.resume and config.output else None
        print(measurement.work_text(missing))
        return
    check_launch(process_count())
    assert config.output is not None
    with says_how_to_resume(config.output):
        found = compare_methods(config, resume=arguments.resume, overwrite=arguments.overwrite)
    if connected := processes(config.load_options().torch_device):
        connected.destroy_process_group()
    if not is_main_process():
        return
    print(found.markdown())
    if found.collected.rows:
        print("written:", config.output)
    else:
        print("no report is written: no row is measured on a document yet")
