"""Compare methods and adapters by retrieval on the same prompts: `rope_extend.retrieve`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from rope_extend.data.documents import load_documents
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import Candidate, Candidates
from rope_extend.evaluation.commands import how_it_was_made
from rope_extend.evaluation.evaluation_config import PLAIN, RetrievalConfig
from rope_extend.evaluation.identity import read_identity
from rope_extend.evaluation.output_directory import RESULTS, check_folders, existing_names
from rope_extend.evaluation.prompts import Prompt
from rope_extend.evaluation.results import RetrievalResult
from rope_extend.evaluation.retrieval import TRIALS, TrialLog, answer_prompts, make_prompts
from rope_extend.evaluation.retrieval_report import PAGE, PICTURES, TABLE, write_retrieval
from rope_extend.evaluation.tasks import make_tasks, template_for
from rope_extend.files import write_json, write_text
from rope_extend.journal import Identity, check_same
from rope_extend.memory.segments import expand_segments
from rope_extend.models.loading import pretrained
from rope_extend.models.view import unwrap
from rope_extend.units import format_length

logger = logging.getLogger(__name__)

PROMPTS, SETTINGS = "prompts.jsonl", "settings.json"


def retrieve(
    config: RetrievalConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> list[RetrievalResult]:
    """Measure retrieval with each method, untrained, and with each adapter; write the report.

    Every row answers the same prompts. Methods extend the model to the longest length. Everything is checked
    before the weights are loaded.

    If `config.output` is set, the report goes there: `prompts.jsonl`, `trials.jsonl`, `settings.json`,
    `results.jsonl`, `table.md`, a heat map for each row and task, accuracy against length for each task, and
    all of it in `report.html`. An interrupted run can be resumed from the finished trials.

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
        directory = _check_run_directory(config.output, resume=resume, overwrite=overwrite)
    run = _RetrievalRun(config, progress)
    if directory is not None:
        _start(directory, run.settings(), run.prompts, resume=resume)
    results = list(run.results(None if directory is None else directory / TRIALS))
    if directory is not None:
        write_retrieval(results, directory, made_by=how_it_was_made("retrieve", config))
    return results


