"""Compare methods on one model, from untrained rows to a verdict: `rope_extend.compare_methods`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.commands import how_it_was_made
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.output_directory import FILES, check_files, check_folders
from rope_extend.evaluation.perplexity_report import markdown_report, write_report
from rope_extend.evaluation.retrieval_report import retrieval_table
from rope_extend.models.processes import process_count
from rope_extend.report.tables import Sentences
from rope_extend.study.cells import FOLDER, PERPLEXITY, Cell, CellStore
from rope_extend.study.collecting import Collected, collect
from rope_extend.study.deciding import decision
from rope_extend.study.resuming import check_resumed
from rope_extend.study.run_study import Study
from rope_extend.study.study_config import StudyConfig


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
    if process_count() > 1:
        raise RopeExtendError("report runs in one process; start it without torchrun or accelerate launch")
    directory = check_directory(config.output, resume=resume, overwrite=overwrite)
    study = Study(config)
    if not resume and study.plan is not None:
        study.left_out_text()  # refuses a budget in which nothing can be measured

    def prepare(cells: Sequence[Cell]) -> None:
        if overwrite:
            remove(directory)
        elif resume:
            check_resumed(directory, cells)

    cells = study.run(directory, before=prepare)
    found = comparison(study, cells, directory)
    if found.collected.rows:
        lead = [found.verdict, *([] if found.missing is None else [found.missing])]
        write_report(
            found.collected.rows, directory, trained_length=study.trained, overwrite=True, lead=lead,
            made_by=how_it_was_made("report", config),
        )  # fmt: skip
    return found


def comparison(study: Study, cells: Sequence[Cell], directory: str | Path) -> Comparison:
    """What is measured so far of the cells of a study."""
    store = CellStore(directory)
    values = [store.read(cell) for cell in cells]
    collected = collect([each for each in values if each is not None], [row.label for row in study.rows])
    collected = replace(collected, rows=[study.candidates.described(row) for row in collected.rows])
    missing = [cell for cell, each in zip(cells, values, strict=True) if each is None]
    controls = {PLAIN, *study.candidates.plain_methods, *study.candidates.plain_adapters}
    judged = [row.label for row in study.rows if (row.method or row.adapter) not in controls]
    unfinished = {*collected.partial, *(cell.row.label for cell in missing)}
    later = [label for label in judged if label in unfinished]
    verdict = decision(collected.rows, study.config, later)
    return Comparison(collected, verdict, not_measured(missing))


def not_measured(missing: Sequence[Cell]) -> Sentences | None:
    """What is missing, row by row; None if nothing is."""
    if not missing:
        return None
    counts = Counter((cell.row.label, cell.kind) for cell in missing)
    said = [
        f"{label}: {count} {'documents' if kind == PERPLEXITY else 'prompts'}"
        for (label, kind), count in counts.items()
    ]
    return Sentences("Not measured yet", said)


def check_directory(output: str | Path, *, resume: bool, overwrite: bool) -> Path:
    """Check that a study can use a directory.

    Raises:
        RopeExtendError: it holds a study or a report, and neither `resume` nor `overwrite` is set, or both
            are, or a file or a link stands in the way.
    """
    if resume and overwrite:
        raise RopeExtendError("resume uses the study on disk and overwrite replaces it; choose one of them")
    directory, cells = check_folders(output), Path(output) / FOLDER
    if cells.is_symlink() or (cells.exists() and not cells.is_dir()):
        raise RopeExtendError(
            f"{str(cells)!r} is a file or a link, but a study needs a directory of that name; move it, or "
            "use another directory"
        )
    begun = holds_cells(directory)
    if begun and not (resume or overwrite):
        raise RopeExtendError(
            f"{str(directory)!r} holds a study; give resume=True to measure what is missing, or "
            "overwrite=True to replace it"
        )
    return check_files(directory, FILES, overwrite=overwrite or (resume and begun))


def holds_cells(directory: Path) -> bool:
    """Whether a directory holds finished cells."""
    return bool(CellStore(directory).files)


def remove(directory: Path) -> None:
    """Delete the cells and the report of a study, and nothing else."""
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    CellStore(directory).remove()
