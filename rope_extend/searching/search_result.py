"""The result of a search, and its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rope_extend.encodings import LongRoPE, RopeShape, SavedEncoding
from rope_extend.evaluation.statistics import Difference, or_none
from rope_extend.files import replacing_files, write_json, write_text
from rope_extend.method_names import CURRENT, ENCODING_FILE
from rope_extend.searching.search_config import ORIGINAL, SHORT_TEXTS, SearchConfig
from rope_extend.searching.search_log import Cost
from rope_extend.searching.space import Table
from rope_extend.units import format_duration, format_length

CARD, SUMMARY, CURVE = "README.md", "search.json", "curve.png"
FILES = (CARD, SUMMARY, CURVE, ENCODING_FILE)
"""The files of a finished search; the encoding appears last."""


@dataclass(frozen=True)
class HeldOutRow:
    """A finalist or a closed form on the held-out documents.

    Attributes:
        label: its name.
        table: the candidate.
        score: its fitness on the held-out documents, in nats per token; lower is better.
        parts: the mean loss of each part of the fitness, in nats per token.
        by_document: its fitness on each of the held-out documents.
        difference: its score minus the winner's, with the 95 % interval over documents.
    """

    label: str
    table: Table
    score: float
    parts: Mapping[str, float]
    by_document: Sequence[float]
    difference: Difference

    def to_dict(self) -> dict[str, Any]:
        """Plain values of JSON; what is not finite becomes None."""
        return {
            "label": self.label,
            **asdict(self.table),
            "score": or_none(self.score),
            "parts": {part: or_none(value) for part, value in self.parts.items()},
            "by_document": [or_none(value) for value in self.by_document],
            "minus_winner": self.difference.to_dict(),
        }


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
            "cost": asdict(self.cost),
            "curve": [[passes, or_none(value)] for passes, value in self.curve],
            "documents": list(self.documents),
            "holdout": list(self.holdout),
            "data": self.data,
        }

    def table_text(self) -> str:
        """The rows as a Markdown table."""
        lines = [
            "| table | loss, nats | minus the winner's (95 %) | attention factor | divisors |",
            "|---|---|---|---|---|",
        ]
        for row in self.rows:
            difference = row.difference
            if row is self.winner:
                change = "the winner"
            else:
                change = f"{difference.nats:+.4f}"
                if difference.low is not None:
                    change += f" ({difference.low:+.4f} … {difference.high:+.4f})"
            divisors = row.table.divisors
            lines.append(
                f"| {row.label} | {row.score:.4f} | {change} | {row.table.attention_factor:g} | "
                f"{divisors[0]:g} … {divisors[-1]:g} |"
            )
        return "\n".join(lines)

    def card(self) -> str:
        """The card: what was searched, on which documents, what it cost, and how to use it."""
        config, cost = self.config, self.cost
        target = format_length(self.encoding.target_length(self.shape) or config.target_length)
        weights = ", ".join(
            f"{weight:.3g} × {'needle' if part == 'needle' else f'loss at {part} tokens'}"
            for part, weight in config.weights().items()
        )
        divisors = " ".join(f"{divisor:g}" for divisor in self.table.divisors)
        resolved = f"{self.winner.label}, {self.encoding}"
        return f"""# Frequency divisors for {config.model}, {target} tokens

`{ENCODING_FILE}` holds the encoding: {resolved}. Use this directory as a method:

```
rope-extend evaluate {quote(config.model)} --methods DIRECTORY --lengths {target} --data ... --output report
rope-extend finetune --model {quote(config.model)} --method DIRECTORY --target-length {target} ...
```

In Python: `rope_extend.extend(model, "{target}", "DIRECTORY")`, or `rope_extend.encoding("DIRECTORY")`.

## What was searched

- Model: {config.model}, trained on {self.shape.trained_length} tokens.
- Rotation: {self.shape.dim} channels of a head, base {self.shape.theta:g}.
- Strategy: {config.strategy}, seed {config.seed}.
- Fitness: {weights}.
- Divisors{_relative(config)}, fastest pair first: {divisors}
- Attention factor {self.table.attention_factor:g}, start tokens {self.table.start_tokens}.
- {self._other_texts()}

## Held-out documents

The loss is the fitness on {len(self.holdout)} documents that were not searched on. The difference is paired
by document. {self._measured()}

{self.table_text()}

## Cost

{cost.evaluations:,} evaluations, {cost.passes:,} forward passes, {cost.forward_tokens:,} forward tokens,
{format_duration(cost.seconds)}. Held-out documents are included.

![The best fitness against the documents measured]({CURVE})

## Documents

Fingerprint of all: {self.data}.

Searched on:

{_bullets(self.documents)}

Held out:

{_bullets(self.holdout)}
"""

    def _measured(self) -> str:
        """A sentence of the card: which encoding the scores belong to."""
        if not self.encoding.depends_on_length and self.config.search_for != SHORT_TEXTS:
            return "Each row was measured as it would be written, with one table for all texts."
        return (
            "Each row was measured as it would be written, with one table for short texts and one for long "
            "texts. Before that, the search measured each candidate as one table for all texts."
        )

    def _other_texts(self) -> str:
        """A line of the card: which divisors the texts get that were not searched for."""
        if self.config.search_for == SHORT_TEXTS:
            return (
                "These divisors are for texts within the trained window. Longer ones keep the model's table."
            )
        if self.config.short == ORIGINAL:
            return "Within the trained window: plain RoPE."
        if self.encoding.depends_on_length:
            return (
                "Within the trained window: the short list that the model has. Both lists share the factor "
                f"on cos and sin, now {self.encoding.attention_factor(self.shape):.6g}, so such texts change "
                "too."
            )
        return "Within the trained window: the same divisors."

    def write(self, directory: Path) -> None:
        """Write the files of a finished search; all of them appear, or none.

        Raises:
            OSError: a file cannot be written.
        """
        from rope_extend.plots.training_curves import plot_search_curve

        with replacing_files(directory, last=ENCODING_FILE) as files:
            write_text(files / CARD, self.card())
            write_json(files / SUMMARY, self.to_dict())
            curve = [(passes, value) for passes, value in self.curve if math.isfinite(value)]
            plot_search_curve(curve, files / CURVE, title=f"{self.config.strategy}: fitness so far")
            saved = SavedEncoding(self.encoding, self.shape, self.encoding.target_length(self.shape))
            saved.write(files / ENCODING_FILE)


def _relative(config: SearchConfig) -> str:
    """What the divisors of a card are relative to, if that is not plain RoPE."""
    return " of the table that the model had, which the encoding multiplies" * (config.start == CURRENT)


def _bullets(names: Sequence[str]) -> str:
    return "\n".join(f"- {name}" for name in names)
