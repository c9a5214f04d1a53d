"""Compare methods and adapters by perplexity on the same text: `rope_extend.evaluate`."""

from __future__ import annotations

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.commands import how_it_was_made
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.output_directory import FILES, check_measurement
from rope_extend.evaluation.perplexity_report import write_report
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.running import run
from rope_extend.models.processes import is_main_process


def evaluate(
    config: EvaluationConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> list[EvaluationRow]:
    """Measure perplexity with each method, untrained, and with each adapter; write the report.

    Every row is measured on the same tokens. Methods extend the model to the longest length. Everything is
    checked before the weights are loaded. Under `torchrun` or `accelerate launch` each process measures its
    share of the documents, all processes get the same rows, and one of them writes the report.

    If `config.output` is set, the report goes there: `results.jsonl`, tables, pictures and `report.html`.
    What is finished is kept there too, so an interrupted evaluation can be resumed, and a finished one can
    get more rows or documents.

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
    if config.output is None and (resume or overwrite):
        raise RopeExtendError(
            "resume and overwrite refer to a report on disk, and output is not set; set output"
        )
    if config.data is None:
        raise RopeExtendError("evaluation: data is not set; give long documents to measure perplexity on")
    output = None
    if config.output is not None:
        output = check_measurement(config.output, FILES, overwrite=overwrite, resume=resume)
    measurement = Measurement(config)
    found = run(measurement, output, resume=resume, overwrite=overwrite, progress=progress)
    rows = found.collected.rows
    if output is not None and rows and is_main_process():
        write_report(
            rows, output, trained_length=measurement.trained, overwrite=overwrite or resume, lead=found.lead,
            made_by=how_it_was_made("evaluate", config),
        )  # fmt: skip
    return rows
