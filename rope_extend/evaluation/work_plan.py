"""Everything that an evaluation will compute, with its estimated time; and what a time limit leaves out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rope_extend.config import AUTO
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.candidates import Candidates, adapter_labels
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.evaluation.finished_documents import EXTENT
from rope_extend.evaluation.finished_rows import FinishedRow, RowFolders
from rope_extend.evaluation.forward_plan import ForwardPlan
from rope_extend.evaluation.protocols import PROTOCOLS, Protocol, Settings, protocol_named
from rope_extend.files import write_json
from rope_extend.units import format_duration, format_length

DEPTHS = 5
"""Number of depths of the passkeys within the trained window."""
MOST_TRIALS = 4
"""Default number of passkeys at each depth, if they are cheap."""
CHEAP_PROMPTS = 65_536
"""Tokens of a row's passkeys that are cheap whatever the documents have."""


@dataclass(frozen=True)
class Extent:
    """How much an evaluation measures.

    Attributes:
        documents: number of documents.
        cropped: whether the control row with a cropped context is measured.
        trials: passkeys at each depth of each length; 0 for none.
        samples: number of documents that each row continues, those with a cropped context too.
    """

    documents: int
    cropped: bool
    trials: int
    samples: int = 0


DOCUMENTS, CROPPED, PROMPTS, SAMPLES = "documents", "cropped", "prompts", "samples"
CROPPED_PROMPTS = "cropped prompts"
"""Kinds of pieces of an evaluation."""


@dataclass(frozen=True)
class Finished:
    """What an interrupted evaluation has finished: it costs nothing more, and is never left out.

    Attributes:
        documents: number of documents of each row, in the order of the rows; empty if there are none.
        cropped: number of documents of the rows whose context is cropped, of all of them together.
        answered: seconds of the finished passkeys of each row, in the order of the rows.
        cropped_answered: seconds of those of the control with a cropped context.
        least: the smallest extent that has all of this.
    """

    documents: tuple[int, ...] = ()
    cropped: int = 0
    answered: tuple[float, ...] = ()
    cropped_answered: float = 0.0
    least: Extent = Extent(0, False, 0)


