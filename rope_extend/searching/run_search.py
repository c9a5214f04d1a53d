"""Find frequency divisors for a model: `rope_extend.search`."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rope_extend.data.documents import Document, fingerprint, load_documents
from rope_extend.data.sources import check_outside
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import LOADING
from rope_extend.evaluation.forward_plan import ForwardPlan, plan_forward
from rope_extend.evaluation.identity import model_identity
from rope_extend.evaluation.output_directory import check_files
from rope_extend.evaluation.statistics import paired
from rope_extend.journal import only_writer
from rope_extend.memory.budget import expand_segments
from rope_extend.models.load_options import LoadOptions
from rope_extend.models.loading import pretrained
from rope_extend.models.processes import process_count
from rope_extend.models.rotary_tables import shape_of
from rope_extend.progress import progress_bar
from rope_extend.searching.evaluations import LOG, Evaluator, score
from rope_extend.searching.search_config import HELD_OUT_TABLES, SearchConfig
from rope_extend.searching.search_result import FILES, HeldOutRow, SearchResult
from rope_extend.searching.space import Space
from rope_extend.searching.strategy import published, race
from rope_extend.units import format_duration, format_length

logger = logging.getLogger(__name__)


_NOT_IN_IDENTITY = (
    "model", "data", "output", "text_column", "split",
    *SearchConfig.groups[LOADING],
)  # fmt: skip
"""Settings on which no evaluation depends, or that have an entry of their own."""


def search(
    config: SearchConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> SearchResult:
    """Find a divisor for the frequency of each channel pair, and an attention factor.

    If `config.output` is set, the directory gets the encoding (`encoding.json`), the settings and held-out
    losses (`search.json`), and the log of all evaluations. The directory is then a method:
    `extend(model, target_length, directory)`.

    An interrupted search loses at most one evaluation. With `resume=True` it continues, and ends on the same
    table, bit for bit.

    Args:
        config: what to search, and how.
        resume: resume an interrupted search in the output directory.
        overwrite: replace a search in the output directory.
        progress: show progress bars.

    Raises:
        RopeExtendError: no such model or data, too few documents of the target length, a pass that does not
            fit into memory, or an output directory that holds a search.
    """
    expand_segments()
    if config.data is None:
        raise RopeExtendError("search: data is not set; give documents of at least target_length tokens")
    if process_count() > 1:
        raise RopeExtendError("search runs in one process; start it without torchrun or accelerate launch")
    output = _checked_output(config, resume, overwrite)
    space, plan = _planned(config, progress)
    logger.info("%s", plan)
    plan.check()
    with nullcontext() if output is None else only_writer(output, "search"):
        tokenizer = pretrained(AutoTokenizer, config.model)
        documents = search_documents(config, tokenizer)
        model = LoadOptions.of(config).load(config.model)
        if output is not None and overwrite:
            for name in (*FILES[::-1], LOG):  # the encoding first: it must not stay next to another log
                (output / name).unlink(missing_ok=True)
        settings = {name: value for name, value in config.to_dict().items() if name not in _NOT_IN_IDENTITY}
        content = {"documents": fingerprint(documents), "trained": asdict(space.shape)}
        identity = {**settings, **model_identity(model), **content}
        file = None if output is None else output / LOG
        chunk = plan.forward.longest.chunk_size if plan.forward else None
        evaluator = Evaluator(model, documents, config, space, file=file, identity=identity, chunk=chunk)
        bar = progress_bar(shown=progress, total=plan.passes, unit="doc", desc="search")
        with evaluator, bar as evaluator.bar:
            result = _searched(evaluator)
            if output is not None:
                result.write(output)
        return result


@dataclass(frozen=True)
class SearchPlan:
    """The estimated cost of a search.

    Attributes:
        passes: the largest number of forward passes, with those over held-out documents.
        forward_tokens: tokens of these passes.
        forward: the memory and time of one pass; None for a family that cannot be estimated.
    """

    passes: int
    forward_tokens: int
    forward: ForwardPlan | None

    def check(self) -> None:
        """Refuse a search whose passes do not fit into memory."""
        if self.forward is not None:
            self.forward.check()

    def __str__(self) -> str:
        text = f"at most {self.passes:,} forward passes, {self.forward_tokens:,} forward tokens"
        if self.forward is None:
            return text
        seconds = self.passes * self.forward.longest.seconds
        return f"{text}, about {format_duration(seconds)}\n{self.forward}"


def plan_search(config: SearchConfig) -> SearchPlan:
    """Estimate the cost of a search from the config of the model alone; needs neither data nor weights.

    Raises:
        RopeExtendError: no such model, or the target is not beyond the trained window.
    """
    return _planned(config)[1]


def _planned(config: SearchConfig, progress: bool = False) -> tuple[Space, SearchPlan]:
    options = LoadOptions.of(config)
    empty = options.empty(config.model)
    shape = shape_of(empty, config.trained_length)
    if config.target_length <= shape.trained_length:
        raise RopeExtendError(
            f"search: target_length must exceed the trained window of {shape.trained_length} tokens, got "
            f"{config.target_length}"
        )
    space = Space(shape, config.target_length)
    passes = config.race_passes + HELD_OUT_TABLES * config.holdout
    table = space.table([1.0] * (space.pairs - 1) + [space.factor])
    forward = plan_forward(
        config.model,
        [config.target_length],
        load_options=options,
        empty=empty,
        encodings=[space.encoding(table)],
        trained_length=space.shape.trained_length,
        progress=progress,
    )
    return space, SearchPlan(passes, passes * config.target_length, forward)


def _checked_output(config: SearchConfig, resume: bool, overwrite: bool) -> Path | None:
    if resume and overwrite:
        raise RopeExtendError(
            "resume continues the search on disk and overwrite replaces it; choose one of them"
        )
    if config.output is None:
        if resume or overwrite:
            raise RopeExtendError(
                "resume and overwrite refer to a search on disk, and output is not set; set output"
            )
        return None
    begun = (Path(config.output) / LOG).exists()
    output = check_files(config.output, FILES, overwrite=overwrite or (resume and begun))
    check_outside(output, config.data)
    if begun and not (resume or overwrite):
        raise RopeExtendError(
            f"{str(output)!r} holds an interrupted search; give resume=True to resume it, or overwrite=True "
            "to replace it"
        )
    if (output / LOG).is_symlink() or (output / LOG).is_dir():
        raise RopeExtendError(f"{str(output / LOG)!r} is a link or a directory; use another directory")
    return output


def search_documents(config: SearchConfig, tokenizer: Any) -> list[Document]:
    """The documents of a search, and then those that are held out.

    Raises:
        RopeExtendError: too few documents of the target length; copies do not count.
    """
    assert config.data is not None
    count = config.documents + config.holdout
    documents = load_documents(
        config.data,
        tokenizer,
        text_column=config.text_column,
        split=config.split,
        min_tokens=config.target_length,
        max_documents=count,
        max_tokens=config.target_length,
        distinct=True,
    )
    if len(documents) < count:
        raise RopeExtendError(
            f"search: {config.documents} documents and {config.holdout} held-out ones of "
            f"{format_length(config.target_length)} tokens are needed, and the data has {len(documents)}, "
            "without copies; give more data, or fewer documents"
        )
    return documents


def _searched(evaluator: Evaluator) -> SearchResult:
    config, space = evaluator.config, evaluator.space
    rows = {table: f"race {n}" for n, table in enumerate(race(evaluator), start=1)}
    for name, table in published(config, space).items():
        rows.setdefault(table, name)
    losses = {table: evaluator.held_out(table) for table in rows}
    by_score = sorted(rows, key=lambda table: score(losses[table]))
    winner = by_score[0]
    if not math.isfinite(score(losses[winner])):
        raise RopeExtendError(
            "search: no candidate has a finite loss on the held-out documents; the model gives NaN, so try "
            "another dtype"
        )
    target, terms = config.target_length, [1] * config.holdout
    found = [
        HeldOutRow(
            label=rows[table],
            table=table,
            losses=losses[table],
            difference=paired(target, losses[winner], losses[table], terms),
        )
        for table in by_score
    ]
    names = [document.name for document in evaluator.all_documents]
    return SearchResult(
        config=config,
        shape=space.shape,
        encoding=space.encoding(winner),
        rows=found,
        cost=evaluator.cost,
        documents=names[: config.documents],
        holdout=names[config.documents :],
        data=fingerprint(evaluator.all_documents),
    )
