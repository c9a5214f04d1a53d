"""Print the perplexity of an extended model that is extended again, from both starts, as Markdown.

    python scripts/compare_starts.py MODEL --target-length 4k --data demo:evaluation

The model is a checkpoint with a scaled table. Each method is put on it untrained, with `start="pretrained"`
and with `start="current"`. The last column is the difference of the losses at the target length, document by
document, with its 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from page_parts import difference_text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import rope_extend as rx
from rope_extend.evaluation.statistics import paired
from rope_extend.method_names import STARTS
from rope_extend.units import format_length, parse_length


def rows(
    model: PreTrainedModel, documents: Sequence[rx.Document], methods: Sequence[str], lengths: Sequence[int]
) -> list[str]:
    """A row of the table for each method and start."""
    lines, target = [], lengths[-1]
    for method in methods:
        results = []
        for start in STARTS:
            with rx.extend(model, target, method, start=start):
                results.append(rx.perplexity(model, documents, lengths, progress=False))
        for start, result in zip(STARTS, results, strict=True):
            change = ""
            if start != STARTS[0]:
                assert result.document_nll is not None
                assert result.document_terms is not None
                assert results[0].document_nll is not None
                difference = paired(
                    target, results[0].document_nll[target], result.document_nll[target],
                    result.document_terms[target],
                )  # fmt: skip
                change = difference_text(difference)
            values = " | ".join(f"{result.ppl[length]:.2f}" for length in lengths)
            lines.append(f"| {method} | {start} | {values} | {change} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory or hub id of a checkpoint with a scaled table")
    parser.add_argument("--target-length", type=parse_length, required=True, help="the new window")
    parser.add_argument("--data", required=True, help="documents of at least that length")
    parser.add_argument("--documents", type=int, default=8, help="number of documents (default: 8)")
    parser.add_argument(
        "--min-tokens",
        type=parse_length,
        help="only documents of this length, such as 8k (default: the window)",
    )
    parser.add_argument("--methods", default="linear,ntk,llama3,yarn", help="methods, separated by commas")
    arguments = parser.parse_args()
    target = arguments.target_length
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    documents = rx.load_documents(
        arguments.data,
        AutoTokenizer.from_pretrained(arguments.model),
        min_tokens=max(target, arguments.min_tokens or 0),
        max_documents=arguments.documents,
        max_tokens=target,
    )
    trained = rx.info(model).shape.trained_length
    lengths = [trained]
    while lengths[-1] * 2 < target:
        lengths.append(lengths[-1] * 2)
    lengths.append(target)
    heads = " | ".join(format_length(length) for length in lengths)
    print(f"| method | start | {heads} | current minus pretrained, nats (95 %) |")
    print("|---|---|" + "---|" * (len(lengths) + 1))
    print("\n".join(rows(model, documents, arguments.methods.split(","), lengths)))


if __name__ == "__main__":
    main()
