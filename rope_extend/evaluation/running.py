"""Run a measurement: its cells in order, each kept when it is finished, by one process or by several."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from rope_extend.attention.split_window import split_window
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.answering import answer_batch
from rope_extend.evaluation.cells import (
    PERPLEXITY,
    RETRIEVAL,
    Cell,
    CellStore,
    check_resumed,
    collect,
    our_parts,
)
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.loss_computer import RunOptions
from rope_extend.evaluation.measurement import Measurement
from rope_extend.evaluation.perplexity import perplexity
from rope_extend.evaluation.protocols import WindowSettings
from rope_extend.evaluation.report_parts import table_parts
from rope_extend.evaluation.results import EvaluationRow, PerplexityResult
from rope_extend.models.processes import is_main_process, process_count, processes
from rope_extend.progress import progress_bar
from rope_extend.report.page import Part, markdown
from rope_extend.units import format_duration, format_length

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What a measurement has measured.

    Attributes:
        rows: what was measured of each row, on the documents that the rows share.
        missing: the cells that are not finished.
        lead: what the report begins with: the verdict, and what is missing.
    """

    rows: list[EvaluationRow]
    missing: list[Cell]
    lead: Sequence[Part] = ()

    @property
    def unfinished(self) -> list[str]:
        """The labels of rows of which something is missing."""
        return [*dict.fromkeys(cell.row.label for cell in self.missing)]

    def markdown(self) -> str:
        """The tables, and below them the verdict, where somebody at a terminal looks."""
        return markdown([*table_parts(self.rows), *self.lead])