@dataclass(frozen=True)
class Costs:
    """Estimated seconds of the parts of an evaluation.

    Attributes:
        documents: seconds of each row on one document, in the order of the rows, without the controls.
        cropped_rows: number of rows whose context is cropped.
        cropped_document: seconds of one of these on one document.
        prompt_rows: number of rows that answer the passkeys, without the controls.
        prompt: seconds of one passkey of each length.
        prompt_lengths: tokens of the passkeys.
        sample: seconds of one continuation.
        cropped_prompt: as `prompt`, of the control with a cropped context if that answers passkeys.
        cropped_prompt_lengths: tokens of its passkeys; empty if it answers none.
        finished: what costs nothing more.
    """

    documents: tuple[float, ...]
    cropped_rows: int
    cropped_document: float
    prompt_rows: int
    prompt: float
    prompt_lengths: tuple[int, ...]
    sample: float = 0.0
    cropped_prompt: float = 0.0
    cropped_prompt_lengths: tuple[int, ...] = ()
    finished: Finished = Finished()

    @property
    def rows(self) -> int:
        """Number of rows, without the controls."""
        return len(self.documents)

    def seconds(self, extent: Extent) -> float:
        """Of all parts together."""
        return sum(seconds for _, seconds in self.pieces(extent))

    def parts(self, extent: Extent) -> list[tuple[str, float]]:
        """Each part in words, and its seconds."""
        done = self.finished
        documents = f"{extent.documents} document{'' if extent.documents == 1 else 's'} each"

        def measured(words: str, rows: int, kind: str, finished: int) -> tuple[str, float]:
            said = f", {finished} of {rows * extent.documents} finished" if finished else ""
            return f"{words}: {_rows(rows)}, {documents}{said}", self._of(kind, extent)

        found = [measured("perplexity", self.rows, DOCUMENTS, sum(done.documents))]
        if extent.cropped and self.cropped_rows:
            found.append(measured("control, cropped context", self.cropped_rows, CROPPED, done.cropped))
        answering = Counter({self.prompt_lengths: self.prompt_rows} if extent.trials else ())
        if extent.trials and extent.cropped and self.cropped_prompt_lengths:
            answering[self.cropped_prompt_lengths] += 1
        for lengths, rows in answering.items():
            count = DEPTHS * extent.trials * len(lengths)
            kinds = {PROMPTS: self.prompt_lengths, CROPPED_PROMPTS: self.cropped_prompt_lengths}
            seconds = sum(self._of(kind, extent) for kind, its in kinds.items() if its == lengths)
            words = f"control, {_passkeys(lengths)}: {_rows(rows)}, {count} prompts each"
            found.append((words, seconds))
        if extent.samples:
            words = f"samples of text: {_rows(self._sampled_rows(extent))}, {extent.samples} each"
            found.append((words, self._of(SAMPLES, extent)))
        return found

    def _of(self, kind: str, extent: Extent) -> float:
        """Seconds of all pieces of a kind."""
        return sum(seconds for piece, seconds in self.pieces(extent) if piece == kind)

    def pieces(self, extent: Extent) -> list[tuple[str, float]]:
        """Each piece that is measured at once, by its kind, with its seconds: for `Clock`."""
        done, trials = self.finished, DEPTHS * extent.trials
        found: list[tuple[str, float]] = []
        begun = done.documents or (0,) * self.rows
        for seconds, finished in zip(self.documents, begun, strict=True):
            found += [(DOCUMENTS, seconds)] * (extent.documents - finished)
        if extent.cropped:
            count = self.cropped_rows * extent.documents - done.cropped
            found += [(CROPPED, self.cropped_document)] * count
        if trials:
            answered = done.answered or (0.0,) * self.prompt_rows
            found += [(PROMPTS, max(0.0, trials * self.prompt - seconds)) for seconds in answered]
        if trials and extent.cropped and self.cropped_prompt_lengths:
            seconds = trials * self.cropped_prompt - done.cropped_answered
            found.append((CROPPED_PROMPTS, max(0.0, seconds)))
        if extent.samples:
            found += [(SAMPLES, extent.samples * self.sample)] * self._sampled_rows(extent)
        return found

    def _sampled_rows(self, extent: Extent) -> int:
        """The number of rows that continue documents."""
        return self.rows + (self.cropped_rows if extent.cropped else 0)

    def text(self, extent: Extent) -> str:
        """The parts with their estimated time, one line each, and all together."""
        lines = [f"{words}, about {format_duration(seconds)}" for words, seconds in self.parts(extent)]
        return "\n".join([*lines, f"in all about {format_duration(self.seconds(extent))}"])

    def within(self, extent: Extent, budget: float) -> tuple[Extent, list[str]]:
        """The extent that a time limit allows, and what it leaves out, in words.

        Samples of text go first, then the controls: passkeys, and the cropped context. Then documents go,
        down to one. Nothing goes of which a part is finished.

        Args:
            extent: what would be measured without a limit.
            budget: seconds.

        Raises:
            RopeExtendError: one document does not fit, or the rest of what is begun.
        """
        smaller, least = extent, self.finished.least
        while self.seconds(smaller) > budget and smaller.samples:
            smaller = replace(smaller, samples=smaller.samples - 1)
        while self.seconds(smaller) > budget and smaller.trials > least.trials:
            smaller = replace(smaller, trials=smaller.trials - 1)
        if self.seconds(smaller) > budget and not least.cropped:
            smaller = replace(smaller, cropped=False)
        while self.seconds(smaller) > budget and smaller.documents > max(1, least.documents):
            smaller = replace(smaller, documents=smaller.documents - 1)
        if self.seconds(smaller) > budget:
            short = f"a budget of {format_duration(budget)} is too short"
            takes = f"take about {format_duration(self.seconds(smaller))}; allow more time"
            if least.documents:
                raise RopeExtendError(
                    f"{short} to complete what is finished already: {_rows(self.rows)} on the "
                    f"{least.documents} documents that were begun {takes}, or use another output directory"
                )
            raise RopeExtendError(
                f"{short}: {_rows(self.rows)} on one document, without any control and without samples of "
                f"text, {takes}, or use fewer rows or shorter lengths"
            )
        return smaller, self.left_out(extent, smaller)

    def left_out(self, whole: Extent, smaller: Extent) -> list[str]:
        """What the smaller extent does not have, in words."""
        said = []
        if smaller.samples < whole.samples:
            some = f"{whole.samples - smaller.samples} of {whole.samples} samples of text of each row"
            said.append(some if smaller.samples else "the samples of text")
        if smaller.trials < whole.trials:
            passkeys = _passkeys(self.prompt_lengths)
            some = f"{whole.trials - smaller.trials} of {whole.trials} {passkeys}, at each depth"
            said.append(some if smaller.trials else f"the {passkeys}")
        if whole.cropped and not smaller.cropped:
            said.append("the control with a cropped context")
        if smaller.documents < whole.documents:
            said.append(f"{whole.documents - smaller.documents} of {whole.documents} documents")
        return said


