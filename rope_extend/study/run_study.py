"""Measure a model cell by cell: every row on the first document, then every row on the second, and so on.

So the rows can be compared at any time, and an interruption loses one cell at most.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rope_extend.checkpoint.info import info
from rope_extend.checkpoint.manifest import adapter_digests, check_directory
from rope_extend.data.documents import Document, fingerprint, load_documents
from rope_extend.data.token_cache import tokenizer_content
from rope_extend.encodings import RemapEncoding, encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import Candidate, Candidates, adapter_labels
from rope_extend.evaluation.clock import Clock
from rope_extend.evaluation.evaluation_config import PLAIN
from rope_extend.evaluation.forward_plan import ForwardPlan, plan_forward
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.perplexity import RunOptions, perplexity
from rope_extend.evaluation.prompts import Prompt, Task
from rope_extend.evaluation.protocols import PROTOCOLS, WindowSettings
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.evaluation.retrieval import answer_prompts, make_prompts, prompts_fingerprint
from rope_extend.evaluation.tasks import TASKS, make_tasks, template_for
from rope_extend.evaluation.work_plan import pass_lengths, seconds_of_window
from rope_extend.journal import Identity
from rope_extend.memory.segments import expand_segments
from rope_extend.models.load_options import input_device
from rope_extend.models.loading import pretrained
from rope_extend.report.versions import versions
from rope_extend.study.cells import (
    PERPLEXITY,
    RETRIEVAL,
    Cell,
    CellStore,
    StudyRow,
    perplexity_values,
    retrieval_values,
)
from rope_extend.study.study_config import METHODS, StudyConfig
from rope_extend.units import format_duration, format_length

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """Which part of the cells this process measures: those whose number modulo `count` is `index`."""

    index: int = 0
    count: int = 1


class Study:
    """A study with all its settings, texts and prompts; the weights are loaded when it runs.

    Args:
        config: what to measure.
        texts: read the documents and write the prompts. Without them only an estimate can be made.

    Raises:
        RopeExtendError: no such model, adapter, method or data, an adapter that is incomplete or damaged,
            texts that are too short, a task that does not fit a length, or a length that does not fit into
            memory.
    """

    def __init__(self, config: StudyConfig, *, texts: bool = True) -> None:
        expand_segments("auto")
        self.config = config = _without_needless_methods(config)
        self.candidates = candidates = Candidates.of(config)
        for adapter, record in candidates.records.items():
            check_directory(Path(adapter), record.weights, record.configs)
        self.trained = candidates.trained_length
        self.lengths = sorted({*candidates.lengths, self.trained} if self._extends else candidates.lengths)
        self.rows = self._rows()
        whole = [row for row in self.rows if row.crop is None]
        lengths = pass_lengths(PROTOCOLS["prefix"], candidates, self.lengths)
        self.passes = dict(zip(whole, lengths, strict=True))
        self.plan = self._plan()
        if self.plan is not None:
            logger.info("%s", self.plan)
            self.plan.check()
        self.documents: list[Document] = []
        self.tasks: list[Task] = []
        self.prompts: list[Prompt] = []
        if texts:
            self.tokenizer = pretrained(AutoTokenizer, candidates.name)
            self.documents = self._documents()
            self.tasks = self._tasks()
            self.prompts = self._prompts()

    @property
    def _extends(self) -> bool:
        return self.candidates.longest > self.candidates.trained_length

    def _plan(self) -> ForwardPlan | None:
        """The memory and time of windows of every length that occurs; None for a family without estimates."""
        candidates, config = self.candidates, self.config
        assert config.task_lengths is not None
        # A dry run of a method that changes positions takes minutes for a long window, so it is not planned.
        encodings = [each for each in candidates.encodings.values() if not isinstance(each, RemapEncoding)]
        lengths = {self.lengths[-1], self.trained, *(config.task_lengths if config.tasks else ())}
        lengths.update(*self.passes.values())
        return plan_forward(
            candidates.name,
            sorted(lengths),
            load_options=candidates.load_options,
            empty=candidates.empty,
            encodings=[None, *encodings],
            adapters=[(Path(adapter), record.encoding) for adapter, record in candidates.records.items()],
            trained_length=self.trained,
        )

    def _documents(self) -> list[Document]:
        config = self.config
        if config.data is None:
            return []
        return load_documents(
            config.data,
            self.tokenizer,
            text_column=config.text_column,
            split=config.split,
            min_tokens=self.lengths[-1],
            max_documents=config.max_documents,
            max_tokens=self.lengths[-1],
            distinct=True,
        )

    def _tasks(self) -> list[Task]:
        if not self.config.tasks:
            return []
        texts = [self.tokenizer.decode(each.input_ids, skip_special_tokens=True) for each in self.documents]
        return make_tasks(self.config.tasks, haystack=texts, template=template_for(self.candidates.name))

    def _prompts(self) -> list[Prompt]:
        """The prompts, the first trial of every task, length and depth first."""
        if not self.tasks:
            return []
        assert self.config.task_lengths is not None
        prompts = make_prompts(
            self.tasks, self.tokenizer, self.config.task_lengths, options=self.config.prompt_options,
            progress=False,
        )  # fmt: skip
        return sorted(prompts, key=lambda prompt: prompt.trial)  # stable: keeps tasks, lengths and depths

    def _rows(self) -> list[StudyRow]:
        """The rows, each control with a cropped context after the row of the same weights."""
        candidates = self.candidates
        crops = self.config.cropped and self._extends
        plain = next(iter(candidates.plain_methods), PLAIN)
        control = self._cropped(StudyRow(plain, method=plain))
        rows = []
        for method, label in candidates.method_labels.items():
            rows.append(StudyRow(label, method=method))
            if crops and method == plain:
                rows.append(control)
        if crops and control not in rows:
            rows.insert(0, control)
        for adapter, label in adapter_labels(candidates.records).items():
            rows.append(StudyRow(label, adapter=adapter))
            if crops and adapter in candidates.plain_adapters:
                rows.append(self._cropped(rows[-1]))
        return rows

    def _cropped(self, row: StudyRow) -> StudyRow:
        """A row with its context cropped to the trained window."""
        label = f"{row.label}, cropped to {format_length(self.trained)}"
        return replace(row, label=label, crop=self.trained)

    def cells(self, model: Any) -> list[Cell]:
        """All cells, in the order in which they are measured.

        Args:
            model: the model with its weights, unpatched.
        """
        return self._cells(model_identity(model))

    def missing(self, directory: str | Path) -> list[Cell]:
        """The cells that are not finished in a directory, without a look at the weights, for an estimate."""
        finished = [values["identity"] for values in CellStore(directory).every().values()]
        return [
            cell
            for cell in self._cells({})
            if not any(cell.identity.items() <= identity.items() for identity in finished)
        ]

    def _cells(self, base: Identity) -> list[Cell]:
        """All cells of a model with this identity."""
        identities = {row: {**base, **self._row_identity(row)} for row in self.rows}
        cells = [
            Cell(PERPLEXITY, row, number, number, self._document_work(row),
                 {**identities[row], **self._document_identity(row, number)})
            for number in range(len(self.documents))
            for row in self.rows
        ]  # fmt: skip
        tasks = {task.name: task.describe() for task in self.tasks}
        tokenizer = tokenizer_content(self.tokenizer)[:16] if self.prompts else None
        cells += [
            Cell(RETRIEVAL, row, number, prompt.trial, self._prompt_work(row, prompt.length), {
                **identities[row], "kind": RETRIEVAL, "task": tasks[prompt.task], "crop": row.crop,
                "prompt": prompts_fingerprint([prompt]), "chat": prompt.chat, "length": prompt.length,
                "tokenizer": tokenizer,
            })
            for row in self.rows
            for number, prompt in enumerate(self.prompts)
            if row.crop is None or prompt.length > row.crop
        ]  # fmt: skip
        return sorted(cells, key=lambda cell: (cell.round, cell.kind))  # stable

    def _row_identity(self, row: StudyRow) -> Identity:
        """The encoding of a row, and the files of its adapter that decide what is computed."""
        candidates = self.candidates
        if row.adapter is not None:
            record = candidates.records[row.adapter]
            return {
                "encoding": record.encoding.to_dict(),
                "adapter": adapter_digests(Path(row.adapter)),
                "shape": asdict(record.shape),
            }
        assert row.method is not None
        changed_to = encoding(PLAIN) if row.method == PLAIN else candidates.encodings[row.method]
        if changed_to is None:
            return {"shape": None}  # the checkpoint's own encoding, which is in the identity of the model
        return {"encoding": changed_to.to_dict(), "shape": asdict(candidates.info.shape)}

    def _document_identity(self, row: StudyRow, number: int) -> Identity:
        data = fingerprint([self.documents[number]])
        return {"kind": PERPLEXITY, "lengths": self.lengths, "window": row.crop, "data": data}

    def _document_work(self, row: StudyRow) -> float:
        longest = self.lengths[-1]
        if row.crop is None:
            return sum(map(self._seconds, self.passes[row]))
        windows = PROTOCOLS["cropped"].layout(longest, longest, {"window": row.crop})
        return len(windows) * self._seconds(row.crop)

    def _prompt_work(self, row: StudyRow, length: int) -> float:
        return self._seconds(length if row.crop is None else min(row.crop, length))

    def _planned(self) -> list[tuple[int, str, str, float]]:
        """The round, row, kind and estimated seconds of each cell, in the order in which cells are measured.

        Of a study without texts, as many documents and prompts are counted as the config asks for.
        """
        config = self.config
        assert config.task_lengths is not None
        documents = len(self.documents) or config.max_documents
        cells = [
            (number, row.label, PERPLEXITY, self._document_work(row))
            for number in range(documents)
            for row in self.rows
        ]
        cells += [
            (trial, row.label, RETRIEVAL, self._prompt_work(row, length))
            for row in self.rows
            for task in config.tasks
            for length in config.task_lengths
            for _, trial in config.prompt_options.trials_of(TASKS[task])
            if row.crop is None or length > row.crop
        ]
        return sorted(cells, key=lambda cell: (cell[0], cell[2]))  # as `cells`

    def left_out_text(self, missing: Sequence[Cell] | None = None) -> str:
        """What the budget leaves for later, by the estimate; empty without a budget, or if all of it fits.

        Args:
            missing: the cells that are not finished; by default none is.

        Raises:
            RopeExtendError: there is no estimate of the time, or not even one measurement fits.
        """
        budget = self.config.budget
        if budget is None:
            return ""
        if self.plan is None:
            raise RopeExtendError(
                f"a plan with a budget needs an estimate of the time, but {self.config.model} cannot be "
                "estimated; leave budget out"
            )
        planned = self._planned()
        if missing is not None:
            planned = [(cell.round, cell.row.label, cell.kind, cell.work) for cell in missing]
        within = sum(total <= budget for total in accumulate(seconds for *_, seconds in planned))
        if within == len(planned):
            return ""
        if not within:
            raise RopeExtendError(
                f"a budget of {format_duration(budget)} is too short: the first of {len(planned)} "
                f"measurements takes about {format_duration(planned[0][-1])}; allow more time, or use "
                "shorter lengths"
            )
        counts = Counter((label, kind) for _, label, kind, _ in planned[within:])
        what = {PERPLEXITY: "documents", RETRIEVAL: "prompts"}
        later = ", ".join(f"{label}: {count} {what[kind]}" for (label, kind), count in counts.items())
        return (
            f"within the budget of {format_duration(budget)}: {within} of {len(planned)} measurements; left "
            f"for --resume: {later}"
        )

    def missing_text(self, missing: Sequence[Cell]) -> str:
        """What is missing of a study, and its estimated time."""
        if not missing:
            return "nothing is missing: everything is measured"
        work: dict[str, list[float]] = {}
        for cell in missing:
            what = "perplexity"
            if cell.kind == RETRIEVAL:
                prompt = self.prompts[cell.number]
                what = f"{prompt.task} at {format_length(prompt.length)}"
            work.setdefault(what, []).append(cell.work)
        unit = {"perplexity": "documents"}
        parts = [
            self._part(
                f"{what}: {len(each)} {unit.get(what, 'prompts')} missing, of all rows together", sum(each)
            )
            for what, each in work.items()
        ]
        return "\n".join([*parts, self._part("in all", sum(map(sum, work.values())))])

    def work_text(self) -> str:
        """What will be measured, and its estimated time."""
        config = self.config
        assert config.task_lengths is not None
        documents = len(self.documents) or config.max_documents
        depths = len(config.prompt_options.depth_list)
        texts = documents * sum(map(self._document_work, self.rows))
        parts = [self._part(f"perplexity: {len(self.rows)} rows, {documents} documents each", texts)]
        for task in config.tasks:
            for length in config.task_lengths:
                rows = [row for row in self.rows if row.crop is None or length > row.crop]
                prompts = depths * config.trials
                work = prompts * sum(self._prompt_work(row, length) for row in rows)
                words = f"{task} at {format_length(length)}: {len(rows)} rows, {prompts} prompts each"
                parts.append(self._part(words, work))
                texts += work
        return "\n".join([*parts, self._part("in all", texts)])

    def _part(self, words: str, work: float) -> str:
        return f"{words}, about {format_duration(work)}" if self.plan else words

    def _seconds(self, tokens: int) -> float:
        """Estimated seconds of a window; without an estimate its tokens, which are as good for ratios."""
        if self.plan is None:
            return float(tokens)
        return seconds_of_window(self.plan, tokens)

    def run(
        self,
        directory: str | Path,
        *,
        share: Share | None = None,
        before: Callable[[Sequence[Cell]], None] | None = None,
    ) -> list[Cell]:
        """Measure the cells that are not finished, and keep each; returns all cells.

        Args:
            directory: where finished cells are kept.
            share: the part of the cells that this process measures; all by default.
            before: called with all cells when the model is loaded, before any is read or measured.
        """
        share, store = share or Share(), CellStore(directory)
        logger.info("%s", self.work_text())
        reserve = self.plan.activations if self.plan else 0
        lm = self.candidates.load_options.load(self.candidates.name, reserve=reserve)
        cells = self.cells(lm)
        if before is not None:
            before(cells)
        mine = cells[share.index :: share.count]
        open_cells = [cell for cell in mine if not store.has(cell)]
        logger.info("%d of %d cells are finished", len(mine) - len(open_cells), len(mine))
        work = [(f"{cell.kind}, {cell.row.label}", cell.work) for cell in open_cells]
        machine = {"device": _device_name(lm), **versions()}
        clock = Clock(work, self.config.budget, in_seconds=self.plan is not None)
        with _Prepared(self.candidates, lm) as prepared:
            for number, cell in enumerate(open_cells):
                if not clock.has_time(number):
                    break
                started, used = time.perf_counter(), time.process_time()
                values = self._measure(prepared.candidate(cell.row), cell)
                seconds = time.perf_counter() - started
                cost = {"seconds": seconds, "cpu_seconds": time.process_time() - used, "machine": machine}
                store.write(cell, {**values, **cost})
                clock.finished(number, seconds)
                logger.info("[%d/%d] %s; %s", number + 1, len(open_cells), _said(cell, values), clock)
        return cells

    def _measure(self, candidate: Candidate, cell: Cell) -> dict[str, Any]:
        """The values of a cell."""
        subject = self.candidates.subject(candidate, cell.row.label)
        if cell.kind == RETRIEVAL:
            prompt = self.prompts[cell.number]
            return retrieval_values(
                prompt.trial,
                answer_prompts(
                    candidate.model, self.tokenizer, self.tasks, [prompt], subject=subject,
                    crop=cell.row.crop, progress=False,
                ),
            )  # fmt: skip
        document = self.documents[cell.number]
        settings = WindowSettings() if cell.row.crop is None else WindowSettings(window=cell.row.crop)
        result = perplexity(
            candidate.model,
            document,
            self.lengths,
            protocol="prefix" if cell.row.crop is None else "cropped",
            progress=False,
            options=RunOptions(suggested_chunk=self.plan.longest.chunk_size if self.plan else None),
            **settings,
        )
        return perplexity_values(EvaluationRow.of(subject, result), Path(document.name).name)


def _without_needless_methods(config: StudyConfig) -> StudyConfig:
    """The settings with plain RoPE alone, if no methods are named and the model has the target already."""
    if config.methods != METHODS:
        return config
    trained = info(config.model, trained_length=config.trained_length).shape.trained_length
    assert config.target_length is not None
    return config if config.target_length > trained else replace(config, methods=(PLAIN,))


def _device_name(lm: Any) -> str:
    """The name of the device on which a model runs: `cpu`, or that of the GPU."""
    device = input_device(lm)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _said(cell: Cell, values: dict[str, Any]) -> str:
    """What was measured, for the log."""
    if cell.kind == RETRIEVAL:
        (found,) = values["cells"]
        depth = "" if found["depth"] is None else f" at depth {found['depth']:g}"
        score = found["scores"][0]
        return f"{cell.row.label}: {found['task']}, {format_length(found['length'])}{depth}: {score:.0%}"
    length, ppl = max(values["result"]["ppl"].items(), key=lambda pair: int(pair[0]))
    shown = "not finite" if ppl is None else f"{ppl:.2f}"
    return f"{cell.row.label}: {values['document']}, perplexity {shown} at {format_length(int(length))}"


class _Prepared:
    """The model under one row at a time; a row that follows itself stays."""

    def __init__(self, candidates: Candidates, lm: Any) -> None:
        self.candidates, self.lm = candidates, lm
        self.row: StudyRow | None = None
        self.stack = ExitStack()

    def __enter__(self) -> _Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def candidate(self, row: StudyRow) -> Candidate:
        """The model under a row."""
        if self.row is None or (self.row.method, self.row.adapter) != (row.method, row.adapter):
            self.stack.close()
            self.stack = ExitStack()
            context = (
                self.candidates.untrained(self.lm, row.method)
                if row.method is not None
                else self.candidates.tuned(self.lm, str(row.adapter))
            )
            self.current = self.stack.enter_context(context)
        self.row = row
        return self.current
