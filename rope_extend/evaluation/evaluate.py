"""Compare methods and adapters by perplexity on the same text: `rope_extend.evaluate`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from rope_extend.data.documents import load_documents
from rope_extend.encodings import Encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import Candidate, Candidates
from rope_extend.evaluation.clock import Clock
from rope_extend.evaluation.commands import how_it_was_made
from rope_extend.evaluation.evaluation_config import PLAIN, EvaluationConfig
from rope_extend.evaluation.finished_rows import RowFolders
from rope_extend.evaluation.forward_plan import ForwardPlan, plan_forward
from rope_extend.evaluation.output_directory import UNFINISHED, check_output, remove_unfinished
from rope_extend.evaluation.perplexity import RunOptions, perplexity
from rope_extend.evaluation.perplexity_report import write_report
from rope_extend.evaluation.prompts import Prompt, PromptOptions
from rope_extend.evaluation.protocols import Protocol, WindowSettings, protocol_named
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult, Subject
from rope_extend.evaluation.retrieval import TRIALS, TrialLog, answer_prompts, make_prompts
from rope_extend.evaluation.samples import continuations
from rope_extend.evaluation.tasks import Passkey, template_for
from rope_extend.evaluation.work_plan import (
    CROPPED,
    CROPPED_PROMPTS,
    DEPTHS,
    DOCUMENTS,
    PROMPTS,
    SAMPLES,
    asked_for,
    decided_extent,
    documents_begun,
    evaluation_costs,
    finished_rows,
    passkey_lengths,
    whole_extent,
    write_extent,
)
from rope_extend.memory.budget import is_out_of_memory
from rope_extend.memory.segments import expand_segments
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import pretrained
from rope_extend.models.processes import is_main_process, processes
from rope_extend.progress import LINE_EVERY
from rope_extend.report.tables import Sentences
from rope_extend.units import format_length

logger = logging.getLogger(__name__)


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
    Until then, finished documents are kept there, so an interrupted evaluation can be resumed.

    Args:
        config: what to measure, and how.
        resume: resume an interrupted evaluation in the output directory.
        overwrite: replace a report in the output directory.
        progress: show progress bars, on terminals only.

    Returns:
        The rows of the table.

    Raises:
        RopeExtendError: no such model, adapter, method or data, texts that are too short, a length that does
            not fit into memory, or an output directory that holds a report.
    """
    expand_segments("auto")
    if config.output is None:
        if resume or overwrite:
            raise RopeExtendError(
                "resume and overwrite refer to a report on disk, and output is not set; set output"
            )
        return list(evaluation_rows(config, progress=progress))
    output = check_output(config.output, overwrite=overwrite, resume=resume)
    connected = processes(config.load_options().torch_device)
    if connected:  # no process changes the directory before all have checked it
        connected.wait_for_everyone()
    made_by = how_it_was_made("evaluate", config)
    # Checks the config.
    evaluation = _Evaluation(config, None, output / UNFINISHED, progress, resume=resume)
    if resume and is_main_process():
        evaluation.warn_of_other_rows()
    measured = evaluation.rows()
    if overwrite and is_main_process():
        remove_unfinished(output)
    if connected:
        connected.wait_for_everyone()
    rows = list(measured)
    if is_main_process():
        trained_length = rows[0].trained_length
        assert trained_length is not None
        missing = [Sentences("Left out, because of the budget", evaluation.left_out)]
        write_report(
            rows,
            output,
            trained_length=trained_length,
            overwrite=overwrite or resume,
            lead=missing if evaluation.left_out else (),
            made_by=made_by,
        )
        remove_unfinished(output)
    return rows


def evaluation_rows(
    config: EvaluationConfig,
    *,
    load_options: LoadOptions | None = None,
    finished: str | Path | None = None,
    progress: bool = True,
) -> Iterator[EvaluationRow]:
    """Yield the rows of `evaluate` one by one, without a report.

    Args:
        config: what to measure, and how.
        load_options: how the model is loaded; by default as in `config`.
        finished: directory in which the losses of finished documents are kept, in one directory per row. A
            second call resumes there.
        progress: show progress bars, on terminals only.

    Raises:
        RopeExtendError: as `evaluate`.
    """
    return _Evaluation(config, load_options, finished, progress, resume=finished is not None).rows()


