"""Speed and memory compared with named peers, measured side by side in one run; ratios, not absolute times.

Each row prints ours, the peer's, and ours / peer. Times are the minimum of interleaved repetitions, or their
median if a row says so. FLOPs, bytes, and counts of operations and graphs are deterministic.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
import transformers
from bias_cost import attention_biases
from decoding import dynamic_cache, linear_attention
from evaluator import evaluator_8b, evaluator_agreement, evaluator_memory, whole_curve
from interpolation import interpolation_curve
from measuring import Row, device_name
from patched_forward import patched_forward
from remap_cost import changed_positions
from remap_prefill import changed_positions_prefill
from training_cost import packed_documents, training_8b, training_loss, training_step

from rope_extend.memory.segments import expand_segments

BENCHMARKS = {
    "evaluator-memory": evaluator_memory,
    "evaluator-agreement": evaluator_agreement,
    "evaluator-8b": evaluator_8b,
    "whole-curve": whole_curve,
    "training-loss": training_loss,
    "training-step": training_step,
    "packed-documents": packed_documents,
    "training-8b": training_8b,
    "patched-forward": patched_forward,
    "dynamic-cache": dynamic_cache,
    "changed-positions": changed_positions,
    "changed-positions-prefill": changed_positions_prefill,
    "attention-biases": attention_biases,
    "linear-attention": linear_attention,
    "interpolation-curve": interpolation_curve,
}


DRAWN = {"interpolation-curve"}
"""The benchmarks that draw their results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run: {', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="number of timed repetitions of each side (default: 7)"
    )
    parser.add_argument("--output", type=Path, help="JSON lines file to write the rows to as well")
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help=f"directory for the curves of {', '.join(DRAWN)}",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(
            f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    if arguments.output and arguments.output.exists():
        parser.error(f"{arguments.output} already exists; give another file")
    logging.getLogger("rope_extend").setLevel(logging.ERROR)  # hide what a patch tells users
    expand_segments("auto")  # before anything initialises CUDA
    device = device_name()
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}", file=sys.stderr)
    print(f"{'benchmark':<84} {'ours':>12} {'peer':>12}  ratio  target  peer")
    for name in arguments.names or BENCHMARKS:
        options = {"pictures": arguments.pictures} if name in DRAWN else {}
        for result in BENCHMARKS[name](arguments.repetitions, **options):
            print(line(result), flush=True)
            if arguments.output:
                versions = {"torch": torch.__version__, "transformers": transformers.__version__}
                with arguments.output.open("a") as file:
                    file.write(json.dumps({**result, "device": device, **versions}) + "\n")


def line(result: Row) -> str:
    """A comparison as a line of the table."""
    ours = "not measured" if result["ours"] is None else f"{result['ours']:.4g}"
    ratio = "yet" if result["ours"] is None else _or_dash(result["ratio"], ".3f")
    return (
        f"{result['name']:<84} {ours:>12} {_or_dash(result['theirs'], '.4g'):>12} {ratio:>6}  "
        f"{_or_dash(result['target'], '.3g'):>6}  {result['peer']} ({result['unit']})"
    )


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    main()
