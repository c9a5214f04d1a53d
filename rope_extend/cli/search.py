"""The command that searches frequency divisors: search."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rope_extend.cli.config_arguments import add_fields, add_model_or_config, config_of
from rope_extend.config import flag_values
from rope_extend.errors import RopeExtendError
from rope_extend.searching.search_config import LOAD_FIELDS, SearchConfig


def search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `search`."""
    add_model_or_config(parser, SearchConfig)
    parser.add_argument(
        "--plan", action="store_true",
        help="print the largest number of passes and tokens, the memory and the estimated time, and stop; "
        "needs neither --data nor weights",
    )  # fmt: skip
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace a search in the output directory")
    existing.add_argument(
        "--resume", action="store_true", help="resume an interrupted search in the output directory"
    )
    add_fields(parser, SearchConfig, LOAD_FIELDS)


def search(arguments: argparse.Namespace) -> None:
    """Find a divisor for the frequency of each channel pair, and an attention factor, on long documents.

    The first argument is a checkpoint or a YAML file, such as those in configs/search/. The output directory
    gets encoding.json, a card and the log of all evaluations. It is then a method of every other command:
    --method DIR. After an interruption, the same command with --resume continues.
    """
    config = config_of(SearchConfig, arguments.model_or_config, flag_values(SearchConfig, arguments))
    if not arguments.plan and not (config.data and config.output):
        raise RopeExtendError("search needs --data and --output, or --plan for an estimate without them")

    from rope_extend.searching.run_search import plan_search
    from rope_extend.searching.run_search import search as run
    from rope_extend.searching.search_log import LOG

    if arguments.plan:
        plan = plan_search(config)
        print(plan)
        plan.check()
        return
    assert config.output is not None
    try:
        result = run(config, resume=arguments.resume, overwrite=arguments.overwrite)
    except KeyboardInterrupt:
        if (Path(config.output) / LOG).exists():
            print(f"\n{config.output} keeps what is measured; add --resume to continue", file=sys.stderr)
        raise
    print(result.table_text())
    cost = result.cost
    print(
        f"{cost.evaluations:,} evaluations, {cost.passes:,} forward passes, {cost.forward_tokens:,} tokens, "
        f"{cost.seconds:.0f} s"
    )
    print("written:", config.output)
