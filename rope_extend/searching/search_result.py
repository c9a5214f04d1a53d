"""The result of a search, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rope_extend.encodings import LongRoPE, RopeShape, SavedEncoding
from rope_extend.evaluation.statistics import Difference, plain
from rope_extend.files import write_json
from rope_extend.method_names import ENCODING_FILE
from rope_extend.report.tables import interval, markdown_table
from rope_extend.searching.evaluations import Cost, score
from rope_extend.searching.search_config import SearchConfig
from rope_extend.searching.space import Table

SUMMARY = "search.json"
FILES = (SUMMARY, ENCODING_FILE)
"""The files of a finished search; the encoding appears last."""


@dataclass(frozen=True)
class HeldOutRow:
    """A finalist or a closed form on the held-out documents.

    Attributes:
        label: its name.
        table: the candidate.
        losses: its mean loss on each of the held-out documents, in nats per token.
        difference: its score minus the winner's, with the 95 % interval over documents.
    """

    label: str
    table: Table
    losses: Sequence[float]
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

    def write(self, directory: Path) -> None:
        """Write the files of a finished search, the encoding last.

        Raises:
            OSError: a file cannot be written.
        """
        write_json(directory / SUMMARY, self.to_dict())
        saved = SavedEncoding(self.encoding, self.shape, self.encoding.target_length(self.shape))
        saved.write(directory / ENCODING_FILE)
