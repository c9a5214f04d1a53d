"""Continue a long text with an extended model. Copy it and change it.

python scripts/generate.py MODEL prompt.txt --method dynamic_yarn --target-length 32k --max-new-tokens 200
"""

import argparse
from pathlib import Path

from transformers import TextStreamer

import rope_extend as rx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="directory, GGUF file or hub id of a model, or of what rope_extend saved")
parser.add_argument("prompt", type=Path, help="text file")
parser.add_argument("--method", help="extend the model by this method, without training")
parser.add_argument("--target-length", help="window for --method, in tokens")
parser.add_argument("--base-model", help="base model of an adapter (default: the one that it names)")
parser.add_argument("--max-new-tokens", type=int, default=200)


def main(args: argparse.Namespace) -> None:
    if (args.method is None) != (args.target_length is None):
        parser.error("--method and --target-length belong together")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1; got {args.max_new_tokens}")
    tokenizer = rx.load_tokenizer(args.model)
    ids = tokenizer(args.prompt.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"]
    if not ids.numel():
        parser.error(f"{args.prompt} is empty")
    print(f"{ids.shape[1]} tokens of prompt")

    for empty in (True, False):  # first without weights, so that mistakes are found before they are loaded
        model = rx.load_any(args.model, base_model=args.base_model, empty=empty)
        if args.method:
            rx.extend(model, args.target_length, args.method, tokenizer=tokenizer)
    patch = rx.current_patch(model)
    window = patch.target_length if patch else rx.info(model).current_length
    if ids.shape[1] + args.max_new_tokens > window:
        print(f"prompt and answer exceed the window of {window} tokens, so expect nonsense after it")
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    ids = ids.to(model.device)
    model.generate(
        input_ids=ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=args.max_new_tokens,
        do_sample=False, streamer=streamer,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main(parser.parse_args())
    except (rx.RopeExtendError, OSError, UnicodeError) as error:  # a mistake: one sentence, no traceback
        parser.exit(2, f"{parser.prog}: error: {error}\n")
