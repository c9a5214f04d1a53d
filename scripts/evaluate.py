"""Measure the perplexity of a model at several lengths, next to its control. Copy it and change it.

python scripts/evaluate.py MODEL TEXT... --lengths 4k,8k,16k --output evaluation

MODEL is an adapter or a checkpoint of rope_extend, or any model with --method. The control is the model
before its extension, on the same targets, with a context cropped to the window that it was trained on. The
last line says whether the longer context is of use. If MODEL was trained, that takes --control-adapter: plain
RoPE, trained on as many tokens within the old window.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import rope_extend as rx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory, GGUF file or hub id of a model, or of what rope_extend saved")
parser.add_argument("data", nargs="+", help="text files, directories, a hub dataset, or demo:evaluation")
parser.add_argument("--lengths", nargs="+", required=True, help="lengths in tokens, such as 4k,8k,16k")
parser.add_argument("--method", help="extend the model by this method, without training")
parser.add_argument("--base-model", help="the model before its extension (default: as MODEL was saved)")
parser.add_argument("--control-adapter", help="control: an adapter of the same training in the old window")
parser.add_argument("--documents", type=int, default=16)
parser.add_argument("--output", default="evaluation", help="directory for table and picture")
parser.add_argument("--overwrite", action="store_true", help="replace table and picture in --output")


def main(args: argparse.Namespace) -> None:
    if args.documents < 1:
        parser.error(f"--documents must be at least 1; got {args.documents}")
    output = rx.check_files(args.output, ("table.csv", "perplexity.svg"), overwrite=args.overwrite)
    lengths = rx.parse_lengths(args.lengths)
    base = args.base_model or rx.base_model_of(args.model)
    untrained = args.method or Path(base) == Path(args.model).expanduser()
    if untrained and args.control_adapter:
        parser.error("--control-adapter is for a model that was trained, and without --method")
    window = rx.info(base).current_length
    if args.control_adapter:
        control = rx.current_patch(rx.load_any(args.control_adapter, base_model=base, empty=True))
        if control.target_length != (window := control.shape.trained_length):
            parser.error(f"the control {args.control_adapter} was not trained in the old window, {window}")
    if lengths[-1] > window:  # at its own window, both rows keep losses in the blocks of the control
        lengths = sorted({window, *lengths})

    if doubt := rx.reason_for_doubt(args.model, args.control_adapter, args.data):
        print(f"This will decide nothing on {Path(args.model).name}, because {doubt}.")
    extended(args, base, lengths[-1], empty=True)  # without weights, so that mistakes are found at once
    tokenizer = rx.load_tokenizer(base)
    documents = rx.load_documents(args.data, tokenizer, min_tokens=lengths[-1], max_documents=args.documents)
    print(f"{len(documents)} documents of at least {lengths[-1]} tokens; the model was trained on {window}")
    model = extended(args, base, lengths[-1])
    patch = rx.current_patch(model)
    reach = patch.target_length if patch else rx.info(model).current_length
    if lengths[-1] > reach:
        print(f"{lengths[-1]} tokens exceed the window of {reach} tokens, so expect nonsense after it")
    label = f"{Path(args.model).name}, {patch.encoding if patch else 'unpatched'}"
    rows = {label: rx.perplexity(model, documents, lengths)}
    del model, patch
    if lengths[-1] > window:  # the model before its extension, which may do harm within the window too
        model = rx.load_any(args.control_adapter or base, base_model=base)
        name = f"{Path(args.control_adapter or base).name}, context cropped to {window}"
        rows[name] = rx.perplexity(model, documents, lengths, protocol="cropped", window=window)

    table = {label: row.levels for label, row in rows.items()}
    curves = table.copy()
    if len(rows) > 1:  # beyond its window, a control may score some of the targets only
        (ours, row), (name, cropped) = rows.items()
        same, beyond = row.against(cropped), f"from token {window} on, targets of the control"
        table[f"{ours}, {beyond}"] = {each.length: each.before * each.ratio for each in same}
        table[f"{name}, {beyond}"] = {each.length: each.before for each in same}
        within = [n for n in lengths if n <= window]
        curves = {
            label: {n: each.levels[n] for n in within} | table[f"{label}, {beyond}"]
            for label, each in rows.items()
        }
    output.mkdir(parents=True, exist_ok=True)
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", *lengths])
        for label, levels in table.items():
            writer.writerow([label, *(f"{levels[n]:.4f}" if n in levels else "" for n in lengths)])
    print((output / "table.csv").read_text(), end="")

    for label, levels in curves.items():
        plt.plot(list(levels), list(levels.values()), marker="o", label=label)
    plt.axvline(window, color="grey", linestyle=":", label="trained window")
    plt.xscale("log", base=2)
    plt.xticks(lengths, lengths)
    plt.minorticks_off()
    plt.xlabel("context length in tokens")
    plt.ylabel(f"perplexity (beyond {window}: of the tokens from there on)")
    plt.legend(loc="lower left", bbox_to_anchor=(0, 1))  # above the axes, on no line
    plt.savefig(output / "perplexity.svg", bbox_inches="tight")
    print(f"wrote {output / 'table.csv'} and {output / 'perplexity.svg'}")
    if len(rows) < 2:
        print(f"No length exceeds the window of {window}.")
        return
    same_training = True if args.control_adapter else None if untrained else False
    if same_training is False:
        print("The control is the model before training. For one that is trained, give --control-adapter.")
    if doubt:
        print(f"Not decided on {Path(args.model).name}, because {doubt}.")
    else:
        print(rx.verdict(*rows.values(), same_training=same_training))


def extended(args: argparse.Namespace, base: str, longest: int, *, empty: bool = False) -> Any:
    """The model that is measured; with --method, extended to the longest length."""
    model = rx.load_any(args.model, base_model=base, empty=empty)
    if args.method:
        rx.extend(model, longest, args.method)
    return model


if __name__ == "__main__":
    rx.run_script(parser, main)  # prints a mistake in one sentence
