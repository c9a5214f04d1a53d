"""Speed and memory compared with named peers, measured side by side in one run; ratios, not absolute times.

Each row prints ours, the peer's, and ours / peer. Times are the minimum of interleaved repetitions, or their
median if a row says so. FLOPs, bytes, and counts of operations and graphs are deterministic.

With `--output`, finished benchmarks are kept: the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import measuring
import torch
import transformers
from bias_cost import attention_biases
from decoding import changed_positions, dynamic_cache, linear_attention
from evaluator import evaluator_8b, evaluator_agreement, evaluator_memory, whole_curve
from interpolation import interpolation_curve
from kernel_cost import attention_kernels
from measuring import Row, device_name
from patched_forward import patched_forward
from remap_prefill import changed_positions_prefill
from training_cost import packed_documents, training_8b, training_loss, training_step

from rope_extend.memory.budget import expand_segments

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
    "attention-kernels": attention_kernels,
    "linear-attention": linear_attention,
    "interpolation-curve": interpolation_curve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*BENCHMARKS], metavar="NAME",
        help=f"benchmarks to run: {', '.join(BENCHMARKS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of all models")
    parser.add_argument(
        "--repetitions", type=int, default=7, help="number of timed repetitions of each side (default: 7)"
    )
    parser.add_argument("--output", type=Path, help="JSON lines file of the rows, made or continued")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; use --device cpu")
    logging.getLogger("rope_extend").setLevel(logging.ERROR)  # hide what a patch tells users
    expand_segments()  # before anything initialises CUDA
    measuring.DEVICE = arguments.device
    machine = {"device": device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    words = "{device}, torch {torch}, transformers {transformers}"
    here = words.format(**machine)
    found = arguments.output is not None and arguments.output.exists()
    kept = [json.loads(line) for line in arguments.output.open()] if found else []
    if other := [row for row in kept if any(row[name] != value for name, value in machine.items())]:
        parser.error(f"{arguments.output} was measured on {words.format(**other[0])}; this is {here}")
    print(here, file=sys.stderr)
    print(f"{'benchmark':<84} {'ours':>12} {'peer':>12}  ratio  target  peer")
    failed = 0
    for name in arguments.names or BENCHMARKS:
        if rows := [row for row in kept if row["benchmark"] == name]:
            print(*map(line, rows), sep="\n", flush=True)
            continue
        rows = []
        try:
            for result in BENCHMARKS[name](arguments.repetitions):
                print(line(result), flush=True)
                rows.append({"benchmark": name, **result, **machine})
        except Exception:  # the others may still be right
            logging.getLogger(__name__).exception("%s failed", name)
            failed = 1
            continue
        if arguments.output:
            with arguments.output.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return failed


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
    sys.exit(main())
