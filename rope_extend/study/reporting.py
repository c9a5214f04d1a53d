"""Compare methods on one model, from untrained rows to a verdict: `rope_extend.compare_methods`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rope_extend.checkpoint.info import info
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.collecting import Collected
from rope_extend.evaluation.commands import how_it_was_made
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.output_directory import FILES, check_measurement
from rope_extend.evaluation.perplexity_report import markdown_report, write_report
from rope_extend.evaluation.retrieval_report import retrieval_table
from rope_extend.evaluation.running import Found, run
from rope_extend.models.processes import is_main_process
from rope_extend.report.tables import Sentences
from rope_extend.study.deciding import decision
from rope_extend.study.study_config import METHODS, StudyConfig


@dataclass(frozen=True)
class Comparison:
    """What a study found.

    Attributes:
        collected: the rows, and what is missing of them.
        verdict: what to do.
        missing: what was not measured; None if everything was.
    """

    collected: Collected
    verdict: Sentences
    missing: Sentences | None

    def markdown(self) -> str:
        """The verdict, what is missing, and the tables."""
        parts = [self.verdict.markdown()]
        parts += [] if self.missing is None else [self.missing.markdown()]
        if self.collected.rows:
            parts.append(markdown_report(self.collected.rows).rstrip("\n"))
        elif self.collected.retrieval:
            parts.append(retrieval_table(self.collected.retrieval).rstrip("\n"))
        return "\n\n".join(parts) + "\n"


def compare_methods(config: StudyConfig, *, resume: bool = False, overwrite: bool = False) -> Comparison:
    """Measure a model under several methods, and with adapters, and say what to do.

    Every row is measured on the same documents and prompts: perplexity at every length, passkeys at the
    target, and the control whose context is cropped. Rows advance together, document by document, so the
    report of an interrupted study is worth reading too.

    The directory `config.output` gets the report of `rope_extend.evaluate`, which begins with the verdict,
    and each finished cell. The same call with `resume=True` measures what is missing.

    Args:
        config: what to measure.
        resume: use the finished cells in the output directory.
        overwrite: delete the study in the output directory, once the model is loaded.

    Raises:
        RopeExtendError: no such model, adapter, method or data, texts that are too short, a length that does
            not fit into memory, a budget in which nothing can be measured, or an output directory that holds
            a report, or with `resume` one that holds another study or a report of something else.
    """
    if config.output is None or (config.data is None and not config.tasks):
        raise RopeExtendError("a report needs data and output; give long documents, and a directory")
    directory = check_measurement(config.output, FILES, resume=resume, overwrite=overwrite)
    measurement = Measurement(without_needless_methods(config))
    found = comparison(measurement, run(measurement, directory, resume=resume, overwrite=overwrite))
    if found.collected.rows and is_main_process():
        lead = [found.verdict, *([] if found.missing is None else [found.missing])]
        write_report(
            found.collected.rows, directory, trained_length=measurement.trained, overwrite=True, lead=lead,
            made_by=how_it_was_made("report", config),
        )  # fmt: skip
    return found


def comparison(measurement: Measurement, found: Found) -> Comparison:
    """The verdict on what is measured so far."""
    candidates, config = measurement.candidates, measurement.config
    assert isinstance(config, StudyConfig)
    collected = found.collected
    controls = {PLAIN, *candidates.plain_methods, *candidates.plain_adapters}
    judged = [row.label for row in measurement.rows if (row.method or row.adapter) not in controls]
    unfinished = {*collected.partial, *(cell.row.label for cell in found.missing)}
    later = [label for label in judged if label in unfinished]
    verdict = decision(collected.rows, config, later)
    return Comparison(collected, verdict, next(iter(found.lead), None))


def without_needless_methods(config: StudyConfig) -> StudyConfig:
    """The settings with plain RoPE alone, if no methods are named and the model has the target already."""
    if config.methods != METHODS:
        return config
    trained = info(config.model, trained_length=config.trained_length).shape.trained_length
    assert config.target_length is not None
    return config if config.target_length > trained else replace(config, methods=(PLAIN,))
