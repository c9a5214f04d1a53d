"""Continue a long text with an extended model. Copy it and change it.

python scripts/generate.py MODEL prompt.txt --method jet_long --target-length 32k --max-new-tokens 200
"""

import argparse
from pathlib import Path

import torch
from transformers import TextStreamer

import rope_extend as rx
from rope_extend.cli.arguments import length, run_script
from rope_extend.data.sources import read_file
from rope_extend.evaluation.prompts import encode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory, GGUF file or hub id of a model, or of what rope_extend saved")
parser.add_argument("prompt", type=Path, help="text file, also compressed")
parser.add_argument("--method", help="extend the model by this method, without training")
parser.add_argument("--target-length", help="window for --method, such as 32k")
parser.add_argument("--base-model", help="base model of an adapter (default: the one that it names)")
parser.add_argument("--max-new-tokens", type=length, default=200, help="longest answer, in tokens")
parser.add_argument("--max-tokens", type=length, help="longest prompt (default: window less answer)")


def main(args: argparse.Namespace) -> None:
    if (args.method is None) != (args.target_length is None):
        parser.error("--method and --target-length belong together")
    text, tokenizer = read_file(args.prompt), rx.load_tokenizer(args.model)
    if not text.strip():
        parser.error(f"{args.prompt} is empty; give a file with text")
    for empty in (True, False):  # first without weights, so that mistakes are found before they are loaded
        model = rx.load_any(args.model, base_model=args.base_model, empty=empty)
        if args.method:
            rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
        patch = rx.current_patch(model)
        window = patch.target_length if patch else rx.info(model).current_length
        most = args.max_tokens or window - args.max_new_tokens
        if most < 1:
            parser.error(
                f"--max-new-tokens {args.max_new_tokens} leaves no room in a window of {window} tokens"
            )
    ids = encode(tokenizer, text, chat=False)
    print(f"prompt: {f'the first {most:,} of ' if len(ids) > most else ''}{len(ids):,} tokens")
    ids = torch.tensor([ids[:most]], device=model.device)
    if ids.shape[1] + args.max_new_tokens > window:
        print(f"prompt and answer exceed the window of {window} tokens, so expect nonsense after it")
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    model.generate(
        input_ids=ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=args.max_new_tokens,
        do_sample=False, streamer=streamer,
    )  # fmt: skip


if __name__ == "__main__":
    run_script(parser, main)  # prints a mistake in one sentence
