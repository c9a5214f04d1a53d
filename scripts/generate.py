"""Continue a long text with an extended model. Copy it and change it.

python scripts/generate.py MODEL prompt.txt --method jet_long --target-length 32k --max-new-tokens 200
"""

import argparse
from pathlib import Path

from transformers import TextStreamer

import rope_extend as rx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory, GGUF file or hub id of a model, or of what rope_extend saved")
parser.add_argument("prompt", help="text file, also compressed")
parser.add_argument("--method", help="extend the model by this method, without training")
parser.add_argument("--target-length", help="window for --method, such as 32k")
parser.add_argument("--base-model", help="base model of an adapter (default: the one that it names)")
parser.add_argument("--max-new-tokens", default="200", help="longest answer, in tokens")
parser.add_argument("--max-tokens", help="longest prompt (default: window less answer)")


def main(args: argparse.Namespace) -> None:
    if (args.method is None) != (args.target_length is None):
        parser.error("--method and --target-length belong together")
    answer = rx.parse_length(args.max_new_tokens)
    tokenizer = rx.load_tokenizer(args.model)
    if not Path(args.prompt).is_file():
        parser.error(f"no file {args.prompt}")
    (ids, *others) = [each.input_ids for each in rx.load_documents(args.prompt, tokenizer, max_documents=2)]
    if others:
        parser.error(f"{args.prompt} has several texts; give a file with one")
    if ids[-1] == tokenizer.eos_token_id:  # which would say that the text ends here
        ids = ids[:-1]
    for empty in (True, False):  # first without weights, so that mistakes are found before they are loaded
        model = rx.load_any(args.model, base_model=args.base_model, empty=empty)
        if args.method:
            rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
        patch = rx.current_patch(model)
        window = patch.target_length if patch else rx.info(model).current_length
        most = rx.parse_length(args.max_tokens) if args.max_tokens else window - answer
        if most < 1:
            parser.error(f"--max-new-tokens {answer} leaves no room in a window of {window} tokens")
    print(f"prompt: {f'the first {most:,} of ' if len(ids) > most else ''}{len(ids):,} tokens")
    ids = ids[None, :most].to(model.device)
    if ids.shape[1] + answer > window:
        print(f"prompt and answer exceed the window of {window} tokens, so expect nonsense after it")
    model.generate(
        input_ids=ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=answer, do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )  # fmt: skip


if __name__ == "__main__":
    rx.run_script(parser, main)  # prints a mistake in one sentence
