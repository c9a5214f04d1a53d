"""The result of a search, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rope_extend.encodings import LongRoPE, RopeShape, SavedEncoding
from rope_extend.evaluation.statistics import Difference, plain
from rope_extend.files import replacing_files, write_json, write_text
from rope_extend.method_names import CURRENT, ENCODING_FILE
from rope_extend.report.page import Part, markdown
from rope_extend.report.tables import Code, Section, interval, markdown_table, markdown_text
from rope_extend.searching.evaluations import Cost, Losses, score
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Table
from rope_extend.units import format_duration, format_length

CARD, SUMMARY = "README.md", "search.json"
FILES = (CARD, SUMMARY, ENCODING_FILE)
"""The files of a finished search; the encoding appears last."""


@dataclass(frozen=True)
class HeldOutRow:
    """A finalist or a closed form on the held-out documents.

    Attributes:
        label: its name.
        table: the candidate.
        losses: its mean losses on each of the held-out documents, in nats per token.
        difference: its score minus the winner's, with the 95 % interval over documents.
    """

    label: str
    table: Table
    losses: Sequence[Losses]
    difference: Difference

    @property
    def score(self) -> float:
        """Its fitness on the held-out documents, in nats per token; lower is better."""
        return score(self.losses)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON; what is not finite becomes None."""
        values = {"label": self.label, **asdict(self.table), "score": self.score, "losses": self.losses}
        return {**plain(values), "minus_winner": self.difference.to_dict()}


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        config: the settings.
        shape: the rotary shape of the model as it was pretrained.
        encoding: the winner as an encoding.
        rows: finalists and closed forms on the held-out documents, the winner first.
        cost: what the search cost, with the part before it was resumed.
        documents: names of the documents that were searched on.
        holdout: names of the documents that decided.
        data: fingerprint of all of them.
    """

    config: SearchConfig
    shape: RopeShape
    encoding: LongRoPE
    rows: Sequence[HeldOutRow]
    cost: Cost
    documents: Sequence[str]
    holdout: Sequence[str]
    data: str

    @property
    def winner(self) -> HeldOutRow:
        """The row with the lowest loss on the held-out documents."""
        return self.rows[0]

    @property
    def table(self) -> Table:
        """The winner's divisors and attention factor."""
        return self.winner.table

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return {
            "config": self.config.to_dict(),
            "shape": asdict(self.shape),
            "rows": [row.to_dict() for row in self.rows],
            "cost": self.cost._asdict(),
            "documents": list(self.documents),
            "holdout": list(self.holdout),
            "data": self.data,
        }

    def lines(self) -> list[list[str]]:
        """The rows as lines of a table."""
        lines = [["table", "loss, nats", "minus the winner's (95 %)", "attention factor", "divisors"]]
        for row in self.rows:
            difference, divisors = row.difference, row.table.divisors
            change = f"{difference.nats:+.4f}"
            if difference.low is not None:
                change += f" ({interval(difference.low, difference.high)})"
            lines.append([
                row.label, f"{row.score:.4f}", "the winner" if row is self.winner else change,
                f"{row.table.attention_factor:g}", f"{divisors[0]:g} … {divisors[-1]:g}",
            ])  # fmt: skip
        return lines

    def table_text(self) -> str:
        """The rows as a Markdown table."""
        return markdown_table(self.lines())

    def card(self) -> str:
        """The card: what was searched, on which documents, what it cost, and how to use it."""
        config, shape, encoding, cost = self.config, self.shape, self.encoding, self.cost
        target = format_length(encoding.target_length(shape) or config.target_length)
        evaluate = f"rope-extend evaluate {quote(config.model)} --methods DIRECTORY --lengths {target}"
        finetune = f"rope-extend finetune --model {quote(config.model)} --method DIRECTORY"
        relative = ""
        if config.start == CURRENT:
            relative = " of the table that the model had, which the encoding multiplies"
        parts: list[Part] = [
            f"{ENCODING_FILE} holds the encoding, {self.winner.label}. Use this directory as a method.",
            Code("On the command line", f"{evaluate} --data ... --output report\n"
                 f"{finetune} --target-length {target} ..."),
            Code("In Python", f'rope_extend.extend(model, "{target}", "DIRECTORY")'),
            Section("What was searched", notes=[
                f"Model: {config.model}, trained on {shape.trained_length} tokens.",
                f"Rotation: {shape.dim} channels of a head, base {shape.theta:g}.",
                f"Seed: {config.seed}.",
                f"Fitness: mean loss at {', '.join(map(str, config.lengths))} tokens.",
                f"Attention factor: {self.table.attention_factor:g}.",
            ]),
            Code(f"Divisors{relative}, fastest pair first", " ".join(f"{d:g}" for d in self.table.divisors)),
            Code("The encoding", str(encoding)),
            Section("Held-out documents", self.lines(), [
                f"The loss is the fitness on {len(self.holdout)} documents that were not searched on. The "
                "difference is paired by document.",
                "The winner was chosen by its loss on these documents, so this loss is too good. Measure it "
                "on other documents.",
            ]),
            Section("Cost", notes=[
                f"{cost.evaluations:,} evaluations, {cost.passes:,} forward passes, {cost.forward_tokens:,} "
                f"forward tokens, {format_duration(cost.seconds)}. Held-out documents are included.",
            ]),
            Section("Searched on", notes=self.documents),
            Section("Held out", notes=self.holdout),
            f"Fingerprint of all documents: {self.data}.",
        ]  # fmt: skip
        title = f"Frequency divisors for {config.model}, {target} tokens"
        return f"# {markdown_text(title)}\n\n{markdown(parts)}"

    def write(self, directory: Path) -> None:
        """Write the files of a finished search; all of them appear, or none.

        Raises:
            OSError: a file cannot be written.
        """
        with replacing_files(directory, last=ENCODING_FILE) as files:
            write_text(files / CARD, self.card())
            write_json(files / SUMMARY, self.to_dict())
            saved = SavedEncoding(self.encoding, self.shape, self.encoding.target_length(self.shape))
            saved.write(files / ENCODING_FILE)
