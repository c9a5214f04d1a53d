"""The result of a search, and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rope_extend.encodings import LongRoPE, RopeShape, SavedEncoding
from rope_extend.evaluation.statistics import Difference, plain
from rope_extend.files import replacing_files, write_json, write_text
from rope_extend.method_names import ENCODING_FILE
from rope_extend.report.tables import interval, markdown_table
from rope_extend.searching.evaluations import Cost
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
        score: its fitness on the held-out documents, in nats per token; lower is better.
        parts: the mean loss at each length, in nats per token.
        by_document: its fitness on each of the held-out documents.
        difference: its score minus the winner's, with the 95 % interval over documents.
    """

    label: str
    table: Table
    score: float
    parts: Mapping[int, float]
    by_document: Sequence[float]
    difference: Difference

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON; what is not finite becomes None."""
        values = {**vars(self), **asdict(self.table), "minus_winner": self.difference.to_dict()}
        return {name: plain(value) for name, value in values.items() if name not in ("table", "difference")}


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        config: the settings.
        shape: the rotary shape of the model as it was pretrained.
        encoding: the winner as an encoding.
        rows: finalists and closed forms on the held-out documents, the winner first.
        cost: what the search cost, with the part before it was resumed.
        curve: documents measured, and the best fitness on all documents so far, each time it improved.
        documents: names of the documents that were searched on.
        holdout: names of the documents that decided.
        data: fingerprint of all of them.
    """

    config: SearchConfig
    shape: RopeShape
    encoding: LongRoPE
    rows: Sequence[HeldOutRow]
    cost: Cost
    curve: Sequence[tuple[int, float]]
    documents: Sequence[str]
    holdout: Sequence[str]
    data: str

    @property
    def winner(self) -> HeldOutRow:
        """The row with the lowest loss on the held-out documents."""
        return self.rows[0]

    @property
    def table(self) -> Table:
        """The winner's divisors, start tokens and attention factor."""
        return self.winner.table

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON."""
        return {
            "config": self.config.to_dict(),
            "shape": asdict(self.shape),
            "rows": [row.to_dict() for row in self.rows],
            "cost": self.cost._asdict(),
            "curve": plain(self.curve),
            "documents": list(self.documents),
            "holdout": list(self.holdout),
            "data": self.data,
        }

    def table_text(self) -> str:
        """The rows as a Markdown table."""
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
        return markdown_table(lines)

    def card(self) -> str:
        """The card: what was searched, on which documents, what it cost, and how to use it."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        config = self.config
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
            keep_trailing_newline=True, autoescape=False,
        )  # fmt: skip
        return environment.get_template("search_card.md").render(
            result=self, config=config, shape=self.shape, encoding=self.encoding, winner=self.winner,
            cost=self.cost, encoding_file=ENCODING_FILE, quoted=quote(config.model),
            target=format_length(self.encoding.target_length(self.shape) or config.target_length),
            divisors=" ".join(f"{divisor:g}" for divisor in self.table.divisors),
            table=self.table_text(), duration=format_duration(self.cost.seconds),
        )  # fmt: skip

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