def whole_extent(config: EvaluationConfig, candidates: Candidates, documents: int) -> Extent:
    """What an evaluation measures without a time limit.

    Args:
        config: the settings.
        candidates: the rows.
        documents: number of documents.
    """
    cropped, plain = _has_cropped(config, candidates), candidates.plain_methods
    samples = min(config.samples, documents)
    compares = len(candidates.encodings) + len(candidates.records) > len(plain)
    if config.retrieval == AUTO:
        # Within the trained window alone, passkeys show what an extension costs: they need a row before it.
        if not config.retrieval_lengths and not (compares and (cropped or plain)):
            return Extent(documents, cropped, 0, samples)
        tokens = sum(passkey_lengths(config, candidates))
        trials = default_trials(documents, candidates.longest, tokens)
        return Extent(documents, cropped, trials, samples)
    return Extent(documents, cropped, int(config.retrieval), samples)


def _has_cropped(config: EvaluationConfig, candidates: Candidates) -> bool:
    """Whether the cropped context is a control: if the same targets are scored with it."""
    rule, trained = protocol_named(config.protocol), candidates.trained_length
    settings = rule.check_settings(config.window_settings, candidates.lengths)
    same = config.protocol == "prefix" or rule.shares_targets(settings, trained)
    return config.cropped and same and candidates.longest > trained


def evaluation_costs(
    config: EvaluationConfig,
    candidates: Candidates,
    plan: ForwardPlan,
    lengths: Sequence[int],
    tokens: int | None = None,
    finished: Sequence[FinishedRow] = (),
) -> Costs:
    """The estimated seconds of each part of an evaluation.

    Args:
        config: what is measured.
        candidates: its rows.
        plan: seconds of windows of the lengths.
        lengths: the lengths that are measured.
        tokens: tokens of the longest document; by default as few as the protocol needs.
        finished: what is finished of each row, in the order of `finished_rows`.
    """
    rule, trained = protocol_named(config.protocol), candidates.trained_length
    tokens = tokens or config.max_tokens or lengths[-1] + rule.extra_tokens
    settings = rule.check_settings(config.window_settings, lengths)
    documents = tuple(
        seconds_of_documents(plan, rule, passes, tokens, settings)
        for passes in pass_lengths(rule, candidates, lengths)
    )
    if rule.nested:
        windows = PROTOCOLS["cropped"].layout(tokens, lengths[-1], {"window": trained})
        cropped = sum(seconds_of_window(plan, window.tokens) for window in windows)
    else:
        cropped = seconds_of_documents(plan, rule, [trained], tokens, settings)
    passkeys = passkey_lengths(config, candidates)
    answers = _has_cropped(config, candidates) and not candidates.plain_methods
    cropped_passkeys = tuple(n for n in passkeys if n <= trained) if answers else ()

    def seconds_of(sizes: Iterable[int]) -> float:
        return sum(seconds_of_window(plan, size) for size in sizes)

    return Costs(
        documents, len(candidates.cropped_labels), cropped, len(documents), seconds_of(passkeys), passkeys,
        seconds_of_window(plan, lengths[-1]), seconds_of(cropped_passkeys), cropped_passkeys,
        _finished(finished, seconds_of),
    )  # fmt: skip


