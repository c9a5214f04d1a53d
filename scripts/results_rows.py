"""The lines of docs/results/results.jsonl as rows: perplexity up to a target length, and all retrieval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from results_lines import SEARCH, TRAINING, Line, is_measured_line
from rope_extend.study.cells import PERPLEXITY, RETRIEVAL
from rope_extend.study.collecting import Collected, collect

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.comparison import Comparison
from rope_extend.evaluation.controls import against_cropped
from rope_extend.evaluation.results import EvaluationRow
from rope_extend.plots.curves import MOST_RATIO


@dataclass(frozen=True)
class Results:
    """Everything that the page shows.

    Attributes:
        lines: all lines of the results.
        collected: the rows up to the target length.
        longest: that length in tokens.
    """

    lines: Sequence[Line]
    collected: Collected
    longest: int

    @property
    def rows(self) -> list[EvaluationRow]:
        return self.collected.rows

    @property
    def near(self) -> list[Comparison]:
        """The rows whose perplexity at the longest length is near that of the cropped context."""
        found = against_cropped(self.rows)
        return [gain for gain in found if gain.differences[-1].ratio <= MOST_RATIO]

    @property
    def trained(self) -> int:
        """The trained window in tokens, which every measured line has."""
        found = next(line["trained_length"] for line in self.lines if is_measured_line(line))
        assert isinstance(found, int)
        return found

    @property
    def model(self) -> str:
        """The name of the model, from the lines."""
        names = dict.fromkeys(line["model"] for line in self.lines if is_measured_line(line))
        return " and ".join(names)

    @property
    def lines_of_target(self) -> list[Line]:
        """The lines of perplexity on texts of the target length."""
        return [line for line in self.of_kind(PERPLEXITY) if longest_of(line) == self.longest]

    @property
    def other_targets(self) -> list[int]:
        """The targets besides that of the main table, the longest first."""
        targets = {longest_of(line) for line in self.of_kind(PERPLEXITY)} - {self.longest}
        return sorted((each for each in targets if each > self.trained), reverse=True)

    @property
    def books(self) -> str:
        """The books that every row has, as text."""
        return books_text(len(self.collected.documents))

    def of_kind(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind]


def results_of(lines: Sequence[Line], longest: int | None = None) -> Results:
    """The rows of the lines with texts of one target length, and all retrieval.

    If these lines differ in their lengths or dtype, those that most have are used: rows of a
    table have the same columns, in one dtype.

    Args:
        lines: all lines of the results.
        longest: the target length in tokens; by default that of most lines, and of two the longer one.

    Raises:
        RopeExtendError: lines of two models, prompts or results, which no table may mix.
    """
    perplexities = [line for line in lines if line["kind"] == PERPLEXITY]
    if longest is None:
        targets = Counter(longest_of(line) for line in perplexities)
        longest = max(targets, key=lambda length: (targets[length], length), default=0)
    columns = Counter(_columns(line) for line in perplexities if longest_of(line) == longest)
    used = [line for line in perplexities if columns and _columns(line) == columns.most_common(1)[0][0]]
    used += [line for line in lines if line["kind"] == RETRIEVAL]
    _check_same(lines)
    labels = sorted(dict.fromkeys(line["label"] for line in used), key=rank)
    return Results(lines, collect(used, labels), longest)


def _check_same(lines: Sequence[Line]) -> None:
    """Refuse two models, two prompts of one trial, and two results of one row on the same text or prompt.

    Texts are known by their tokens: two files of one name are two texts. All lines are compared, also those
    that no table shows.
    """
    weights: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    found: dict[tuple[Any, ...], Any] = {}
    for line in lines:
        identity = line.get("identity") or {}
        if is_measured_line(line) or identity.get("weights"):
            dtype = line.get("dtype") or str(identity["dtype"]).removeprefix("torch.")
            if weights.setdefault(dtype, identity.get("weights")) != identity.get("weights"):
                raise RopeExtendError(
                    f"the lines hold results of two models, with the weights {weights[dtype]} and "
                    f"{identity.get('weights')}; move the lines or cells of one of them to another directory"
                )
        if line["kind"] == PERPLEXITY:
            name, result = line["result"]["data"], line["result"]["document_nll"]
            shown = f"{line['document']} ({name})"
            row = line["label"], *_columns(line)
        elif line["kind"] == RETRIEVAL:
            (cell,) = line["cells"]
            shown = name = f"{cell['task']} at {cell['length']}, depth {cell['depth']}, trial {line['trial']}"
            prompt, result = cell["data"], cell["scores"]
            row = line["label"], line["dtype"]
            if prompts.setdefault(name, prompt) != prompt:
                raise RopeExtendError(
                    f"the cells hold two prompts of the name {name!r}, {prompts[name]} and {prompt}; move "
                    "the cells of one of them to another directory"
                )
        else:
            continue
        if found.setdefault((*row, name), result) != result:
            raise RopeExtendError(
                f"the cells hold two results of {line['label']!r} on {shown!r}, as after a change of the "
                "weights; move one of them to another directory"
            )


def _columns(line: Line) -> tuple[Any, ...]:
    return tuple(line["result"]["ppl"]), line["dtype"]


def longest_of(line: Line) -> int:
    return max(int(length) for length in line["result"]["ppl"])


def books_text(count: int) -> str:
    """`one book`, or `4 books`."""
    return "one book" if count == 1 else f"{count} books"


ORDER = (
    "none", "linear", "ntk", "dynamic_ntk", "yarn", "dynamic_yarn", "short_original(yarn)", "ntk(", "yarn(",
    "race", "self_extend", "rerope", "dual_chunk", "jet_long", "sinks", "string",
)  # fmt: skip


def rank(label: str) -> tuple[Any, ...]:
    """Plain RoPE and its control first, then methods on frequencies, then those on positions."""
    starts = [
        n for n, name in enumerate(ORDER) if label == name or (name.endswith("(") and label.startswith(name))
    ]
    if label.startswith("none, cropped"):
        return False, 0, 1, label
    return "LoRA" in label, starts[0] if starts else len(ORDER), 0, label


def machines(lines: Sequence[Line]) -> list[str]:
    """The devices of the measured lines."""
    names = dict.fromkeys(_device(line) for line in lines if is_measured_line(line))
    return ["a CPU" if name == "cpu" else name for name in names]


def _device(line: Line) -> str:
    return str(line.get("machine", {}).get("device", "cpu"))


def seconds(lines: Sequence[Line]) -> float:
    """Seconds of cells, on a CPU those of its cores, of searches, and of the steps of LoRA runs."""
    cells = [line for line in lines if is_measured_line(line)]
    measured = sum(line["cpu_seconds" if _device(line) == "cpu" else "seconds"] for line in cells)
    runs = {line["run"]: line["seconds"] for line in lines if line["kind"] == TRAINING}
    searches = sum(line["cost"].get("seconds", 0.0) for line in lines if line["kind"] == SEARCH)
    return float(measured + sum(runs.values()) + searches)