def run(
    measurement: Measurement,
    where: Path | None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Measured:
    """Measure the cells that are not finished, and keep each.

    Under `torchrun` or `accelerate launch` each process measures its share, and all get the same result.

    Args:
        where: the directory where finished cells are kept, to which no other run writes; None keeps them in
            memory.
        resume: use the finished cells there, and refuse those of another measurement.
        overwrite: delete the finished cells there, once the model is loaded.

    Raises:
        RopeExtendError: the directory holds another measurement.
    """
    shares, started = measurement.config.split_window, process_count()
    if shares not in (1, started):
        raise RopeExtendError(
            f"split_window={shares} needs {shares} processes, and there are {started}; start them with "
            f"torchrun --nproc-per-node {shares} -m rope_extend {measurement.config.command} ..."
        )
    cells = measurement.cells()
    connected = processes(measurement.candidates.load_options.torch_device)
    left = measurement.missing(where) if where is not None and resume else cells
    logger.info("%s", measurement.work_text(left))
    with ExitStack() as stack:
        reserve = measurement.plan.longest.peak if measurement.plan else 0
        lm = measurement.candidates.load_options.load(measurement.candidates.name, reserve=reserve)
        measurement.candidates.check_adapters(lm, [cell.row for cell in left])
        identity = model_identity(lm)
        rank, count = (connected.process_index, connected.num_processes) if connected else (0, 1)
        # The others open files of their own when the main process has taken over those of an earlier run.
        with connected.main_process_first() if connected else nullcontext():
            if rank == 0 and where is not None and overwrite:
                for path in our_parts(where):
                    path.unlink(missing_ok=True)
            store = CellStore(where, identity, rank)
            stack.callback(store.close)
            if rank == 0:
                if resume:
                    check_resumed(store, cells)
                store.take_parts()
        finished = {cell.digest for cell in cells if store.read(cell)}
        if connected:
            finished = broadcast_object_list([finished])[0]
        left = [cell for cell in cells if cell.digest not in finished]
        mine = [cell for n, cell in enumerate(left) if n % count == rank or _together(measurement, cell)]
        if finished:
            logger.info("%d of %d cells are finished", len(finished), len(cells))
            _measured(measurement, store, cells)  # refuses damaged cells, before others are measured
        if (others := len(store.records) - len(finished)) > 0:
            logger.warning(
                "%d cells in %s are of other rows, texts (--documents %s), settings or versions: not used",
                others, where, measurement.config.max_documents,
            )  # fmt: skip
        _measure_all(measurement, lm, mine, store, progress)
        if connected:
            _share(store, connected)
        return _measured(measurement, store, cells)


def _share(store: CellStore, connected: Any) -> None:
    """Give all processes the finished cells of each; the main process takes over their files."""
    for records in gather_object([store.records]):
        if is_main_process():
            store.take(records.values())
        else:
            store.records |= records
    if not is_main_process():
        store.close()
    connected.wait_for_everyone()
    if is_main_process():
        store.take_parts()


def _measure_all(
    measurement: Measurement, lm: Any, cells: Sequence[Cell], store: CellStore, progress: bool
) -> None:
    """Measure some cells, within the budget."""
    budget = measurement.config.budget
    tokens, work = sum(cell.tokens for cell in cells), sum(cell.work for cell in cells)
    shown = progress and is_main_process()
    bar = progress_bar(shown=shown, total=tokens, unit="tok", unit_scale=True, desc="measuring")
    row, begun, done = None, time.perf_counter(), 0.0
    with bar, ExitStack() as stack:
        for number, cell in enumerate(cells, start=1):
            over = time.perf_counter() - begun + _seconds(cell.work, done, begun) > (budget or math.inf)
            if _together(measurement, cell):
                over = budget is not None and bool(broadcast_object_list([over])[0])
            elif over and measurement.config.split_window > 1:
                continue  # the others wait at the next cell that all measure together
            if over:
                break
            if row is None or (row.source, row.adapter) != (cell.row.source, cell.row.adapter):
                stack.close()
                model = stack.enter_context(measurement.candidates.prepared(lm, cell.row))
            row = cell.row
            started = time.perf_counter()
            values = _measure(measurement, model, cell, bar)
            _warn_of_worse_than_chance(measurement, lm, cell, values)
            done += cell.work
            if is_main_process() or not _together(measurement, cell):
                store.write(cell, {**values, "seconds": time.perf_counter() - started})
            if progress:
                left = f"{format_duration(_seconds(work - done, done, begun))} to go"
                logger.info("[%d/%d] %s; %s", number, len(cells), log_line(cell, values), left)


def _warn_of_worse_than_chance(measurement: Measurement, lm: Any, cell: Cell, values: dict[str, Any]) -> None:
    """Say if plain RoPE does worse within its window than a guess among all tokens."""
    plain = cell.row.record is None and cell.row.crop is None and measurement.candidates.is_plain(cell.row)
    first = cell.kind == PERPLEXITY and cell.number == 0  # once is enough
    if not (first and plain) or measurement.lengths[0] > measurement.trained:
        return
    size, by_length = lm.config.get_text_config().vocab_size, values["result"]["ppl"]
    if (level := by_length[min(by_length, key=int)] or math.inf) > size:
        logger.warning(
            "perplexity %.0f of %s within the trained window is worse than a guess among %d tokens; do the "
            "tokenizer, the weights and the text belong together?", level, values["document"], size,
        )  # fmt: skip


def _together(measurement: Measurement, cell: Cell) -> bool:
    """Whether all processes measure a cell together, each a part of every window."""
    return measurement.config.split_window > 1 and cell.kind == PERPLEXITY


def _seconds(work: float, done: float, begun: float) -> float:
    """The seconds that some work will take, at the speed of what is done since `begun`."""
    return max(0.0, work) * (time.perf_counter() - begun) / done if done else 0.0


def _measure(measurement: Measurement, model: Any, cell: Cell, bar: Any) -> dict[str, Any]:
    """The values of a cell."""
    about = measurement.candidates.subject(model, cell.row)
    if cell.kind == PERPLEXITY:
        result = _perplexity(measurement, model, cell, bar)
        document = Path(measurement.documents[cell.number].name).name
        return {**about, "document": document, "result": result.to_dict()}
    batch = measurement.batches[cell.number]
    task = measurement.tasks[batch[0].task]
    trials, peak = answer_batch(model, measurement.tokenizer, task, batch, cell.row.crop)
    bar.update(cell.tokens)
    cost = {"forward_tokens": cell.tokens, "peak_memory_bytes": peak}
    return {**about, "crop": cell.row.crop, "trials": trials, **cost}


def _perplexity(measurement: Measurement, model: Any, cell: Cell, bar: Any) -> PerplexityResult:
    """The perplexity of a row on a document."""
    crop, config = cell.row.crop, measurement.config
    protocol, settings = config.protocol, config.window_settings
    if crop is not None:
        protocol, settings = "cropped", WindowSettings(window=crop, blocks=config.control_blocks)
    chunk = config.chunk or (measurement.plan.longest.chunk_size if measurement.plan else None)
    with split_window(model) if _together(measurement, cell) else nullcontext():
        return perplexity(
            model,
            measurement.documents[cell.number],
            measurement.lengths,
            protocol=protocol,
            options=RunOptions(chunk, bar, config.control_blocks),
            **settings,
        )


def _measured(measurement: Measurement, store: CellStore, cells: Sequence[Cell]) -> Measured:
    """What is measured so far."""
    values, missing = list[dict[str, Any]](), list[Cell]()
    for cell in cells:
        record = store.read(cell)
        if record is None:
            missing.append(cell)
            continue
        # The trained window and the label are those of now, not of when a cell was measured.
        values.append({**record, "trained_length": measurement.trained, "label": cell.row.label})
    return Measured(collect(values, [row.label for row in measurement.rows]), missing)


def log_line(cell: Cell, values: dict[str, Any]) -> str:
    """What was measured, for the log."""
    if cell.kind == RETRIEVAL:
        trials = values["trials"]
        score = sum(trial["score"] for trial in trials) / len(trials)
        where = f"{trials[0]['task']}, {format_length(trials[0]['length'])}"
        return f"{cell.row.label}: {where}, {len(trials)} prompts: {score:.0%}"
    length, ppl = max(values["result"]["ppl"].items(), key=lambda pair: int(pair[0]))
    shown = "not finite" if ppl is None else f"{ppl:.2f}"
    return f"{cell.row.label}: {values['document']}, perplexity {shown} at {format_length(int(length))}"
