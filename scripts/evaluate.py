"""Measure the perplexity of a model at several lengths, next to the control. Copy it and change it.

python scripts/evaluate.py MODEL TEXT... --lengths 4096 8192 16384 --output evaluation

MODEL is an adapter or a checkpoint of rope_extend, or any model with --method. The control is the same model
on the same targets, with a context that is cropped to the window it was trained on. An extension is of use
where its perplexity is below that.
"""

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

import rope_extend as rx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory or hub id of a model, or of what rope_extend saved")
parser.add_argument("data", nargs="+", help="text files, directories, a hub dataset, or demo:evaluation")
parser.add_argument("--lengths", type=int, nargs="+", required=True, help="context lengths in tokens")
parser.add_argument("--method", help="extend the model by this method, without training")
parser.add_argument("--documents", type=int, default=16)
parser.add_argument("--output", default="evaluation", help="directory for table and picture")
args = parser.parse_args()
longest = max(args.lengths)

optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
tokenizer = AutoTokenizer.from_pretrained(args.model)
if args.method is None and cached_file(args.model, "rope_extend.json", **optional):
    model = rx.load(args.model)
else:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
if args.method is not None:
    rx.extend(model, longest, args.method)
patch = rx.current_patch(model)
trained = patch.shape.trained_length if patch else model.config.max_position_embeddings
documents = rx.load_documents(args.data, tokenizer, min_tokens=longest, max_documents=args.documents)
print(f"{len(documents)} documents of at least {longest} tokens; the model was trained on {trained}")

name = str(patch.encoding) if patch else "unpatched"
rows = {name: rx.perplexity(model, documents, args.lengths).ppl}
if longest > trained:
    control = rx.perplexity(model, documents, args.lengths, protocol="cropped", window=trained)
    rows[f"{name}, context cropped to {trained}"] = control.ppl

output = Path(args.output)
output.mkdir(parents=True, exist_ok=True)
with (output / "table.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["row", *sorted(args.lengths)])
    for label, ppl in rows.items():
        writer.writerow([label, *(f"{ppl[length]:.4f}" for length in sorted(args.lengths))])
print((output / "table.csv").read_text(), end="")

for label, ppl in rows.items():
    plt.plot(sorted(ppl), [ppl[length] for length in sorted(ppl)], marker="o", label=label)
plt.axvline(trained, color="grey", linestyle=":", label="trained window")
plt.xscale("log", base=2)
plt.xlabel("context length in tokens")
plt.ylabel("perplexity")
plt.legend()
plt.savefig(output / "perplexity.svg", bbox_inches="tight")
print(f"wrote {output / 'table.csv'} and {output / 'perplexity.svg'}")
