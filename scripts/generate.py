"""Continue a long text with an extended model. Copy it and change it.

python scripts/generate.py MODEL prompt.txt --method dynamic_yarn --target-length 32768 --max-new-tokens 200
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import cached_file

import rope_extend as rx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory or hub id of a model, or of what rope_extend saved")
parser.add_argument("prompt", type=Path, help="text file")
parser.add_argument("--method", help="extend the model by this method, without training")
parser.add_argument("--target-length", type=int, help="window for --method, in tokens")
parser.add_argument("--max-new-tokens", type=int, default=200)
args = parser.parse_args()
if (args.method is None) != (args.target_length is None):
    parser.error("--method and --target-length belong together")

optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
tokenizer = AutoTokenizer.from_pretrained(args.model)
if args.method is None and cached_file(args.model, "rope_extend.json", **optional):
    model = rx.load(args.model)
else:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
if args.method is not None:
    rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
if torch.cuda.is_available():
    model = model.to("cuda")

inputs = tokenizer(args.prompt.read_text(encoding="utf-8"), return_tensors="pt").to(model.device)
print(f"{inputs['input_ids'].shape[1]} tokens of prompt")
streamer = TextStreamer(tokenizer, skip_prompt=True)
model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, streamer=streamer)