def _finished(rows: Sequence[FinishedRow], seconds_of: Callable[[Iterable[int]], float]) -> Finished:
    """What the rows have finished together."""
    whole, cropped = ([row for row in rows if row.cropped == crops] for crops in (False, True))
    answered, of_control = (
        tuple(seconds_of(length for length, _ in row.answered) for row in some) for some in (whole, cropped)
    )
    least = Extent(
        documents=max((number + 1 for row in rows for number in row.documents), default=0),
        cropped=any(row.documents for row in cropped),
        trials=max((trial + 1 for row in rows for _, trial in row.answered), default=0),
    )
    return Finished(
        tuple(len(row.documents) for row in whole), sum(len(row.documents) for row in cropped), answered,
        sum(of_control), least,
    )  # fmt: skip


def finished_rows(
    directory: Path, config: EvaluationConfig, candidates: Candidates, whole: Extent
) -> list[FinishedRow]:
    """What an interrupted evaluation has finished of each row, of all that would be measured.

    Args:
        directory: that of the finished documents.
        config: the settings.
        candidates: the rows.
        whole: what the evaluation measures without a time limit.

    Returns:
        The rows of methods, of adapters, and then those with a cropped context.
    """
    folders, lengths = RowFolders(directory, candidates), passkey_lengths(config, candidates)
    labels = [*candidates.method_labels.values(), *adapter_labels(candidates.records).values()]
    rows = [folders.finished(label) for label in labels]
    if whole.cropped:
        rows += [folders.finished(label, cropped=True) for label in candidates.cropped_labels]
    joined = protocol_named(config.protocol).joined
    # Documents that are processed as one are finished together, without those that the budget left out.
    count = documents_begun(directory, whole.documents)[1] if joined else whole.documents
    return [
        replace(
            row,
            documents=frozenset(
                number for number in range(count) if (0 if joined else number) in row.documents
            ),
            answered=tuple(
                (length, trial)
                for length, trial in row.answered
                if length in lengths and trial < whole.trials
            ),
        )
        for row in rows
    ]


def passkey_lengths(config: EvaluationConfig, candidates: Candidates) -> tuple[int, ...]:
    """The lengths of the passkeys in tokens, ascending: the trained window, and those of the config.

    Raises:
        RopeExtendError: one exceeds the longest length, to which methods extend the model.
    """
    more = config.retrieval_lengths or ()
    if more and max(more) > candidates.longest:
        raise RopeExtendError(
            f"evaluation: retrieval_lengths must be at most the longest of the lengths, "
            f"{candidates.longest:,}, to which methods extend the model; got {list(more)}"
        )
    return tuple(sorted({candidates.trained_length, *more}))


