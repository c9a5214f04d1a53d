"""Measure a model cell by cell: every row on the first document, then every row on the second, and so on.

So the rows can be compared at any time, and an interruption loses one cell at most. `evaluate`, `retrieve`
and `compare_methods` are measurements with other settings.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from transformers import AutoTokenizer

from rope_extend.attention.split_window import check_split
from rope_extend.checkpoint.manifest import adapter_digests, check_directory
from rope_extend.data.documents import Document, fingerprint, load_documents
from rope_extend.data.sources import source_files
from rope_extend.data.token_cache import tokenizer_content
from rope_extend.encodings import encoding
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import Candidates, plain_label
from rope_extend.evaluation.cells import PERPLEXITY, RETRIEVAL, Cell, RowSpec, finished_in
from rope_extend.evaluation.evaluation_config import PLAIN, ModelConfig
from rope_extend.evaluation.forward_plan import ForwardPlan, plan_forward
from rope_extend.evaluation.perplexity import window_starts
from rope_extend.evaluation.prompts import Prompt, Task, make_prompts, prompts_fingerprint
from rope_extend.evaluation.protocols import PROTOCOLS, protocol_named
from rope_extend.evaluation.results import control_edges
from rope_extend.evaluation.tasks import make_tasks, template_for
from rope_extend.journal import Identity
from rope_extend.memory.budget import expand_segments
from rope_extend.memory.meta_device import quiet_patching
from rope_extend.models.loading import pretrained
from rope_extend.models.processes import is_main_process, processes
from rope_extend.units import counted, format_duration, format_length

logger = logging.getLogger(__name__)

BATCH_TOKENS = 32_768
"""Prompt tokens that are answered together. A batch has at least one prompt."""
KINDS = {PERPLEXITY: ("document",), RETRIEVAL: ("batch of prompts", "batches of prompts")}
"""What the cells of each kind are called, and several of them."""


class Measurement:
    """A measurement with all its settings, texts and prompts; the weights are loaded when it runs.

    Args:
        config: what to measure, and how.
        texts: read the documents and write the prompts. Without them only an estimate can be made.
        progress: show the estimate, with the number of its dry runs, and how many prompts are written.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        texts: bool = True,
        progress: bool = True,
    ) -> None:
        expand_segments()
        if texts and config.data is not None:
            source_files(config.data)  # so that a wrong path is refused at once
        self.config = config
        self.candidates = candidates = Candidates.of(config)
        for row in candidates.rows:
            if row.record is not None:
                check_directory(Path(row.source), row.record.weights, row.record.configs)
        self.trained = candidates.trained_length
        extends = candidates.lengths[-1] > self.trained
        plain = [row for row in candidates.rows if row.record is None and candidates.is_plain(row)]
        extended = len(candidates.rows) > len(plain) and (bool(plain) or extends)
        self.has_plain = bool(plain)
        self.prompt_settings = config.prompts(candidates.lengths, self.trained, extended=extended)
        self.rule = protocol_named(config.protocol)
        self.lengths = list(candidates.lengths)
        if self.rule.nested and extends:  # a control, which comes with the same pass
            self.lengths = sorted({*self.lengths, self.trained})
        self.settings = self.rule.check_settings(config.window_settings, self.lengths)
        self.crops = config.cropped and extends and config.protocol == "prefix"
        self.rows = self._rows(config.documents, config.cropped)
        self.passes = self._pass_lengths()
        for row in candidates.rows if config.split_window > 1 else ():
            if row.record is None:
                with quiet_patching(), candidates.prepared(candidates.empty, row):
                    check_split(candidates.empty, config.split_window)
        self.plan = self._plan(progress)
        if self.plan is not None and texts:
            self.plan.check()
            if progress:  # before prompts are written, which may take long
                logger.info("%s", self.plan)
        self.documents: list[Document] = []
        self.tasks: dict[str, Task] = {}
        self.batches: list[list[Prompt]] = []
        if texts:
            self.tokenizer = pretrained(AutoTokenizer, candidates.name)
            self.documents = self._documents()
            self._write_prompts(progress)

    def _pass_lengths(self) -> dict[str, list[int]]:
        """The length of each pass over a document, by the label of the row.

        A nested protocol needs one pass for all lengths; one for each group of lengths with equal tables, if
        the tables depend on the length. Its windows of a fixed length have the same table at any length.
        """
        candidates, rule = self.candidates, self.rule
        if rule.nested and not rule.settings:
            groups = candidates.length_groups(self.lengths)
            return {label: [group[-1] for group in several] for label, several in groups.items()}
        passes = [self.lengths[-1]] if rule.nested else self.lengths
        return {row.label: passes for row in candidates.rows}

    def _plan(self, progress: bool) -> ForwardPlan | None:
        """The memory and time of windows of every length that occurs; None for a family without estimates."""
        candidates, config = self.candidates, self.config
        trained = [(Path(row.source), row.record.encoding) for row in candidates.rows if row.record]
        untrained = [row for row in candidates.rows if row.record is None and row.source != PLAIN]
        return plan_forward(
            candidates.name,
            self.lengths,
            load_options=candidates.load_options,
            empty=candidates.empty,
            encodings=[None, *(row.encoding for row in untrained if row.encoding is not None), *trained],
            trained_length=self.trained,
            chunk=config.chunk,
            batched=self.crops or not self.rule.nested,
            progress=progress,
        )

    def _documents(self) -> list[Document]:
        config, rule = self.config, self.rule
        if config.data is None:
            return []
        least = self.lengths[-1] + rule.extra_tokens if config.documents else 0
        cut = self.lengths[-1] if rule.nested else config.max_tokens
        connected = processes(self.candidates.load_options.torch_device)
        # The other processes use the tokens that the main process has cached.
        with connected.main_process_first() if connected else nullcontext():
            documents = load_documents(
                config.data,
                self.tokenizer,
                text_column=config.text_column,
                split=config.split,
                min_tokens=least,
                max_documents=config.max_documents,
                max_tokens=cut,
                distinct=config.documents,
            )
        if config.documents and config.max_documents and len(documents) < config.max_documents:
            found = counted(len(documents), "document")
            logger.info("the data has %s with %s tokens or more; all are measured", found, f"{least:,}")
        return documents

    def _write_prompts(self, progress: bool) -> None:
        """The prompts in batches of one task and length, the first trial of all depths first."""
        wanted = self.prompt_settings
        if not wanted.tasks:
            return
        texts = [self.tokenizer.decode(each.input_ids, skip_special_tokens=True) for each in self.documents]
        tasks = make_tasks(wanted.tasks, haystack=texts, template=template_for(self.tokenizer))
        self.tasks = {task.name: task for task in tasks}
        shown = progress and is_main_process()
        for task in tasks:
            for length in wanted.lengths:
                try:
                    prompts = make_prompts(task, self.tokenizer, length, wanted, progress=shown)
                except RopeExtendError as error:
                    if length != wanted.optional_length:
                        raise
                    logger.warning("%s at %s is not measured: %s", task.name, format_length(length), error)
                    continue
                size, trial = max(1, BATCH_TOKENS // prompts[0].tokens), len(wanted.depths)
                # No batch has prompts of two trials, so that answered ones stay as they are among more.
                for start in range(0, len(prompts), trial):
                    some = prompts[start : start + trial]
                    self.batches += [some[at : at + size] for at in range(0, len(some), size)]

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts."""
        return [prompt for batch in self.batches for prompt in batch]

    def _rows(self, documents: bool, controls: bool) -> list[RowSpec]:
        """The rows, each control with a cropped context after the row of the same weights."""
        candidates, crops = self.candidates, self.crops
        untrained = [row for row in candidates.rows if row.record is None]
        plain = next(filter(candidates.is_plain, untrained), None)
        rows = []
        for row in candidates.rows:
            rows.append(row)
            if crops and candidates.is_plain(row) and (documents or row is plain or row.record):
                rows.append(self._cropped(row))
        if plain is None and controls and (crops or not documents):
            control = RowSpec(plain_label(candidates.info), PLAIN, encoding(PLAIN))
            rows.insert(len(untrained), self._cropped(control) if crops else control)
        return rows

    def _cropped(self, row: RowSpec) -> RowSpec:
        """A row with its context cropped to the trained window."""
        label = f"{row.label}, cropped to {format_length(self.trained)}"
        return replace(row, label=label, crop=self.trained)

    def _answers(self, row: RowSpec, length: int) -> bool:
        """Whether a row answers prompts of a length; a control those that no other row of plain RoPE does."""
        return row.crop is None or length > row.crop or (row.record is None and not self.has_plain)

    def _seconds(self, tokens: int) -> float:
        """Estimated seconds of a window: that of the shortest planned one that is as long, in proportion.

        Without an estimate its tokens, which are as good for ratios.
        """
        if self.plan is None:
            return float(tokens)
        longer = [each for each in self.plan.lengths if each.length >= tokens]
        nearest = longer[0] if longer else self.plan.longest
        return nearest.seconds * tokens / nearest.length

    def _windows(self, row: RowSpec, document: Document) -> tuple[list[int], int]:
        """The tokens of each window of a row on a document, and how often each is measured."""
        rule, settings, passes = self.rule, self.settings, self.passes.get(row.label, [])
        if row.crop is not None:
            settings = {"window": row.crop, "blocks": self.config.control_blocks}
            rule, passes = PROTOCOLS["cropped"], [self.lengths[-1]]
        layouts = [rule.layout(len(document), length, settings) for length in passes]
        times = len(window_starts(rule, self.candidates.empty, document))
        return [window.tokens for windows in layouts for window in windows], times

    def cells(self) -> list[Cell]:
        """All cells, in the order in which they are measured."""
        cells = [*self._document_cells(), *self._prompt_cells()]
        rows, kinds = {row: number for number, row in enumerate(self.rows)}, [*KINDS]
        return sorted(cells, key=lambda cell: (cell.round, rows[cell.row], kinds.index(cell.kind)))  # stable

    def _document_cells(self) -> Iterator[Cell]:
        if not self.config.documents or not self.documents:
            return
        for row in self.rows:
            shared = {**self._row_identity(row), "protocol": self.rule.name, **self.settings}
            shared |= {"lengths": self.lengths, "window of context": row.crop}
            blocks = self.config.control_blocks
            if row.crop is not None or (self.rule.nested and control_edges(self.lengths, blocks)):
                shared["control_blocks"] = blocks  # else the losses are in the same blocks for any number
            for number, document in enumerate(self.documents):
                windows, times = self._windows(row, document)
                work, tokens = times * sum(map(self._seconds, windows)), times * sum(windows)
                identity = {**shared, "data": fingerprint([document])}
                if times > 1:  # with BOS before each window and without
                    identity["times"] = times
                yield Cell(PERPLEXITY, row, number, number, work, tokens, identity)

    def _prompt_cells(self) -> Iterator[Cell]:
        content = tokenizer_content(self.tokenizer)[:16] if self.batches else None
        tasks = {name: task.describe() for name, task in self.tasks.items()}
        for row in self.rows:
            shared = {**self._row_identity(row), "crop": row.crop, "tokenizer": content}
            for number, batch in enumerate(self.batches):
                first = batch[0]
                if self._answers(row, first.length):
                    tokens = [prompt.visible(row.crop) for prompt in batch]
                    identity = {
                        **shared, "task": tasks[first.task], "chat": first.chat, "length": first.length,
                        "prompts": prompts_fingerprint(batch),
                    }  # fmt: skip
                    work = sum(map(self._seconds, tokens))
                    yield Cell(RETRIEVAL, row, number, first.trial, work, sum(tokens), identity)

    def _row_identity(self, row: RowSpec) -> Identity:
        """The encoding of a row, and the files of its adapter that decide what is computed."""
        if row.record is not None:
            return {
                "encoding": row.record.encoding.to_dict(),
                "adapter": adapter_digests(Path(row.source)),
                "shape": asdict(row.record.shape),
            }
        if row.encoding is None:
            return {"shape": None}  # the checkpoint's own encoding, which is in the identity of the model
        return {"encoding": row.encoding.to_dict(), "shape": asdict(self.candidates.info.shape)}

    def missing(self, directory: str | Path) -> list[Cell]:
        """The cells that are not finished in a directory, without a look at the weights, for an estimate."""
        finished = finished_in(directory)
        return [cell for cell in self.cells() if cell.digest not in finished]

    def work_text(self, cells: Sequence[Cell]) -> str:
        """What will be measured, and its estimated time."""
        if not cells:
            return "nothing is missing: everything is measured"

        def timed(words: str, work: Sequence[Cell]) -> str:
            # On a CPU, forwards of stories260K (1 MB) take 3.5 (64 tokens) to 1.5 times (2k) their products.
            how = "at least" if self.plan and self.plan.longest.weights < 50_000_000 else "about"
            return f"{words}, {how} {format_duration(sum(c.work for c in work))}" if self.plan else words

        lines = []
        for kind, words in KINDS.items():
            if work := [cell for cell in cells if cell.kind == kind]:
                rows = len({cell.row for cell in work})
                what = f"{kind}: {counted(rows, 'row')}, {counted(len(work), *words)} in all"
                lines.append(timed(what, work))
        return "\n".join([*lines, timed("in all", cells)])


def counted_by_row(cells: Iterable[Cell]) -> list[str]:
    """How many cells each row has of each kind, in words."""
    counts = Counter((cell.row.label, cell.kind) for cell in cells)
    return [f"{label}: {counted(count, *KINDS[kind])}" for (label, kind), count in counts.items()]