def evaluated_lengths(candidates: Candidates, rule: Protocol) -> list[int]:
    """The lengths of an evaluation. The trained window is a control, and comes with the same pass."""
    trained = candidates.trained_length
    if rule.nested and candidates.longest > trained:
        return sorted({*candidates.lengths, trained})
    return list(candidates.lengths)


def plan_work(config: EvaluationConfig, *, resume: bool = False) -> tuple[ForwardPlan | None, str]:
    """Estimate the memory and time of windows, and of everything that an evaluation computes.

    Args:
        config: what to measure, and how. Neither `data` nor weights are needed: as many documents as
            `max_documents` are counted, or one, each as long as the longest length.
        resume: what is finished of the evaluation in the output directory costs nothing.

    Returns:
        The plan of windows, None for a family that cannot be estimated; and the time of each part, in words.

    Raises:
        RopeExtendError: no such model, adapter or method, or a budget that is too short.
    """
    candidates = Candidates.of(config)
    lengths = evaluated_lengths(candidates, protocol_named(config.protocol))
    plan = plan_evaluation(config, candidates, lengths)
    if plan is None:
        return None, ""
    directory = Path(config.output) / UNFINISHED if resume and config.output else None
    documents = config.max_documents or 1
    if directory is not None:
        documents, _ = documents_begun(directory, documents)
    extent = whole_extent(config, candidates, documents)
    finished = finished_rows(directory, config, candidates, extent) if directory else []
    costs = evaluation_costs(config, candidates, plan, lengths, None, finished)
    decided = decided_extent(config, candidates, costs, extent, directory)
    missing = costs.left_out(extent, decided)
    said = "".join(f"\nleft out, because of the budget: {each}" for each in missing)
    return plan, costs.text(decided) + said


def plan_evaluation(
    config: EvaluationConfig, candidates: Candidates | None = None, lengths: Sequence[int] | None = None
) -> ForwardPlan | None:
    """Estimate the memory and time of an evaluation, from the config of the model alone.

    Args:
        config: what to measure, and how. Neither `data` nor weights are needed.
        candidates: those of the config, if they exist already.
        lengths: lengths in tokens; by default those of the candidates.

    Returns:
        The plan; None for a family whose memory cannot be estimated.

    Raises:
        RopeExtendError: no such model, adapter or method.
    """
    candidates = candidates or Candidates.of(config)
    encodings: list[Encoding | None] = [None]
    encodings += [each for name, each in candidates.encodings.items() if each is not None and name != PLAIN]
    return plan_forward(
        candidates.name,
        lengths or candidates.lengths,
        load_options=candidates.load_options,
        empty=candidates.empty,
        encodings=encodings,
        adapters=[(Path(adapter), record.encoding) for adapter, record in candidates.records.items()],
        trained_length=candidates.trained_length,
        chunk=config.chunk,
        batched=config.cropped or not protocol_named(config.protocol).nested,
    )


