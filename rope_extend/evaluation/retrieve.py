"""Compare methods and adapters by retrieval on the same prompts: `rope_extend.retrieve`."""

from __future__ import annotations

import json

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.commands import how_it_was_made
from rope_extend.evaluation.evaluation_config import RetrievalConfig
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.output_directory import RESULTS, check_folders, check_measurement
from rope_extend.evaluation.results import RetrievalResult
from rope_extend.evaluation.retrieval_report import PAGE, PICTURES, TABLE, write_retrieval
from rope_extend.evaluation.running import run
from rope_extend.files import write_text
from rope_extend.models.processes import is_main_process

PROMPTS = "prompts.jsonl"


def retrieve(
    config: RetrievalConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> list[RetrievalResult]:
    """Measure retrieval with each method, untrained, and with each adapter; write the report.

    Every row answers the same prompts. Methods extend the model to the longest length. Everything is checked
    before the weights are loaded.

    If `config.output` is set, the report goes there: `prompts.jsonl`, `results.jsonl`, `report.md`, a heat
    map for each row and task, accuracy against length for each task, and all of it in `report.html`. What
    is finished is kept there too, so an interrupted run can be resumed.

    Args:
        config: what to measure, and how.
        resume: resume the run in the output directory.
        overwrite: replace the run in the output directory.
        progress: show progress bars, on terminals only.

    Returns:
        The rows of the tables.

    Raises:
        RopeExtendError: no such model, adapter, method or data, a task that does not fit a length, or an
            output directory that holds another run.
    """
    if config.output is None and (resume or overwrite):
        raise RopeExtendError(
            "resume and overwrite refer to a run on disk, and output is not set; set output"
        )
    directory = None
    if config.output is not None:
        pictures = [path.name for name in PICTURES for path in check_folders(config.output).glob(name)]
        names = (PROMPTS, RESULTS, TABLE, PAGE, *sorted(pictures))
        directory = check_measurement(config.output, names, resume=resume, overwrite=overwrite)
    measurement = Measurement(config)
    found = run(measurement, directory, resume=resume, overwrite=overwrite, progress=progress)
    results = found.collected.retrieval
    if directory is not None and results and is_main_process():
        lines = [json.dumps(prompt.to_dict(), ensure_ascii=False) + "\n" for prompt in measurement.prompts]
        write_text(directory / PROMPTS, "".join(lines))
        write_retrieval(results, directory, made_by=how_it_was_made("retrieve", config))
    return results