def default_trials(documents: int, tokens: int, prompt_tokens: int) -> int:
    """Passkeys at each depth that cost no more than the documents, from 1 to 4.

    Args:
        documents: number of documents.
        tokens: tokens of each.
        prompt_tokens: tokens of a passkey, or of one of each length.
    """
    each = DEPTHS * prompt_tokens
    if MOST_TRIALS * each <= CHEAP_PROMPTS:
        return MOST_TRIALS
    return max(1, min(MOST_TRIALS, documents * tokens // each))


def pass_lengths(rule: Protocol, candidates: Candidates, lengths: Sequence[int]) -> list[list[int]]:
    """The length of each pass over a document, of each method and then of each adapter.

    A nested protocol needs one pass for all lengths; one for each group of lengths with equal tables, if the
    tables depend on the length. Its windows of a fixed length have the same table at any length.

    Args:
        rule: the protocol.
        candidates: the rows.
        lengths: the lengths that are measured.
    """
    if rule.nested and not rule.settings:
        return [[group[-1] for group in groups] for groups in candidates.length_groups(lengths)]
    passes = [lengths[-1]] if rule.nested else list(lengths)
    return [passes] * (len(candidates.encodings) + len(candidates.records))


def seconds_of_documents(
    plan: ForwardPlan, rule: Protocol, passes: Sequence[int], tokens: int, settings: Settings
) -> float:
    """Estimated seconds of one document under a protocol.

    Args:
        plan: seconds of windows of some lengths.
        rule: the protocol.
        passes: the length of each pass.
        tokens: tokens of the document.
        settings: the settings of the protocol.
    """
    windows = [window for length in passes for window in rule.layout(tokens, length, settings)]
    return sum(seconds_of_window(plan, window.tokens) for window in windows)


def seconds_of_window(plan: ForwardPlan, tokens: int) -> float:
    """Estimated seconds of a window: that of the shortest planned one that is as long, in proportion."""
    longer = [each for each in plan.lengths if each.length >= tokens]
    nearest = longer[0] if longer else plan.longest
    return nearest.seconds * tokens / nearest.length


def asked_for(config: EvaluationConfig, candidates: Candidates, whole: Extent) -> dict[str, Any]:
    """What the extent of an evaluation with a budget depends on, as plain values.

    It has no estimate, because another estimate must not change what a resumed evaluation measures.

    Args:
        config: its settings.
        candidates: its rows.
        whole: its extent without the budget.
    """
    passkeys = list(passkey_lengths(config, candidates))
    rows = {"methods": [*candidates.encodings], "adapters": [*candidates.records]}
    return {"budget": config.budget, "passkey_lengths": passkeys, **rows, **asdict(whole)}


def decided_extent(
    config: EvaluationConfig, candidates: Candidates, costs: Costs, whole: Extent, directory: Path | None
) -> Extent:
    """What an evaluation measures: all of it, or what its budget allows.

    An interrupted evaluation measures what was decided when it began, and all of which a part is finished.

    Args:
        config: its settings.
        candidates: its rows.
        costs: the estimated time of its parts.
        whole: its extent without a budget.
        directory: that of the finished documents of the interrupted one; None if nothing is resumed.

    Raises:
        RopeExtendError: the budget is too short, or the file in the directory is damaged.
    """
    if config.budget is None:
        return whole
    kept = read_extent(directory, asked_for(config, candidates, whole)) if directory else None
    decided, least = kept or costs.within(whole, config.budget)[0], costs.finished.least
    documents = max(decided.documents, least.documents)
    if least.documents and protocol_named(config.protocol).joined:
        documents = least.documents  # none can be added to a text that is finished
    return replace(
        decided,
        documents=documents,
        cropped=decided.cropped or least.cropped,
        trials=max(decided.trials, least.trials),
    )


def write_extent(directory: Path, extent: Extent, asked: Mapping[str, Any]) -> None:
    """Keep the extent of a running evaluation, so that the same one, resumed, measures the same.

    Args:
        directory: that of the finished documents.
        extent: what is measured.
        asked: the values of `asked_for`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / EXTENT, {"asked": dict(asked), "measured": asdict(extent)})


def read_extent(directory: Path, asked: Mapping[str, Any]) -> Extent | None:
    """The extent of an interrupted evaluation; None if none was kept, or if it was asked for something else.

    Raises:
        RopeExtendError: the file is damaged.
    """
    kept = _kept(directory)
    return kept[1] if kept is not None and kept[0] == asked else None


def _kept(directory: Path) -> tuple[dict[str, Any], Extent] | None:
    """What the extent of an interrupted evaluation was asked for, and the extent; None if none was kept."""
    file = directory / EXTENT
    if not file.exists():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return dict(kept["asked"]), Extent(**kept["measured"])
    except (ValueError, TypeError, KeyError) as error:
        raise RopeExtendError(
            f"{str(file)!r} does not say what was left out: {error}; use overwrite=True to start again"
        ) from error


def documents_begun(directory: Path, documents: int) -> tuple[int, int]:
    """The number of documents that an interrupted evaluation had, and of those that it was to measure.

    Both are `documents` if no budget left any out.

    Raises:
        RopeExtendError: the file of the extent is damaged.
    """
    if (kept := _kept(directory)) is None:
        return documents, documents
    return kept[0].get("documents", documents), kept[1].documents


def _passkeys(lengths: Sequence[int]) -> str:
    """Passkeys in words, with their lengths."""
    return f"passkeys at {' and '.join(map(format_length, lengths))}"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"
