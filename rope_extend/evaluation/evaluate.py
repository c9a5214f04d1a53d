"""Measure a model under several methods and with adapters: `rope_extend.evaluate` and `retrieve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import yaml

from rope_extend.data.sources import check_outside
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import EvaluationConfig, ModelConfig, RetrievalConfig
from rope_extend.evaluation.labels import from_here
from rope_extend.evaluation.measurement import Measurement, counted_by_row
from rope_extend.evaluation.output_directory import check_measurement
from rope_extend.evaluation.report_files import write_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.running import Found, run
from rope_extend.files import public_name
from rope_extend.models.processes import is_main_process
from rope_extend.report.tables import Code, Section


def evaluate(
    config: EvaluationConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> list[EvaluationRow]:
    """Measure perplexity with each method, untrained, and with each adapter; write the report.

    Every row is measured on the same tokens. Methods extend the model to the longest length. Everything is
    checked before the weights are loaded. Under `torchrun` or `accelerate launch` each process measures its
    share of the documents, all processes get the same rows, and one of them writes the report.

    If `config.output` is set, the report goes there: `results.jsonl`, tables, pictures and `report.html`.
    What is finished is kept there too, so an evaluation can be resumed, and get more rows or documents.

    Args:
        config: what to measure, and how.
        resume: use what is measured in the output directory.
        overwrite: replace what is measured in the output directory.
        progress: show progress.

    Returns:
        The rows of the table, on the documents that they share.

    Raises:
        RopeExtendError: no such model, adapter, method or data, texts that are too short, a length that does
            not fit into memory, or an output directory that holds a report.
    """
    if config.data is None:
        raise RopeExtendError("evaluation: data is not set; give long documents to measure perplexity on")
    return measure(config, resume=resume, overwrite=overwrite, progress=progress).rows


def retrieve(
    config: RetrievalConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> list[EvaluationRow]:
    """Measure retrieval with each method, untrained, and with each adapter; write the report.

    Every row answers the same prompts, and has its `retrieval`. The report also has `prompts.jsonl`. A task
    that does not fit a length is refused. All else is as for `evaluate`.
    """
    return measure(config, resume=resume, overwrite=overwrite, progress=progress).rows


def measure(
    config: ModelConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    lead: Callable[[Found], Section] | None = None,
) -> Found:
    """Run a measurement, and write its report if the config has a directory for it; see `evaluate`.

    Args:
        lead: makes the section that the report begins with.
    """
    if config.output is None and (resume or overwrite):
        raise RopeExtendError(
            "resume and overwrite refer to a report on disk, and output is not set; set output"
        )
    directory = None
    if config.output is not None:
        directory = check_measurement(config.output, overwrite=overwrite, resume=resume)
        check_outside(directory, config.data)
    measurement = Measurement(config, progress=progress)

    def report(found: Found) -> Found:
        first = [lead(found)] if lead else []
        if found.missing:
            first.append(Section("Not measured yet", notes=counted_by_row(found.missing)))
        if directory is not None and found.rows and is_main_process():
            try:
                write_report(
                    found.rows, directory, overwrite=overwrite or resume, prompts=measurement.prompts,
                    lead=first, end=[how_it_was_made(config)], unfinished=found.unfinished,
                )  # fmt: skip
            except OSError as error:
                raise RopeExtendError(
                    f"cannot write the report to {str(directory)!r}: {error}; free space on the disk, "
                    "and give resume=True: what is measured is kept"
                ) from error
        return replace(found, lead=first)

    return run(measurement, directory, resume=resume, overwrite=overwrite, progress=progress, report=report)


def how_it_was_made(config: ModelConfig) -> Code:
    """The last part of a report: the settings that made it, as YAML for the same command.

    Reports are published, so of a path outside the working directory only the last part is shown.
    """
    values = config.to_dict()
    changed = {
        each.name: values[each.name] for each in fields(config) if getattr(config, each.name) != each.default
    }
    for name in ("model", "adapters", "methods", "data", "output"):
        given = changed.get(name) or []
        if isinstance(given, list):
            changed |= {name: [public_name(from_here(text)) for text in given]} if given else {}
        else:
            changed[name] = public_name(from_here(given))
    file = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True).rstrip("\n")
    return Code("The settings that made this report", f"# rope-extend {config.command} settings.yaml\n{file}")