class _RetrievalRun:
    """A run with all its settings and prompts, but without the weights.

    Args:
        config: what to measure, and how.
        progress: show progress bars.
    """

    def __init__(self, config: RetrievalConfig, progress: bool) -> None:
        expand_segments("auto")
        self.config, self.progress = config, progress
        self.candidates = candidates = Candidates.of(config)
        self.tokenizer = pretrained(AutoTokenizer, candidates.name)
        template = config.template or template_for(candidates.name)
        self.tasks = make_tasks(config.tasks, haystack=self._haystack(), template=template)
        self.prompts = self._prompts(candidates.lengths)
        trained = candidates.trained_length
        if config.controls and trained not in candidates.lengths:
            self.prompts += self._control_prompts(trained)

    def _haystack(self) -> list[str]:
        """The texts in which needles are hidden."""
        config = self.config
        if config.data is None:
            return []
        documents = load_documents(
            config.data,
            self.tokenizer,
            text_column=config.text_column,
            split=config.split,
            max_documents=config.max_documents,
            max_tokens=self.candidates.longest,
        )
        return [self.tokenizer.decode(document.input_ids, skip_special_tokens=True) for document in documents]

    def _prompts(self, lengths: Sequence[int]) -> list[Prompt]:
        options = self.config.prompt_options
        return make_prompts(self.tasks, self.tokenizer, lengths, options=options, progress=self.progress)

    def _control_prompts(self, length: int) -> list[Prompt]:
        """Prompts of the tasks that fit the trained window; a warning for the others."""
        prompts = []
        options = self.config.prompt_options
        for task in self.tasks:
            try:
                prompts += make_prompts(
                    [task], self.tokenizer, [length], options=options, progress=self.progress
                )
            except RopeExtendError as error:
                logger.warning("no control of %s within the trained window: %s", task.name, error)
        return prompts

    def settings(self) -> Identity:
        """The settings that all trials depend on. Each trial also has an identity of its own."""
        config, candidates = self.config, self.candidates
        return {
            "model": candidates.name,
            "tasks": [task.describe() for task in self.tasks],
            "lengths": list(candidates.lengths),
            "depths": config.prompt_options.depth_list,
            "trials": config.trials,
            "seed": config.seed,
            "chat": config.chat,
            "trained_length": candidates.trained_length,
            "batch_tokens": config.batch_tokens,
            "dtype": str(unwrap(candidates.empty).dtype),
            "quantize": config.quantize,
        }

    def results(self, log: Path | None) -> Iterator[RetrievalResult]:
        """Load the weights, and yield each row when it is measured.

        Args:
            log: file of the finished trials.
        """
        candidates, trained = self.candidates, self.candidates.trained_length
        near = [prompt for prompt in self.prompts if prompt.length <= trained]
        far = [prompt for prompt in self.prompts if prompt.length > trained]
        controls = self.config.controls
        plain = candidates.plain_methods[:1]
        # Plain RoPE is measured within its window even if nobody asked for it, as the control of the others.
        added = [PLAIN] if controls and not plain else []
        lm = candidates.load_options.load(candidates.name)
        for candidate in candidates.models(lm, [*added, *candidates.encodings]):
            prompts = near if candidate.label in added else self.prompts
            if prompts:
                yield self._result(candidate, prompts, log)
            if controls and candidate.adapter is None and far and candidate.label in (*plain, *added):
                yield self._result(candidate, far, log, crop=trained)

    def _result(
        self, candidate: Candidate, prompts: Sequence[Prompt], log: Path | None, crop: int | None = None
    ) -> RetrievalResult:
        label = candidate.label if crop is None else f"{candidate.label}, cropped to {format_length(crop)}"
        logger.info("retrieval: %s", label)
        # The label of an adapter depends on the other adapters of the run, its directory does not.
        key = label if candidate.adapter is None else f"adapter {candidate.adapter}"
        return answer_prompts(
            candidate.model,
            self.tokenizer,
            self.tasks,
            prompts,
            subject=self.candidates.subject(candidate, label),
            crop=crop,
            batch_tokens=self.config.batch_tokens,
            log=None if log is None else TrialLog(log, key),
            progress=self.progress,
        )


def _check_run_directory(output: str | Path, *, resume: bool, overwrite: bool) -> Path:
    """Refuse to mix two runs in one directory, before anything is computed.

    Raises:
        RopeExtendError: the directory holds a run, and neither `resume` nor `overwrite` is set, or it holds
            something else.
    """
    if resume and overwrite:
        raise RopeExtendError("resume uses the run on disk and overwrite replaces it; choose one of them")
    directory = check_folders(output)
    pictures = sorted(path.name for pattern in PICTURES for path in directory.glob(pattern))
    existing = existing_names(directory, (SETTINGS, PROMPTS, TRIALS, RESULTS, TABLE, PAGE, *pictures))
    if resume and existing and SETTINGS not in existing:
        raise RopeExtendError(
            f"{str(directory)!r} holds {', '.join(existing)}, but no run that can be resumed; use another "
            "directory"
        )
    if existing and not (resume or overwrite):
        raise RopeExtendError(
            f"{str(directory)!r} already holds {', '.join(existing)}; use another directory, resume=True to "
            "resume that run, or overwrite=True to replace it"
        )
    return directory


def _start(directory: Path, settings: Identity, prompts: Sequence[Prompt], *, resume: bool) -> None:
    """Write the settings and prompts of a run. A resumed run must have the same settings."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / SETTINGS
    if resume and file.exists():
        check_same(
            read_identity(file),
            settings,
            what=f"{str(directory)!r} holds trials",
            advice="use the same settings, another directory, or overwrite=True to replace the run",
        )
    else:  # an earlier report stays until the new one replaces it
        (directory / TRIALS).unlink(missing_ok=True)
    write_json(file, settings)
    lines = [json.dumps(prompt.to_dict(), ensure_ascii=False) + "\n" for prompt in prompts]
    write_text(directory / PROMPTS, "".join(lines))
