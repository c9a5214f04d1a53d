"""Print one table of several searches on the same held-out documents, as Markdown.

    python scripts/compare_searches.py race longrope gradient

Each argument is the output directory of `rope-extend search`. The first is what the others are compared with,
document by document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.statistics import paired
from rope_extend.searching.search_result import SUMMARY


def read(directory: str) -> dict[str, Any]:
    """The summary of a finished search."""
    values: dict[str, Any] = json.loads((Path(directory) / SUMMARY).read_text(encoding="utf-8"))
    return values


def found_row(search: dict[str, Any]) -> dict[str, Any]:
    """The best finalist of the strategy itself; closed forms do not count."""
    strategy = search["config"]["strategy"]
    row: dict[str, Any] = next(row for row in search["rows"] if row["label"].startswith(f"{strategy} "))
    return row


def line(label: str, row: dict[str, Any], first: dict[str, Any], cost: dict[str, Any] | None) -> str:
    """A row of the table: loss, difference to the first with its interval, cost, and divisors."""
    documents = len(row["by_document"])
    difference = paired(1, first["by_document"], row["by_document"], [1] * documents)
    change = (
        "" if row is first else f"{difference.nats:+.4f} ({difference.low:+.4f} … {difference.high:+.4f})"
    )
    tokens = "" if cost is None else f"{cost['forward_tokens']:,}"
    divisors = " ".join(f"{divisor:g}" for divisor in row["divisors"])
    return (
        f"| {label} | {row['score']:.4f} | {change} | {tokens} | {row['attention_factor']:g} | {divisors} |"
    )


def main() -> None:
    """Print the table.

    Raises:
        RopeExtendError: the searches have different held-out documents.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("searches", nargs="+", help="output directories of rope-extend search")
    searches = [read(directory) for directory in parser.parse_args().searches]
    if len({tuple(search["holdout"]) for search in searches}) > 1:
        raise RopeExtendError("these searches have different held-out documents, so they cannot be compared")
    first = found_row(searches[0])
    print("| table | loss, nats | minus the first (95 %) | forward tokens | attention factor | divisors |")
    print("|---|---|---|---|---|---|")
    for search in searches:
        print(line(search["config"]["strategy"], found_row(search), first, search["cost"]))
    for row in searches[0]["rows"]:
        if row["label"] in ("linear", "ntk", "yarn", "llama3"):
            print(line(row["label"], row, first, None))


if __name__ == "__main__":
    main()