class _Evaluation:
    """An evaluation with all its settings, texts and prompts, but without the weights.

    Args:
        config: what to measure, and how.
        load_options: how the model is loaded; by default as in `config`.
        finished: directory in which the losses of finished documents are kept.
        progress: show progress bars on terminals, and lines elsewhere.
        resume: count what is in `finished`, and use what it says about the budget.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        load_options: LoadOptions | None,
        finished: str | Path | None,
        progress: bool,
        *,
        resume: bool = False,
    ) -> None:
        if config.data is None:
            raise RopeExtendError("evaluation: data is not set; give long documents to measure perplexity on")
        expand_segments("auto")
        self.config, self.progress = config, progress
        self.candidates = candidates = Candidates.of(config, load_options)
        self.finished = None if finished is None else Path(finished)
        self.folders = None if finished is None else RowFolders(Path(finished), candidates)
        self.rule = protocol_named(config.protocol)
        self.lengths = evaluated_lengths(candidates, self.rule)

        self.plan = plan_evaluation(config, candidates, self.lengths)
        if self.plan is not None:
            logger.info("%s", self.plan)
            self.plan.check()

        self.tokenizer = pretrained(AutoTokenizer, candidates.name)
        self.connected = processes(candidates.load_options.torch_device)
        # The other processes use the tokens that the main process has cached.
        with self.connected.main_process_first() if self.connected else nullcontext():
            self.documents = load_documents(
                config.data,
                self.tokenizer,
                text_column=config.text_column,
                split=config.split,
                min_tokens=0 if self.rule.joined else self.lengths[-1] + self.rule.extra_tokens,
                max_documents=config.max_documents,
                max_tokens=self.lengths[-1] if self.rule.nested else config.max_tokens,
                distinct=not self.rule.joined,
            )
        self.task = Passkey(template=template_for(candidates.name))
        extent = whole_extent(config, candidates, len(self.documents))
        self.left_out: list[str] = []
        self.extent, self.asked = extent, asked_for(config, candidates, extent)
        self.clock, self.last_line = Clock([]), time.monotonic()
        passkey_lengths(config, candidates)  # refuses lengths that no row is extended to
        self._plan_work(resume)
        self.documents = self.documents[: self.extent.documents]
        self.control_method = [PLAIN] if self.extent.cropped and not candidates.plain_methods else []
        self.prompts = self._prompts() if self.extent.trials else []

    def _plan_work(self, resume: bool) -> None:
        """Estimate the time of everything, and leave out what the budget does not allow."""
        config = self.config
        if config.budget is not None and (self.plan is None or self.connected):
            reason = f"{config.model} cannot be estimated" if self.plan is None else "several processes run"
            raise RopeExtendError(f"budget needs an estimate of the time, but {reason}; leave budget out")
        if self.plan is None:
            return
        longest, whole = max(map(len, self.documents)), self.extent
        directory = self.finished if resume else None
        finished = finished_rows(directory, config, self.candidates, whole) if directory else []
        costs = evaluation_costs(config, self.candidates, self.plan, self.lengths, longest, finished)
        self.extent = decided_extent(config, self.candidates, costs, whole, directory)
        self.left_out = costs.left_out(whole, self.extent)
        for said in self.left_out:
            logger.warning("left out, because of the budget: %s", said)
        logger.info("%s", costs.text(self.extent))
        self.clock = Clock(costs.pieces(self.extent))

    def warn_of_other_rows(self) -> None:
        """Say which finished losses are of rows that are not measured, because the report replaces them."""
        if self.folders and (others := self.folders.others(cropped=self.extent.cropped)):
            logger.warning(
                "%s holds losses of rows that are not measured now: %s; they are deleted when the report is "
                "written. To keep them, interrupt this evaluation, and resume it with these rows",
                self.finished, ", ".join(others),
            )  # fmt: skip

    def _prompts(self) -> list[Prompt]:
        """The passkeys; none at a length that the task does not fit, with a warning."""
        options = PromptOptions(depths=DEPTHS, trials=self.extent.trials)
        prompts: list[Prompt] = []
        for length in passkey_lengths(self.config, self.candidates):
            try:
                prompts += make_prompts(
                    [self.task], self.tokenizer, [length], options=options, progress=False
                )
            except RopeExtendError as error:
                logger.warning("retrieval at %s tokens is not measured: %s", format_length(length), error)
        return prompts

    def rows(self) -> Iterator[EvaluationRow]:
        """Load the weights, and yield each row when it is measured."""
        candidates = self.candidates
        if self.config.budget is not None and self.finished is not None:
            write_extent(self.finished, self.extent, self.asked)
        reserve = self.plan.activations if self.plan else 0
        lm = candidates.load_options.load(candidates.name, reserve=reserve)
        for candidate in candidates.models(lm, [*candidates.encodings, *self.control_method]):
            how = "" if candidate.adapter else ", untrained"
            logger.info("evaluating %s%s%s", candidate.label, how, self._to_go())
            if candidate.label in self.control_method:
                yield self._completed(candidate, self._control(candidate))
                continue
            protocol, settings = self.config.protocol, self.config.window_settings
            subject = candidates.subject(candidate)
            result = self._perplexity(candidate, subject, self.lengths, protocol, settings)
            yield self._completed(candidate, EvaluationRow.of(subject, result))
            if self.extent.cropped and candidate.label in candidates.cropped_labels:
                yield self._with_samples(candidate, candidates.described(self._control(candidate)))

    def _control(self, candidate: Candidate) -> EvaluationRow:
        """The row of plain RoPE with its context cropped to the trained window."""
        window = self.candidates.trained_length
        label = f"{candidate.label}, cropped to {format_length(window)}"
        subject = self.candidates.subject(candidate, label)
        if self.rule.nested:
            settings = WindowSettings(window=window)
            return EvaluationRow.of(
                subject, self._perplexity(candidate, subject, self.lengths, "cropped", settings)
            )
        protocol, settings = self.config.protocol, self.config.window_settings
        result = self._perplexity(candidate, subject, [window], protocol, settings)
        return EvaluationRow.of(subject, result.repeated(window, self.lengths))

    def _perplexity(
        self,
        candidate: Candidate,
        subject: Subject,
        lengths: Sequence[int],
        protocol: str,
        settings: WindowSettings,
    ) -> PerplexityResult:
        kind = DOCUMENTS if subject.label == candidate.label else CROPPED
        options = RunOptions(
            chunk=self.config.chunk,
            suggested_chunk=self.plan.longest.chunk_size if self.plan else None,
            finished=self._folder(candidate, cropped=kind == CROPPED),
            document_finished=partial(self._document_finished, subject.label, kind),
            share=self.connected is not None,
        )
        return perplexity(
            candidate.model,
            self.documents,
            lengths,
            protocol=protocol,
            save_losses=self.config.save_losses,
            progress=self.progress and is_main_process(),
            options=options,
            **settings,
        )

    def _folder(self, candidate: Candidate, *, cropped: bool) -> Path | None:
        """The folder of what is finished of a row."""
        return None if self.folders is None else self.folders.folder(candidate.label, cropped=cropped)

    def _document_finished(self, label: str, kind: str, number: int, seconds: float) -> None:
        """Correct the time to go; a line in the log where no terminal shows a progress bar."""
        self.clock.finished_one(kind, seconds)
        now = time.monotonic()
        if self.progress and not sys.stderr.isatty() and now - self.last_line >= LINE_EVERY:
            self.last_line = now
            logger.info("%s: document %d of %d%s", label, number + 1, len(self.documents), self._to_go())

    def _to_go(self) -> str:
        """The time to go, after a comma; empty without an estimate."""
        return f", {self.clock}" if self.clock.work else ""

    def _completed(self, candidate: Candidate, row: EvaluationRow) -> EvaluationRow:
        """The row with retrieval and samples, if they were asked for."""
        row = self.candidates.described(row)
        return self._with_samples(candidate, self._with_retrieval(candidate, row))

    def _with_samples(self, candidate: Candidate, row: EvaluationRow) -> EvaluationRow:
        """The row with its continuations of documents, in the main process."""
        if not self.extent.samples or not is_main_process():
            return row
        with self._optional(SAMPLES, f"{row.label}: no samples of text"):
            samples = continuations(
                candidate.model,
                self.tokenizer,
                self.documents,
                self.lengths[-1],
                self.candidates.trained_length if row.result.cropped else None,
                most=self.extent.samples,
            )
            return replace(row, samples=samples)
        return row  # memory ran out

    def _with_retrieval(self, candidate: Candidate, row: EvaluationRow) -> EvaluationRow:
        """The row with its retrieval, in the main process."""
        trained = self.candidates.trained_length
        # A row whose context is cropped is the model itself within the trained window, and not beyond.
        prompts = [prompt for prompt in self.prompts if prompt.length <= trained or not row.result.cropped]
        if not prompts or not is_main_process():  # few, so not worth sharing
            return row
        log = None
        if folder := self._folder(candidate, cropped=row.result.cropped):
            log = TrialLog(folder / TRIALS, row.label, alone=True)
        kind = CROPPED_PROMPTS if row.result.cropped else PROMPTS
        with self._optional(kind, f"{row.label}: retrieval is not measured"):
            retrieval = answer_prompts(
                candidate.model,
                self.tokenizer,
                [self.task],
                prompts,
                subject=self.candidates.subject(candidate, row.label),
                log=log,
                progress=self.progress,
            )
            return replace(row, retrieval=retrieval)
        return row  # memory ran out

    @contextmanager
    def _optional(self, piece: str, without: str) -> Iterator[None]:
        """Time a piece that is not worth losing the perplexity of its row: if memory runs out, only warn.

        Args:
            piece: its kind, for the clock.
            without: what the warning says.
        """
        started = time.perf_counter()
        try:
            yield
        except RopeExtendError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            logger.warning("%s: %s", without, error)
        else:
            self.clock.finished_one(piece, time.perf_counter() - started)
